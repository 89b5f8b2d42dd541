"""Fit of every method with every seed on a user's own network and data."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from torch import nn

from flowbnn.batches import check_repeatable, device_of, fingerprint
from flowbnn.compare.candidates import BASELINE, CANDIDATES, Candidate, find_candidates
from flowbnn.compare.comparison import Comparison
from flowbnn.compare.measurement import measure, warm_up
from flowbnn.compare.results import (
    ResultCache,
    SeedResults,
    record_warnings,
)
from flowbnn.data.formats import as_inputs, as_loader, columns_of
from flowbnn.errors import FlowBNNError, warn
from flowbnn.methods import Calibrator, Method
from flowbnn.methods.fit_options import FitOptions, LikelihoodName
from flowbnn.networks import check_copyable
from flowbnn.options import Count, File, NonEmpty, Positive, Seed, check, checked
from flowbnn.training import ProgressBar
from flowbnn.training.options import Accelerator, Precision, length_of

Methods = Annotated[Sequence[str | Method], NonEmpty()]
MethodsByLabel = Annotated[Mapping[str, Method], NonEmpty()]


@checked
def compare(
    network: nn.Module,
    train_loader: Any,
    test_loader: Any,
    *,
    novel: Any = None,
    validation: Any = None,
    methods: str | Method | Methods | MethodsByLabel | None = None,
    epochs: Count = 20,
    lr: Positive = 1e-3,
    samples: Count = 128,
    seed: Seed = 0,
    seeds: Count | Annotated[Sequence[Seed], NonEmpty()] = 1,
    likelihood: LikelihoodName = "auto",
    batch_size: Count | None = None,
    num_data: Count | None = None,
    clip_gradient: Positive | None = None,
    accelerator: Accelerator = "auto",
    precision: Precision = "32-true",
    folder: File | None = None,
    progress: bool = True,
) -> Comparison:
    """Fits several methods to a network and data, and compares their quality and cost.

    Args:
        network: Any module. Every method trains a copy from the given weights, except for deep ensembles, whose members are
            reinitialized. The deterministic baseline (maximum likelihood) is always included.
        train_loader: Training data: a loader of ``(inputs, targets)``, a ``Dataset``, or a pair of tensors or arrays. They are read
            repeatedly.
        test_loader: Test data of any of these formats.
        novel: Inputs unlike the training data, or a loader of them. They add the novelty AUROC.
        validation: Held-out data for methods that need them, such as temperature scaling. By default, these methods hold out some
            training data.
        methods: Keys of :data:`CANDIDATES`, glob patterns of keys, methods, or methods by label. None compares all candidates.
        epochs: Number of epochs of methods that are selected by key. A method that needs more is left out with a warning.
        lr: Learning rate of methods that are selected by key.
        samples: Number of networks averaged in a prediction.
        seed: First seed if ``seeds`` is a number.
        seeds: Number of seeds, or the seeds. Every seed starts from the given weights.
        likelihood: Observation model of every fit, as in :class:`~flowbnn.methods.FitOptions`.
        batch_size: Number of examples in a training batch, if ``train_loader`` is no loader. The default is about 64.
        num_data: Number of training examples.
        clip_gradient: Largest norm of the gradient.
        accelerator: Device type of every fit.
        precision: Precision of every fit.
        folder: Folder that stores finished results. A second call continues from them. Results with other settings, weights or test
            data are computed again with a warning.
        progress: If True, shows a progress bar in a terminal.

    Raises:
        FlowBNNError: If a loader can be read only once, if there are no methods or seeds, or if the baseline fails.

    >>> from flowbnn.data import TensorLoader, clusters
    >>> loaders = [TensorLoader(*clusters(100, 1.0), batch_size=50) for _ in range(2)]
    >>> result = compare(nn.Linear(2, 2), *loaders, methods=["map", "mc-dropout"], epochs=1, samples=4)
    >>> sorted(row["key"] for row in result.rows)
    ['map', 'mc-dropout', 'mle']
    """
    check_copyable(network)
    all_seeds = list(range(seed, seed + seeds) if isinstance(seeds, int) else dict.fromkeys(seeds))
    train_loader = as_loader(
        train_loader, batch_size=batch_size, shuffle=True, stage="train", argument="train_loader"
    )
    test_loader = as_loader(test_loader, argument="test_loader", columns=columns_of(train_loader))
    for argument, loader in (("train_loader", train_loader), ("test_loader", test_loader)):
        check(argument, loader, Iterable, "compare")
    if validation is not None:
        validation = as_loader(
            validation, stage="validation", argument="validation", columns=columns_of(train_loader)
        )
    if novel is not None:
        columns = columns_of(train_loader)
        novel = (
            as_loader(novel, columns=columns)
            if isinstance(novel, tuple)
            else as_inputs(novel, "novel", columns)
        )
    check_repeatable(train_loader, "train_loader")
    check_repeatable(test_loader, "test_loader")
    options: dict[str, Any] = {"num_data": num_data, "clip_gradient": clip_gradient}
    options |= {"accelerator": accelerator, "precision": precision}
    experiment = _Experiment(
        network, train_loader, test_loader, novel, validation, samples, likelihood, _changed_options(options)
    )
    failures: dict[str, str] = {}
    selection = _choose_methods(methods, failures, epochs=epochs, lr=lr, batches=length_of(train_loader))
    if methods is None:
        selection = _drop_slow_methods(selection, network, failures)
    settings = {"epochs": epochs, "lr": lr, "samples": samples, "seeds": all_seeds, **experiment.options}
    cache = ResultCache(folder, experiment.fingerprint(with_data=folder is not None))
    warm_up(network, train_loader, likelihood)
    parts = SeedResults(all_seeds, {})
    runs = [(candidate, method, number) for candidate, method in selection for number in all_seeds]
    with ProgressBar("comparing", len(runs), unit="fit", visible=progress) as bar:
        # the fits show nothing, because their times are compared
        for index, (candidate, method, number) in enumerate(runs):
            bar.update(index, label=f"comparing: {candidate.label}, seed {number}")
            parts.content[candidate.key, number] = experiment.run(candidate, method, number, cache, failures)
    return Comparison(
        [candidate for candidate, _ in selection],
        parts,
        failures,
        settings | _describe_network(network, selection),
        _describe_call(methods, settings),
    )


@dataclass(frozen=True)
class _Experiment:
    """The network, the data and the options that all methods share.

    Args:
        network: Network. Every fit copies it.
        train_loader: Training batches.
        test_loader: Test batches.
        novel: Inputs unlike the training data, or None.
        validation: Held-out batches, or None.
        samples: Number of networks averaged in a prediction.
        likelihood: Observation model.
        options: Options of every fit that differ from the defaults.
    """

    network: nn.Module
    train_loader: Iterable[Any]
    test_loader: Iterable[Any]
    novel: Any
    validation: Iterable[Any] | None
    samples: int
    likelihood: Any
    options: dict[str, Any]

    def fingerprint(self, with_data: bool) -> dict[str, Any]:
        """Returns the options and checksums that decide if a stored result can be used.

        Args:
            with_data: If True, includes the first test batch, provided that the loader yields the same one twice.
        """
        values = {**self.options, "likelihood": self.likelihood}
        test_loader = self.test_loader if with_data else ()
        first, second = ([fingerprint(list(islice(test_loader, 1)))] for _ in range(2))
        checksums = [fingerprint(self.network.state_dict()), *(first if first == second else [])]
        return {name: repr(value) for name, value in values.items()} | {
            "samples": self.samples,
            "checksums": checksums,
        }

    def run(
        self, candidate: Candidate, method: Method, seed: int, cache: ResultCache, failures: dict[str, str]
    ) -> dict[str, Any]:
        """Returns the result of a method and a seed, from the cache or by a fit.

        Args:
            candidate: Candidate of the method.
            method: Method to fit.
            seed: Seed of the fit.
            cache: Stored results.
            failures: Reasons why methods failed, by key. A failed fit adds one and has no metrics.
        """
        stored = cache.get(candidate.key, seed, repr(method))
        if stored is not None:
            return stored
        start = time.monotonic()
        try:
            with record_warnings() as warning_records:
                result = measure(
                    method,
                    self.network,
                    self.train_loader,
                    self.test_loader,
                    novel=self.novel,
                    samples=self.samples,
                    likelihood=self.likelihood,
                    validation=self.validation if candidate.needs_held_out else None,
                    seed=seed,
                    **self.options,
                )
        except FlowBNNError as error:
            _record_failure(candidate, error, failures)
            return {"values": {"nll": None}, "warnings": [], "seconds": time.monotonic() - start}
        result |= {"warnings": warning_records, "seconds": time.monotonic() - start}
        cache.put(candidate.key, seed, repr(method), result)
        return result


def _changed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a fit that differ from the defaults."""
    defaults = FitOptions()
    return {name: value for name, value in options.items() if value != getattr(defaults, name)}


