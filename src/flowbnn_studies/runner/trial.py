"""Results of a trial of the program: too small to mean anything, which they say wherever they are shown."""

import re
from typing import Any

__all__ = ["mark_trial"]


def _without_published(row: dict[str, Any]) -> dict[str, Any]:
    cells = {
        key: {**cell, "published": None} if cell and "published" in cell else cell
        for key, cell in row["values"].items()
    }
    return {**row, "values": cells}


def _own_lines(figure: dict[str, Any]) -> dict[str, Any]:
    """The figure without the curves and levels of others, and without the sentence about them."""
    panels = figure["data"].get("panels")
    if figure["kind"] != "curves" or not panels:
        return figure
    own = []
    for panel in panels:
        lines = [line for line in panel["lines"] if line.get("style") != "dashed"]
        own.append({**{name: part for name, part in panel.items() if name != "levels"}, "lines": lines})
    caption = re.sub(r" ?Dashed, [^.]*\.", "", figure.get("caption") or "")
    return {**figure, "caption": caption, "data": {**figure["data"], "panels": own}}


def mark_trial(results: dict[str, Any], generated: bool = False) -> dict[str, Any]:
    """The results with a title, an answer and a note that say what they are, and nothing published beside their numbers.

    Args:
        results: of one study.
        generated: whether the images were made by the program in place of the data set that the title names.

    >>> marked = mark_trial({"title": "LeNet on Fashion-MNIST", "rows": [], "figures": [], "notes": []}, generated=True)
    >>> marked["title"]
    'LeNet on Fashion-MNIST (generated images, a trial of the program: the numbers mean nothing)'
    """
    small = "generated images" if generated else "tiny settings"
    data = (
        " It learned and was tested on pictures that the program makes, not on the data set of its name."
        if generated
        else ""
    )
    told = f"This is a trial of the program with {small}: its numbers mean nothing."
    return {
        **results,
        "title": f"{results['title']} ({small}, a trial of the program: the numbers mean nothing)",
        "answer": told + data,
        "trial": "yes",
        "rows": [_without_published(row) for row in results["rows"] if not row.get("cited")],
        "figures": [_own_lines(figure) for figure in results["figures"]],
        "notes": [f"{told}{data} No published values stand beside them.", *results["notes"]],
    }
