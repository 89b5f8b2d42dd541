"""Tests of the package structure: imports point from higher to lower packages, and the public names exist."""

import ast
import gc
import importlib
import sys
from pathlib import Path

import pytest

import flowbnn

ROOT = Path(flowbnn.__file__).parent
PACKAGES = [  # from the highest to the lowest; each may import only those below it
    "integrations",
    "sklearn",
    "export",
    "active",
    "conformal",
    "fit",
    "calibrate",
    "diagnostics",
    "compare",
    "methods",
    "posterior",
    "vae",
    "density",
    "regression",
    "training",
    "convert",
    "flattening",
    "objectives",
    "likelihoods",
    "predictive",
    "noise",
    "flows",
    "distributions",
    "transforms",
    "nets",
    "kernels",
    "plots",
    "metrics",
    "data",
    "batches",
    "packing",
    "networks",
    "models",
    "records",
    "options",
    "memory",
    "errors",
    "numerics",
    "version",
]
LEVEL = {package: -index for index, package in enumerate(PACKAGES)}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_names(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] in ("flowbnn", "flowbnn_studies")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path):
    here = package_of(path)
    assert here in LEVEL, f"{path.name} is in a package that PACKAGES does not list"
    for name in imported_names(path):
        parts = name.split(".")
        assert parts[0] == "flowbnn", (
            f"{path.name} imports {name}: studies use the library, never the reverse"
        )
        assert parts[1] in LEVEL, f"{path.name} imports {name} from the package itself"
        there = parts[1]
        assert LEVEL[there] <= LEVEL[here], f"{path.name} in {here} imports {name}, which is above it"
        assert there == here or LEVEL[there] < LEVEL[here], (
            f"{path.name} imports {name} from a package at the same level"
        )


def test_no_method_imports_another():
    methods = {
        cls.__module__: name
        for name, cls in vars(flowbnn.methods).items()
        if isinstance(cls, type) and cls.__module__.startswith("flowbnn.methods.") and name in flowbnn.__all__
    }
    assert "flowbnn.methods.laplace.laplace" in methods
    for path in (ROOT / "methods").rglob("*.py"):
        used = (
            {name.rpartition(".")[0] for name in imported_names(path)} if path.stem != "__init__" else set()
        )
        assert not used & set(methods), (
            f"{path.name} imports a method; what methods share has a file of its own"
        )


def test_no_file_imports_itself_through_others():
    sys.path.insert(0, str(ROOT.parents[1] / "benchmarks"))
    try:
        from structure import imports, loops
    finally:
        sys.path.pop(0)
    for package in (ROOT, ROOT.parent / "flowbnn_studies"):
        graph = imports(package)
        assert len(graph) > 20
        assert loops(graph) == 0


def test_the_public_surface_exists_and_is_sorted():
    for name in flowbnn.__all__:
        assert hasattr(flowbnn, name), name
    assert len(flowbnn.__all__) == len(set(flowbnn.__all__))  # ruff keeps them in order
    for package in (
        "transforms",
        "nets",
        "flows",
        "distributions",
        "noise",
        "metrics",
        "training",
        "methods",
        "posterior",
        "predictive",
        "diagnostics",
        "conformal",
    ):
        module = getattr(flowbnn, package)
        assert module.__all__, package
        for name in module.__all__:
            assert hasattr(module, name), f"{package}.{name}"


def test_files_of_tests_are_named_after_modules():
    """The name is that of a module or package, possibly followed by an aspect, in the folder of the same path."""
    tests, package_wide = (
        ROOT.parents[1] / "tests",
        {"documents", "examples", "fresh_process", "gpu_suite", "imports", "language", "site", "stress"},
    )
    for path in tests.rglob("test_*.py"):
        *folders, name = path.relative_to(tests).with_suffix("").parts
        source = ROOT.parent / "flowbnn_studies" if folders[:1] == ["studies"] else ROOT
        folder = source.joinpath(*(folders[1:] if source != ROOT else folders))
        assert folder.is_dir(), f"{path} is in a folder that mirrors no package"
        modules = {module.stem for module in folder.iterdir() if module.suffix == ".py" or module.is_dir()}
        modules |= {folder.name.removeprefix("flowbnn_")} | (set() if folders else package_wide)
        subject = name.removeprefix("test_")
        assert any(f"{subject}_".startswith(f"{module}_") for module in modules), f"{path} names no module"


@pytest.mark.parametrize("enabled", [True, False])
def test_an_import_pauses_the_garbage_collector_and_restores_it(enabled, monkeypatch):
    switches = []
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "disable", lambda: switches.append("off"))
    monkeypatch.setattr(gc, "enable", lambda: switches.append("on"))
    importlib.reload(flowbnn)
    assert switches == (["off", "on"] if enabled else ["off"])
