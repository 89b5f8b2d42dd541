"""Docstrings follow two rules of style that a program can check.

1. A docstring begins with what the object does or is. It never opens with What, How, Where, Whether, Which or By how much.
2. An argument is explained by a noun phrase that stands alone. It is never explained by a bare genitive, as in "momentum: of the walk".
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks")
OPENING = re.compile(r"(What|How|Where|Whether|Which|By how much)\b")
SECTION = re.compile(r"^(Args|Arguments|Attributes|Parameters|Returns|Yields|Raises):$")
GENITIVE = re.compile(r"^[\w, *`.()\[\]|\"']+: [Oo]f ")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def docstrings(path: Path) -> list[tuple[int, str]]:
    """Returns the line number and the text of every docstring of a file."""
    return [
        (node.body[0].lineno, text)
        for node in documented_nodes(ast.parse(path.read_text(encoding="utf-8")))
        if (text := ast.get_docstring(node))
    ]


def documented_nodes(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields the objects that may have a docstring. Only statements are searched, because expressions contain none."""
    if isinstance(node, DOCUMENTED):
        yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, block, ())
        for child in children if isinstance(children, list) else ():
            yield from documented_nodes(child)


def genitives(text: str) -> Iterator[str]:
    """Yields the lines of the sections of a docstring that explain an argument by a bare genitive."""
    inside = False
    for line in text.splitlines():
        if SECTION.match(line):
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside and GENITIVE.match(line.strip()):
            yield line.strip()


def python_files() -> list[Path]:
    """Returns every Python file of the library, the tests and the benchmarks."""
    return sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))


def test_docstrings_begin_with_what_the_object_does():
    """No docstring opens with a question word."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text.splitlines()[0]}"
        for path in python_files()
        for line, text in docstrings(path)
        if OPENING.match(text)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_arguments_are_explained_by_noun_phrases():
    """No argument is explained by a bare genitive."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {words}"
        for path in python_files()
        for line, text in docstrings(path)
        for words in genitives(text)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("text", ["What it does.", "Where files lie.", "By how much it grows."])
def test_the_rule_for_openings_finds_question_words(text):
    """The pattern finds openings by question words and leaves others alone."""
    assert OPENING.match(text)
    assert not OPENING.match("Whatever the batch holds is returned.")


def test_the_rule_for_arguments_finds_genitives():
    """The pattern finds bare genitives inside a section only."""
    text = (
        "Walks.\n\nArgs:\n    steps, pace: of the walk.\n    rate: Rate of the walk.\n\nnote: of no concern"
    )
    assert list(genitives(text)) == ["steps, pace: of the walk."]
