"""Counts how large, how deep and how plain the library is, and prints each count beside its value at the start and its goal.

    python benchmarks/structure.py [--out FOLDER] [--no-time]
    python benchmarks/structure.py --list sentences constants [--folder src/flowbnn/vae]
    python benchmarks/structure.py --calls

Nothing here fails: the table is information. Calls are those of the library's own functions, traced with ``sys.setprofile`` on a
perceptron with two noisy layers. Everything else is counted in the syntax trees of ``src/flowbnn``:

- *Lines of code* are neither blank nor a comment nor part of a docstring.
- *Sentences in code* are string literals with four words in a row that are no docstrings. An f-string counts once.
- *Checking lines* are those of ``raise``, ``assert`` and ``warn(...)``, of an ``if`` that ends in one of them, of an ``except`` that
  raises again, and of sentences. A function counts as a whole if at least two fifths of its body are such lines.
- *Constants* are names in capitals that a module assigns, without type variables (single letters).

``--list`` prints every place that a row counts, so that it can be changed. ``--calls`` prints the calls of one prediction and of one
training step.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.noise import NormalPlanar

ROOT = Path(fb.__file__).parent
STUDIES = ROOT.parent / "flowbnn_studies"
REPOSITORY = ROOT.parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)
OPENING = re.compile(r"(What|How|Where|Whether|Which|By how much)\b")
GENITIVE = re.compile(r"\s{2,}\*{0,2}`{0,2}[\w, *`]+(\([^)]*\))?: +[Oo]f\b")
FOUR_WORDS = re.compile(r"\b[A-Za-z'-]+ [A-Za-z'-]+ [A-Za-z'-]+ [A-Za-z'-]+\b")
WARN_NAME = re.compile(r"_?warn")
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")


@dataclass(frozen=True)
class Place:
    """A place in a file that a row of the table counts."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(REPOSITORY)}:{self.line}: {' '.join(self.text.split())[:160]}"


@dataclass(frozen=True)
class Row:
    """One row of the table: a count, its value at the start, and its goal."""

    name: str
    value: Any
    start: Any = ""
    goal: Any = ""

    def __str__(self) -> str:
        return f"{self.name:60} {self.value!s:>28} {self.start!s:>22} {self.goal!s:>18}"


# Calls, traced while the library runs


class Trace:
    """Counts the calls of the library's own functions between ``start`` and ``stop``, or inside a ``with`` block."""

    def start(self) -> None:
        """Begins a new count."""
        self.files: set[str] = set()
        self.tree: list[str] = []
        self.calls = self.deepest = self.depth = 0
        frame = sys._getframe(1)
        while frame is not None:
            self.depth += frame.f_code.co_filename.startswith(str(ROOT))
            frame = frame.f_back  # type: ignore[assignment]
        sys.setprofile(self._count)

    def stop(self) -> None:
        """Ends the count."""
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(str(ROOT)):
            return
        if event == "call":
            self.calls += 1
            self.files.add(file)
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            place = f"{Path(file).relative_to(ROOT)}:{frame.f_code.co_firstlineno}"
            self.tree.append(f"{'  ' * self.depth}{frame.f_code.co_qualname}  {place}")
        elif event == "return":
            self.depth -= 1

    def __enter__(self) -> "Trace":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __str__(self) -> str:
        return f"{len(self.files)} / {self.calls} / {self.deepest}"


class TracedLoader:
    """A loader of four batches that traces the training step on the third. The reading with the most calls counts."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.traces = batch, []  # type: tuple[Any, list[Trace]]

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        trace = Trace()
        for index in range(4):
            if index == 3:
                trace.stop()
                self.traces.append(trace)
            if index == 2:
                trace.start()
            yield self.batch

    @property
    def trace(self) -> Trace:
        """Trace of the training step."""
        return max(self.traces, key=lambda trace: trace.calls)


class CountingLoader(DataLoader):
    """A loader that counts the batches it has handed out."""

    count = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self.count += 1
            yield batch


def perceptron(outputs: int) -> nn.Module:
    """Returns a small perceptron with the weights of seed 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def call_rows() -> list[Row]:
    """Traces one prediction and one training step of a perceptron with two planar layers."""
    network = perceptron(3)
    batch = torch.randn(32, 4), torch.randint(3, (32,))
    loader = TracedLoader(batch)
    posterior = fb.fit(
        fb.to_stochastic(network, {"*": NormalPlanar()}),
        loader,
        epochs=1,
        num_data=128,
        progress=False,
        seed=0,
        validation=None,
    )
    with Trace() as first:
        posterior.predict(batch[0], 16)
    with Trace() as second:
        posterior.predict(batch[0], 16)
    return [
        Row("predict(x, 16), second call: files / calls / depth", second, "20 / 184 / 17", "12 / 110 / 11"),
        Row("predict(x, 16), first call: files / calls / depth", first),
        Row("training step: files / calls / depth", loader.trace, "19 / 135 / 15", "12 / 110 / 11"),
    ]


