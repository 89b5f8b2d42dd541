"""A comparison of methods on a network and loaders of the user's own."""

import inspect
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import Method
from flowbnn.methods.base import LikelihoodName
from flowbnn.posterior.batches import count_data
from flowbnn.posterior.forward import device_of
from flowbnn.training import check_writable, track
from flowbnn_studies.comparing.findings import conclude
from flowbnn_studies.comparing.fingerprint import fingerprint, weights_of
from flowbnn_studies.comparing.measuring import measure, warm_up
from flowbnn_studies.comparing.outcome import Comparison
from flowbnn_studies.comparing.registry import count_weights
from flowbnn_studies.runner.base import Parts, Variant, warned
from flowbnn_studies.runner.lineup import PLAIN, RIVALS, Rival, find_rivals, rivals
from flowbnn_studies.runner.store import plain, read_json, write_json

__all__ = ["Comparison", "compare"]


def compare(
    network: nn.Module,
    train_loader: Iterable[Any],
    test_loader: Iterable[Any],
    *,
    novel: Any = None,
    validation: Iterable[Any] | None = None,
    methods: Sequence[str | Method] | Mapping[str, Method] | None = None,
    epochs: int = 20,
    lr: float = 1e-3,
    samples: int = 128,
    seed: int = 0,
    seeds: int | Sequence[int] = 1,
    likelihood: LikelihoodName = "auto",
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **options: Any,
) -> Comparison:
    """Fit methods on a network and data of your own and say which is best and what each costs.

    Args:
        network: any module; every method works on a copy. The plain network, by maximum likelihood, is always among them.
        train_loader, test_loader: batches of ``(inputs, targets)``; loaders that can be gone through again and again.
        novel: inputs, or a loader of inputs, that training has not seen; adds the novelty AUROC.
        validation: held-out batches for methods that learn from them, as temperature scaling does; else it takes a part of the
            training data.
        methods: names (:mod:`flowbnn_studies.runner.lineup`) or globs of names, methods, or methods by label; None for all.
        epochs, lr: of methods that are given by name; one that so few epochs do not suit is left out with a warning.
        samples: networks averaged in a prediction.
        seed: of everything that is drawn.
        seeds: how often each method is fitted, with ``seed``, ``seed + 1``, ..., or the seeds themselves; the network begins with
            the given weights in all of them.
        likelihood: as in :meth:`~flowbnn.methods.Method.fit`.
        folder: keeps each method's numbers as soon as it is done, and the results.
        resume: take over what an earlier call has finished in ``folder``, with the same network, weights and data; what was
            finished with others is done anew, with a warning. Of the training data, which may be augmented at random, only the
            number, the shape and the targets are looked at.
        progress: show a bar over the methods, on a terminal.
        options: of every fit, such as ``accelerator``.

    >>> from flowbnn.data import TensorLoader, clusters
    >>> loaders = [TensorLoader(*clusters(100, 1.0), batch_size=50) for _ in range(2)]
    >>> found = compare(nn.Linear(2, 2), *loaders, methods=["map", "mc-dropout"], epochs=1, samples=4)
    >>> sorted(row["key"] for row in found.rows)
    ['map', 'mc-dropout', 'mle']
    """
    _check(network, train_loader, test_loader, folder, resume)
    common = {"epochs": epochs, "lr": lr}
    numbers = _seeds(seed, seeds)
    chosen, left = _chosen(methods, {**common, "batches": _batches(train_loader)})
    weights, device = count_weights(network), device_of(network)
    identity = {
        "weights": {} if folder is None else weights_of(network),
        "examples": _length(train_loader),
        "samples": samples,
        "novel": novel is not None,
        "flowbnn": version("flowbnn"),
    }
    data: dict[str, Any] = {}
    held_out = None
    if folder is not None:
        data = {"train": fingerprint(train_loader, inputs=False), "test": fingerprint(test_loader)}
        data["novel"], held_out = fingerprint(novel), fingerprint(validation)
    content: dict[tuple[str, int], dict[str, Any]] = {}
    warm = False
    others: list[tuple[str, list[str]]] = []
    trainings = [(rival, method, number) for rival, method in chosen for number in numbers]
    for rival, method, number in track(trainings, "comparing", progress):
        data["validation"] = held_out if rival.held_out else None
        own = plain({**identity, "seed": number, "method": repr(method), "data": data})
        path = None if folder is None else Path(folder) / "parts" / f"{rival.key}-seed{number}.json"
        stored = read_json(path) if path is not None and resume else None
        if stored is not None and stored.get("identity") == own:
            content[rival.key, number] = stored["content"]
            continue
        if stored is not None:
            others.append(
                (rival.key, [name for name in own if stored.get("identity", {}).get(name) != own[name]])
            )
        if methods is None and rival.most_weights is not None and weights > rival.most_weights:
            part: dict[str, Any] = {
                "values": {},
                "refused": f"with {weights:,} weights it would take hours; name it in methods to have it all the same",
            }
        else:
            if not warm:
                warm_up(network, train_loader, likelihood)
                warm = True
            started = time.monotonic()
            try:
                part = _measured(
                    method,
                    network,
                    train_loader,
                    test_loader,
                    novel=novel,
                    validation=validation if rival.held_out else None,
                    likelihood=likelihood,
                    samples=samples,
                    seed=number,
                    **options,
                )
            except FlowBNNError as error:
                if rival.key == PLAIN:  # what the plain network cannot do, no method can
                    raise FlowBNNError(f"{rival.label} ('{rival.key}'): {error}") from error
                if not any(content.get((rival.key, other), {}).get("refused") for other in numbers):
                    _leave_out(rival, error)
                part = {"values": {}, "refused": str(error)}
            part["seconds"] = time.monotonic() - started
        content[rival.key, number] = part
        if path is not None:
            write_json(path, {"identity": own, "content": part})
    _tell_others(others, folder)
    parts = Parts(numbers, content)
    every = [rival for rival, _ in chosen]
    left += [
        (rival, part["refused"]) for rival in every for part in parts.of(rival.key) if part.get("refused")
    ]
    refusals = [f"{rival.label} is not in the table: {reason.rstrip('.')}." for rival, reason in left]
    notes = list(dict.fromkeys(refusals))
    notes += parts.warnings([Variant(rival.key, rival.label) for rival in every])
    shown = [rival for rival in every if any(part["values"] for part in parts.of(rival.key))]
    findings = conclude(parts, shown, notes, more="seeds=3")
    settings = {
        "network": type(network).__name__,
        "weights": weights,
        "examples": identity["examples"],
        **common,
        "samples": samples,
        "methods": {rival.key: repr(method) for rival, method in chosen},
    }
    command = _command(
        {"novel": novel, "validation": validation, "methods": methods, "epochs": epochs, "lr": lr},
        {"samples": samples, "seed": seed, "seeds": seeds, "likelihood": likelihood, **options},
    )
    threads = torch.get_num_threads()
    place = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
    seconds = sum(part.get("seconds", 0.0) for part in content.values())
    made = Comparison(findings, parts, seconds, settings, place, command)
    if folder is not None:
        made.save(folder)
    return made


