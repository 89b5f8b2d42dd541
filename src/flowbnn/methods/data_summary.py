"""Summary of a training set, from one pass over its loader: first batch, number of examples, statistics of the targets."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from flowbnn.batches import (
    check_finite_batch,
    check_repeatable,
    has_row_axis,
    join,
    reported_size,
    shapes,
    split_weighted_batch,
)
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, describe_value, requirement_error
from flowbnn.likelihoods import Likelihood, RealLikelihood, make_likelihood
from flowbnn.metrics.checks import are_binary, are_probabilities
from flowbnn.regression import TargetStatistics
from flowbnn.training.options import length_of
from flowbnn.training.randomness import preserve_rng_state


def check_loader(loader: Any, purpose: str = "training", needs_length: str = "") -> None:
    """Checks that an object can be read as a loader of ``(inputs, targets)``.

    Args:
        loader: Object to check. Nothing is read from it unless it is a list.
        purpose: Use of the data, for the message.
        needs_length: Feature that needs a loader with a length, for the message. Empty if no length is needed.

    Raises:
        FlowBNNError: If the object is not a loader, is empty, can be read only once, or has no targets or no length.
    """
    requirement = value = hint = ""
    check_repeatable(loader)
    if not hasattr(loader, "__iter__") or isinstance(loader, Tensor | str):
        requirement, value = "a pair (inputs, targets), a Dataset or a DataLoader", describe_value(loader)
    elif isinstance(loader, list | tuple) and not loader:
        raise empty_loader(purpose)
    elif isinstance(loader, list | tuple) and (first := split_weighted_batch(loader[0])).targets is None:
        requirement, value = "batches of (inputs, targets)", "inputs alone"
        if isinstance(first.inputs, Mapping):
            value, hint = "a dictionary", _advice_for_keys(first.inputs)
        elif isinstance(loader[0], Tensor):
            value, hint = (
                "a list of inputs alone",
                "use the tuple (inputs, targets) for all examples or one batch",
            )
    elif needs_length and length_of(loader) is None:
        purpose, requirement, value = needs_length, "len(loader)", describe_value(loader)
    if requirement:
        raise requirement_error(purpose, requirement, value, hint, kind="loader", argument="loader")


def _advice_for_keys(batch: Mapping[str, Any]) -> str:
    """Returns how to name the inputs and the targets of a dictionary.

    >>> _advice_for_keys({"x": 0, "y": 1})
    "use flowbnn.data.Columns(loader, inputs=['x'], targets='y')"
    """
    keys = list(batch)
    target = next((name for name in ("targets", "target", "y") if name in batch), keys[-1])
    inputs = [key for key in keys if key != target]
    return f"use flowbnn.data.Columns(loader, inputs={inputs!r}, targets={target!r})"


def check_targets_differ(loader: Any, likelihood: str) -> None:
    """Raises FlowBNNError if all targets of data in memory are equal.

    Args:
        loader: Loader of the training data. Nothing is read from it unless it has its tensors in memory.
        likelihood: Name of the likelihood.
    """
    targets = loader.tensors[-1] if isinstance(loader, TensorLoader) and len(loader.tensors) > 1 else None
    if targets is None or len(targets) < 2 or not bool((targets == targets[:1]).all()):
        return
    if targets.is_floating_point() and likelihood in ("auto", "gaussian") and len(loader.tensors) == 2:
        hint = "check the targets, or fix the noise scale by likelihood=fb.likelihoods.Gaussian(0.1)"
        fields = {"kind": "targets", "argument": "loader"}
        raise requirement_error(
            "a learned noise scale", "targets that differ", f"{len(targets)} equal targets", hint, **fields
        )
    is_class = targets.ndim == 1 and not targets.is_floating_point() and int(targets[0]) >= 0
    if is_class and likelihood != "gaussian":
        value = f"class {int(targets[0])} for all {len(targets)} examples"
        raise requirement_error("training", "several classes", value, kind="classes", argument="loader")


def empty_loader(purpose: str = "training") -> FlowBNNError:
    """Returns the error for a loader without examples.

    Args:
        purpose: Use of the data.
    """
    return FlowBNNError(f"the loader for {purpose} is empty", kind="loader", argument="loader")


def first_batch(loader: Iterable[Any], purpose: str) -> tuple[Any, Any]:
    """Returns inputs and targets of the first batch, and restores all generators.

    Args:
        loader: Batches of ``(inputs, targets)``.
        purpose: Use of the data, for messages.
    """
    with closing(_read(loader, None, purpose)) as reader:
        inputs, targets = next(reader)
    if not len(targets):
        raise empty_loader(purpose)
    return inputs, targets


def _read(loader: Iterable[Any], seed: int | None, purpose: str = "training") -> Generator[tuple[Any, Any]]:
    """Yields inputs and targets of the batches. The generators are restored when the reader is closed."""
    check_loader(loader, purpose)
    empty = True
    with preserve_rng_state(loader, seed):
        for batch in loader:
            check_loader([batch], purpose)
            empty = False
            yield split_weighted_batch(batch)[:2]
    if empty:
        raise empty_loader(purpose)


@dataclass(frozen=True)
class DataSummary:
    """Summary of a training set.

    Args:
        inputs: Inputs of the first batch.
        targets: Targets of the first batch.
        sample: Inputs and targets of the first examples: the first batch, or at least 8 examples of a regression with smaller batches.
        num_examples: Number of training examples, or None if it is unknown.
        statistics: Statistics of all targets of a regression, otherwise None.

    >>> import torch
    >>> loader = [(torch.ones(4, 2), torch.tensor([1.0, 2.0, 3.0, 4.0]))] * 3
    >>> data = DataSummary.read(loader)
    >>> data.num_examples, data.statistics.mean.item(), data.sample[0].shape
    (12, 2.5, torch.Size([8, 2]))
    """

    inputs: Any
    targets: Tensor
    sample: tuple[Any, Tensor]
    num_examples: int | None
    statistics: TargetStatistics | None

    def require_num_examples(self) -> int:
        """Returns the number of training examples.

        Raises:
            FlowBNNError: If the number is unknown or zero.
        """
        return _known_size(self.num_examples)

    @classmethod
    def read(
        cls,
        loader: Iterable[Any],
        likelihood: Likelihood | str = "auto",
        seed: int | None = None,
        num_data: int | None = None,
        min_rows: int = 8,
    ) -> "DataSummary":
        """Reads a loader once and restores all generators.

        Only the first batch is read, with two exceptions. A regression needs all targets, to standardize them. The examples of a
        loader that has a length but does not report its number of examples are counted, if ``num_data`` is None.

        Args:
            loader: Batches of ``(inputs, targets)``.
            likelihood: Likelihood or its name, which tells a regression from a classification.
            seed: Seed for the order of a shuffled loader.
            num_data: Number of training examples, if known.
            min_rows: Minimum size of ``sample`` for a regression, to estimate the size of the residuals.
        """
        check_loader(loader)
        count, is_fixed = 0, num_data is not None
        num_data = num_data if is_fixed else reported_size(loader)
        must_count = num_data is None and length_of(loader) is not None
        with closing(_read(loader, seed)) as reader:
            first = next(reader)
            if not is_fixed and not has_row_axis(first[0]) and length_of(loader) is not None:
                num_data, must_count = None, True  # the loader counts graphs, the likelihood targets
            link = regression_link(likelihood, first[1])
            statistics = None if link is None else TargetStatistics()
            batches: list[tuple[Any, Tensor]] = []
            for number, batch in enumerate(chain([first], reader)):
                if statistics is not None and count < min_rows:
                    batches.append(batch)
                count += len(batch[1])
                if statistics is not None and link is not None:
                    check_finite_batch(batch, 0, number)
                    statistics.add(link(batch[1]))
                elif not must_count:
                    break
        if num_data is None and (must_count or statistics is not None):
            num_data = count
        same_shape = len({shapes(batch) for batch in batches}) == 1 and has_row_axis(first[0])
        return cls(*first, join(batches) if len(batches) > 1 and same_shape else first, num_data, statistics)


def count_examples(loader: Iterable[Any]) -> int:
    """Returns the number of examples that a loader reports. If it reports none but has a length, they are counted in one pass.

    Args:
        loader: Batches of ``(inputs, targets)``.

    Raises:
        FlowBNNError: If the number is unknown or zero.
    """
    number = reported_size(loader)
    if number is None and length_of(loader) is not None:
        with closing(_read(loader, None)) as reader:
            number = sum(len(targets) for _, targets in reader)
    return _known_size(number)


def _known_size(number: int | None) -> int:
    """Returns a number of examples. Raises FlowBNNError if it is unknown or zero."""
    if number is None:
        raise requirement_error("training", "len(loader) or num_data=", kind="loader", argument="num_data")
    if not number:
        raise empty_loader()
    return number


def regression_link(likelihood: Likelihood | str, targets: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Returns the function from real-valued targets to the scale of the outputs, or None if targets are not real-valued.

    Args:
        likelihood: Likelihood or its name. ``"auto"`` is chosen by the targets.
        targets: Targets of the first batch.
    """
    if likelihood == "auto":
        is_real = targets.is_floating_point() and not are_probabilities(targets) and not are_binary(targets)
        return (lambda values: values) if is_real else None
    model = make_likelihood(likelihood)
    return model.link if isinstance(model, RealLikelihood) else None