def _choose_methods(methods: Any, failures: dict[str, str], **common: Any) -> list[tuple[Candidate, Method]]:
    """Returns the methods, the baseline first.

    Args:
        methods: Argument of :func:`compare`.
        failures: Reasons why methods failed, by key. A method whose settings are invalid adds one.
        common: Settings of methods that are selected by key.
    """
    if methods is None:
        methods = [candidate.key for candidate in CANDIDATES]
    elif isinstance(methods, str | Method):
        methods = [methods]
    selection: dict[str, tuple[Candidate, Method]] = {}
    labels_and_methods = (
        methods.items() if isinstance(methods, Mapping) else ((None, method) for method in methods)
    )
    for label, method in ((None, BASELINE), *labels_and_methods):
        if isinstance(method, str):
            for candidate in find_candidates([method]):
                try:
                    selection[candidate.key] = (candidate, candidate.make(**common))
                except FlowBNNError as error:
                    _record_failure(candidate, error, failures)
            continue
        key = re.sub(r"[^a-z0-9]+", "-", (label or method.name).lower()).strip("-") or "method"
        while key in selection:
            key += "-again"
        calibrates = isinstance(method, Calibrator)
        candidate = Candidate(
            key, label or repr(method), type(method), vars(method), needs_held_out=calibrates
        )
        selection[key] = candidate, method
    return list(selection.values())


