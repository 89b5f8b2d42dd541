"""A study that trains in milliseconds and records its calls."""

from collections.abc import Iterator
from contextlib import contextmanager

from flowbnn.options import options
from flowbnn_studies import Findings, Metric, Study, Variant, register_study
from flowbnn_studies.runner.study import STUDIES

METRIC = Metric("score", "Score", "higher", ".3f", "A number.")


@options
class Settings:
    slope: float = 2.0
    epochs: int = 1


class Tiny(Study):
    name = "tiny"
    title = description = question = source = "tiny"
    seeds = 2
    settings = Settings
    keep_networks = True
    partial = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.stop_at: tuple[str, int] | None = None

    def variants(self, settings):
        return Variant("base", "Base"), Variant("more", "More", start_from="base")

    def train(self, job):
        if (job.variant, job.seed) == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append((job.variant, job.seed))
        if job.start_from is not None:
            assert job.start_path.exists(), "the network of the start variant is missing"
        job.network_path.write_text("weights")
        return {"values": {"score": job.settings.slope * (job.seed + 1) + (job.variant == "more")}}

    def findings(self, settings, parts):
        rows = self.rows(settings, parts, [METRIC])
        return Findings(f"{parts.mean('more', 'score'):.1f}", [METRIC], rows, [])


@contextmanager
def registered(study: Study) -> Iterator[Study]:
    register_study(study)
    try:
        yield study
    finally:
        STUDIES.pop(study.name, None)
