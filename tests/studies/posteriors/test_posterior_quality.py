"""Tests of the studies of posteriors compared with long chains, with settings of a trial run."""

import pytest
import torch

from flowbnn import diagnostics
from flowbnn.compare.results import SeedResults
from flowbnn.transforms import BlockTriangular
from flowbnn_studies import get_study
from flowbnn_studies.posteriors import posterior_quality as study
from flowbnn_studies.posteriors import when_it_matters as matters
from flowbnn_studies.runner.findings import CHAIN_METRICS, describe_convergence
from flowbnn_studies.runner.run import run_study


@pytest.mark.slow
@pytest.mark.usefixtures("unrefined")
def test_study_runs(tmp_path, monkeypatch):
    quality_study, seeds, pareto_k = get_study("posterior-quality"), [], diagnostics.pareto_k
    settings = quality_study.make_settings(quick=True)  # its chains are too short to converge

    def record_seed(posterior, loader, samples, seed):
        seeds.append(seed)
        return pareto_k(posterior, loader, samples, seed)

    monkeypatch.setattr(diagnostics, "pareto_k", record_seed)
    results = run_study(quality_study, settings=settings, seeds=1, out=tmp_path, progress=False)
    rows = {row["key"]: row["values"] for row in results["rows"]}
    assert list(rows) == ["exact", "factorized", "natural", "full", "flow", "factorized-along"]
    assert {"k_blobs", "seconds_blobs"} <= set(rows["full"])
    assert not {f"{key}_blobs" for key in CHAIN_METRICS} & {key for row in rows.values() for key in row}
    assert "no chains have converged" in results["answer"]
    assert "R-hat is above 1.01: blobs seed 0, exact (" in results["notes"][-1]
    # for the full covariance and the flow; other draws choose than measure
    assert seeds.count(study.CHOICE_SEED) == 4
    assert set(seeds) == {0, study.CHOICE_SEED}


def test_unconverged_chains_are_named():
    line = describe_convergence([("blobs seed 0", 1.2), ("blobs seed 1", None), ("blobs seed 2", 1.01)])
    assert line.endswith("above 1.01: blobs seed 0 (1.200), blobs seed 1 (infinite).")
    assert "All chains" in describe_convergence([("blobs seed 0", 1.005)])


def test_seeds_with_unconverged_chains_are_omitted():
    table = {"gap": 1.0, "excess": 0.1, "variation": 0.1, "agreement": 1.0, "k": 0.3, "rhat": 1.0}
    content = {
        ("blobs", seed): {
            "table": {
                row: table | {"gap": float(seed), "rhat": rhat} for row in ("exact", "full", "factorized")
            }
        }
        for seed, rhat in enumerate((1.002, None, 1.3, 1.004))
    }
    parts = study.problem_parts_by_row(SeedResults([0, 1, 2, 3], content))
    assert parts.values("full", "gap_blobs") == [0.0, 3.0]
    assert parts.values("full", "k_blobs") == [0.3] * 4
    settings = get_study("posterior-quality").make_settings(quick=True)
    assert "2 seeds: the gap to the exact posterior is 1.50 nats for the joint Gaussian" in study.answer(
        settings, parts
    )


@pytest.mark.usefixtures("unrefined")
def test_joint_noise_starts_from_the_given_gaussian():
    settings = get_study("posterior-quality").make_settings(quick=True)
    case = study.make_case("blobs", settings, 0, {})
    start = study.fit_by_calibrate(case, 0, {})
    for key in ("full", "flow"):
        model = study.to_stochastic(case.network, {"*": study.RECIPES[key][1]})
        study.initialize_joint_noise(model, start.model)
        initialized = study.NoisePosterior(model, case.likelihood)
        bounds = [
            diagnostics.pareto_k(posterior, case.loader, 200).elbo for posterior in (initialized, start)
        ]
        assert bounds[0] == pytest.approx(bounds[1], abs=1e-3)
    assert torch.equal(case.network.fc1.weight, start.model.fc1.weight)


@pytest.mark.slow
@pytest.mark.usefixtures("unrefined")
def test_figures_over_the_number_of_examples(tmp_path):
    matters_study = get_study("when-it-matters")
    results = run_study(
        matters_study, settings=matters_study.make_settings(quick=True), seeds=1, out=tmp_path, progress=False
    )
    assert [row["key"] for row in results["rows"]] == ["blobs-20", "blobs-30"]
    curve, sizes = results["figures"]
    assert [line["label"] for line in curve["data"]["panels"][0]["lines"]] == ["Factorized", "Joint"]
    assert sizes["data"]["panels"][0]["lines"][0]["x"] == [20, 30]
    assert (tmp_path / "when-it-matters" / "results.json").exists()


def test_line_is_sorted_by_x():
    parts = SeedResults(
        [0], {(key, 0): {"values": {"excess": 0.1 * place}} for place, key in enumerate("abc")}
    )
    line = matters.sorted_line("one", parts, ["a", "b", "c"], "excess", [0.3, -0.1, 0.2])
    assert line["x"] == [None, 0.2, 0.3]  # values that are not positive are missing on the logarithmic axis
    assert line["mean"] == pytest.approx([0.1, 0.2, 0.0])


def test_answer_names_relevant_gaps():
    settings = get_study("when-it-matters").make_settings(problems=("blobs",), sizes=(20, 50))
    values = {"per_example_factorized": 0.3, "per_example_full": 0.1, "excess_factorized": 0.08}
    content = {
        (f"blobs-{size}", seed): {"values": values | {"excess_full": 0.001 * seed}}
        for size in (20, 50)
        for seed in range(3)
    }
    text = matters.answer(settings, SeedResults([0, 1, 2], content))
    assert "with 20 (+0.079 (95 % CI" in text
    assert "gap below 0.300 nats per example" in text
    assert "without such an effect is 0.100" in text


def test_chain_and_low_rank_match_a_chain_covariance() -> None:
    sizes = (2, 3, 2)
    source = BlockTriangular(sizes, "chain").double()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    columns = (source(torch.eye(7, dtype=torch.float64))[0] - source.shift).mT
    covariance = columns @ columns.mT
    for across, rank in (("chain", 1), ("low-rank", 7)):
        map_ = BlockTriangular(sizes, across, rank).double()
        study.match_gaussian(map_, torch.zeros(7), covariance)
        columns = (map_(torch.eye(7, dtype=torch.float64))[0] - map_.shift).mT
        torch.testing.assert_close(columns @ columns.mT, covariance)


def test_independent_blocks_match_the_blocks_of_the_precision() -> None:
    root = torch.randn(5, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    covariance = root @ root.mT / 5
    map_ = BlockTriangular((2, 3)).double()
    study.match_gaussian(map_, torch.zeros(5), covariance)
    columns = (map_(torch.eye(5, dtype=torch.float64))[0] - map_.shift).mT
    precision = covariance.inverse()
    torch.testing.assert_close((columns @ columns.mT)[:2, :2], precision[:2, :2].inverse())
    assert (columns @ columns.mT)[:2, 2:].abs().max() == 0
