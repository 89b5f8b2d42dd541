"""Runs the tests that need a CUDA device, and records the result in ``docs/gpu-tests.json`` and in ``docs/devices.md``.

``make test-gpu`` calls it. The commit is read from git, or from the variable ``FLOWBNN_COMMIT`` where there is no repository.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RECORD, DOCUMENT = ROOT / "docs" / "gpu-tests.json", ROOT / "docs" / "devices.md"
BEGIN, END = "<!-- gpu tests -->\n", "<!-- end of gpu tests -->"
COLUMNS = ("date", "commit", "device", "torch", "passed", "failed", "skipped", "seconds")
ARGUMENTS = [
    "-m",
    "gpu",
    "tests",
    "-n",
    "6",
    "-p",
    "no:benchmark",
    "-o",
    "addopts=-q --import-mode=importlib",
]


def current_commit() -> str:
    """Returns the variable ``FLOWBNN_COMMIT``, or the short hash of the commit, with a mark if files have changed since."""
    if commit := os.environ.get("FLOWBNN_COMMIT"):
        return commit
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read_counts(path: Path) -> dict[str, Any]:
    """Returns the numbers of passed, failed and skipped tests, and the seconds, of a JUnit file of pytest."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    tests, failures, errors, skipped = (
        int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    seconds = round(float(suite.get("time", 0)))
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped, "seconds": seconds}


def table(record: dict[str, Any] | None) -> str:
    """Returns the result of a run as a table in Markdown."""
    if record is None:
        return "No run has been recorded yet.\n"
    rows = [COLUMNS, ("---",) * len(COLUMNS), tuple(str(record[name]) for name in COLUMNS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def update_document(text: str, record: dict[str, Any] | None) -> str:
    """Returns a document with the table of a run between the two marks."""
    head, _, tail = text.partition(BEGIN)
    return head + BEGIN + table(record) + END + tail.partition(END)[2]


def main() -> int:
    """Runs the tests and stores their result. Returns the exit status of pytest."""
    import torch

    if not torch.cuda.is_available():
        print("make test-gpu needs a CUDA device; nothing was run or recorded", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *ARGUMENTS, f"--junitxml={path}"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        counts = read_counts(path)
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": current_commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **counts,
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    DOCUMENT.write_text(update_document(DOCUMENT.read_text(encoding="utf-8"), record), encoding="utf-8")
    print(table(record))
    return status


if __name__ == "__main__":
    sys.exit(main())