def work_before_training(targets: torch.Tensor, outputs: int) -> str:
    """Counts the forward passes and the batches of ``fb.fit`` before the first training step's own.

    Args:
        targets: Targets of 20 batches of 32.
        outputs: Number of outputs of the network.

    Returns:
        The two counts, as text.
    """
    network = perceptron(outputs)
    passes: list[int] = []
    network.register_forward_hook(lambda *_: passes.append(1))  # a copy of the network keeps the hook
    loader = CountingLoader(TensorDataset(torch.randn(20 * 32, 4), targets), batch_size=32)
    counts: list[tuple[int, int]] = []
    handle = register_optimizer_step_pre_hook(lambda *_: counts.append((len(passes), loader.count)))
    try:
        model = fb.to_stochastic(network, {"*": NormalPlanar()})
        fb.fit(model, loader, epochs=1, progress=False, seed=0, validation=None)
    finally:
        handle.remove()
    passes_before, batches_before = counts[0]
    return f"{passes_before - 1} and {batches_before - 1}"


def fit_rows() -> list[Row]:
    """Counts what ``fb.fit`` does before its first training step. The step's own pass and batch do not count."""
    goal = "at most 2 and 20"
    classes = work_before_training(torch.randint(3, (640,)), outputs=3)
    regression = work_before_training(torch.randn(640, 1), outputs=1)
    return [
        Row("fit before its first step, classes: passes and batches", classes, "13 and 21", goal),
        Row("fit before its first step, regression: passes and batches", regression, "53 and 61", goal),
    ]


# Counts in the syntax trees


class Source:
    """The text, the syntax tree and the lines of code of one file."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.nodes = list(ast.walk(ast.parse(self.text)))
        self.code = {
            number
            for number, line in enumerate(self.text.splitlines(), 1)
            if line.strip() and not line.strip().startswith("#")
        }
        statements = [node for node in self.nodes if isinstance(node, ast.Expr) and is_text(node.value)]
        self.texts = {id(node.value) for node in statements}  # docstrings, and strings that are statements
        for node in statements:
            self.code -= lines_of(node)

    def docstrings(self) -> Iterator[Place]:
        """Yields the docstrings of modules, classes and functions. Those of modules are at line 1."""
        for node in self.nodes:
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield Place(self.path, node.body[0].lineno, text)

    def long_functions(self, most: int = 50) -> Iterator[Place]:
        """Yields the functions of more than ``most`` lines of code, each with its length."""
        for node in self.nodes:
            if isinstance(node, FUNCTIONS) and (size := len(lines_of(node) & self.code)) > most:
                yield Place(self.path, node.lineno, f"{node.name} {size}")

    def sentences(self) -> Iterator[tuple[ast.expr, Place]]:
        """Yields the string literals with four words in a row that are no docstrings, and their places."""
        f_strings = [node for node in self.nodes if isinstance(node, ast.JoinedStr)]
        inner = {id(child) for node in f_strings for child in ast.walk(node) if child is not node}
        for node in self.nodes:
            if id(node) in inner | self.texts:
                continue
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            words = [piece.value for piece in pieces if is_text(piece)]  # type: ignore[attr-defined]
            if any(FOUR_WORDS.search(text) for text in words):
                yield node, Place(self.path, node.lineno, "{}".join(words))  # type: ignore[attr-defined, misc]

    def constants(self) -> Iterator[Place]:
        """Yields the names in capitals that the module assigns."""
        for node in ast.parse(self.text).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name) and CONSTANT.fullmatch(name.id):
                        yield Place(self.path, node.lineno, ast.unparse(node))

    def checking_lines(self) -> set[int]:
        """Returns the lines of code that check, refuse, warn or explain."""
        lines = {line for node, _ in self.sentences() for line in lines_of(node)}
        for node in self.nodes:
            if (
                isinstance(node, ast.Raise | ast.Assert)
                or is_warning(node)
                or (isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise))
            ):
                lines |= lines_of(node)
            elif isinstance(node, ast.If) and ends_in_refusal(node.body):
                lines |= set(range(node.lineno, (node.body[-1].end_lineno or 0) + 1))
        functions: set[int] = set()
        for node in self.nodes:
            if isinstance(node, FUNCTIONS):
                body = {line for line in lines_of(node) & self.code if line >= node.body[0].lineno}
                if body and len(body & lines) >= 0.4 * len(body):
                    functions |= lines_of(node)
        return (lines | functions) & self.code


def is_text(node: ast.AST) -> bool:
    """Returns whether a node is a string literal."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_number(node: ast.AST | None) -> bool:
    """Returns whether a node is a number, or a tuple, list, set or dictionary of numbers."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    items = node.values if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return bool(items) and all(is_number(item) for item in items)


def is_warning(node: ast.AST) -> bool:
    """Returns whether a node calls a function whose name begins with warn."""
    function = getattr(node, "func", None)
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return bool(WARN_NAME.match(name))


def ends_in_refusal(body: list[ast.stmt]) -> bool:
    """Returns whether the last statement of a block raises or warns."""
    return isinstance(body[-1], ast.Raise) or is_warning(getattr(body[-1], "value", body[-1]))


def lines_of(node: Any) -> set[int]:
    """Returns the line numbers of a node."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def sources(package: Path) -> list[Path]:
    """Returns the Python files of a folder."""
    return sorted(package.rglob("*.py"))


