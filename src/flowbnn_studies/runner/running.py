"""Running a study: jobs that are not done yet, their progress, and the results they make together."""

import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions, alone, check_writable, connect, is_main_process, launched
from flowbnn_studies.runner.base import Findings, Parts, Study
from flowbnn_studies.runner.display import Display
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.planning import choose, stages, suited, tidy, with_starts
from flowbnn_studies.runner.store import plain, write_json
from flowbnn_studies.runner.trial import mark_trial
from flowbnn_studies.runner.workers import Workers, open_workers

__all__ = ["run_study"]

EARLIER = "earlier"  # folder of what a new run put aside

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
    smoke: bool = False,
) -> dict[str, Any]:
    """Run a study and write ``out/<study>/results.json``.

    Every finished pair of variant and seed is stored at once under ``parts``, every training keeps a checkpoint under
    ``checkpoints``. With ``resume`` nothing that is finished is done again and a training that was cut goes on; what other
    settings left behind is not used. Without it, the study starts clean; an older ``results.json`` stays until the new one
    replaces it.

    Args:
        study: from :func:`flowbnn_studies.get_study`.
        settings: the study's own dataclass; None takes its defaults.
        seeds: how many (0, 1, ...), or which; None is each variant's own number.
        out: folder of all studies.
        resume: go on where a run was cut.
        progress: a bar on a terminal, else a line for each finished variant.
        accelerator, precision: as in Lightning Fabric; ``"auto"`` is what suits the study.
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
        smoke: the settings are too small to mean anything: say so in title, answer and notes, with nothing published beside.

    Returns:
        What was written.
    """
    started = time.monotonic()
    settings = study.make_settings() if settings is None else settings
    accelerator, precision = suited(study, accelerator, precision)
    where: dict[str, Any] = {"accelerator": accelerator, "precision": precision}
    where |= {"devices": devices, "num_nodes": num_nodes, "strategy": strategy, "acceleration": acceleration}
    together = str(devices) != "1" or num_nodes > 1 or launched()
    if together and (workers.number if workers is not None else jobs) > 1:
        raise FlowBNNError("jobs train side by side and devices train one together: use one or the other")
    connect(TrainingOptions(**where))
    folder = Path(out) / study.folder(settings)
    variants = study.variants(settings)
    every = [
        Job(study.name, variant.key, seed, settings, folder, variant.after, resume, **where)
        for variant in variants
        for seed in _seeds((variant.seeds or study.seeds) if seeds is None else seeds)
    ]
    chosen = choose(study, every, only)
    if not (collect or resume):
        study.check(settings, chosen)  # before anything that is there is cleared
    aside = alone(lambda: _prepare(folder, resume or collect, chosen if only else None))
    if aside and progress and is_main_process():
        print(
            f"{aside} finished trainings of an earlier run were put aside in '{folder / EARLIER}'; --resume would have kept them."
        )
    done = alone(
        lambda: [
            job for job in chosen if resume and not collect and job.stored(study.keeps_networks) is not None
        ]
    )
    todo = alone(lambda: [] if collect else with_starts(every, [job for job in chosen if job not in done]))
    # a start whose network is gone is trained again, and its row with it
    others = [] if resume else [job for job in todo if job not in chosen]
    again = alone(lambda: _put_aside(folder, [job.part for job in others if job.part.exists()]))
    if again and progress and is_main_process():
        names = ", ".join(job.name for job in others)
        print(
            f"{names}: trained again, because others start from it; what was there is in '{folder / EARLIER}'."
        )
    if todo:
        given = nullcontext(workers) if workers is not None else open_workers(min(jobs, len(todo)))
        shown = progress and is_main_process()
        with Display(study, variants, [*done, *todo], shown) as display, given as staff:
            display.skip(done)
            for stage in stages(variants, todo):
                display.busy(stage[: staff.number])
                for number, job in enumerate(staff.do(stage), start=staff.number):
                    display.done(job, stage[number : number + 1])
                if not study.keeps_networks:
                    alone(lambda: tidy(every))
    return alone(lambda: _conclude(study, settings, every, done, folder, collect, smoke, command, started))


