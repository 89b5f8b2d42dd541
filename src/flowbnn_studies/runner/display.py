"""What a study shows while it runs: a bar on a terminal, else one line for each finished variant."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flowbnn_studies.runner.base import Study, Variant
from flowbnn_studies.runner.job import Job

__all__ = ["Display"]


class Display:
    """Progress of one study, on standard error."""

    def __init__(
        self,
        study: Study,
        variants: Sequence[Variant],
        jobs: Sequence[Job],
        shown: bool,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.name, self.shown = study.name, shown
        self.labels = {variant.key: variant.label for variant in variants}
        self.left = {key: sum(job.variant == key for job in jobs) for key in self.labels}
        self.running: list[Job] = []
        self.started = time.monotonic()
        self.task = TaskID(0)
        self.bar: Progress | None = None
        if shown and self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.fields[study]}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self.task = self.bar.add_task("starting", total=len(jobs), study=study.name)

    def __enter__(self) -> "Display":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            if kind is None:
                self.bar.update(self.task, description="done")
            self.bar.stop()

    def skip(self, jobs: Sequence[Job]) -> None:
        """Count jobs that an earlier run has finished."""
        for job in jobs:
            self.left[job.variant] -= 1
        if self.bar is not None:
            self.bar.advance(self.task, len(jobs))

    def busy(self, jobs: Sequence[Job]) -> None:
        """Say which jobs are running now."""
        self.running = list(jobs)
        self._describe()

    def done(self, job: Job, following: Sequence[Job]) -> None:
        """Count a finished job; ``following`` are those that take its place."""
        self.running = [other for other in self.running if other != job] + list(following)
        self.left[job.variant] -= 1
        if self.bar is not None:
            self.bar.advance(self.task)
            self._describe()
        elif self.shown and not self.left[job.variant]:
            gone = time.monotonic() - self.started
            self.console.print(f"{self.name}: {self.labels[job.variant]} done ({gone:.0f} s)")

    def _describe(self) -> None:
        if self.bar is not None:
            running = ", ".join(f"{self.labels[job.variant]}, seed {job.seed}" for job in self.running)
            self.bar.update(self.task, description=running)
