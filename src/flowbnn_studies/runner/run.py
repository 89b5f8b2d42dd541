"""Runs a study: finds the jobs to do, runs them in worker processes, reports progress, and writes the results."""

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

from flowbnn.compare.results import SeedResults, record_warnings, to_plain_values, write_json
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.options import Count, checked
from flowbnn.training import (
    ProgressBar,
    TrainingOptions,
    check_writable,
    connect,
    is_main_process,
    is_torchrun_worker,
    num_processes,
    run_on_main,
)
from flowbnn.training.progress import format_seconds
from flowbnn_studies.runner.findings import mark_trial
from flowbnn_studies.runner.study import GPUS, Job, Study, Variant, get_study

ARCHIVE = "earlier"  # folder of finished trainings that a new run replaces
SCHEMA = 1  # version of the results file
TRIAL_SEEDS = 2  # the fewest seeds that have a standard deviation


def available_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_job(job: Job) -> Job:
    """Runs one job and stores its result. One thread is used, so that the numbers do not depend on the number of cores."""
    started = time.monotonic()
    threads, rng_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        run_on_main(job.prepare_folder)
        torch.manual_seed(job.seed)
        with record_warnings() as warning_records:
            content = get_study(job.study).train(job)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(rng_state)
    machine = {
        "device": device_name(job.accelerator)
        + (f", {num_processes()} processes" if num_processes() > 1 else ""),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if job.accelerator in GPUS:
        machine["acceleration"] = job.acceleration  # it affects times
    content |= {"warnings": warning_records, "seconds": time.monotonic() - started, "machine": machine}
    run_on_main(lambda: write_json(job.result_path, {"identity": job.identity(), "content": content}))
    return job


def device_name(accelerator: str) -> str:
    """Returns a description of the machine.

    >>> device_name("cpu").startswith("cpu, ")
    True
    """
    if accelerator in GPUS and torch.cuda.is_available():
        return f"cuda, {torch.cuda.get_device_name(0)}"
    return f"{accelerator}, {platform.machine()}, {os.cpu_count()} cores, one thread for each training"


class Workers:
    """Runs jobs in a pool of processes, or one after the other in this process.

    Args:
        number: Number of processes.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(number, context, initializer=init_worker) if number > 1 else None

    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Yields each job when it is finished, in any order."""
        if self.pool is None:
            yield from map(run_job, jobs)
            return
        with block_interrupts():
            waiting: set[Future[Job]] = {self.pool.submit(run_job, job) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise FlowBNNError(
                "a worker process died, possibly out of memory; continue with --resume, and with fewer processes by --jobs",
                kind="worker",
            ) from None


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Context manager that blocks Ctrl-C, so that processes started inside never receive it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def init_worker() -> None:
    """Makes a worker ignore Ctrl-C and exit together with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def exit_with_parent() -> None:
            wait_for([parent.sentinel])
            os._exit(1)

        threading.Thread(target=exit_with_parent, daemon=True).start()


@contextmanager
@checked
def open_workers(jobs: Count = 1) -> Iterator[Workers]:
    """Context manager that provides workers.

    Args:
        jobs: Number of processes; 1 runs the jobs in this process.
    """
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
    """Runs a study and writes ``out/<study>/results.json``.

    Every finished pair of variant and seed is stored under ``parts``, and every training keeps a checkpoint under ``checkpoints``.
    With ``resume``, finished trainings are reused and an interrupted one continues; results of other settings are ignored.
    Otherwise all trainings start anew, and earlier ones are archived. An existing ``results.json`` stays until the new one replaces
    it.

    Args:
        study: Study, from :func:`flowbnn_studies.get_study`.
        settings: Settings of the study; None for the defaults.
        seeds: Number of seeds, or a list of seeds; None for the number of each variant, at most two in a trial run.
        out: Folder of all studies.
        resume: Continue an interrupted run.
        progress: Print a line to standard error for each finished training.
        accelerator, precision: Device and precision, as in :class:`~flowbnn.training.TrainingOptions`; ``"auto"`` takes what suits
            the study.
        devices, num_nodes: Number of devices and machines that train each variant together, as in
            :class:`~flowbnn.training.TrainingOptions`. More than one needs torchrun. The first process writes the results.
        acceleration: Execution of training steps on a GPU, as in :class:`~flowbnn.training.TrainingOptions`.
        only: Globs of the keys of the variants to train. Variants that they start from are trained as well. Requires a study with
            ``partial``.
        collect: Train nothing, and make the results from the stored parts of any device.
        jobs: Number of processes; above 1 the caller must be a script that multiprocessing can import.
        workers: Open workers, used instead of ``jobs``.
        command: Command that reproduces the run.
        trial: Mark the results as a trial run and remove published values.

    Returns:
        Content of ``results.json``.
    """
    started = time.monotonic()
    settings = study.make_settings() if settings is None else settings
    accelerator, precision = resolve_device(study, accelerator, precision)
    device_options: dict[str, Any] = {"accelerator": accelerator, "precision": precision}
    device_options |= {"devices": devices, "num_nodes": num_nodes, "acceleration": acceleration}
    distributed = str(devices) != "1" or num_nodes > 1 or is_torchrun_worker()
    if distributed and (workers.number if workers is not None else jobs) > 1:
        raise FlowBNNError("jobs > 1 cannot be combined with several devices; set jobs=1", argument="jobs")
    connect(TrainingOptions(**device_options))
    folder = Path(out) / study.folder(settings)
    all_jobs = _make_jobs(study, settings, folder, seeds, trial, resume=resume, **device_options)
    selected = _select_jobs(study, all_jobs, only)
    if not (collect or resume):
        study.check(settings, selected)

    done, todo, archived = run_on_main(
        lambda: _plan_jobs(study, folder, all_jobs, selected, resume=resume, collect=collect)
    )
    progress = progress and is_main_process()
    if archived and progress:
        print(f"Archived {archived} finished trainings in '{folder / ARCHIVE}'. Use --resume to reuse them.")
    if todo:
        with nullcontext(workers) if workers is not None else open_workers(min(jobs, len(todo))) as pool:
            _run_jobs(study, settings, all_jobs, todo, pool, len(done), started if progress else None)

    def conclude() -> dict[str, Any]:
        content, notes = _load_parts(study, all_jobs, len(done), folder, collect)
        results = _build_results(study, settings, content, notes, command, collect)
        # otherwise the time is the sum over trainings, which come from several runs
        if not (study.partial or done or collect):
            results["seconds"] = round(time.monotonic() - started, 1)
        if trial:
            results |= mark_trial(results, getattr(settings, "source", "") == "generated")
        write_json(folder / "results.json", results)
        return to_plain_values(results)

    return run_on_main(conclude)


def _make_jobs(
    study: Study,
    settings: Any,
    folder: Path,
    seeds: int | Sequence[int] | None,
    trial: bool,
    **options: Any,
) -> list[Job]:
    """Returns a job for every variant and seed."""
    limit = TRIAL_SEEDS if trial else None
    return [
        Job(study.name, variant.key, seed, settings, folder, variant.start_from, **options)
        for variant in study.variants(settings)
        for seed in (_seeds(variant.seeds or study.seeds)[:limit] if seeds is None else _seeds(seeds))
    ]


def _plan_jobs(
    study: Study, folder: Path, all_jobs: Sequence[Job], selected: Sequence[Job], resume: bool, collect: bool
) -> tuple[list[Job], list[Job], int]:
    """Returns the finished jobs, the jobs to run, and the number of archived results."""
    check_writable(folder / "results.json")
    done = [job for job in selected if resume and not collect and job.load_result(study.keep_networks)]
    todo = [] if collect else _add_start_jobs(all_jobs, [job for job in selected if job not in done])
    return done, todo, 0 if resume else _archive_results(todo)


def _run_jobs(
    study: Study,
    settings: Any,
    all_jobs: Sequence[Job],
    todo: Sequence[Job],
    workers: Workers,
    num_done: int,
    started: float | None,
) -> None:
    """Runs the jobs in stages. Shows a progress bar and prints a line for each unless ``started`` is None."""
    variants = study.variants(settings)
    labels, total = {variant.key: variant.label for variant in variants}, num_done + len(todo)
    bar = ProgressBar(study.name, total, unit="training", start=num_done, visible=started is not None)
    with bar:
        for stage in _stages(variants, todo):
            for job in workers.run(stage):
                bar.update(bar.completed + 1)
                if started is not None:
                    times = f"{bar.completed} of {total}, {time.monotonic() - started:.0f} s"
                    if bar.seconds_left is not None:
                        times += f", about {format_seconds(bar.seconds_left)} left"
                    line = f"{study.name}: finished {labels[job.variant]}, seed {job.seed} ({times})"
                    print(line, file=sys.stderr, flush=True)
            if not study.keep_networks:
                run_on_main(lambda: _delete_checkpoints(all_jobs))


def _load_parts(
    study: Study, all_jobs: Sequence[Job], num_reused: int, folder: Path, collect: bool
) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str]]:
    """Returns the stored results by variant and seed, and notes on missing and reused ones."""
    stored = {(job.variant, job.seed): job.load_result(anywhere=collect) for job in all_jobs}
    content = {key: part for key, part in stored.items() if part is not None}
    missing = [variant for variant, seed in stored if (variant, seed) not in content]
    if not content or (missing and not study.partial):
        raise FlowBNNError(
            f"'{folder}' has {len(content)} of {len(all_jobs)} results for these settings; run the study first",
            kind="file",
        )
    notes = []
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        notes.append(f"{len(missing)} of {len(all_jobs)} trainings are missing: {names}.")
    if num_reused:
        notes.append(f"{num_reused} of {len(all_jobs)} trainings were reused from an earlier run (--resume).")
    return content, notes


def resolve_device(study: Study, accelerator: str = "auto", precision: str = "auto") -> tuple[str, str]:
    """Returns the accelerator and the precision, where "auto" takes what suits the study and this machine."""
    if accelerator == "auto":
        accelerator = study.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = "bf16-mixed" if accelerator in GPUS and study.accelerator == "auto" else "32-true"
    return accelerator, precision


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise FlowBNNError(
            f"seeds must be a number of at least 1 or a list of different integers of at least 0, got {seeds}",
            argument="seeds",
        )
    return numbers


def _select_jobs(study: Study, all_jobs: Sequence[Job], only: Sequence[str] | None) -> list[Job]:
    """Returns the jobs whose variant matches one of the globs; all jobs without globs."""
    if not only:
        return list(all_jobs)
    if not study.partial:
        raise FlowBNNError(f"study '{study.name}' cannot be run in parts; remove --only", argument="only")
    keys = list(dict.fromkeys(job.variant for job in all_jobs))
    for glob in only:
        if not any(fnmatchcase(key, glob) for key in keys):
            raise FlowBNNError(
                f"'{glob}' matches no variant of '{study.name}'{nearest(glob, keys)}", argument="only"
            )
    return [job for job in all_jobs if any(fnmatchcase(job.variant, glob) for glob in only)]


def _add_start_jobs(all_jobs: Sequence[Job], todo: Sequence[Job]) -> list[Job]:
    """Returns the jobs in order, with those whose trained networks they start from and which are not stored."""
    by_name = {job.name: job for job in all_jobs}
    needed = {job.name for job in todo}
    waiting = list(todo)
    while waiting:
        job = waiting.pop()
        start = by_name.get(f"{job.start_from}-seed{job.seed}")
        if job.start_from is not None and start is None:
            raise FlowBNNError(
                f"'{job.variant}' starts from '{job.start_from}', which has no seed {job.seed}",
                argument="seeds",
            )
        if start is not None and start.name not in needed and start.load_result(network=True) is None:
            needed.add(start.name)
            waiting.append(start)
    return [job for job in all_jobs if job.name in needed]


def _stages(variants: Sequence[Variant], todo: Sequence[Job]) -> list[list[Job]]:
    """Returns the jobs in stages: a stage starts from networks of earlier ones. Exclusive jobs come last, one by one."""
    by_key = {variant.key: variant for variant in variants}
    depth: dict[str, int] = {}
    for variant in variants:
        depth[variant.key] = 0 if variant.start_from is None else depth[variant.start_from] + 1
    ordered = sorted(todo, key=lambda job: -by_key[job.variant].cost)
    concurrent = [job for job in ordered if not by_key[job.variant].exclusive]
    levels = [
        [job for job in concurrent if depth[job.variant] == level] for level in range(max(depth.values()) + 1)
    ]
    return [level for level in levels if level] + [[job] for job in ordered if by_key[job.variant].exclusive]


def _delete_checkpoints(all_jobs: Sequence[Job]) -> None:
    """Deletes the networks and checkpoints of finished jobs, except those that an unfinished job starts from."""
    unfinished = [job for job in all_jobs if job.load_result() is None]
    needed = {job.checkpoint_folder for job in unfinished} | {job.start_path.parent for job in unfinished}
    for job in all_jobs:
        if job.checkpoint_folder not in needed:
            shutil.rmtree(job.checkpoint_folder, ignore_errors=True)


def _archive_results(jobs: Sequence[Job]) -> int:
    """Moves finished results to the archive folder, where nothing overwrites them. Returns their number.

    A trained network is moved together with its result, under the same name. Other checkpoints lose their identity file, so that no
    later run continues from them.
    """
    finished = [job for job in jobs if job.result_path.exists()]
    for job in finished:
        archive = job.folder / ARCHIVE
        archive.mkdir(exist_ok=True)
        names = (archive / f"{job.name}{f'-{number}' if number > 1 else ''}.json" for number in count(1))
        target = next(name for name in names if not name.exists())
        if job.network_path.exists():  # first, because a network without its result would be lost
            job.network_path.replace(target.with_suffix(job.network_path.suffix))
        job.result_path.replace(target)
    for job in jobs:
        job.identity_path.unlink(missing_ok=True)
    return len(finished)


def _build_results(
    study: Study,
    settings: Any,
    content: dict[tuple[str, int], dict[str, Any]],
    notes: Sequence[str],
    command: str | None,
    collect: bool,
) -> dict[str, Any]:
    """Returns the content of ``results.json``."""
    parts = SeedResults(sorted({seed for _, seed in content}), content)
    findings = study.findings(settings, parts)
    machines = [part["machine"] for part in content.values()]

    def machine(name: str) -> str:
        return " and ".join(dict.fromkeys(str(entry.get(name, "not stored")) for entry in machines))

    command = command or f"flowbnn run {study.name}"
    default_precision = resolve_device(study, machine("accelerator"))[1]
    if collect and machine("precision") != default_precision and "--precision" not in command:
        command += f" --precision {machine('precision')}"
    fields = {name for entry in machines for name in entry}
    machine_settings = [name for name in ("accelerator", "precision", "acceleration") if name in fields]
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
        "settings": {**asdict(settings), **{name: machine(name) for name in machine_settings}},
        "metrics": [asdict(metric) for metric in findings.metrics],
        "rows": findings.rows,
        "figures": findings.figures,
        "notes": [*findings.notes, *study.warning_notes(settings, parts), *notes],
        "headline": list(study.headline),
        "comparisons": findings.comparisons,
        "command": command,
        "seconds": round(sum(part["seconds"] for part in content.values()), 1),
    }
    return {
        name: value for name, value in results.items() if value or name not in ("headline", "comparisons")
    }