def _drop_slow_methods(
    selection: Sequence[tuple[Candidate, Method]], network: nn.Module, failures: dict[str, str]
) -> list[tuple[Candidate, Method]]:
    """Returns the methods that do not take hours for a network of this size. Others are added to ``failures``."""
    weights = sum(parameter.numel() for parameter in network.parameters())
    for candidate, _ in selection:
        if weights > candidate.max_weights:
            failures[candidate.key] = f"too slow for {weights:,} weights; name it explicitly"
    return [(candidate, method) for candidate, method in selection if weights <= candidate.max_weights]


def _record_failure(candidate: Candidate, error: FlowBNNError, failures: dict[str, str]) -> None:
    """Adds the reason why a method failed, and warns once. An error of the baseline is raised, because no method can avoid it."""
    if candidate.key == BASELINE:
        raise error
    if candidate.key not in failures:
        text = f"{candidate.label} ('{candidate.key}') is left out: {error}"
        warn(text, kind="left out", method=candidate.key)
    failures[candidate.key] = str(error)


def _describe_network(network: nn.Module, selection: Sequence[tuple[Candidate, Method]]) -> dict[str, Any]:
    """Returns the network and the methods as plain settings."""
    return {
        "network": type(network).__name__,
        "weights": sum(parameter.numel() for parameter in network.parameters()),
        "device": device_of(network).type,
        "methods": {candidate.key: repr(method) for candidate, method in selection},
    }


def _describe_call(methods: Any, settings: Mapping[str, Any]) -> str:
    """Returns a call of :func:`compare` as text."""
    arguments = "".join(f", {name}={value!r}" for name, value in settings.items())
    return f"flowbnn.compare(network, train_loader, test_loader, methods={methods!r}{arguments})"
