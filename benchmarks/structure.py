"""How large and how deep the library is: files, lines, raises, import loops, and the calls behind a prediction and a training step.

    python benchmarks/structure.py [--out FOLDER]

Lines and raises are counted over ``src/flowbnn``; calls are those of the library's own functions, traced with ``sys.setprofile`` on a
perceptron with two noisy layers. Each row has the number that the design asks for.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import flowbnn as fb
from flowbnn.noise import NormalPlanar

ROOT = Path(fb.__file__).parent
STUDIES = ROOT.parent / "flowbnn_studies"
REPOSITORY = Path(__file__).parents[1]
ZOO = ("transforms", "flows", "distributions", "nets")


class Trace:
    """Counts the calls of the library's own functions inside a ``with`` block."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls = self.deepest = 0

    def start(self) -> None:
        frame, self.depth = sys._getframe(1), 0
        while frame is not None:
            self.depth += frame.f_code.co_filename.startswith(str(ROOT))
            frame = frame.f_back  # type: ignore[assignment]
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)):
            if event == "call":
                self.calls += 1
                self.files.add(file)
                self.depth += 1
                self.deepest = max(self.deepest, self.depth)
            elif event == "return":
                self.depth -= 1

    def __enter__(self) -> "Trace":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class OneStep:
    """A loader of four batches that traces the training step on the third."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.trace = batch, Trace()

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for index in range(4):
            if index == 3:
                self.trace.stop()
            if index == 2:
                self.trace.start()
            yield self.batch
        self.trace.stop()


def calls() -> dict[str, Any]:
    """What a prediction and a training step go through."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(32, 4), torch.randint(3, (32,))
    model = fb.to_stochastic(network, {"*": NormalPlanar()})
    loader = OneStep(batch)
    posterior = fb.fit(model, loader, epochs=1, num_data=128, progress=False, seed=0)
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(None))
    with Trace() as first:
        posterior.predict(batch[0], 16, seed=0)
    number = len(passes)
    with Trace() as second:
        posterior.predict(batch[0], 16, seed=0)
    handle.remove()
    trials = number - (len(passes) - number)
    step = loader.trace
    return {
        "predict, second call: files": len(second.files),
        "predict, second call: calls": second.calls,
        "predict, second call: depth": second.deepest,
        "predict, first call: calls": first.calls,
        "predict, first call: trial passes": trials,
        "training step: files": len(step.files),
        "training step: calls": step.calls,
        "training step: depth": step.deepest,
    }


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def code_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    text = path.read_text()
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def imports(package: Path) -> dict[str, set[str]]:
    """The files of a package that each of its files imports, at its head or later."""
    names = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in sources(package)
    }
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name] |= {inner if inner in names else node.module} & names.keys()
    return found


def loops(graph: dict[str, set[str]]) -> int:
    """Whether files import each other in a circle: 0 or 1."""
    try:
        TopologicalSorter({file: others - {file} for file, others in graph.items()}).prepare()
    except CycleError as error:
        print("a loop:", " ".join(error.args[1]))
        return 1
    return 0


def import_time(rounds: int = 7) -> float:
    """``import flowbnn`` over ``import torch``, each in a process of its own, taking turns; bytecode is cached, as after an install."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import flowbnn"], check=True, env=environment)
    times: dict[str, list[float]] = {"torch": [], "flowbnn": []}
    for _ in range(rounds):
        for name, seconds in times.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True, env=environment)
            seconds.append(time.perf_counter() - start)
    return median(ours / theirs for ours, theirs in zip(times["flowbnn"], times["torch"], strict=True))


def static() -> dict[str, Any]:
    """What can be counted without running anything."""
    files = sources(ROOT)
    lines = sum(len(path.read_text().splitlines()) for path in files)
    code = sum(code_lines(path) for path in files)
    raises = sum(
        isinstance(node, ast.Raise) for path in files for node in ast.walk(ast.parse(path.read_text()))
    )
    caches = sum(len(re.findall(r"^\w+\b.*= Weak\w*Dictionary", path.read_text(), re.M)) for path in files)
    readme = (REPOSITORY / "README.md").read_text()
    fullest = max(len(list(folder.glob("*.py"))) for folder in ROOT.rglob("*") if folder.is_dir())
    return {
        "library: files": len(files),
        "library: lines": lines,
        "zoo of flows: lines": sum(
            len(p.read_text().splitlines()) for name in ZOO for p in sources(ROOT / name)
        ),
        "library: raises per 1,000 lines of code": round(1000 * raises / code, 1),
        "library: largest folder, files": fullest,
        "library: longest file, lines": max(len(path.read_text().splitlines()) for path in files),
        "library: import loops": loops(imports(ROOT)),
        "library: module-global weak caches": caches,
        "studies: import loops": loops(imports(STUDIES)),
        "studies: files": len(sources(STUDIES)),
        "studies: lines": sum(len(path.read_text().splitlines()) for path in sources(STUDIES)),
        "README: words": len(readme.split()),
        "README: lines": len(readme.splitlines()),
    }


REACH = {
    "library: files": 130,
    "library: lines": 20_000,
    "zoo of flows: lines": 6_000,
    "library: raises per 1,000 lines of code": 10,
    "library: largest folder, files": 16,
    "library: longest file, lines": 450,
    "library: import loops": 0,
    "library: module-global weak caches": 1,
    "studies: import loops": 0,
    "studies: files": 45,
    "studies: lines": 8_000,
    "README: words": 900,
    "README: lines": 130,
    "predict, second call: files": 12,
    "predict, second call: calls": 150,
    "predict, second call: depth": 10,
    "predict, first call: calls": 300,
    "predict, first call: trial passes": 2,
    "training step: files": 12,
    "training step: calls": 140,
    "training step: depth": 10,
    "import flowbnn over import torch": 1.15,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for structure.json")
    parser.add_argument("--no-time", action="store_true", help="leave out the time that the import takes")
    given = parser.parse_args()
    rows = static() | calls()
    if not given.no_time:
        rows["import flowbnn over import torch"] = round(import_time(), 3)
    for name, value in rows.items():
        met = "yes" if value <= REACH[name] else "NO"
        print(f"{name:45} {value:>10,} {'at most':>10} {REACH[name]:>8,}   {met}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "structure.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
