"""A comparison of methods on a network and loaders of the user's own."""

import platform
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.inference import Method
from flowbnn.inference.batches import count_data
from flowbnn.inference.method import LikelihoodName
from flowbnn.inference.passes import device_of
from flowbnn.studies.base import Findings, Metric, Parts, Variant
from flowbnn.studies.comparing.findings import conclude
from flowbnn.studies.comparing.measuring import measure, warm_up
from flowbnn.studies.comparing.registry import count_weights
from flowbnn.studies.lineup import PLAIN, RIVALS, Rival, find_rivals, rivals
from flowbnn.studies.store import plain, read_json, write_json
from flowbnn.training import check_writable, track

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """The table of a comparison; printing it shows it, :meth:`save` stores it.

    Args:
        findings: rows sorted by NLL, metrics, figures, the answer.
        parts: what was measured for each method.
        seconds: the whole took.
        settings: of the comparison, as plain values.
        device: the machine, in words.
    """

    findings: Findings
    parts: Parts
    seconds: float
    settings: dict[str, Any]
    device: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each method, the best NLL first: its ``key``, its ``label`` and its numbers by name."""
        return [
            {
                "key": row["key"],
                "label": row["label"],
                **{name: cell["mean"] for name, cell in row["values"].items()},
            }
            for row in self.findings.rows
        ]

    @property
    def best(self) -> str:
        """The key of the method with the lowest NLL."""
        if not self.findings.rows:
            raise FlowBNNError("no method of this comparison has numbers; its notes say why")
        return self.findings.rows[0]["key"]

    def table(self) -> str:
        """The numbers as text, sorted by NLL."""
        return text_table(self.findings.metrics, self.findings.rows)

    def __str__(self) -> str:
        notes = "".join(f"\n- {note}" for note in self.findings.notes)
        return f"{self.table()}\n\n{self.findings.answer}{notes}"

    def save(self, folder: str | Path) -> Path:
        """Write ``folder/results.json``, of which ``flowbnn report FOLDER`` makes a page with figures."""
        found = self.findings
        results = {
            "schema": 1,
            "study": "compare",
            "title": "Which method should I use?",
            "question": "On this network and this data, which method should one use, and what does it cost?",
            "answer": found.answer,
            "source": "",
            "command": "flowbnn.compare(network, train_loader, test_loader)",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "device": self.device,
            "versions": {
                "flowbnn": version("flowbnn"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "seeds": self.parts.seeds,
            "settings": self.settings,
            "metrics": [asdict(metric) for metric in found.metrics],
            "rows": found.rows,
            "figures": found.figures,
            "notes": found.notes,
        }
        return write_json(Path(folder) / "results.json", results)


def text_table(metrics: Sequence[Metric], rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows and metrics in columns of one width, with the spread where there are several seeds."""

    def cell(row: Mapping[str, Any], metric: Metric) -> str:
        found = row["values"].get(metric.key)
        if found is None or found["mean"] is None:
            return "-"
        text = format(found["mean"], metric.format)
        return text if found["std"] is None else f"{text} ± {found['std']:{metric.format}}"

    lines = [["", *(metric.label for metric in metrics)]]
    lines += [[row["label"], *(cell(row, metric) for metric in metrics)] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


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
        methods: names (:mod:`flowbnn.studies.lineup`), methods, or methods by label; None for all.
        epochs, lr: of methods that are given by name.
        samples: networks averaged in a prediction.
        seed: of everything that is drawn.
        likelihood: as in :meth:`~flowbnn.inference.Method.fit`.
        folder: keeps each method's numbers as soon as it is done, and the results.
        resume: take over what an earlier call has finished in ``folder``.
        progress: show a bar over the methods, on a terminal.
        options: of every fit, such as ``accelerator``.

    >>> from flowbnn.data import TensorLoader, clusters
    >>> loaders = [TensorLoader(*clusters(100, 1.0), batch_size=50) for _ in range(2)]
    >>> found = compare(nn.Linear(2, 2), *loaders, methods=["map", "mc-dropout"], epochs=1, samples=4)
    >>> sorted(row["key"] for row in found.rows)
    ['map', 'mc-dropout', 'mle']
    """
    started = time.monotonic()
    _check(network, train_loader, test_loader, folder, resume)
    common = {"epochs": epochs, "lr": lr}
    chosen = _chosen(methods, common)
    weights, device = count_weights(network), device_of(network)
    identity = {
        "weights": {name: list(value.shape) for name, value in network.named_parameters()},
        "examples": _length(train_loader),
        "samples": samples,
        "seed": seed,
        "novel": novel is not None,
        "flowbnn": version("flowbnn"),
    }
    content: dict[tuple[str, int], dict[str, Any]] = {}
    warm = False
    for rival, method in track(chosen, "comparing", progress):
        own = plain({**identity, "method": repr(method)})
        path = None if folder is None else Path(folder) / "parts" / f"{rival.key}-seed{seed}.json"
        stored = read_json(path) if path is not None and resume else None
        if stored is not None and stored.get("identity") == own:
            content[rival.key, seed] = stored["content"]
            continue
        if methods is None and rival.most_weights is not None and weights > rival.most_weights:
            part: dict[str, Any] = {
                "values": {},
                "refused": f"with {weights:,} weights it would take hours; name it in methods to have it all the same",
            }
        else:
            if not warm:
                warm_up(network, train_loader, likelihood)
                warm = True
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
                    seed=seed,
                    **options,
                )
            except FlowBNNError as error:
                if rival.key == PLAIN:
                    raise  # what the plain network cannot do, no method can
                part = {"values": {}, "refused": str(error)}
        content[rival.key, seed] = part
        if path is not None:
            write_json(path, {"identity": own, "content": part})
    parts = Parts([seed], content)
    every = [rival for rival, _ in chosen]
    notes = [
        f"{rival.label} is not in the table: {content[rival.key, seed]['refused'].rstrip('.')}."
        for rival in every
        if content[rival.key, seed].get("refused")
    ]
    notes += parts.warnings([Variant(rival.key, rival.label) for rival in every])
    findings = conclude(parts, [r for r in every if content[r.key, seed]["values"]], notes)
    settings = {
        "network": type(network).__name__,
        "weights": weights,
        "examples": identity["examples"],
        **common,
        "samples": samples,
        "methods": {rival.key: repr(method) for rival, method in chosen},
    }
    threads = torch.get_num_threads()
    place = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
    made = Comparison(findings, parts, time.monotonic() - started, settings, place)
    if folder is not None:
        made.save(folder)
    return made


def _measured(*given: Any, **options: Any) -> dict[str, Any]:
    """As :func:`measure`, with what the fit warned of among the notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlowBNNWarning)
        part = measure(*given, **options)
    ours = [warning for warning in caught if issubclass(warning.category, FlowBNNWarning)]
    for warning in caught:
        if warning not in ours:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return {**part, "warnings": [str(warning.message) for warning in ours]}


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


