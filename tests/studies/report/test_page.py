"""Tests that the page is complete, self-contained and escaped, and has every number."""

import ast
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import flowbnn_studies.report
from flowbnn.errors import FlowBNNError
from flowbnn_studies.report import save_figures, write_markdown, write_report
from flowbnn_studies.report.tables import REFERENCES, make_tables

VOID = {"meta", "link", "br", "img", "hr", "input"}
LOADS = {"src", "srcset", "data", "poster", "action", "background"}


class Reader(HTMLParser):
    """Parser that checks that tags match, and collects the texts, links and requests of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.headings: list[int] = []
        self.identifiers: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.labels: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "title"):
            self.text.append(data)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        self.identifiers += [attributes["id"] or ""] if "id" in attributes else []
        self.loads += [attributes[name] or "" for name in LOADS & set(attributes)]
        if "href" in attributes:
            (self.links if tag == "a" else self.loads).append(attributes["href"] or "")
        if tag == "svg" and attributes.get("role") == "img":
            self.labels.append(attributes["aria-label"] or "")

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def page_of(results: list[Any], folder: Path) -> str:
    return write_report(results, folder / "report.html").read_text(encoding="utf-8")


def test_page_has_every_text_and_number(
    page: str, two_clusters: dict[str, Any], digits: dict[str, Any]
) -> None:
    words = Reader(page).words
    assert len(page.encode()) < 2_000_000
    for study in (two_clusters, digits):
        for field in ("title", "question", "source", "command", "device"):
            assert study[field] in words
        texts = [study["answer"].splitlines()[0], *study["notes"], *study["versions"].values()]
        texts += [metric["definition"] for metric in study["metrics"]]
        texts += [figure[name] for figure in study["figures"] for name in ("title", "caption")]
        for text in texts:
            assert text in words
    for expected in (
        *("0.953 ± 0.002", "published 0.953", "0.024 ± 0.005", "published 0.009", "1,290"),
        *("ECE ↓", "Accuracy ↑", "lower is better", "5 seeds", "train.epochs", "41.3 s", "2 modes"),
        *(
            "Paired differences over seeds",
            "+0.010 to +0.030",
            "Elsewhere",
            "Scroll sideways for 4 columns →",
        ),
        "0.100",  # from a per-seed value: 0.0943 + 1.1 * 0.0051
    ):
        assert expected in words
    # no missing number is printed
    assert not re.search(r"\b(nan|inf|None|null)\b", words, re.IGNORECASE)


def test_page_loads_nothing(page: str) -> None:
    reader = Reader(page)
    assert all(load.startswith(("data:", "#")) for load in reader.loads)
    # links to click on, nothing is loaded
    cited = [reference.link for reference in REFERENCES if reference.link]
    assert [link for link in reader.links if not link.startswith("#")] == cited
    assert "http://" not in page
    assert page.count("https://") == len(cited)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert not {"script", "iframe", "object", "embed", "form"} & set(reader.tags)


def test_page_has_contents_and_opens_with_stories(page: str) -> None:
    """The page has a table of contents, and each study opens with its question. Everything else is folded."""
    reader = Reader(page)
    assert reader.headings[0] == 1
    assert reader.headings.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(reader.headings))
    assert len(reader.identifiers) == len(set(reader.identifiers))
    targets = [link[1:] for link in reader.links if link.startswith("#")]
    assert targets[0] == "overview"
    assert targets.count("references") == 1
    assert set(targets) <= set(reader.identifiers)
    assert len({target for target in targets if target.startswith("study-")}) == 5
    assert page.count('<article class="study"') == page.count('<details class="fold more">') == 5
    assert "position: sticky" in page
    assert len(reader.labels) == 43
    assert all(len(label) > 20 for label in reader.labels)
    assert (
        reader.labels[0] == "Figure 1, Where each network decides. Predicted class and uncertainty. Plain MLP"
    )


def test_single_study_has_no_contents_and_is_open(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["figures"] = []
    page = page_of([two_clusters], tmp_path)
    assert not [link for link in Reader(page).links if link.startswith("#")]
    assert "One study" in Reader(page).words
    assert page.count('<details class="fold more" open>') == 1


def test_text_is_escaped(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    bad = "<script>alert('x')</script> & \"<img src=http://evil.test/x onerror=y>"
    two_clusters["figures"] = two_clusters["figures"][1:3]  # one of models, one of panels
    for field in ("study", "title", "question", "answer", "source", "command", "created", "device"):
        two_clusters[field] = bad
    two_clusters["notes"] = [bad]
    two_clusters["settings"] = {bad: {bad: [bad, None, float("nan"), True]}}
    two_clusters["versions"] = {bad: bad}
    two_clusters["seeds"] = [bad, 1]
    for item in (*two_clusters["rows"], *two_clusters["metrics"]):
        item["label"] = bad
        item["definition"] = bad
    for figure in two_clusters["figures"]:
        figure["title"] = figure["caption"] = bad
        for panel in (*figure["data"].get("models", []), *figure["data"].get("panels", [])):
            panel["title"] = panel["label"] = bad
    page = page_of([two_clusters], tmp_path)
    reader = Reader(page)
    assert not {"script", "img"} & set(reader.tags)
    assert "<script" not in page
    assert "<img" not in page
    assert bad in reader.words
    assert bad in unescape(page)


def test_control_characters_are_replaced(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    bad = "bell \x07 nul \x00 half \ud800 tab \t"
    two_clusters["figures"] = two_clusters["figures"][1:2]
    two_clusters |= {"title": bad, "answer": bad, "notes": [bad], "versions": {bad: bad}}
    for figure in two_clusters["figures"]:
        figure["title"] = figure["caption"] = bad
        for panel in (*figure["data"].get("models", []), *figure["data"].get("panels", [])):
            panel["title"] = panel["label"] = bad
    page = page_of([two_clusters], tmp_path)
    assert "bell \ufffd nul \ufffd half \ufffd tab" in page
    assert not set(page) & set("\x07\x00")
    write_markdown([two_clusters], tmp_path / "a.md")
    save_figures([two_clusters], tmp_path)


def test_one_seed_has_no_standard_deviation(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["seeds"] = [7]
    two_clusters["figures"] = []
    for row in two_clusters["rows"]:
        for value in row["values"].values():
            value["std"], value["per_seed"] = 0.0, [value["mean"]]
    words = Reader(page_of([two_clusters], tmp_path)).words
    assert "±" not in words
    assert "One seed, so there is no standard deviation" in words
    assert "Values of every seed" not in words


def test_missing_values_are_dashes(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    values = two_clusters["rows"][0]["values"]
    values["accuracy"] = None
    values["nll"] = {"mean": float("nan"), "std": float("nan"), "per_seed": [None, float("nan")]}
    values["ece"] = {"mean": float("inf"), "std": None, "published": None}
    del values["parameters"]
    two_clusters["figures"] = []
    cells = make_tables(two_clusters)[0].rows[0].cells
    assert [cell.mean for cell in cells] == ["–", "–", "∞", "–"]
    assert [cell.std for cell in cells] == [""] * 4
    assert not any(cell.best for row in make_tables(two_clusters)[0].rows for cell in row.cells)
    words = Reader(page_of([two_clusters], tmp_path)).words
    assert not re.search(r"\b(nan|inf|None)\b", words)


def test_page_is_written_atomically(
    two_clusters: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "made" / "here" / "report.html"
    two_clusters["figures"] = []
    assert write_report([two_clusters], out) == out
    before = out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(FlowBNNError) as error:
        write_report([two_clusters], out)
    assert error.value.kind == "file"
    assert "No space left on device" in str(error.value)
    assert out.read_text() == before
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_folder_as_output_gets_report_html(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["figures"] = []
    assert write_report([two_clusters], tmp_path) == tmp_path / "report.html"


def test_unwritable_output_is_refused(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["figures"] = two_clusters["figures"][1:2]
    two_clusters["figures"][0]["data"]["models"] = two_clusters["figures"][0]["data"]["models"][:1]
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FlowBNNError) as error:
        write_report([two_clusters], tmp_path / "file" / "report.html")
    assert error.value.kind == "file"
    with pytest.raises(FlowBNNError) as error:
        save_figures([two_clusters], tmp_path / "file")
    assert error.value.kind == "file"
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("write", [write_report, write_markdown])
@pytest.mark.parametrize("name", ["results.json", "posterior.safetensors", "page"])
def test_files_of_a_study_are_not_overwritten(
    two_clusters: dict[str, Any], tmp_path: Path, write: Callable[..., Path], name: str
) -> None:
    two_clusters["figures"] = []
    (tmp_path / name).write_text("kept")
    with pytest.raises(FlowBNNError) as error:
        write([two_clusters], tmp_path / name)
    assert (error.value.kind, error.value.argument) == ("file", "out")
    assert (tmp_path / name).read_text() == "kept"


def test_empty_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FlowBNNError) as error:
        write_report([], tmp_path / "report.html")
    assert error.value.kind == "file"
    assert list(tmp_path.iterdir()) == []


def test_report_imports_no_models() -> None:
    """The report reads results and draws figures. It imports no torch and nothing that fits or predicts."""
    folder = Path(flowbnn_studies.report.__file__).parent
    imports = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imports.add(node.module or "")
    assert "flowbnn.errors" in imports
    own_imports = {
        name
        for name in imports
        if name.split(".")[0] == "flowbnn" and not name.startswith("flowbnn_studies.report")
    }
    allowed = {"errors", "plots", "training", "compare.results", "plots.style", "plots.reliability"}
    assert own_imports == {f"flowbnn.{name}" for name in allowed}
    assert not {name for name in imports if name.split(".")[0] in ("torch", "lightning", "torchmetrics")}
    assert "matplotlib.pyplot" not in imports
