"""Running a study: the jobs that are not done yet, the processes that do them, their progress, and the results they make together."""

import multiprocessing
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import count
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import torch

from flowbnn.compare.results import Parts, plain, recorded_warnings, write_json
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.options import Count, checked
from flowbnn.training import (
    TrainingOptions,
    check_writable,
    connect,
    is_main_process,
    is_torchrun_worker,
    num_processes,
    run_on_main,
)
from flowbnn_studies.runner.findings import mark_trial
from flowbnn_studies.runner.study import GPUS, Job, Study, Variant, get_study

EARLIER = "earlier"  # folder of finished trainings that a new run put aside
SCHEMA = 1
ENOUGH = 2  # seeds of a trial, from which on there is a spread


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def work(job: Job) -> Job:
    """Do one job and store its result; with one thread, so that the numbers do not depend on the machine's cores."""
    started = time.monotonic()
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        run_on_main(job.begin)
        torch.manual_seed(job.seed)
        with recorded_warnings() as warned:
            content = get_study(job.study).train(job)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
    machine = {
        "device": device_name(job.accelerator)
        + (f", {num_processes()} processes" if num_processes() > 1 else ""),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if job.accelerator in GPUS:
        machine["acceleration"] = job.acceleration  # which changes times
    content |= {"warnings": warned, "seconds": time.monotonic() - started, "machine": machine}
    run_on_main(lambda: write_json(job.part, {"identity": job.identity(), "content": content}))
    return job


def device_name(accelerator: str) -> str:
    """The machine, in words.

    >>> device_name("cpu").startswith("cpu, ")
    True
    """
    if accelerator in GPUS and torch.cuda.is_available():
        return f"cuda, {torch.cuda.get_device_name(0)}"
    return f"{accelerator}, {platform.machine()}, {os.cpu_count()} cores, one thread for each training"


class Workers:
    """Does jobs: with a pool of ``number`` processes, or one after the other in this process."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(number, context, initializer=_prepare) if number > 1 else None

    def do(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Yield each job as it is done, in any order."""
        if self.pool is None:
            yield from map(work, jobs)
            return
        with _held_back():
            waiting: set[Future[Job]] = {self.pool.submit(work, job) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise FlowBNNError(
                "a worker process died (out of memory?); what is finished is kept: go on with --resume, and --jobs 1 needs the least",
                kind="worker",
            ) from None


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold Ctrl-C back: processes that are started inside never see it, not even while they import."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _prepare() -> None:
    """A worker leaves Ctrl-C to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            wait_for([parent.sentinel])
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


@contextmanager
@checked
def open_workers(jobs: Count = 1) -> Iterator[Workers]:
    """Workers for the length of a ``with`` block; with ``jobs`` above 1, that many processes."""
    before = set(multiprocessing.active_children())
    workers = Workers(jobs)
    try:
        yield workers
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        if workers.pool is not None:
            workers.pool.shutdown(wait=True, cancel_futures=True)


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
        seeds: how many (0, 1, ...), or which; None is each variant's own number, of a trial two at most.
        out: folder of all studies.
        resume: go on where a run was interrupted.
        progress: a line on standard error for each finished training.
        accelerator, precision: as in :class:`~flowbnn.training.TrainingOptions`; ``"auto"`` is what suits the study.
        devices, num_nodes: processes that train each variant together, as in
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
    where |= {"devices": devices, "num_nodes": num_nodes, "acceleration": acceleration}
    together = str(devices) != "1" or num_nodes > 1 or is_torchrun_worker()
    if together and (workers.number if workers is not None else jobs) > 1:
        raise FlowBNNError(
            "jobs train side by side and devices train one together: use one or the other", argument="jobs"
        )
    connect(TrainingOptions(**where))
    folder = Path(out) / study.folder(settings)
    variants, most = study.variants(settings), ENOUGH if trial else None
    every = [
        Job(study.name, variant.key, seed, settings, folder, variant.after, resume, **where)
        for variant in variants
        for seed in (_seeds(variant.seeds or study.seeds)[:most] if seeds is None else _seeds(seeds))
    ]
    chosen = _choose(study, every, only)
    if not (collect or resume):
        study.check(settings, chosen)

    def plan() -> tuple[list[Job], list[Job], int]:
        """What is done already, what is to do, and how many finished trainings that puts aside."""
        check_writable(folder / "results.json")
        done = [job for job in chosen if resume and not collect and job.stored(study.keeps_networks)]
        todo = [] if collect else _with_starts(every, [job for job in chosen if job not in done])
        return done, todo, 0 if resume else _put_aside(todo)

    done, todo, aside = run_on_main(plan)
    shown = progress and is_main_process()
    if aside and shown:
        print(
            f"{aside} finished trainings of an earlier run were put aside in '{folder / EARLIER}'; --resume would have kept them."
        )
    if todo:
        labels, number = {variant.key: variant.label for variant in variants}, len(done)
        with nullcontext(workers) if workers is not None else open_workers(min(jobs, len(todo))) as staff:
            for stage in _stages(variants, todo):
                for job in staff.do(stage):
                    number += 1
                    if shown:
                        place = f"{number} of {len(done) + len(todo)}, {time.monotonic() - started:.0f} s"
                        line = f"{study.name}: {labels[job.variant]}, seed {job.seed} done ({place})"
                        print(line, file=sys.stderr, flush=True)
                if not study.keeps_networks:
                    run_on_main(lambda: _tidy(every))

    def conclude() -> dict[str, Any]:
        stored = {(job.variant, job.seed): job.stored(anywhere=collect) for job in every}
        content = {key: part for key, part in stored.items() if part is not None}
        missing = [variant for variant, seed in stored if (variant, seed) not in content]
        if not content or (missing and not study.partial):
            raise FlowBNNError(
                f"'{folder}' has results of {len(content)} of the {len(every)} trainings of these settings; run the study first",
                kind="file",
            )
        notes = []
        if missing:
            names = ", ".join(dict.fromkeys(missing))
            notes.append(f"{len(missing)} of {len(every)} trainings are still missing: {names}.")
        if done:
            notes.append(
                f"{len(done)} of {len(every)} trainings were finished by an earlier run and taken over (--resume)."
            )
        results = _results(study, settings, content, notes, command, collect)
        # else it is the time of all trainings, which were put together from several runs
        if not (study.partial or done or collect):
            results["seconds"] = round(time.monotonic() - started, 1)
        if trial:
            results |= mark_trial(results, getattr(settings, "source", "") == "generated")
        write_json(folder / "results.json", results)
        return plain(results)

    return run_on_main(conclude)


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


def _put_aside(jobs: Sequence[Job]) -> int:
    """Move finished trainings to where nothing overwrites them, since hours may have gone into them; how many were moved.

    A trained network that is still there goes with its result, under the same name. Other checkpoints lose their mark, so that no
    later run goes on from them, and are deleted when their job begins.
    """
    finished = [job for job in jobs if job.part.exists()]
    for job in finished:
        aside = job.folder / EARLIER
        aside.mkdir(exist_ok=True)
        names = (aside / f"{job.name}{f'-{number}' if number > 1 else ''}.json" for number in count(1))
        place = next(name for name in names if not name.exists())
        if job.posterior.exists():  # first: without its result nobody would come for it
            job.posterior.replace(place.with_suffix(job.posterior.suffix))
        job.part.replace(place)
    for job in jobs:
        job.mark.unlink(missing_ok=True)
    return len(finished)


def _results(
    study: Study,
    settings: Any,
    content: dict[tuple[str, int], dict[str, Any]],
    notes: Sequence[str],
    command: str | None,
    collect: bool,
) -> dict[str, Any]:
    """The results that the parts make together."""
    parts = Parts(sorted({seed for _, seed in content}), content)
    findings = study.findings(settings, parts)
    machines = [part["machine"] for part in content.values()]

    def machine(name: str) -> str:
        return " and ".join(dict.fromkeys(str(one.get(name, "not stored")) for one in machines))

    command = command or f"flowbnn run {study.name}"
    usual = best_place(study, machine("accelerator"))[1]
    if collect and machine("precision") != usual and "--precision" not in command:
        command += f" --precision {machine('precision')}"
    known = {name for one in machines for name in one}
    where = [name for name in ("accelerator", "precision", "acceleration") if name in known]
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
        "settings": {**asdict(settings), **{name: machine(name) for name in where}},
        "metrics": [asdict(metric) for metric in findings.metrics],
        "rows": findings.rows,
        "figures": findings.figures,
        "notes": [*findings.notes, *study.shortfalls(settings, parts), *notes],
        "headline": list(study.headline),
        "comparisons": findings.comparisons,
        "command": command,
        "seconds": round(sum(part["seconds"] for part in content.values()), 1),
    }
    return {
        name: value for name, value in results.items() if value or name not in ("headline", "comparisons")
    }
