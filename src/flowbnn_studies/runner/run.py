"""Running a study: the jobs that are not done yet, their progress, and the results they make together."""

import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.results import Parts, plain, write_json
from flowbnn.training import TrainingOptions, alone, check_writable, connect, is_main_process, launched
from flowbnn_studies.runner.job import GPUS, Job
from flowbnn_studies.runner.study import Study, Variant
from flowbnn_studies.runner.workers import Workers, open_workers

__all__ = ["best_place", "run_study"]

EARLIER = "earlier"  # folder of finished trainings that a new run put aside
SCHEMA = 1


def run_study(
    study: Study,
    *,
    settings: Any = None,
    seeds: int | Sequence[int] | None = None,
    out: str | Path = "results",
    resume: bool = False,
    progress: bool = True,
    accelerator: str = "auto",
    precision: str = "auto",
    devices: int | str = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    acceleration: str = "auto",
    only: Sequence[str] | None = None,
    collect: bool = False,
    jobs: int = 1,
    workers: Workers | None = None,
    command: str | None = None,
    trial: bool = False,
) -> dict[str, Any]:
    """Run a study and write ``out/<study>/results.json``.

    Every finished pair of variant and seed is stored at once under ``parts``, every training keeps a checkpoint under
    ``checkpoints``. With ``resume`` nothing that is finished is done again and an interrupted training goes on; what other
    settings left behind is not used. Without it, the study starts clean; an older ``results.json`` stays until the new one
    replaces it.

    Args:
        study: from :func:`flowbnn_studies.get_study`.
        settings: the study's own class; None takes its defaults.
        seeds: how many (0, 1, ...), or which; None is each variant's own number.
        out: folder of all studies.
        resume: go on where a run was interrupted.
        progress: a bar on a terminal, else a line for each finished variant.
        accelerator, precision: as in :class:`~flowbnn.training.TrainingOptions`; ``"auto"`` is what suits the study.
        devices, num_nodes, strategy: processes that train each variant together, as in
            :class:`~flowbnn.training.TrainingOptions`; they are started by running the caller's script again, up to here.
            The first one writes the results.
        acceleration: how steps are taken on a GPU, as in :class:`~flowbnn.training.TrainingOptions`.
        only: globs on the variants' keys: train these alone, and those they start from; for studies whose results can be
            put together from several runs. What was finished before stays.
        collect: train nothing; make the results of the parts that are there, on whatever device they were made.
        jobs: processes; above 1 the caller must be a script that multiprocessing can import.
        workers: open ones, instead of ``jobs``.
        command: what to type to do this again.
        trial: the settings are too small to mean anything: say so, and show nothing published beside the numbers.

    Returns:
        What was written.
    """
    started = time.monotonic()
    settings = study.make_settings() if settings is None else settings
    accelerator, precision = best_place(study, accelerator, precision)
    where: dict[str, Any] = {"accelerator": accelerator, "precision": precision}
    where |= {"devices": devices, "num_nodes": num_nodes, "strategy": strategy, "acceleration": acceleration}
    together = str(devices) != "1" or num_nodes > 1 or launched()
    if together and (workers.number if workers is not None else jobs) > 1:
        raise FlowBNNError(
            "jobs train side by side and devices train one together: use one or the other", argument="jobs"
        )
    connect(TrainingOptions(**where))
    folder = Path(out) / study.folder(settings)
    variants = study.variants(settings)
    every = [
        Job(study.name, variant.key, seed, settings, folder, variant.after, resume, **where)
        for variant in variants
        for seed in _seeds((variant.seeds or study.seeds) if seeds is None else seeds)
    ]
    chosen = _choose(study, every, only)
    if not (collect or resume):
        study.check(settings, chosen)
    shown = progress and is_main_process()
    aside = alone(lambda: _prepare(folder, resume or collect, chosen if only else None))
    if aside and shown:
        print(
            f"{aside} finished trainings of an earlier run were put aside in '{folder / EARLIER}'; --resume would have kept them."
        )
    keeping = study.keeps_networks
    done = alone(
        lambda: [job for job in chosen if resume and not collect and job.stored(keeping) is not None]
    )
    todo = alone(lambda: [] if collect else _with_starts(every, [job for job in chosen if job not in done]))
    again = [job for job in todo if not resume and job not in chosen and job.part.exists()]
    if alone(lambda: _put_aside(folder, [job.part for job in again])) and shown:
        names = ", ".join(job.name for job in again)
        print(
            f"{names}: trained again, because others start from it; what was there is in '{folder / EARLIER}'."
        )
    if todo:
        opened = nullcontext(workers) if workers is not None else open_workers(min(jobs, len(todo)))
        with opened as staff, Display(study.name, variants, [*done, *todo], shown) as display:
            display.done(*done)
            for stage in _stages(variants, todo):
                for job in staff.do(stage):
                    display.done(job)
                if not study.keeps_networks:
                    alone(lambda: _tidy(every))
    return alone(lambda: _conclude(study, settings, every, done, collect, trial, command, started))


