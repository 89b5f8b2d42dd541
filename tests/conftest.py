"""Makes the helper modules of the tests importable, starts every test from the same seed, and prints failures when they happen."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

# parallel test workers share the cores, so each uses one thread and compiles in its own process
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

sys.path[:0] = [
    str(Path(__file__).parent / folder)
    for folder in ("", "kernels", "transforms", "posterior", "methods", "studies", "studies/report")
]

gc.disable()  # imports create half a million objects and no garbage


class FailurePrinter:
    """Plugin that prints the first line of an error at once, so that a run which is ended early has shown it.

    Args:
        config: Configuration of pytest.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (report.longreprtext if crash is None else crash.message).strip().splitlines() or [""]
            reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f"\n{report.nodeid} failed after {report.duration:.0f} s: {lines[0]:.200}")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(FailurePrinter(config))


def pytest_collection_finish() -> None:
    """Excludes imported objects from garbage collection, which would look through all of them again and again."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # graphs of the compiler live long
    gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def unrefined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits Gaussians without the refinement by the Hessian, which takes longest and has tests of its own."""
    from flowbnn.methods.variational.hessian_refinement import HessianRefinement

    monkeypatch.setattr(HessianRefinement, "suits", staticmethod(lambda _: False))
