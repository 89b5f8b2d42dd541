"""Running a study: jobs that are not done yet, their progress, and the results they make together."""

import os
import platform
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flowbnn.errors import FlowBNNError
from flowbnn.studies.base import Findings, Parts, Study
from flowbnn.studies.display import Display
from flowbnn.studies.job import Job
from flowbnn.studies.store import plain, read_json, write_json
from flowbnn.studies.workers import Workers, open_workers
from flowbnn.training import check_writable

__all__ = ["run_study"]

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
    precision: str = "32-true",
    jobs: int = 1,
    workers: Workers | None = None,
    command: str | None = None,
    smoke: bool = False,
) -> dict[str, Any]:
    """Run a study and write ``out/<study>/results.json``.

    Every finished pair of variant and seed is stored at once under ``parts``, every training keeps a checkpoint under
    ``checkpoints``. With ``resume`` nothing that is finished is done again and a training that was cut goes on; what other
    settings left behind is not used. Without it, the study starts clean; an older ``results.json`` stays until the new one
    replaces it.

    Args:
        study: from :func:`flowbnn.studies.get_study`.
        settings: the study's own dataclass; None takes its defaults.
        seeds: how many (0, 1, ...), or which.
        out: folder of all studies.
        resume: go on where a run was cut.
        progress: a bar on a terminal, else a line for each finished variant.
        accelerator, precision: as in Lightning Fabric; ``"auto"`` is what suits the study.
        jobs: processes; above 1 the caller must be a script that multiprocessing can import.
        workers: open ones, instead of ``jobs``.
        command: what to type to do this again.
        smoke: the settings are too small to mean anything: say so instead of an answer.

    Returns:
        What was written.
    """
    started = time.monotonic()
    settings = study.make_settings() if settings is None else settings
    chosen = _seeds(study.seeds if seeds is None else seeds)
    accelerator = study.accelerator if accelerator == "auto" else accelerator
    folder = Path(out) / study.name
    _prepare(folder, resume)
    variants = study.variants(settings)
    todo = [
        Job(study.name, variant.key, seed, settings, folder, variant.after, resume, accelerator, precision)
        for variant in variants
        for seed in chosen
    ]
    reused = sum(job.stored() is not None for job in todo) if resume else 0
    given = nullcontext(workers) if workers is not None else open_workers(min(jobs, len(todo)))
    with Display(study, variants, todo, progress) as display, given as staff:
        for stage in _stages(study, settings, todo):
            finished = [job for job in stage if resume and job.stored() is not None]
            waiting = [job for job in stage if job not in finished]
            display.skip(finished)
            display.busy(waiting[: staff.number])
            for number, job in enumerate(staff.do(waiting), start=staff.number):
                display.done(job, waiting[number : number + 1])
    parts = Parts(chosen, {(job.variant, job.seed): _content(job) for job in todo})
    findings = study.findings(settings, parts)
    if smoke:
        findings.answer = "This is a smoke run with tiny settings: its numbers mean nothing."
    if reused:
        findings.notes.append(
            f"{reused} of {len(todo)} trainings were finished by an earlier run and taken over (--resume)."
        )
    results = _results(study, settings, chosen, findings, accelerator, precision)
    results["command"] = command or f"flowbnn run {study.name}"
    results["seconds"] = round(time.monotonic() - started, 1)
    write_json(folder / "results.json", results)
    return plain(results)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
        raise FlowBNNError(
            f"seeds are a number of at least 1, or different numbers of at least 0, not {seeds}"
        )
    return chosen


def _prepare(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise FlowBNNError(
            f"'{folder}' is a file, but the results go into a folder of that name; name another with --out"
        )
    check_writable(folder / "results.json")
    for name in () if resume else ("parts", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
        if (folder / name).exists():
            raise FlowBNNError(
                f"cannot clear '{folder / name}' of an earlier run; name another folder with --out"
            )


def _stages(study: Study, settings: Any, todo: list[Job]) -> list[list[Job]]:
    """Jobs that need nothing, then those that start from them, and so on; the longest chains decide."""
    depth: dict[str, int] = {}
    cost: dict[str, float] = {}
    for variant in study.variants(settings):
        depth[variant.key] = 0 if variant.after is None else depth[variant.after] + 1
        cost[variant.key] = variant.cost
    todo = sorted(todo, key=lambda job: -cost[job.variant])
    return [[job for job in todo if depth[job.variant] == level] for level in range(max(depth.values()) + 1)]


def _content(job: Job) -> dict[str, Any]:
    found = read_json(job.part)
    if found is None or "content" not in found:
        raise FlowBNNError(f"'{job.part}' has vanished while the study ran; run it again with --resume")
    return found["content"]


def _results(
    study: Study, settings: Any, seeds: list[int], findings: Findings, accelerator: str, precision: str
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "study": study.name,
        "title": study.title,
        "question": study.question,
        "answer": findings.answer,
        "source": study.source,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device(accelerator),
        "versions": {
            "flowbnn": version("flowbnn"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seeds": seeds,
        "settings": {**study.describe_settings(settings), "accelerator": accelerator, "precision": precision},
        "metrics": [asdict(metric) for metric in findings.metrics],
        "rows": findings.rows,
        "figures": findings.figures,
        "notes": findings.notes,
    }


def _device(accelerator: str) -> str:
    if accelerator in ("cuda", "gpu") and torch.cuda.is_available():
        return f"cuda, {torch.cuda.get_device_name(0)}"
    return f"{accelerator}, {platform.machine()}, {os.cpu_count()} cores, one thread for each training"