def _length(loader: Any) -> int | None:
    try:
        return count_data(loader)
    except (FlowBNNError, TypeError):
        return None


def _chosen(methods: Any, common: dict[str, Any]) -> list[tuple[Rival, Method]]:
    """The methods with their names, the plain network first."""
    if methods is None:
        return [(rival, rival.make(**common)) for rival in rivals()]
    if isinstance(methods, str | Method):
        methods = [methods]
    given = list(methods.items()) if isinstance(methods, Mapping) else [(None, one) for one in methods]
    if not given:
        raise FlowBNNError(
            "there is no method to compare; name some, such as ['map', 'laplace'], or leave methods out for all"
        )
    found: dict[str, tuple[Rival, Method]] = {}
    for label, one in given:
        if isinstance(one, str):
            found |= {rival.key: (rival, rival.make(**common)) for rival in find_rivals([one])}
        elif isinstance(one, Method):
            rival = _rival_of(one, label, found)
            found[rival.key] = (rival, one)
        else:
            raise FlowBNNError(
                f"methods are names or methods, such as 'map' or fb.MAP(), not a {type(one).__name__}"
            )
    if PLAIN not in found:
        rival = find_rivals([PLAIN])[0]
        found = {PLAIN: (rival, rival.make(**common)), **found}
    return list(found.values())


def _rival_of(method: Method, label: str | None, taken: Mapping[str, Any]) -> Rival:
    like = next((rival for rival in RIVALS if rival.method == method.name), None)
    title = label or repr(method)
    key = re.sub(r"[^a-z0-9]+", "-", (label or method.name).lower()).strip("-") or "method"
    while key in taken or key == PLAIN:
        key += "-again"
    family = like.family if like else "point"
    return Rival(key, title, method.name, family, held_out=bool(like and like.held_out))
