"""Tests of tables, Markdown and terminal output."""

import re
from typing import Any

from flowbnn_studies.report import console_lines, write_markdown, write_report
from flowbnn_studies.report.tables import best_numbers, comparison_table, make_tables


def join_lines(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_each_group_has_a_table_without_empty_rows(lenet: dict[str, Any]) -> None:
    first, second = make_tables(lenet)
    assert (first.group, second.group) == ("", "Elsewhere")
    assert [column.label for column in second.columns] == ["ECE", "Parameters"]
    assert [row.label for row in first.rows] == ["Gaussian noise", "Flow noise", "Of others"]
    assert [row.label for row in second.rows] == ["Gaussian noise", "Flow noise"]
    cell = first.rows[2].cells[0]  # a cited row shows its value and is never best
    assert (cell.mean, cell.published, cell.best) == ("0.999", "", False)


def test_best_value_of_each_column_is_marked(digits: dict[str, Any]) -> None:
    def marks() -> list[list[bool]]:
        return [[cell.best for cell in row.cells] for row in make_tables(digits)[0].rows]

    assert marks() == [[False] * 4] * 3 + [[True, True, True, False]]
    assert best_numbers(digits)[2] == ("ECE", "0.006", "Flow noise")
    # values that are printed alike are equally good
    digits["rows"][0]["values"]["ece"]["mean"] = digits["rows"][3]["values"]["ece"]["mean"] + 1e-6
    assert [row[2] for row in marks()] == [True, False, False, True]
    assert best_numbers(digits)[2] == ("ECE", "0.006", "Plain network and 1 more")
    # references, unfinished rows and trial runs have no best values
    digits["rows"][0]["reference"], digits["rows"][3]["unfinished"] = "yes", "1 of 5 seeds"
    assert [row[2] for row in marks()] == [False, False, True, False]
    assert make_tables(digits)[0].rows[3].label == "Flow noise (1 of 5 seeds)"
    digits["trial"] = "yes"
    assert not any(any(row) for row in marks())
    assert best_numbers(digits) == []


def test_equal_labels_are_distinguished_by_group(digits: dict[str, Any]) -> None:
    first, second = digits["metrics"][:2]
    second["label"] = first["label"]
    first["group"], second["group"] = "Blobs", "Boston"
    assert [name for name, _, _ in best_numbers(digits)[:2]] == [
        f"{first['label']}, Blobs",
        f"{first['label']}, Boston",
    ]


def test_ece_is_among_the_first_three_columns(flow_length: dict[str, Any]) -> None:
    flow_length["metrics"].insert(0, flow_length["metrics"].pop())
    (table,) = make_tables(flow_length)
    assert [column.label for column in table.columns] == ["Parameters", "Accuracy", "ECE", "NLL"]
    assert table.rows[0].cells[2].mean == "0.094"


def test_significant_comparisons_are_marked(lenet: dict[str, Any]) -> None:
    compared = comparison_table(lenet)
    assert compared is not None
    heads, rows = compared
    assert heads == ["Accuracy ↑", "ECE ↓"]
    table: dict[str, list[Any]] = dict(rows)
    significant, other = table["flow − Gaussian"]
    assert (significant.mean, significant.span, significant.p, significant.significant) == (
        "+0.020",
        "+0.010 to +0.030",
        "p 0.062",
        True,
    )
    assert not other.significant
    missing, bare = table["Gaussian − plain"]
    assert missing is None
    assert (bare.span, bare.p, bare.significant) == ("", "", False)
    assert comparison_table({**lenet, "comparisons": []}) is None


def test_markdown_has_every_number_and_text(
    two_clusters: dict[str, Any], lenet: dict[str, Any], tmp_path: Any
) -> None:
    two_clusters["rows"][1]["label"] = "a | b"
    text = write_markdown([two_clusters, lenet], tmp_path / "docs" / "results.md").read_text()
    assert text.startswith("# Results\n")
    for name in ("title", "question", "command"):
        assert two_clusters[name] in text
    first, second = two_clusters["answer"].splitlines()
    assert f"**{first}**" in text
    assert f"- {second}" in text
    assert "| two-clusters | Yes: over 5 seeds" in text  # the overview
    for row, label in zip(two_clusters["rows"], ("Plain MLP", "a \\| b"), strict=True):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
        for metric in two_clusters["metrics"]:
            value = row["values"][metric["key"]]
            assert format(value["mean"], metric["format"]) in line
            if value["published"] is not None:
                assert f"({value['published']:{metric['format']}})" in line
    assert "<summary>Elsewhere</summary>" in text
    assert (
        "| flow − Gaussian | **+0.020** (+0.010 to +0.030, p 0.062) | −0.001 (−0.020 to +0.018, p 1) |"
        in text
    )
    assert "| Of others | 0.999 | – |" in text
    assert text.count("Share of test samples whose most probable class is right.") == 1


def test_references_are_listed_and_stars_are_escaped(two_clusters: dict[str, Any], tmp_path: Any) -> None:
    two_clusters["figures"] = []
    two_clusters["metrics"][0] |= {"label": "AUROC, entropy*", "definition": "By entropy*."}
    page = write_report([two_clusters], tmp_path / "page.html").read_text()
    text = write_markdown([two_clusters], tmp_path / "a.md").read_text()
    assert "AUROC, entropy\\*" in text
    assert "By entropy\\*." in text
    for output in (page, text):
        assert "Weijiang Xiong" in output
        assert "https://arxiv.org/abs/2010.13498" in output


def test_console_mentions_published_values_only_if_present(two_clusters: dict[str, Any]) -> None:
    lines = console_lines(two_clusters)
    assert "[published]" in "\n".join(lines)
    assert "  Source: Xiong's report, figure 3" in lines
    for row in two_clusters["rows"]:
        for cell in row["values"].values():
            cell["published"] = None
    assert "[published]" not in "\n".join(console_lines(two_clusters))


def test_console_shows_the_headline_in_order(two_clusters: dict[str, Any]) -> None:
    assert console_lines(two_clusters)[3].split() == ["Accuracy", "NLL", "ECE"]
    lines = console_lines({**two_clusters, "headline": ["parameters", "accuracy"]})
    assert lines[3].split() == ["Parameters", "Accuracy"]
    assert any("Trained numbers in the network." in line for line in lines)


def test_console_has_a_table_for_each_group_of_equal_labels(two_clusters: dict[str, Any]) -> None:
    value = {"mean": 0.25, "std": None, "per_seed": [0.25], "published": None}
    two_clusters["metrics"] = [
        {"key": f"nll_{name}", "label": "NLL", "group": name} for name in ("one", "two")
    ]
    two_clusters["headline"] = ["nll_one", "nll_two"]
    two_clusters["rows"] = [{"label": "Plain", "values": {"nll_one": value, "nll_two": value}}]
    lines = [line.strip() for line in console_lines(two_clusters)]
    assert lines[lines.index("one") + 1] == lines[lines.index("two") + 1] == "NLL"
    assert lines[lines.index("one") + 2].split() == ["Plain", "0.250"]


def test_console_shows_number_of_notes_and_the_last(two_clusters: dict[str, Any]) -> None:
    two_clusters["notes"] = []
    assert "notes in the results file" not in "\n".join(console_lines(two_clusters))
    two_clusters["notes"] = ["first"]
    assert any(line.strip().startswith("1 note in the results file") for line in console_lines(two_clusters))
    two_clusters["notes"] = ["first", "best-flow-channel: collapsed"]
    text = join_lines(console_lines(two_clusters))
    assert "2 notes in the results file and the report; the last: best-flow-channel: collapsed" in text
    assert "first" not in text


def test_markdown_escapes_html_and_links(lenet: dict[str, Any], tmp_path: Any) -> None:
    bad = "<img src=x onerror=y> [a](javascript:b) `</details>` \\<b> |\n[c]: javascript:d"
    for field in ("study", "title", "question", "answer", "source", "command", "device"):
        lenet[field] = bad
    lenet |= {"notes": [bad], "versions": {bad: bad}, "seeds": [bad]}
    for item in (*lenet["rows"], *lenet["metrics"]):
        item |= {"label": bad, "definition": bad}
        item |= {"group": bad} if "group" in item else {}
    text = write_markdown([lenet], tmp_path / "a.md").read_text()
    text = re.sub(r"(?m)^Reproduce: `[^`\n]*`", "", text)  # code is not interpreted
    text = re.sub(r"<summary>[^<\n]*</summary>", "", text)  # escaped as HTML
    bare = re.sub(r"\\[\\|*\[\]<`]", "", text)
    assert set(re.findall(r"<[^>\s]*", bare)) <= {"<details", "</details"}
    assert "[a](" not in bare
    assert not re.search(r"(?m)^\[", bare)
    assert len(lenet["title"].splitlines()) == 2  # the input is not changed
