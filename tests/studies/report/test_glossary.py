"""Terms and sources are told where they are used, and only there."""

from typing import Any

from flowbnn_studies.report import write_markdown, write_report
from flowbnn_studies.report.console import console_lines
from flowbnn_studies.report.glossary import TERMS


def starred(results: dict[str, Any]) -> dict[str, Any]:
    """The results with a metric whose label uses a term."""
    results["metrics"].append(
        {"key": "auroc_entropy", "label": "AUROC, entropy*", "format": ".3f", "definition": "How often."}
    )
    for row in results["rows"]:
        row["values"]["auroc_entropy"] = {"mean": 0.75, "std": None, "per_seed": [0.75], "published": None}
    return results


def test_a_term_is_explained_where_a_table_uses_it(two_clusters: dict[str, Any], tmp_path):
    meaning = TERMS["entropy*"]
    before = write_report([two_clusters], tmp_path / "page.html").read_text()
    assert meaning not in before
    results = starred(two_clusters)
    page = write_report([results], tmp_path / "page.html").read_text()
    assert page.count(meaning) == 1
    assert TERMS["NLL*"] not in page
    text = write_markdown([results], tmp_path / "a.md").read_text()
    assert "- **entropy\\***: " in text  # the term's own star is no mark of Markdown
    assert "AUROC, entropy\\*" in text
    assert meaning in text
    told = " ".join(" ".join(console_lines(results, every=True)).split())
    assert meaning in told
    assert meaning not in " ".join(" ".join(console_lines(results)).split())


def test_every_source_named_is_listed_and_no_other(two_clusters: dict[str, Any], tmp_path):
    two_clusters["rows"][0]["label"] = "Trinh et al.: SGD"
    for text in (
        write_report([two_clusters], tmp_path / "page.html").read_text(),
        write_markdown([two_clusters], tmp_path / "a.md").read_text(),
    ):
        assert "Weijiang Xiong" in text
        assert "https://arxiv.org/abs/2010.13498" in text
        assert "Ravenda" not in text
        assert "Sungsoo Ahn" not in text
    two_clusters["source"], two_clusters["rows"][0]["label"] = "", "SGD"
    assert "Sources" not in write_markdown([two_clusters], tmp_path / "a.md").read_text()
    assert 'id="sources"' not in write_report([two_clusters], tmp_path / "page.html").read_text()


def test_the_console_says_published_only_where_something_is(two_clusters: dict[str, Any]):
    assert "[published]" in "\n".join(console_lines(two_clusters))
    for row in two_clusters["rows"]:
        for cell in row["values"].values():
            cell["published"] = None
    assert "[published]" not in "\n".join(console_lines(two_clusters))
    assert "  Source: document 000, figure 3" in console_lines(two_clusters)
    assert any("document 000: Weijiang Xiong" in line for line in console_lines(two_clusters))


def test_the_console_shows_the_headline_of_the_study_in_its_order(two_clusters: dict[str, Any]):
    usual = console_lines(two_clusters)[3].split()
    assert usual == ["Accuracy", "NLL", "ECE"]
    lines = console_lines({**two_clusters, "headline": ["parameters", "accuracy"]})
    assert lines[3].split() == ["Parameters", "Accuracy"]
    assert any("Trained numbers in the network." in line for line in lines)


def test_the_console_tells_how_many_notes_there_are_and_the_last(two_clusters: dict[str, Any]):
    two_clusters["notes"] = []
    assert "with these numbers" not in "\n".join(console_lines(two_clusters))
    two_clusters["notes"] = ["first"]
    assert any(line.strip().startswith("One note goes") for line in console_lines(two_clusters))
    two_clusters["notes"] = ["first", "best-flow-channel: collapsed"]
    told = " ".join(" ".join(console_lines(two_clusters)).split())
    assert (
        "2 notes go with these numbers, in the file and on its page; the last: best-flow-channel: collapsed"
        in told
    )
    assert "first" not in told
