"""Splits the cases of a test into those of ``make test`` and those of ``make test-slow``."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mark_slow(cases: Iterable[Any], default: Sequence[str]) -> list[Any]:
    """Returns the cases, with the mark ``slow`` on those whose name is not in ``default``.

    Args:
        cases: Names, or objects with a ``name``.
        default: Names of the cases of the default run, which together have every kind of case.
    """
    names = {getattr(case, "name", case): case for case in cases}
    assert set(default) <= set(names), set(default) - set(names)
    return [
        pytest.param(case, marks=() if name in default else pytest.mark.slow, id=name)
        for name, case in names.items()
    ]
