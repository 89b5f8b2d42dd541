"""API reference: one page for every public name, and the check that none is missing."""

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import flowbnn

MAX_VALUE = 100  # characters of a constant that its page shows
INTERNAL = {"batches", "kernels", "numerics", "options", "packing"}  # used by the library only


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring. The full stop of "et al." does not end it.

    Args:
        text: Docstring, or an empty string.
    """
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<!\bal)\. ", paragraph)[0].rstrip(".:") + "." if paragraph else ""


@dataclass(frozen=True)
class Name:
    """A public name.

    Args:
        package: Name of the package that lists it.
        name: Name within the package.
        value: Object.
    """

    package: str
    name: str
    value: Any = field(compare=False)

    @property
    def path(self) -> str:
        """Dotted path of the name."""
        return f"{self.package}.{self.name}"

    @property
    def kind(self) -> str:
        """Kind of the object, as in the directives of autodoc."""
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(self.value) or callable(self.value) else "data"

    @property
    def summary(self) -> str:
        """First sentence of the docstring; empty for data."""
        text = (inspect.getdoc(self.value) or "") if self.kind != "data" else ""
        return first_sentence(text)


def packages() -> list[str]:
    """Returns the names of the public packages: those with ``__all__``, the library itself first."""
    names = ["flowbnn"]
    for _, name, _ in pkgutil.iter_modules(flowbnn.__path__, "flowbnn."):
        if name.rpartition(".")[2] in INTERNAL:
            continue
        module = importlib.import_module(name)
        if hasattr(module, "__all__"):
            names.append(name)
        if name == "flowbnn.integrations":
            children = [child for _, child, _ in pkgutil.iter_modules(module.__path__, f"{name}.")]
            names += [child for child in children if hasattr(importlib.import_module(child), "__all__")]
    return names


def public_names(package: str) -> Iterator[Name]:
    """Yields the public names of a package that are not modules."""
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            yield Name(package, name, value)


def canonical_names() -> dict[int | str, Name]:
    """Returns the name under which each public object is documented, by identity, and by path for data.

    An object that several packages list is documented under the shortest path, ``flowbnn.X``, or in the package that defines it.
    """
    result: dict[int | str, Name] = {}
    for package in packages():
        for name in public_names(package):
            key = name.path if name.kind == "data" else id(name.value)
            home = getattr(name.value, "__module__", None) or ""
            defines = home == package or home.startswith(f"{package}.")
            if key not in result or (result[key].package != "flowbnn" and defines):
                result[key] = name
    return result


def canonical(name: Name, names: dict[int | str, Name]) -> Name:
    """Returns the name under which an object is documented."""
    return names[name.path if name.kind == "data" else id(name.value)]


def page_of(name: Name) -> str:
    """Returns the page of a name, relative to the folder of the reference.

    Names that differ in case only, such as ``Marginal`` and ``marginal``, get files that differ on every file system.
    """
    room = name.package.removeprefix("flowbnn").lstrip(".") or "flowbnn"
    suffix = "" if name.kind in ("class", "exception") else f"-{name.kind}"
    return f"{room.replace('.', '-')}/{name.name}{suffix}"


def _page(name: Name) -> str:
    title = name.name
    lines = [
        ":orphan:",
        "",
        title,
        "=" * len(title),
        "",
    ]  # hundreds of entries would slow down every page's sidebar
    if name.kind == "data":  # docstrings of data are those of their types
        value = repr(name.value) if len(repr(name.value)) < MAX_VALUE else ""
        return "\n".join(
            [*lines, f".. py:data:: {name.path}", *([f"   :value: {value}"] if value else []), ""]
        )
    lines += [f".. auto{name.kind}:: {name.package}::{name.name}"]
    if name.kind in ("class", "exception"):
        lines += ["   :members:", "   :show-inheritance:"]
    return "\n".join([*lines, ""])


def _index(package: str, names: dict[int | str, Name]) -> str:
    module = importlib.import_module(package)
    title = f"``{package}``"
    lines = [title, "=" * len(title), "", inspect.getdoc(module) or "", ""]
    groups: dict[str, list[Name]] = {}
    for name in public_names(package):
        groups.setdefault(name.kind, []).append(name)
    titles = {"class": "Classes", "exception": "Errors", "function": "Functions", "data": "Constants"}
    for kind, heading in titles.items():
        if kind in groups:
            lines += [heading, "-" * len(heading), "", ".. list-table::", "   :widths: 30 70", ""]
        for name in sorted(groups.get(kind, []), key=lambda item: item.name.lower()):
            target = canonical(name, names)
            lines += [
                f"   * - :doc:`{name.name} </generated/api/{page_of(target)}>`",
                f"     - {name.summary}",
            ]
        lines.append("")
    return "\n".join([*lines, ""])


def write_pages(folder: Path) -> None:
    """Writes the reference: an index, a page for each package and a page for each name."""
    names = canonical_names()
    current = {folder / f"{page_of(name)}.rst" for name in names.values()}
    for path in set(folder.glob("*/*.rst")) - current:  # of names that no longer exist
        if path.name != "index.rst":
            path.unlink()
    rooms = []
    for package in packages():
        room = package.removeprefix("flowbnn").lstrip(".").replace(".", "-") or "flowbnn"
        rooms.append((room, package))
        write(folder / room / "index.rst", _index(package, names))
    for name in names.values():
        write(folder / f"{page_of(name)}.rst", _page(name))
    lines = [
        "API reference",
        "=============",
        "",
        "Every public name has a page. The most important are in :doc:`flowbnn/index`.",
        "",
    ]
    lines += [".. list-table::", "   :widths: 30 70", ""]
    for room, package in rooms:
        summary = Name("", "", importlib.import_module(package)).value.__doc__ or ""
        lines += [f"   * - :doc:`{package} <{room}/index>`", f"     - {first_sentence(summary)}"]
    lines += ["", ".. toctree::", "   :hidden:", "", *(f"   {room}/index" for room, _ in rooms), ""]
    write(folder / "index.rst", "\n".join(lines))


def gallery_picture(script: str, number: int, alt: str) -> list[str]:
    """Returns the Markdown of a figure of the gallery; nothing if the gallery is not executed.

    Args:
        script: Name of the script without its suffix.
        number: Number of the figure in the script, from 1.
        alt: Description of the picture.
    """
    if os.environ.get("FLOWBNN_DOCS_SKIP_GALLERY"):
        return []
    return [f"![{alt}](/generated/gallery/images/sphx_glr_{script}_{number:03d}.png)", ""]


def write(path: Path, text: str) -> None:
    """Writes a page if its text has changed, so that Sphinx reads only what is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