def best_place(study: Study, accelerator: str = "auto", precision: str = "auto") -> tuple[str, str]:
    """Where and how to compute: what was asked for, or else what suits the study and this machine."""
    if accelerator == "auto":
        accelerator = study.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = "bf16-mixed" if accelerator in GPUS and study.accelerator == "auto" else "32-true"
    return accelerator, precision


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
        raise FlowBNNError(
            f"seeds must be a number of at least 1, or different integers of at least 0, got {seeds}",
            argument="seeds",
        )
    return chosen


def _choose(study: Study, every: Sequence[Job], only: Sequence[str] | None) -> list[Job]:
    """The jobs whose variant one of the globs matches; all of them without globs."""
    if not only:
        return list(every)
    if not study.partial:
        raise FlowBNNError(f"study '{study.name}' is run as a whole; leave out --only", argument="only")
    keys = list(dict.fromkeys(job.variant for job in every))
    for glob in only:
        if not any(fnmatchcase(key, glob) for key in keys):
            raise FlowBNNError(
                f"'{glob}' matches no variant of '{study.name}'{nearest(glob, keys)}", argument="only"
            )
    return [job for job in every if any(fnmatchcase(job.variant, glob) for glob in only)]


def _with_starts(every: Sequence[Job], todo: Sequence[Job]) -> list[Job]:
    """The jobs, and those whose trained network they start from where it is missing; one that is there is taken as it is."""
    by_name = {job.name: job for job in every}
    needed = {job.name for job in todo}
    waiting = list(todo)
    while waiting:
        job = waiting.pop()
        start = by_name.get(f"{job.after}-seed{job.seed}")
        if job.after is not None and start is None:
            raise FlowBNNError(
                f"'{job.variant}' starts from '{job.after}', which has no seed {job.seed}", argument="seeds"
            )
        if start is not None and start.name not in needed and start.stored(network=True) is None:
            needed.add(start.name)
            waiting.append(start)
    return [job for job in every if job.name in needed]


def _stages(variants: Sequence[Variant], todo: Sequence[Job]) -> list[list[Job]]:
    """Jobs that need nothing, then those that start from them, and so on; at the end, one by one, those that run alone."""
    by_key = {variant.key: variant for variant in variants}
    depth: dict[str, int] = {}
    for variant in variants:
        depth[variant.key] = 0 if variant.after is None else depth[variant.after] + 1
    ordered = sorted(todo, key=lambda job: -by_key[job.variant].cost)
    side_by_side = [job for job in ordered if not by_key[job.variant].alone]
    levels = [
        [job for job in side_by_side if depth[job.variant] == level]
        for level in range(max(depth.values()) + 1)
    ]
    return [level for level in levels if level] + [[job] for job in ordered if by_key[job.variant].alone]


def _tidy(every: Sequence[Job]) -> None:
    """Delete the trained networks and checkpoints of finished jobs, but for those that an unfinished one starts from."""
    unfinished = [job for job in every if job.stored() is None]
    needed = {job.state for job in unfinished} | {job.start.parent for job in unfinished}
    for job in every:
        if job.state not in needed:
            shutil.rmtree(job.state, ignore_errors=True)


def _prepare(folder: Path, keep: bool, chosen: Sequence[Job] | None) -> int:
    """Make sure that the folder can be written; unless ``keep``, clear it, or what the chosen jobs left in it.

    Finished trainings are put aside, replacing those that were put aside before: hours may have gone into them.

    Returns:
        How many were put aside.
    """
    if folder.exists() and not folder.is_dir():
        raise FlowBNNError(
            f"'{folder}' is a file, but the results go into a folder of that name; name another with --out"
        )
    check_writable(folder / "results.json")
    if keep:
        return 0
    stale = [folder / "parts", folder / "checkpoints"]
    if chosen is not None:
        stale = [path for job in chosen for path in (job.part, job.state)]
    finished = [path for path in (folder / "parts").glob("*.json") if chosen is None or path in stale]
    if finished:
        shutil.rmtree(folder / EARLIER, ignore_errors=True)
    _put_aside(folder, finished)
    for path in stale:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return len(finished)


def _put_aside(folder: Path, finished: Sequence[Path]) -> int:
    """Move finished trainings to where nothing overwrites them."""
    for path in finished:
        (folder / EARLIER).mkdir(parents=True, exist_ok=True)
        path.replace(folder / EARLIER / path.name)
    return len(finished)


