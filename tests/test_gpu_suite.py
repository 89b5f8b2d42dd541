"""Tests of the record of the GPU tests."""

import json

from gpu_suite import DOCUMENT, RECORD, read_counts, update_document

RESULT = {
    "date": "2026-01-02",
    "commit": "abc1234",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "passed": 160,
    "failed": 8,
    "skipped": 0,
    "seconds": 180,
}


def test_counts_are_read_from_a_junit_file(tmp_path):
    path = tmp_path / "junit.xml"
    suite = '<testsuite tests="9" failures="1" errors="1" skipped="2" time="12.3"/>'
    path.write_text(f"<testsuites>{suite}</testsuites>", encoding="utf-8")
    assert read_counts(path) == {"passed": 5, "failed": 2, "skipped": 2, "seconds": 12}


def test_a_run_replaces_the_table_of_the_document():
    text = DOCUMENT.read_text(encoding="utf-8")
    once = update_document(text, RESULT)
    assert "| 2026-01-02 | abc1234 | NVIDIA H200 | 2.11.0 | 160 | 8 | 0 | 180 |" in once
    assert update_document(once, RESULT) == once
    assert update_document(once, None) == update_document(text, None)


def test_the_document_shows_the_stored_run():
    record = json.loads(RECORD.read_text(encoding="utf-8"))  # null before the first run
    text = DOCUMENT.read_text(encoding="utf-8")
    assert update_document(text, record) == text
