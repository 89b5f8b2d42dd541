"""Tests that invalid results are refused by an error that names the file and the field."""

import contextlib
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


def field_of(error: pytest.ExceptionInfo[FlowBNNError]) -> str:
    """Returns the field at fault. The message has one line."""
    assert error.value.kind == "results"
    assert "\n" not in str(error.value)
    return error.value.fields["field"]


def test_results_are_found_in_folder_and_its_children(tmp_path: Path, two_clusters: dict[str, Any]) -> None:
    second = put(tmp_path / "b", two_clusters)
    first = put(tmp_path / "a", two_clusters)
    put(tmp_path / "a" / "too-deep", two_clusters)
    assert find_results(tmp_path) == [first, second]
    own = put(tmp_path, two_clusters)
    assert find_results(tmp_path) == [own, first, second]


def test_missing_results_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FlowBNNError) as error:
            find_results(folder)
        assert error.value.kind == "file"
        assert str(folder) in str(error.value)
    with pytest.raises(FlowBNNError) as error:
        load_results(tmp_path)
    assert error.value.kind == "file"


@pytest.mark.parametrize("text", ["{", "", '{"schema": 1,}', "\x00", "[" * 100_000])
def test_invalid_json_is_refused(tmp_path: Path, text: str) -> None:
    put(tmp_path, text)
    with pytest.raises(FlowBNNError) as error:
        load_results(tmp_path)
    assert error.value.kind == "file"
    assert "results.json" in str(error.value)


@pytest.mark.parametrize("digits", [30, 400, 5000])
def test_huge_integers_are_drawn_as_gaps_or_refused(
    tmp_path: Path, two_clusters: dict[str, Any], digits: int
) -> None:
    """Python cannot convert integers of more than 4,300 digits, nor numpy those of more than 19."""
    results = copy.deepcopy(two_clusters)
    for row in results["rows"]:
        for value in row["values"].values():
            value["mean"] = 123456789
    path = put(tmp_path, json.dumps(results).replace("123456789", "9" * digits))
    with contextlib.suppress(FlowBNNError):  # other exceptions fail
        write_report([path], tmp_path / "report.html")


def test_invalid_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlowBNNError) as error:
        load_results(tmp_path)
    assert error.value.kind == "file"


@pytest.mark.parametrize("content", [[], "text", 3, None])
def test_content_must_be_an_object(tmp_path: Path, content: Any) -> None:
    put(tmp_path, json.dumps(content))
    with pytest.raises(FlowBNNError) as error:
        load_results(tmp_path)
    assert field_of(error) == str(tmp_path / "results.json")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_schema_versions_are_refused(
    tmp_path: Path, two_clusters: dict[str, Any], version: Any
) -> None:
    put(tmp_path, two_clusters | {"schema": version})
    with pytest.raises(FlowBNNError) as error:
        load_results(tmp_path)
    assert field_of(error) == str(tmp_path / "results.json")
    assert f"schema {version!r}" in str(error.value)


NEEDED = ("study", "title", "question", "answer", "seeds", "metrics", "rows", "figures")


@pytest.mark.parametrize("field", NEEDED)
def test_missing_field_is_named(tmp_path: Path, two_clusters: dict[str, Any], field: str) -> None:
    del two_clusters[field]
    put(tmp_path, two_clusters)
    with pytest.raises(FlowBNNError) as error:
        load_results(tmp_path)
    assert field_of(error) == f"{tmp_path / 'results.json'}.{field}"


@pytest.mark.usefixtures("sketched")
def test_optional_fields_may_be_missing(tmp_path: Path, two_clusters: dict[str, Any]) -> None:
    for field in set(two_clusters) - {"schema", *NEEDED}:
        del two_clusters[field]
    two_clusters["figures"] = two_clusters["figures"][1:2]
    for figure in two_clusters["figures"]:
        del figure["caption"]
    page = write_report([put(tmp_path, two_clusters)], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Two classes on a plane" in page


def change(results: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Returns a copy with the item at the dotted path replaced, or removed if the value is ``...``."""
    changed = copy.deepcopy(results)
    *parents, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    place: Any = changed
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return changed


INVALID = [
    ("rows.0.label", ..., "rows[0].label"),
    ("rows.0.values", [], "rows[0].values"),
    ("rows.1.values.ece.mean", "low", "rows[1].values.ece.mean"),
    ("rows.1.values.ece.per_seed", ["a"], "rows[1].values.ece.per_seed"),
    ("metrics.2.format", "1000000f", "metrics[2].format"),
    ("metrics.2.key", None, "metrics[2].key"),
    ("notes", "a note", "notes"),
    ("seeds", 5, "seeds"),
    ("figures.0.kind", "feild", "figures[0].kind"),
    ("figures.0.data.models.1.bins", ..., "figures[0].data.models[1].bins"),
    ("figures.0.data.models.1.grid_class", [0], "figures[0].data.models[1].grid_class"),
    ("figures.0.data.models.0.grid", [[1, 2], [3]], "figures[0].data.models[0].grid"),
    ("figures.0.data.models.0.points", [[1, 2, 3]] * 60, "figures[0].data.models[0].points"),
    ("figures.1.data.models.0.bins.3.fraction", "x", "figures[1].data.models[0].bins[3].fraction"),
    ("figures.1.data.models.0.ece", True, "figures[1].data.models[0].ece"),
    ("figures.2.data.panels.0.groups.0.edges", [0, 1], "figures[2].data.panels[0].groups[0].fraction"),
    ("figures.3.data.panels.0.prior", [1.0], "figures[3].data.panels[0].prior"),
    ("figures.3.data.pairs.0.x", [1.0], "figures[3].data.pairs[0].x"),
    ("figures.3.data.pairs.0.density", [[1.0]], "figures[3].data.pairs[0].density"),
]


@pytest.mark.parametrize(("path", "value", "field"), INVALID, ids=[item[0] for item in INVALID])
def test_invalid_field_is_named(two_clusters: dict[str, Any], path: str, value: Any, field: str) -> None:
    with pytest.raises(FlowBNNError) as error:
        load_results(change(two_clusters, path, value))
    assert field_of(error) == f"two-clusters.{field}"


def test_map_of_wrong_shape_is_refused(rivals: dict[str, Any]) -> None:
    rivals["figures"][1]["data"]["panels"][0]["values"] = [[0.1, 0.2]]
    with pytest.raises(FlowBNNError) as error:
        load_results(rivals)
    assert field_of(error).endswith("figures[1].data.panels[0].values")


def test_curves_of_unequal_length_are_refused(flow_length: dict[str, Any]) -> None:
    wrong = change(flow_length, "figures.0.data.panels.0.lines.1.std", [0.1])
    with pytest.raises(FlowBNNError) as error:
        load_results(wrong)
    assert field_of(error).endswith("figures[0].data.panels[0].lines[1].std")


def test_pipe_is_refused_without_reading(tmp_path):
    os.mkfifo(tmp_path / "results.json")
    for read in (
        load_results,
        lambda path: read_idx(path, (1,)),
        lambda path: read_cifar_binary(path, 1, (1,)),
    ):
        with pytest.raises(FlowBNNError) as error:
            read(tmp_path / "results.json")
        assert error.value.kind in ("file", "results")
    assert read_json(tmp_path / "results.json") is None