def openings(source: Source) -> Iterator[Place]:
    """Yields docstrings that open with a question word."""
    return (place for place in source.docstrings() if OPENING.match(place.text))


def genitives(source: Source) -> Iterator[Place]:
    """Yields lines of docstrings that explain an argument by a bare genitive, as in "momentum: of the walk"."""
    for place in source.docstrings():
        for line in place.text.splitlines():
            if GENITIVE.match(line):
                yield Place(place.path, place.line, line)


def sentences(source: Source) -> Iterator[Place]:
    """Yields the string literals with four words in a row that are no docstrings."""
    return (place for _, place in source.sentences())


def checks(source: Source) -> Iterator[Place]:
    """Yields the lines of code that check, refuse, warn or explain."""
    lines = source.text.splitlines()
    return (Place(source.path, line, lines[line - 1]) for line in sorted(source.checking_lines()))


def matches(source: Source) -> Iterator[Place]:
    """Yields the lines of tests that match the prose of a message."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for _ in re.finditer(r"\bmatch=", line):
            yield Place(source.path, number, line)


LISTS: dict[str, tuple[Path, Callable[[Source], Iterator[Place]]]] = {
    "functions": (ROOT, Source.long_functions),
    "openings": (ROOT, openings),
    "genitives": (ROOT, genitives),
    "sentences": (ROOT, sentences),
    "checks": (ROOT, checks),
    "constants": (ROOT, Source.constants),
    "matches": (REPOSITORY / "tests", matches),
}


def places(name: str, folder: Path | None = None) -> list[Place]:
    """Returns every place that one row counts.

    Args:
        name: Row, one of the keys of ``LISTS``.
        folder: Folder to search. The row's own folder by default.

    Returns:
        The places, in the order of the files.
    """
    default, find = LISTS[name]
    return [place for path in sources(folder or default) for place in find(Source(path))]


def everywhere(name: str) -> int:
    """Returns the count of one row over the library, the studies, the tests and the benchmarks."""
    return sum(len(places(name, REPOSITORY / folder)) for folder in ("src", "tests", "benchmarks"))


def language_rows() -> list[Row]:
    """Counts the rows of long functions, docstrings, messages, constants and tests."""
    found = {name: places(name) for name in LISTS}
    files = [Source(path) for path in sources(ROOT)]
    docstrings = sum(place.line > 1 for source in files for place in source.docstrings())
    code = sum(len(source.code) for source in files)
    lengths = sorted((place.text.split() for place in found["functions"]), key=lambda pair: -int(pair[1]))
    longest = ", ".join(" ".join(pair) for pair in lengths[:2])
    share = f"{len(found['checks']) / code:.1%}"
    opened = f"{sum(place.line > 1 for place in found['openings'])} of {docstrings:,}"
    numbers = sum(is_number(ast.parse(place.text).body[0].value) for place in found["constants"])  # type: ignore[attr-defined]
    return [
        Row("functions above 50 lines of code", len(lengths), 15, "5, none above 70"),
        Row("  the longest", longest, "fit 122, calibrate 99", "70"),
        Row("docstrings that open with What, How, Where, Whether, Which", opened, "248 of 1,608", 0),
        Row("  modules, studies, tests and benchmarks as well", everywhere("openings"), 411, 0),
        Row("arguments explained by a bare genitive", len(found["genitives"]), 148, 0),
        Row("  studies, tests and benchmarks as well", everywhere("genitives"), 214, 0),
        Row("sentences in code", len(found["sentences"]), 516, "at most 280"),
        Row("lines that check, refuse, warn or explain", share, "11 %", "at most 7 %"),
        Row("module-level constants", len(found["constants"]), 238, "at most 90"),
        Row("  numbers, and tuples and dictionaries of numbers", numbers, 166),
        Row("match= in tests", len(found["matches"]), 444, "at most 60"),
    ]


# Imports


def imports(package: Path) -> dict[str, set[str]]:
    """Returns, for each file of a package, the files of that package that it imports, at its head or later."""
    names = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in sources(package)
    }
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    graph[name] |= {inner if inner in names else node.module} & names.keys()
    return graph


def loops(graph: dict[str, set[str]]) -> int:
    """Returns 1 if files import each other in a circle, else 0. Prints the circle."""
    try:
        TopologicalSorter({file: others - {file} for file, others in graph.items()}).prepare()
    except CycleError as error:
        print("import loop:", " ".join(error.args[1]))
        return 1
    return 0


def import_time(rounds: int = 7) -> float:
    """Returns the time of ``import flowbnn`` as a ratio to ``import torch``.

    Each import runs in its own process. The two take turns. Bytecode is cached, as after an installation.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import flowbnn"], check=True, env=environment)
    times: dict[str, list[float]] = {"torch": [], "flowbnn": []}
    for _ in range(rounds):
        for name, seconds in times.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True, env=environment)
            seconds.append(time.perf_counter() - start)
    return median(ours / theirs for ours, theirs in zip(times["flowbnn"], times["torch"], strict=True))