def _conclude(
    study: Study,
    settings: Any,
    every: Sequence[Job],
    done: Sequence[Job],
    collect: bool,
    trial: bool,
    command: str | None,
    started: float,
) -> dict[str, Any]:
    """The results that the parts make together, written."""
    folder = every[0].folder
    stored = {(job.variant, job.seed): job.stored(anywhere=collect) for job in every}
    content = {key: part for key, part in stored.items() if part is not None}
    missing = [variant for variant, seed in stored if (variant, seed) not in content]
    if not content or (missing and not study.partial):
        raise FlowBNNError(
            f"'{folder}' has results of {len(content)} of the {len(every)} trainings of these settings; run the study first"
        )
    parts = Parts(sorted({seed for _, seed in content}), content)
    findings = study.findings(settings, parts)
    machines = [part["machine"] for part in content.values()]

    def machine(name: str) -> str:
        return " and ".join(dict.fromkeys(str(one.get(name, "not stored")) for one in machines))

    notes = list(findings.notes)
    if missing:
        notes.append(
            f"{len(missing)} of {len(every)} trainings are still missing: {', '.join(dict.fromkeys(missing))}."
        )
    if done:
        notes.append(
            f"{len(done)} of {len(every)} trainings were finished by an earlier run and taken over (--resume)."
        )
    command = command or f"flowbnn run {study.name}"
    if (
        collect
        and machine("precision") != best_place(study, machine("accelerator"))[1]
        and "--precision" not in command
    ):
        command += f" --precision {machine('precision')}"
    where = [
        name for name in ("accelerator", "precision", "acceleration") if any(name in one for one in machines)
    ]
    # results that may be put together from several runs tell the time of all trainings
    seconds = (
        sum(part["seconds"] for part in content.values()) if study.partial else time.monotonic() - started
    )
    results = {
        "schema": SCHEMA,
        "study": study.folder(settings),
        "title": study.heading(settings),
        "question": study.question,
        "answer": findings.answer,
        "source": study.source,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine("device"),
        "versions": {name: machine(name) for name in ("flowbnn", "torch", "python")},
        "seeds": parts.seeds,
        "settings": {**study.describe_settings(settings), **{name: machine(name) for name in where}},
        "metrics": [asdict(metric) for metric in findings.metrics],
        "rows": findings.rows,
        "figures": [_with_published(one) for one in findings.figures],
        "notes": notes,
        "headline": list(study.headline),
        "comparisons": findings.comparisons,
        "command": command,
        "seconds": round(seconds, 1),
    }
    if trial:
        results |= mark_trial(results, findings.figures, getattr(settings, "source", "") == "generated")
    results = {
        name: value for name, value in results.items() if value or name not in ("headline", "comparisons")
    }
    write_json(folder / "results.json", results)
    return plain(results)


def _with_published(figure: dict[str, Any]) -> dict[str, Any]:
    """The figure with the sentence about what others published in its caption."""
    caption = " ".join(filter(None, (figure["caption"], figure.get("published"))))
    return {**{name: part for name, part in figure.items() if name != "published"}, "caption": caption}


def mark_trial(
    results: dict[str, Any], figures: Sequence[dict[str, Any]], generated: bool = False
) -> dict[str, Any]:
    """What a trial run shows instead: title, answer and a note that say what it is, and nothing published beside its numbers.

    Args:
        results: of the study.
        figures: as the study made them.
        generated: whether the images were generated in place of the data set that the title names.

    >>> mark_trial({"title": "LeNet on Fashion-MNIST", "rows": [], "notes": []}, [], generated=True)["title"]
    'LeNet on Fashion-MNIST (generated images, a trial run: the numbers mean nothing)'
    """
    small = "generated images" if generated else "tiny settings"
    text = f"This is a trial run with {small}: its numbers mean nothing."
    rows = [
        {**row, "values": {key: {**cell, "published": None} for key, cell in row["values"].items()}}
        for row in results["rows"]
        if not row.get("cited")
    ]
    own = []
    for figure in figures:
        data = dict(figure["data"])
        if figure["kind"] == "curves":
            data["panels"] = [
                {
                    **panel,
                    "lines": [line for line in panel["lines"] if line.get("style") != "dashed"],
                    "levels": [],
                }
                for panel in data["panels"]
            ]
        own.append({**{name: part for name, part in figure.items() if name != "published"}, "data": data})
    return {
        "title": f"{results['title']} ({small}, a trial run: the numbers mean nothing)",
        "answer": text,
        "trial": "yes",
        "rows": rows,
        "figures": own,
        "notes": [f"{text} No published values stand beside them.", *results["notes"]],
    }


class Display:
    """Progress on standard error: a bar on a terminal, else a line for each finished variant."""

    def __init__(self, name: str, variants: Sequence[Variant], jobs: Sequence[Job], shown: bool) -> None:
        console = Console(stderr=True, highlight=False)
        self.name, self.shown, self.console, self.started = name, shown, console, time.monotonic()
        self.labels = {variant.key: variant.label for variant in variants}
        self.left = {key: sum(job.variant == key for job in jobs) for key in self.labels}
        columns = (
            "[bold]{task.fields[study]}",
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        bar = Progress(*columns, TextColumn("{task.description}"), console=console, refresh_per_second=4)
        self.bar = bar if shown and console.is_terminal else None
        self.task = bar.add_task("", total=len(jobs), study=name)

    def __enter__(self) -> "Display":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def done(self, *jobs: Job) -> None:
        """Count finished jobs."""
        for job in jobs:
            self.left[job.variant] -= 1
            if self.bar is not None:
                self.bar.update(
                    self.task, advance=1, description=f"{self.labels[job.variant]}, seed {job.seed} done"
                )
            elif self.shown and not self.left[job.variant]:
                self.console.print(
                    f"{self.name}: {self.labels[job.variant]} done ({time.monotonic() - self.started:.0f} s)"
                )
