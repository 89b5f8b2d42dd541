"""Finds the story of stored results: that of their study, or the stored answer and the first figure."""

from dataclasses import replace
from typing import Any

from flowbnn_studies.report.tables import HEADLINE
from flowbnn_studies.runner.story import MissingNumber, Numbers, Story
from flowbnn_studies.runner.study import STUDIES


def _keep_units(text: str) -> str:
    """Returns a text in which no line ends between a number and its percent sign."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _capitalize(sentence: str) -> str:
    """Returns a sentence that begins with a capital letter, which may follow a quotation mark."""
    place = 1 if sentence.startswith("“") else 0
    return sentence[:place] + sentence[place : place + 1].upper() + sentence[place + 1 :]


def story_of(results: dict[str, Any]) -> Story:
    """Returns the story of stored results.

    Results of unknown studies, of trial runs and of interrupted runs have their stored question, the first line of their answer and
    their first figure.

    Args:
        results: Content of ``results.json``.

    >>> story_of({"study": "mine", "question": "Is it?", "answer": "Yes.\\nDetails.", "rows": [], "metrics": [], "figures": []}).answer
    'Yes.'
    """
    names = [name for name in STUDIES if results["study"] == name or results["study"].startswith(f"{name}-")]
    if names and not results.get("trial"):
        try:
            if (story := STUDIES[max(names, key=len)].story(Numbers(results))) is not None:
                answer, number, meaning = map(_keep_units, (story.answer, story.number, story.meaning))
                return replace(story, answer=_capitalize(answer), number=number, meaning=meaning)
        except MissingNumber:
            pass
    figure = results["figures"][0]["kind"] if results["figures"] else ""
    answer = (results["answer"].splitlines() or [""])[0]
    keys = [metric["key"] for metric in results["metrics"]]
    metrics = tuple(key for key in results.get("headline") or HEADLINE if key in keys) or tuple(keys)
    return Story(results["question"], answer, metrics=metrics[:4], figure=figure)