def _conclude(
    study: Study,
    settings: Any,
    every: Sequence[Job],
    done: Sequence[Job],
    folder: Path,
    collect: bool,
    smoke: bool,
    command: str | None,
    started: float,
) -> dict[str, Any]:
    """What the parts make together, written."""
    found = {(job.variant, job.seed): job.content(collect) for job in every}
    content = {key: part for key, part in found.items() if part is not None}
    missing = [job for job in every if (job.variant, job.seed) not in content]
    if not content or (missing and not study.partial):
        raise FlowBNNError(
            f"'{folder}' has results of {len(content)} of the {len(every)} trainings of these settings; run the study first"
        )
    parts = Parts(sorted({seed for _, seed in content}), content)
    findings = study.findings(settings, parts)
    if missing:
        names = ", ".join(dict.fromkeys(job.variant for job in missing))
        findings.notes.append(f"{len(missing)} of {len(every)} trainings are still missing: {names}.")
    if done:
        findings.notes.append(
            f"{len(done)} of {len(every)} trainings were finished by an earlier run and taken over (--resume)."
        )
    results = _results(study, settings, parts, findings)
    if smoke:
        results = mark_trial(results, getattr(settings, "source", "") == "generated")
    results["command"] = command or f"flowbnn run {study.name}"
    made = {(part["machine"]["accelerator"], part["machine"]["precision"]) for part in content.values()}
    if collect and len(made) == 1:
        accelerator, precision = made.pop()
        if precision != suited(study, accelerator, "auto")[1] and "--precision" not in results["command"]:
            results["command"] += f" --precision {precision}"
    results["seconds"] = round(time.monotonic() - started, 1)
    if study.partial:  # such a run may have been put together from several: the time is that of all trainings
        results["seconds"] = round(sum(part.get("seconds", 0.0) for part in content.values()), 1)
    write_json(folder / "results.json", results)
    return plain(results)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
        raise FlowBNNError(
            f"seeds are a number of at least 1, or different numbers of at least 0, not {seeds}"
        )
    return chosen


def _prepare(folder: Path, resume: bool, chosen: Sequence[Job] | None) -> int:
    """Make sure that the folder can be written; unless resuming, clear it, or what the chosen jobs left in it.

    Finished trainings are put aside, in the place of those that were put aside before: hours may have gone into them.

    Returns:
        How many were put aside.
    """
    if folder.exists() and not folder.is_dir():
        raise FlowBNNError(
            f"'{folder}' is a file, but the results go into a folder of that name; name another with --out"
        )
    check_writable(folder / "results.json")
    if resume:
        return 0
    stale = [folder / "parts", folder / "checkpoints"]
    if chosen is not None:
        stale = [path for job in chosen for path in (job.part, job.state)]
    finished = [path for path in (folder / "parts").glob("*.json") if chosen is None or path in stale]
    _put_aside(folder, finished, anew=True)
    for path in stale:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if path.exists():
            raise FlowBNNError(f"cannot clear '{path}' of an earlier run; name another folder with --out")
    return len(finished)


def _put_aside(folder: Path, finished: Sequence[Path], anew: bool = False) -> int:
    """Move finished trainings to where nothing overwrites them; ``anew``: in the place of those that lie there."""
    if finished:
        if anew:
            shutil.rmtree(folder / EARLIER, ignore_errors=True)
        (folder / EARLIER).mkdir(parents=True, exist_ok=True)
        for path in finished:
            path.replace(folder / EARLIER / path.name)
    return len(finished)


def _results(study: Study, settings: Any, parts: Parts, findings: Findings) -> dict[str, Any]:
    machines = [part["machine"] for part in parts.content.values()]

    def told(name: str) -> str:
        return " and ".join(dict.fromkeys(str(machine.get(name, "not stored")) for machine in machines))

    results = {
        "schema": SCHEMA,
        "study": study.folder(settings),
        "title": study.heading(settings),
        "question": study.question,
        "answer": findings.answer,
        "source": study.source,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": told("device"),
        "versions": {name: told(name) for name in ("flowbnn", "torch", "python")},
        "seeds": parts.seeds,
        "settings": {
            **study.describe_settings(settings),
            "accelerator": told("accelerator"),
            "precision": told("precision"),
            **({"acceleration": told("acceleration")} if any("acceleration" in m for m in machines) else {}),
        },
        "metrics": [asdict(metric) for metric in findings.metrics],
        "rows": findings.rows,
        "figures": findings.figures,
        "notes": findings.notes,
    }
    if study.headline:
        results["headline"] = list(study.headline)
    if findings.comparisons:
        results["comparisons"] = findings.comparisons
    return results
