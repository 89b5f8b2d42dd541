"""Results that cannot be used are refused in one line that names the file and the field."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flowbnn.compare.results import read_json
from flowbnn.errors import FlowBNNError
from flowbnn_studies.data.load import read_cifar_binary, read_idx
from flowbnn_studies.report import find_results, load_results, write_report


def put(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def line(error: pytest.ExceptionInfo[FlowBNNError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_find_in_folder_and_its_children(tmp_path: Path, two_clusters: dict[str, Any]) -> None:
    second = put(tmp_path / "b", two_clusters)
    first = put(tmp_path / "a", two_clusters)
    put(tmp_path / "a" / "too-deep", two_clusters)
    assert find_results(tmp_path) == [first, second]
    own = put(tmp_path, two_clusters)
    assert find_results(tmp_path) == [own, first, second]


def test_nothing_found(tmp_path: Path) -> None:
    with pytest.raises(FlowBNNError, match=r"no results.json in .* run a study") as error:
        find_results(tmp_path)
    line(error)
    with pytest.raises(FlowBNNError, match="no results.json in .*missing"):
        find_results(tmp_path / "missing")
    with pytest.raises(
        FlowBNNError, match=r"cannot read .*results\.json: No such file or directory; run a study first"
    ):
        load_results(tmp_path)


@pytest.mark.parametrize("text", ["{", "", '{"schema": 1,}', "\x00", "[" * 100_000])
def test_not_json(tmp_path: Path, text: str) -> None:
    put(tmp_path, text)
    with pytest.raises(FlowBNNError, match="is not valid JSON") as error:
        load_results(tmp_path)
    assert "results.json" in line(error)


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlowBNNError, match="is not valid JSON"):
        load_results(tmp_path)


@pytest.mark.parametrize("content", [[], "text", 3, None])
def test_not_an_object(tmp_path: Path, content: Any) -> None:
    put(tmp_path, json.dumps(content))
    with pytest.raises(FlowBNNError, match="one JSON object"):
        load_results(tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_wrong_schema(tmp_path: Path, two_clusters: dict[str, Any], version: Any) -> None:
    put(tmp_path, two_clusters | {"schema": version})
    with pytest.raises(FlowBNNError, match="this flowbnn reads schema 1") as error:
        load_results(tmp_path)
    assert repr(version) in line(error)


NEEDED = ("study", "title", "question", "answer", "seeds", "metrics", "rows", "figures")


@pytest.mark.parametrize("field", NEEDED)
def test_missing_field_is_named(tmp_path: Path, two_clusters: dict[str, Any], field: str) -> None:
    del two_clusters[field]
    put(tmp_path, two_clusters)
    with pytest.raises(FlowBNNError, match=f"lacks the field '{field}'") as error:
        load_results(tmp_path)
    line(error)


def test_optional_fields_may_be_missing(tmp_path: Path, two_clusters: dict[str, Any]) -> None:
    for field in set(two_clusters) - {"schema", *NEEDED}:
        del two_clusters[field]
    two_clusters["figures"] = two_clusters["figures"][1:2]
    for figure in two_clusters["figures"]:
        del figure["caption"]
    page = write_report([put(tmp_path, two_clusters)], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Two classes on a plane" in page


def change(results: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the item at the dotted path replaced, or removed where the value is ``...``."""
    changed = copy.deepcopy(results)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = changed
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return changed


WRONG = [
    ("rows.0.label", ..., r"rows\[0\] lacks the field 'label'"),
    ("rows.0.values", [], r"rows\[0\]\.values should be an object"),
    ("rows.1.values.ece.mean", "low", r"rows\[1\]\.values\.ece\.mean should be a number"),
    ("rows.1.values.ece.per_seed", ["a"], r"values\.ece\.per_seed should be numbers"),
    ("metrics.2.format", "1000000f", r"metrics\[2\]\.format is '1000000f'; write one like '\.3f'"),
    ("metrics.2.key", None, r"metrics\[2\] lacks the field 'key'"),
    ("notes", "a note", "notes should be a list"),
    ("seeds", 5, "seeds should be a list"),
    ("figures.0.kind", "feild", r"figures\[0\]\.kind 'feild' is unknown; did you mean 'field'"),
    ("figures.0.data.models.1.bins", ..., r"figures\[0\]\.data\.models\[1\] lacks the field 'bins'"),
    (
        "figures.0.data.models.1.grid_class",
        [0],
        r"models\[1\]\.grid_class has 1 values, but 81 go with its grid",
    ),
    ("figures.0.data.models.0.grid", [[1, 2], [3]], r"grid should be numbers in a list of depth 2"),
    ("figures.0.data.models.0.points", [[1, 2, 3]] * 60, r"points should be a list of \[x, y\]"),
    ("figures.1.data.models.0.bins.3.fraction", "x", r"bins\[3\]\.fraction should be a number"),
    ("figures.1.data.models.0.ece", True, r"models\[0\]\.ece should be a number"),
    (
        "figures.2.data.panels.0.groups.0.edges",
        [0, 1],
        r"groups\[0\]\.fraction has 8 values, but 1 go with its edges",
    ),
    ("figures.3.data.panels.0.prior", [1.0], r"panels\[0\]\.prior has 1 values, but 41 go with its x"),
    ("figures.3.data.pairs.0.x", [1.0], r"pairs\[0\]\.x should be a grid of at least two increasing"),
    ("figures.3.data.pairs.0.density", [[1.0]], r"pairs\[0\]\.density should have 11 rows \(y\) of 11 \(x\)"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[item[0] for item in WRONG])
def test_what_is_wrong_is_named(two_clusters: dict[str, Any], path: str, value: Any, message: str) -> None:
    with pytest.raises(FlowBNNError, match=message) as error:
        load_results(change(two_clusters, path, value))
    line(error)


def test_a_map_of_another_shape_is_refused(rivals: dict[str, Any]) -> None:
    rivals["figures"][1]["data"]["panels"][0]["values"] = [[0.1, 0.2]]
    with pytest.raises(FlowBNNError, match="a row for each y and a column for each x"):
        load_results(rivals)


def test_curves_of_unequal_length(flow_length: dict[str, Any]) -> None:
    wrong = change(flow_length, "figures.0.data.panels.0.lines.1.std", [0.1])
    with pytest.raises(FlowBNNError, match=r"lines\[1\]\.std has 1 values, but 8 go with its x"):
        load_results(wrong)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "results.json")
    for read in (
        load_results,
        lambda path: read_idx(path, (1,)),
        lambda path: read_cifar_binary(path, 1, (1,)),
    ):
        with pytest.raises(FlowBNNError, match="a pipe or a device"):
            read(tmp_path / "results.json")
    assert read_json(tmp_path / "results.json") is None
