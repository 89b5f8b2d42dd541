"""Tests of two-clusters, flow-length and digits with tiny settings: results, figures and interrupted runs."""

import json

import pytest

from flowbnn.data import TensorLoader
from flowbnn_studies import get_study
from flowbnn_studies.flow_length import final_bound
from flowbnn_studies.report import load_results
from flowbnn_studies.runner.run import run_study

SETTINGS = {
    "two-clusters": {
        "hidden": 6,
        "batch": 200,
        "train": 400,
        "test": 400,
        "grid": 5,
        "epochs": 2,
        "samples": 4,
    },
    "flow-length": {"hidden": 6, "batch": 200, "train": 400, "test": 200},
    "digits": {"width": 3, "hidden": 8, "batch": 500, "samples": 4},
}
FIGURES = {
    "two-clusters": ["field", "reliability", "curves", "density"],
    "flow-length": ["curves"],
    "digits": ["images", "histogram", "reliability", "curves", "density"],
}


def small(name):
    study = get_study(name)
    return study, study.make_settings(quick=True, **SETTINGS[name])


@pytest.fixture(scope="module")
def clusters_run(tmp_path_factory):
    """Runs two-clusters once for several tests."""
    study, settings = small("two-clusters")
    folder = tmp_path_factory.mktemp("clusters")
    return study, settings, folder, run_study(study, settings=settings, seeds=1, out=folder, progress=False)


@pytest.mark.parametrize("name", SETTINGS)
def test_study_runs_and_results_follow_the_schema(name, tmp_path, request):
    study, settings = small(name)
    if name == "two-clusters":
        _, _, folder, results = request.getfixturevalue("clusters_run")
    else:
        folder, results = tmp_path, run_study(study, settings=settings, seeds=1, out=tmp_path, progress=False)
    assert load_results(folder / name) == results
    assert [figure["kind"] for figure in results["figures"]] == FIGURES[name]
    keys = list(study.row_labels(settings))
    assert [row["key"] for row in results["rows"]][: len(keys)] == keys
    assert all(row["values"] for row in results["rows"])
    for row in results["rows"]:
        for value in row["values"].values():
            assert value["mean"] == value["per_seed"][0]
    assert len(json.dumps(results)) < 2_000_000


def test_published_numbers_are_shown(clusters_run):
    rows = {row["key"]: row["values"] for row in clusters_run[3]["rows"]}
    assert rows["plain"]["accuracy"]["published"] == 0.953
    assert rows["plain"]["ece"]["published"] == 0.094
    assert rows["flow"]["ece"]["published"] == 0.009
    assert rows["gaussian"]["ece"]["published"] is None


def test_interrupted_training_continues_with_equal_results(tmp_path, monkeypatch, clusters_run):
    study, settings, _, complete = clusters_run
    batches = TensorLoader.__iter__
    batches_seen = []

    def cut(self):
        for batch in batches(self):
            batches_seen.append(1)
            # after the deterministic network (two epochs of two batches, and one reading), inside the first noisy training
            if len(batches_seen) == 9:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(TensorLoader, "__iter__", cut)
        with pytest.raises(KeyboardInterrupt):
            run_study(study, settings=settings, seeds=1, out=tmp_path, progress=False)
    parts = tmp_path / "two-clusters" / "parts"
    assert [path.name for path in parts.iterdir()] == ["plain-seed0.json"]
    assert (tmp_path / "two-clusters" / "checkpoints" / "flow-seed0" / "last.safetensors").exists()
    stamp = (parts / "plain-seed0.json").stat().st_mtime_ns
    again = run_study(study, settings=settings, seeds=1, out=tmp_path, resume=True, progress=False)
    assert (parts / "plain-seed0.json").stat().st_mtime_ns == stamp
    assert again["rows"] == complete["rows"]
    assert again["figures"] == complete["figures"]


@pytest.mark.slow
def test_two_processes_give_equal_results(tmp_path, clusters_run):
    study, settings, _, single = clusters_run
    parallel = run_study(study, settings=settings, seeds=1, out=tmp_path, progress=False, jobs=2)
    assert parallel["rows"] == single["rows"]


def test_final_bound_is_likelihood_minus_kl():
    import torch

    from flowbnn import fit, to_stochastic
    from flowbnn.data import clusters
    from flowbnn.models import MLP
    from flowbnn.noise import NormalAffine

    data = clusters(200, 1.95, torch.Generator().manual_seed(0))
    model = to_stochastic(MLP(2, (4,), 2), {"*": NormalAffine()})
    posterior = fit(model, TensorLoader(*data, batch_size=100), epochs=3, noise_lr=0.1, progress=False)
    model = posterior.model  # the fitted copy
    bound = final_bound(posterior, data, draws=400, kl_draws=1)
    assert bound["negative_elbo"] == pytest.approx(bound["kl"] - bound["log_likelihood"])
    exact = sum(
        float(layer.noise.divergence().kl.detach()) for layer in (posterior.model.fc1, posterior.model.fc2)
    )
    assert bound["kl"] == pytest.approx(exact / 200, rel=1e-5)  # the KL of Gaussian noise has a closed form
    with torch.no_grad():
        outputs = posterior.model(data[0].repeat(400, 1))
    likelihood = -torch.nn.functional.cross_entropy(outputs, data[1].repeat(400))
    assert bound["log_likelihood"] == pytest.approx(float(likelihood), abs=0.02)