def size_rows() -> list[Row]:
    """Counts import loops and lists the longest files, for information."""
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(ROOT)}
    longest = sorted(files, key=lambda path: -files[path])[:1]
    names = ", ".join(f"{path.relative_to(ROOT)} {files[path]}" for path in longest)
    return [
        Row(
            "import loops: library and studies",
            f"{loops(imports(ROOT))} and {loops(imports(STUDIES))}",
            "0 and 0",
            0,
        ),
        Row("files of the library", len(files)),
        Row("  the longest", names),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for structure.json")
    parser.add_argument("--no-time", action="store_true", help="do not measure the time of the import")
    parser.add_argument("--list", nargs="+", choices=LISTS, default=[], help="rows whose places are printed")
    parser.add_argument("--calls", action="store_true", help="print the traced calls, indented by depth")
    parser.add_argument(
        "--folder", type=Path, help="folder that --list searches instead of the whole library"
    )
    options = parser.parse_args()
    if options.list:
        for name in options.list:
            found = places(name, options.folder and options.folder.resolve())
            print(f"{name}: {len(found)}", *found, sep="\n  ")
        return
    if options.calls:
        for row in call_rows():
            print(row.name, *row.value.tree, sep="\n")
        return
    rows = call_rows() + fit_rows() + language_rows() + size_rows()
    if not options.no_time:
        rows.append(Row("time of import flowbnn over import torch", f"{import_time():.3f}", "1.15", "1.15"))
    print(Row("count", "today", "at the start", "goal"), *rows, sep="\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        values = {row.name: str(row.value) for row in rows}
        (options.out / "structure.json").write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
