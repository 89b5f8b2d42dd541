"""Jobs in this process or in a few others; Ctrl-C and a dying parent end them all."""

import multiprocessing
import os
import platform
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for

import torch

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training import alone, processes
from flowbnn_studies.runner.base import warned
from flowbnn_studies.runner.job import Job

__all__ = ["Workers", "device_name", "open_workers", "processors", "work"]

GPUS = ("cuda", "gpu")


def processors() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def work(job: Job) -> Job:
    """Do one job and store its result. One thread, so that the numbers do not depend on the machine's cores."""
    from flowbnn_studies import get_study

    started = time.monotonic()
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        alone(job.begin)
        torch.manual_seed(job.seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FlowBNNWarning)
            content = get_study(job.study).train(job)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
    ours = [warning for warning in caught if issubclass(warning.category, FlowBNNWarning)]
    for warning in caught:
        if warning not in ours:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    content["warnings"] = warned(ours)
    content["seconds"] = time.monotonic() - started
    content["machine"] = {
        "device": device_name(job.accelerator) + (f", {processes()} processes" if processes() > 1 else ""),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if job.accelerator in GPUS:
        content["machine"]["acceleration"] = job.acceleration  # which changes times
    alone(lambda: job.finish(content))
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
    """Does jobs one after the other, in this process."""

    number = 1

    def do(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Yield each job as it is done, in any order."""
        for job in jobs:
            yield work(job)


class ProcessWorkers(Workers):
    """Does jobs in several processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), initializer=_prepare)

    def do(self, jobs: Sequence[Job]) -> Iterator[Job]:
        waiting: set[Future[Job]] = {self.pool.submit(work, job) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise FlowBNNError(
                "a worker process died (out of memory?); what is finished is kept: go on with --resume, and --jobs 1 needs the least"
            ) from None


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
def open_workers(jobs: int = 1) -> Iterator[Workers]:
    """Workers for the length of a ``with`` block; with ``jobs`` above 1, that many processes."""
    if jobs < 1:
        raise FlowBNNError(f"jobs is at least 1, not {jobs}")
    if jobs == 1:
        yield Workers()
        return
    before = set(multiprocessing.active_children())
    workers = ProcessWorkers(jobs)
    try:
        yield workers
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        workers.pool.shutdown(wait=True, cancel_futures=True)
