"""Tables by group, cited rows, paired comparisons, and curves that are not ours."""

import re
from typing import Any

import pytest

from flowbnn.errors import FlowBNNError
from flowbnn_studies.report import load_results, write_markdown, write_report
from flowbnn_studies.report.figures import make_plot, study_colours
from flowbnn_studies.report.tables import compare_table, make_tables


def test_groups_have_tables_of_their_own_without_empty_rows(lenet: dict[str, Any]) -> None:
    tables = dict(make_tables(lenet, {}))
    assert list(tables) == ["", "Elsewhere"]
    assert [column.label for column in tables["Elsewhere"].columns] == ["ECE", "Parameters"]
    assert [row.label for row in tables[""].rows] == ["Gaussian noise", "Flow noise", "Of others"]
    assert [row.label for row in tables["Elsewhere"].rows] == ["Gaussian noise", "Flow noise"]


def test_a_cited_row_shows_its_value_and_wins_nothing(lenet: dict[str, Any]) -> None:
    cell = dict(make_tables(lenet, {}))[""].rows[2].cells[0]
    assert (cell.mean, cell.published, cell.best) == ("0.999", "", False)


def test_comparisons_mark_what_leaves_out_nought(lenet: dict[str, Any]) -> None:
    found = compare_table(lenet)
    assert found is not None
    heads, rows = found
    assert heads == ["Accuracy ↑", "ECE ↓"]
    table = dict(rows)
    clear, unclear = table["flow − Gaussian"]
    assert clear is not None
    assert unclear is not None
    assert (clear.mean, clear.span, clear.p, clear.clear) == ("+0.020", "+0.010 to +0.030", "p 0.062", True)
    assert not unclear.clear
    missing, bare = table["Gaussian − plain"]
    assert missing is None
    assert bare is not None
    assert (bare.span, bare.p, bare.clear) == ("", "", False)
    assert compare_table({**lenet, "comparisons": []}) is None


def test_page_and_markdown_hold_them(lenet: dict[str, Any], tmp_path: Any) -> None:
    html = write_report([lenet], tmp_path / "report.html").read_text()
    assert html.count("<h3>Elsewhere</h3>") == 1
    assert "Differences, seed by seed" in html
    assert "+0.010 to +0.030" in html
    text = write_markdown([lenet], tmp_path / "results.md").read_text()
    assert "**Elsewhere**" in text
    assert (
        "| flow − Gaussian | **+0.020** (+0.010 to +0.030, p 0.062) | −0.001 (−0.020 to +0.018, p 1) |"
        in text
    )
    assert "| Of others | 0.999 | – |" in text


def test_a_line_of_others_has_the_colour_of_ours_and_dashes(lenet: dict[str, Any]) -> None:
    colours = study_colours(load_results(lenet))
    assert colours["Flow noise"] == "vermillion"
    plot = make_plot(lenet["figures"][0], colours)
    keys = {key.label: (key.colour, key.dashes) for key in plot.keys}
    assert keys["Flow noise"] == ("vermillion", "")
    assert keys["Document: flow"] == ("vermillion", "5 2")
    assert keys["baseline"][0] == "muted"
    assert plot.columns == 4


def test_an_unknown_colour_is_named(lenet: dict[str, Any]) -> None:
    lenet["rows"][0]["colour"] = "vermilion"
    with pytest.raises(
        FlowBNNError, match=re.escape("rows[0].colour 'vermilion' is unknown; did you mean 'vermillion'")
    ):
        load_results(lenet)
