"""One page for each stored study, written from its ``results.json``, and the overview ``docs/results.md``."""

from pathlib import Path
from typing import Any

from flowbnn_site.api import write
from flowbnn_studies.report import find_results, load_results, study_markdown
from flowbnn_studies.report.canvas import to_png
from flowbnn_studies.report.figures import make_plot
from flowbnn_studies.report.page import page_colours, story_figures
from flowbnn_studies.report.story import story_of

MAX_FIGURES = 2  # figures of a page; the report has all of them
OVERVIEW = """# Results

Every number of the documentation comes from a stored study. The file `docs/results/<study>/results.json` has its values for every seed,
its settings, package versions, device and time. The documentation site has a page with figures and tables for each study.
`flowbnn report` writes all of them as one page, and `flowbnn run <study>` computes them again ([studies](studies.md)).

| study | question | answer |
|---|---|---|
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def overview(folder: Path) -> str:
    """Returns the text of ``docs/results.md``: question and answer of each study.

    Args:
        folder: Folder of the stored results.
    """
    rows = []
    for path in find_results(folder):
        results = load_results(path)
        story = story_of(results)
        link = f"[{results['study']}](results/{path.parent.name}/results.json)"
        rows.append(f"| {link} | {_cell(story.question)} | {_cell(story.answer)} |\n")
    return OVERVIEW + "".join(rows)


def _figures(results: dict[str, Any], source: Path, folder: Path) -> list[str]:
    """Draws the figure that shows the answer, and a further one, unless newer files exist. Returns their Markdown."""
    lines = []
    colours = page_colours([results])
    lead, others = story_figures(results, story_of(results))
    for index, figure in enumerate([*lead, *others][:MAX_FIGURES], start=1):
        path = folder / f"{results['study']}-{index}.png"
        if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(to_png(make_plot(figure, colours), figure["title"], scale=1.5))
        caption = (
            " ".join((figure.get("caption") or figure["title"]).split()).replace("[", "(").replace("]", ")")
        )
        lines += [f"![{caption}](figures/{path.name})", "", f"*{_cell(caption)}*", ""]
    return lines


def _page(results: dict[str, Any], source: Path, folder: Path) -> str:
    text = "\n".join(study_markdown(results)).replace("## ", "# ", 1)
    # figures stand between the answer and whatever follows it: a table, or a fold that would hide them
    place = min((text.find(mark) for mark in ("\n|  |", "\n<details>") if mark in text), default=len(text))
    return "\n".join(
        [text[:place], "", *_figures(results, source, folder / "figures"), text[place:].lstrip("\n")]
    )


def write_pages(source: Path, folder: Path) -> None:
    """Writes a page for each study and their index.

    Args:
        source: Folder of the stored results.
        folder: Folder of the pages.
    """
    names = []
    for path in find_results(source):
        results = load_results(path)
        names.append(path.parent.name)
        write(folder / f"{path.parent.name}.md", _page(results, path, folder))
    toctree = "\n".join(["```{toctree}", ":maxdepth: 1", "", *names, "```"])
    write(
        folder / "index.md",
        f"# Pages of the studies\n\nThe [overview](../../results.md) has the answers.\n\n{toctree}\n",
    )


if __name__ == "__main__":
    docs = Path(__file__).parents[2]
    (docs / "results.md").write_text(overview(docs / "results"), encoding="utf-8")
