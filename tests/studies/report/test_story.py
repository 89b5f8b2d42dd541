"""Tests of stories: every stored study opens with a question, an answer in one sentence and a number, computed from its rows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flowbnn_studies.report.story import story_of
from flowbnn_studies.runner.story import MissingNumber, Numbers, Story

STORED = sorted(Path(__file__).parents[3].glob("docs/results/*/results.json"))


def make_results(cells: dict[str, list[float]], better: str = "lower", **row: Any) -> dict[str, Any]:
    rows = [
        {
            "key": key,
            "label": key,
            "values": {"score": {"mean": sum(cell) / len(cell), "per_seed": cell}},
            **row,
        }
        for key, cell in cells.items()
    ]
    metric = {"key": "score", "label": "Score", "better": better, "format": ".1f"}
    return {
        "study": "mine", "question": "Is it?", "answer": "It is.\nIn detail.", "seeds": [0, 1, 2],
        "metrics": [metric], "rows": rows, "figures": [],
    }  # fmt: skip


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_every_stored_study_has_a_story(path: Path) -> None:
    results = json.loads(path.read_text())
    story = story_of(results)
    assert story.question.endswith("?") or results["title"] == story.question
    assert story.number
    assert story.meaning  # a story without it is the one of an unknown study
    assert story.answer.count(". ") == 0  # one sentence
    assert len(story.answer.split()) <= 50
    assert not {"nan", "inf", "none"} & set(story.answer.lower().replace(",", "").split())
    assert set(story.metrics) | set(story.charts) <= {metric["key"] for metric in results["metrics"]}
    assert set(story.rows) <= {row["key"] for row in results["rows"]}
    figures = [figure for figure in results["figures"] if figure["kind"] == story.figure]
    assert story.metrics
    if story.figure:
        data = figures[story.place]["data"]
        titles = [panel["title"] for panel in [*data["panels"], *data.get("pairs", [])]]
        assert set(story.panels) <= set(titles)


def test_answer_on_two_clusters_depends_on_the_longer_training() -> None:
    """The answer gives the credit to the noise only if the network that was trained as long is significantly worse."""
    results = json.loads((STORED[0].parents[1] / "two-clusters" / "results.json").read_text())
    same = story_of(results).answer
    longer = next(row for row in results["rows"] if row["key"] == "longer")["values"]["ece"]
    answers = {same}
    for factor in (5.0, 0.2):
        longer["per_seed"] = [factor * value for value in longer["per_seed"]]
        longer["mean"] = sum(longer["per_seed"]) / len(longer["per_seed"])
        answers.add(story_of(results).answer)
        longer["per_seed"] = [value / factor for value in longer["per_seed"]]
    assert len(answers) == 3


@pytest.mark.parametrize(("better", "expected"), [("lower", 1), ("higher", -1)])
def test_comparison_of_rows_follows_the_better_direction(better: str, expected: int) -> None:
    cells = {"a": [1.0, 1.1, 0.9], "b": [2.0, 2.1, 1.9], "c": [3.0, 0.5, 1.0]}
    numbers = Numbers(make_results(cells, better))
    assert numbers.better("a", "b", "score") == expected
    assert numbers.better("b", "a", "score") == -expected
    assert numbers.better("a", "c", "score") == 0
    assert numbers.ranked("score") == (["a", "c", "b"] if better == "lower" else ["b", "c", "a"])
    assert numbers.difference("b", "a", "score").mean == pytest.approx(1.0)


def test_published_and_unfinished_rows_are_not_ranked() -> None:
    for field in ("cited", "reference", "unfinished"):
        results = make_results({"a": [2.0], "b": [1.0]})
        results["rows"][1][field] = "yes"
        assert Numbers(results).ranked("score") == ["a"]


def test_missing_numbers_are_refused() -> None:
    results = make_results({"a": [1.0, 2.0], "b": [1.0]})
    results["rows"][0]["values"]["other"] = {"mean": math.nan}
    numbers = Numbers(results)
    for call in (
        lambda: numbers.mean("c", "score"),
        lambda: numbers.mean("a", "other"),
        lambda: numbers.ranked("missing"),
        lambda: numbers.difference("a", "b", "score"),
    ):
        with pytest.raises(MissingNumber):
            call()


def test_interrupted_runs_and_unknown_studies_have_the_stored_answer() -> None:
    expected = Story("Is it?", "It is.", metrics=("score",))
    results = make_results({"a": [1.0]})
    assert story_of(results) == expected
    assert story_of({**results, "study": "two-clusters"}) == expected
    assert story_of({**results, "study": "compare-lenet-digits", "trial": "yes"}) == expected


def test_names_within_a_sentence() -> None:
    keys = ("Flow noise", "Gaussian noise", "HMC", "Laplace, last layer")
    numbers = Numbers(make_results({key: [1.0] for key in keys}))
    names = [numbers.name(key) for key in numbers.rows]
    assert names == ["flow noise", "Gaussian noise", "HMC", "“Laplace, last layer”"]
