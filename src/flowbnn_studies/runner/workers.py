"""Doing jobs, in this process or in several others; Ctrl-C and a dying parent end them all."""

import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for

import torch

from flowbnn.errors import FlowBNNError
from flowbnn.options import Count, checked
from flowbnn.results import recorded_warnings, write_json
from flowbnn.training import alone, processes
from flowbnn_studies.runner.job import GPUS, Job
from flowbnn_studies.runner.study import get_study


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def work(job: Job) -> Job:
    """Do one job and store its result; with one thread, so that the numbers do not depend on the machine's cores."""
    started = time.monotonic()
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        alone(job.begin)
        torch.manual_seed(job.seed)
        with recorded_warnings() as warned:
            content = get_study(job.study).train(job)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
    machine = {
        "device": device_name(job.accelerator) + (f", {processes()} processes" if processes() > 1 else ""),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if job.accelerator in GPUS:
        machine["acceleration"] = job.acceleration  # which changes times
    content |= {"warnings": warned, "seconds": time.monotonic() - started, "machine": machine}
    alone(lambda: write_json(job.part, {"identity": job.identity(), "content": content}))
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
