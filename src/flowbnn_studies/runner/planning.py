"""Which jobs of a study are to be done, and in which order."""

import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from flowbnn.errors import FlowBNNError, nearest
from flowbnn_studies.runner.base import Study, Variant
from flowbnn_studies.runner.job import Job

__all__ = ["choose", "stages", "suited", "tidy", "with_starts"]


def suited(study: Study, accelerator: str, precision: str) -> tuple[str, str]:
    """Where and how to compute: what was asked for, or else what suits the study and this machine."""
    if accelerator == "auto":
        accelerator = study.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = (
            "bf16-mixed" if accelerator in ("cuda", "gpu") and study.accelerator == "auto" else "32-true"
        )
    return accelerator, precision


def choose(study: Study, every: Sequence[Job], only: Sequence[str] | None) -> list[Job]:
    """The jobs whose variant one of the globs matches; all of them without globs."""
    if not only:
        return list(every)
    if not study.partial:
        raise FlowBNNError(f"study '{study.name}' is run whole; leave out --only")
    keys = list(dict.fromkeys(job.variant for job in every))
    for pattern in only:
        if not any(fnmatchcase(key, pattern) for key in keys):
            raise FlowBNNError(f"'{pattern}' matches no variant of '{study.name}'{nearest(pattern, keys)}")
    return [job for job in every if any(fnmatchcase(job.variant, pattern) for pattern in only)]


def with_starts(every: Sequence[Job], todo: Sequence[Job]) -> list[Job]:
    """The jobs, and those before them whose trained network they start from and which is not there.

    One that is there is taken as it is, whether or not the run resumes: it was not asked to be trained anew.
    """
    by_name = {(job.variant, job.seed): job for job in every}
    needed = {job.name: job for job in todo}
    waiting = list(todo)
    while waiting:
        job = waiting.pop()
        if job.after is None:
            continue
        start = by_name.get((job.after, job.seed))
        if start is None:
            raise FlowBNNError(f"'{job.variant}' starts from '{job.after}', which has no seed {job.seed}")
        if start.name not in needed and start.stored() is None:
            needed[start.name] = start
            waiting.append(start)
    return [job for job in every if job.name in needed]


def stages(variants: Sequence[Variant], todo: Sequence[Job]) -> list[list[Job]]:
    """Jobs that need nothing, then those that start from them, and so on; at the end, one by one, those that run alone."""
    depth: dict[str, int] = {}
    cost = {variant.key: variant.cost for variant in variants}
    alone = {variant.key for variant in variants if variant.alone}
    for variant in variants:
        depth[variant.key] = 0 if variant.after is None else depth[variant.after] + 1
    ordered = sorted(todo, key=lambda job: -cost[job.variant])
    levels = [
        [job for job in ordered if depth[job.variant] == level and job.variant not in alone]
        for level in range(max(depth.values()) + 1)
    ]
    return [stage for stage in levels if stage] + [[job] for job in ordered if job.variant in alone]


def tidy(every: Sequence[Job]) -> None:
    """Delete the trained networks and checkpoints of finished jobs, but for those that an unfinished one starts from."""
    finished = {(job.variant, job.seed): job.stored(network=False) is not None for job in every}
    needed = {(job.after, job.seed) for job in every if not finished[job.variant, job.seed]}
    for job in every:
        if finished[job.variant, job.seed] and (job.variant, job.seed) not in needed:
            shutil.rmtree(job.state, ignore_errors=True)
