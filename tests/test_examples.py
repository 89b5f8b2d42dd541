"""Runs every script of the gallery with a small setting."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("plot_*.py"))


# test_documents.py and the tests of their subjects run the same calls; imports of peft and torch-geometric warn
SLOW = ("04", "06", "08", "10", "12", "14", "16", "18", "21", "22")
MARKS = {path.stem: [pytest.mark.slow] for path in EXAMPLES if path.stem.split("_")[1] in SLOW}
MARKS |= {
    name: [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
    for name in ("plot_19_lora", "plot_20_graphs")
}
PATHS = [pytest.param(path, marks=MARKS.get(path.stem, ())) for path in EXAMPLES]


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_example_runs(path, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLOWBNN_EXAMPLES_QUICK", "1")
    monkeypatch.chdir(tmp_path)  # files that a script writes
    plt.switch_backend("agg")
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    figures = plt.get_fignums()
    plt.close("all")
    assert figures, "an example ends with a figure"
    assert capsys.readouterr().out, "an example prints what it computed"
