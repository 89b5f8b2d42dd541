"""Tests of the study of UCI tables on a synthetic table."""

import numpy as np
import pytest
import torch

from flowbnn.compare.results import SeedResults
from flowbnn.errors import FlowBNNError
from flowbnn_studies import get_study
from flowbnn_studies.runner.run import run_study
from flowbnn_studies.uci import PUBLISHED, SPLITS, _reaches, load_uci


@pytest.fixture
def yacht(tmp_path, monkeypatch):
    """Writes a table of sixty rows with an unused column, targets far from zero, and two splits."""
    folder = tmp_path / "uci" / "yacht"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    table = random.normal(size=(60, 4))
    table[:, 3] = 300.0 + 50.0 * table[:, 0] + random.normal(size=60)
    np.savetxt(folder / "data.txt", table)
    np.savetxt(folder / "index_features.txt", [0, 2], fmt="%d")
    np.savetxt(folder / "index_target.txt", [3], fmt="%d")
    for split in range(2):
        order = np.random.default_rng(split).permutation(60)
        np.savetxt(folder / f"index_train_{split}.txt", order[:50], fmt="%d")
        np.savetxt(folder / f"index_test_{split}.txt", order[50:], fmt="%d")
    monkeypatch.setenv("FLOWBNN_DATA", str(tmp_path))
    return table


def test_split_is_read_in_the_units_of_the_file(yacht):
    inputs, targets, test_inputs, test_targets = load_uci("yacht", 1)
    order = np.random.default_rng(1).permutation(60)
    assert inputs.shape == (50, 2)
    assert targets.shape == (50, 1)
    assert torch.allclose(test_inputs.double(), torch.from_numpy(yacht[order[50:]][:, [0, 2]]), atol=1e-6)
    assert torch.allclose(test_targets.double(), torch.from_numpy(yacht[order[50:]][:, [3]]), rtol=1e-6)


def test_missing_set_is_refused(yacht):
    for name in ("boston", "yaht"):
        with pytest.raises(FlowBNNError) as caught:
            load_uci(name, 0)
        assert (caught.value.kind, caught.value.argument) == ("data", "name")
    assert "'yacht'" in str(caught.value)


def test_study_runs(yacht, tmp_path):
    study = get_study("uci")
    settings = study.make_settings(quick=True, methods=("mle", "mc-dropout", "hmc"), chain_rows=49)
    results = run_study(study, settings=settings, seeds=2, out=tmp_path / "out", progress=False)
    dropout = next(row for row in results["rows"] if row["key"] == "mc-dropout")["values"]
    assert set(dropout) == {"log_likelihood_yacht", "rmse_yacht", "coverage_90_yacht"}
    assert len(dropout["rmse_yacht"]["per_seed"]) == 2
    assert dropout["log_likelihood_yacht"]["published"] == PUBLISHED["mc-dropout"]["yacht"][0]
    assert "yacht" in results["answer"]
    assert {row["key"] for row in results["rows"]} == {"mle", "mc-dropout", "mc-dropout-predicted"}
    assert any("HMC and NUTS" in note for note in results["notes"])
    assert any(note.startswith("Not run: MAP; ") for note in results["notes"])


def test_seeds_without_a_split_are_ignored():
    """Protein has five splits. Its mean and the comparison with published values use only those."""
    better, worse = PUBLISHED["deep-ensemble"]["protein"][0] + 0.01, -3.0
    for value, reaches in ((better, True), (worse, False)):
        content = {
            ("method", seed): {
                "values": {"log_likelihood_protein": value + 0.001 * seed} if seed < SPLITS["protein"] else {}
            }
            for seed in range(20)
        }
        parts = SeedResults(list(range(20)), content)
        assert parts.mean("method", "log_likelihood_protein") == pytest.approx(value + 0.002)
        assert _reaches(parts, "method", "protein") is reaches


def test_published_spreads_are_standard_deviations_over_splits():
    """Gal and Ghahramani report the same means with standard errors: -2.46 +- 0.06 on boston, -3.04 +- 0.02 on concrete."""
    for name, error in (("boston", 0.06), ("concrete", 0.02), ("yacht", 0.03)):
        assert PUBLISHED["mc-dropout"][name][1] / SPLITS[name] ** 0.5 == pytest.approx(error, abs=0.005)
    for below, reaches in ((0.03, True), (0.1, False)):
        value = PUBLISHED["deep-ensemble"]["boston"][0] - below
        content = {("method", seed): {"values": {"log_likelihood_boston": value}} for seed in range(20)}
        assert _reaches(SeedResults(list(range(20)), content), "method", "boston") is reaches
