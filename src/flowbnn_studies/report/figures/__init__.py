"""The figures of a study, each drawn from the ``data`` of its entry in ``results.json`` and nothing else."""

from collections.abc import Callable, Mapping
from typing import Any

from flowbnn_studies.report.canvas import Plot
from flowbnn_studies.report.figures.calibration import field, reliability
from flowbnn_studies.report.figures.charts import bars, curves, histogram, pareto
from flowbnn_studies.report.figures.galleries import bands, density, draws, images, maps

__all__ = ["FIGURES", "make_plot"]

FIGURES: dict[str, Callable[[dict[str, Any], Mapping[str, str]], Plot]] = {
    "bands": bands,
    "bars": bars,
    "curves": curves,
    "density": density,
    "draws": draws,
    "field": field,
    "histogram": histogram,
    "images": images,
    "map": maps,
    "pareto": pareto,
    "reliability": reliability,
}


def make_plot(figure: dict[str, Any], colours: Mapping[str, str]) -> Plot:
    """The plot of one checked entry of ``figures``.

    Args:
        figure: an entry with ``kind`` and ``data``.
        colours: the colour of each label, from :func:`~flowbnn_studies.report.style.assign_colours`.
    """
    return FIGURES[figure["kind"]](figure["data"], colours)
