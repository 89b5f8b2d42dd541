"""Report of studies: figures, tables and one HTML page, made from ``results.json`` alone and never from a model.

>>> from flowbnn_studies.report import find_results, write_report
>>> write_report(find_results("results"), "results/report.html")  # doctest: +SKIP
"""

from flowbnn_studies.report.console import console_lines
from flowbnn_studies.report.markdown import study_markdown, write_markdown
from flowbnn_studies.report.page import save_figures, write_report
from flowbnn_studies.report.reading import find_results, load_results

__all__ = [
    "console_lines",
    "find_results",
    "load_results",
    "save_figures",
    "study_markdown",
    "write_markdown",
    "write_report",
]
