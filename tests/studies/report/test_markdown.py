"""The Markdown twin of the page holds the same numbers."""

from flowbnn_studies.report import write_markdown


def test_every_number_and_word_is_there(two_clusters, tmp_path):
    text = write_markdown([two_clusters], tmp_path / "docs" / "results.md").read_text()
    assert text.startswith("# Results\n")
    for word in (
        two_clusters["title"],
        two_clusters["question"],
        two_clusters["answer"],
        two_clusters["command"],
    ):
        assert word in text
    for row in two_clusters["rows"]:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {row['label']} |")]
        assert line.count(" | ") == len(two_clusters["metrics"])
        for metric in two_clusters["metrics"]:
            value = row["values"].get(metric["key"])
            if value and value["mean"] is not None:
                assert format(value["mean"], metric.get("format", ".3f")) in line
            if value and value["published"] is not None:
                assert f"({value['published']:{metric.get('format', '.3f')}})" in line


def test_bars_in_labels_do_not_break_the_table(two_clusters, tmp_path):
    two_clusters["rows"][0]["label"] = "a | b"
    text = write_markdown([two_clusters], tmp_path / "results.md").read_text()
    assert "| a \\| b |" in text