def _tell_others(others: list[tuple[str, list[str]]], folder: Any) -> None:
    """Warn of what was found in the folder and could not be taken over."""
    if others:
        names = ", ".join(dict.fromkeys(key for key, _ in others))
        differ = ", ".join(dict.fromkeys(name for _, some in others for name in some))
        hint = (
            "; seed torch before the network is made" if any("weights" in some for _, some in others) else ""
        )
        warnings.warn(
            f"what {folder} holds of {names} was made with another network, data or setting (different: {differ}), so it was done "
            f"anew{hint}",
            FlowBNNWarning,
            stacklevel=3,
        )


def _measured(*given: Any, **options: Any) -> dict[str, Any]:
    """As :func:`measure`, with what the fit warned of among the notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlowBNNWarning)
        part = measure(*given, **options)
    ours = [warning for warning in caught if issubclass(warning.category, FlowBNNWarning)]
    for warning in caught:
        if warning not in ours:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return {**part, "warnings": warned(ours)}


def _check(network: Any, train: Any, test: Any, folder: str | Path | None, resume: bool) -> None:
    if not isinstance(network, nn.Module):
        raise FlowBNNError(f"compare takes a network (nn.Module), not a {type(network).__name__}")
    for name, loader in (("train_loader", train), ("test_loader", test)):
        if not hasattr(loader, "__iter__") or iter(loader) is loader:
            raise FlowBNNError(
                f"{name} is gone through once for every method: give a loader, or a list of batches"
            )
    if resume and folder is None:
        raise FlowBNNError("resume needs the folder that an earlier call wrote to")
    if folder is not None:
        check_writable(Path(folder) / "results.json")


def _seeds(first: int, seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, int):
        numbers = [first + more for more in range(seeds)]
    else:
        numbers = list(seeds) if isinstance(seeds, Sequence) else []
    whole = all(isinstance(number, int) and number >= 0 for number in numbers)
    if not numbers or not whole or len(set(numbers)) < len(numbers):
        raise FlowBNNError(
            f"seeds are a number of at least 1, or different numbers of at least 0, not {seeds}"
        )
    return numbers


def _command(*given: Mapping[str, Any]) -> str:
    """The call with what differs from its defaults; what has no words of its own stands by its name."""
    usual = {name: one.default for name, one in inspect.signature(compare).parameters.items()}
    words = ["network", "train_loader", "test_loader"]
    for name, value in (pair for some in given for pair in some.items()):
        if name == "methods":
            words += [] if value is None else [f"methods={_words(value)}"]
        elif name in ("novel", "validation"):
            words += [] if value is None else [f"{name}={name}"]
        elif name not in usual or (value is not usual[name] and value != usual[name]):
            simple = value is None or isinstance(value, str | int | float | list | tuple | range)
            words.append(f"{name}={value!r}" if simple else f"{name}={name}")
    return f"flowbnn.compare({', '.join(words)})"


def _words(methods: Any) -> str:
    """Methods as one writes them in a call."""
    if isinstance(methods, Mapping):
        return "{" + ", ".join(f"{label!r}: {_words(one)}" for label, one in methods.items()) + "}"
    if isinstance(methods, Method):
        ours = type(methods).__module__.partition(".")[0] == "flowbnn"
        return f"flowbnn.{methods!r}" if ours else repr(methods)
    if isinstance(methods, list | tuple):
        return "[" + ", ".join(_words(one) for one in methods) + "]"
    return repr(methods)


def _leave_out(rival: Rival, error: FlowBNNError) -> None:
    warnings.warn(f"{rival.label} ('{rival.key}') is left out of the comparison: {error}", FlowBNNWarning)


def _batches(loader: Any) -> int | None:
    """Batches of an epoch; None where the loader does not know."""
    try:
        return len(loader)
    except TypeError:
        return None


def _length(loader: Any) -> int | None:
    try:
        return count_data(loader)
    except (FlowBNNError, TypeError):
        return None


def _chosen(
    methods: Any, common: dict[str, Any]
) -> tuple[list[tuple[Rival, Method]], list[tuple[Rival, str]]]:
    """The methods with their names, the plain network first, and those that these settings do not suit, with the reason."""
    left: dict[str, tuple[Rival, str]] = {}
    found: dict[str, tuple[Rival, Method]] = {}

    def add(chosen: Iterable[Rival]) -> None:
        for rival in chosen:
            try:
                found[rival.key] = (rival, rival.make(**common))
            except FlowBNNError as error:
                if rival.key == PLAIN:
                    raise FlowBNNError(f"{rival.label} ('{rival.key}'): {error}") from error
                if rival.key not in left:
                    _leave_out(rival, error)
                left[rival.key] = (rival, str(error))

    add(find_rivals([PLAIN]))
    if methods is None:
        add(rivals())
        return list(found.values()), list(left.values())
    if isinstance(methods, str | Method):
        methods = [methods]
    given = list(methods.items()) if isinstance(methods, Mapping) else [(None, one) for one in methods]
    if not given:
        raise FlowBNNError(
            "there is no method to compare; name some, such as ['map', 'laplace'], or leave methods out for all"
        )
    for label, one in given:
        if isinstance(one, str):
            add(find_rivals([one]))
        elif isinstance(one, Method):
            rival = _rival_of(one, label, found)
            found[rival.key] = (rival, one)
        else:
            raise FlowBNNError(
                f"methods are names or methods, such as 'map' or fb.MAP(), not a {type(one).__name__}"
            )
    return list(found.values()), list(left.values())


def _rival_of(method: Method, label: str | None, taken: Mapping[str, Any]) -> Rival:
    like = next((rival for rival in RIVALS if rival.method == method.name), None)
    title = label or repr(method)
    key = re.sub(r"[^a-z0-9]+", "-", (label or method.name).lower()).strip("-") or "method"
    while key in taken or key == PLAIN:
        key += "-again"
    family = like.family if like else "point"
    return Rival(key, title, method.name, family, held_out=bool(like and like.held_out))
