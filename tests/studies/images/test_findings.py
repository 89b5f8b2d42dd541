"""Tests that the texts of the studies on images follow from the numbers."""

import math

import pytest
import torch

from flowbnn.compare.results import CLASSIFICATION
from flowbnn_studies import SeedResults, get_study
from flowbnn_studies.images.evaluation import add_matched_nll, image_metrics, nll_at_entropy, tempering_curve
from flowbnn_studies.images.figures import training_figure
from flowbnn_studies.images.findings import (
    PLAIN,
    answer,
    comparisons,
    notes,
    table_rows,
    trained_variants,
)
from flowbnn_studies.images.settings import (
    EPOCHS,
    FASHION,
    LENET_CIFAR10,
    VGG16_CIFAR10,
    ImageSettings,
    image_variants,
)
from flowbnn_studies.report.tables import comparison_table, make_tables
from flowbnn_studies.runner.study import Variant

VARIANTS = image_variants("LeNet", (3, 5))
WOBBLE = [0.0, 0.0002, -0.0001, 0.0001, -0.0002]


def parts(**changes):
    content = {}
    for index, variant in enumerate(VARIANTS[:-1]):
        base = {"accuracy": 0.9, "nll": 0.3, "ece": 0.02, "brier": 0.1} | changes.get(
            variant.key.replace("-", "_"), {}
        )
        for seed in range(variant.seeds):
            sign = (-1) ** index
            content[variant.key, seed] = {"values": {k: v + sign * WOBBLE[seed] for k, v in base.items()}}
    return SeedResults(list(range(5)), content)


def test_answer_counts_significant_comparisons():
    better = {"accuracy": 0.95, "nll": 0.2, "ece": 0.005}
    flows = {
        f"{recipe}_flow_{site}": better for recipe in ("xiong", "best") for site in ("position", "channel")
    }
    good = answer(parts(**flows), VARIANTS, CLASSIFICATION, FASHION)
    assert good.startswith("Is flow noise better than Gaussian noise? Yes: of 12 comparisons")
    assert "12 are significantly better" in good
    assert "ECE 0.0050" in good
    assert "reaches 0.008" in good
    worse = {name: {"accuracy": 0.8, "nll": 0.5, "ece": 0.1} for name in flows}
    bad = answer(parts(**worse), VARIANTS, CLASSIFICATION, FASHION)
    assert "Gaussian noise? No: " in bad
    assert "12 significantly worse" in bad
    assert "misses 0.008" in bad
    level = answer(parts(), VARIANTS, CLASSIFICATION, FASHION)
    assert "Gaussian noise? Not significantly: of 12 comparisons" in level
    assert "12 not significant" in level


def test_answer_of_a_few_parts():
    complete = parts()
    selected = SeedResults(
        complete.seeds,
        {key: entry for key, entry in complete.content.items() if key[0].startswith("best-flow")},
    )
    assert [variant.key for variant in trained_variants(selected, VARIANTS)] == [
        "best-flow-position",
        "best-flow-channel",
    ]
    assert answer(selected, VARIANTS, CLASSIFICATION, FASHION).startswith("Best mean values: Accuracy 0.9000")
    assert comparisons(selected, CLASSIFICATION) == []


def test_comparisons_pair_common_seeds():
    entries = comparisons(parts(best_flow_channel={"ece": 0.01}), CLASSIFICATION)
    title = "Best: flow − Gaussian, channel"
    (entry,) = [c for c in entries if c["title"] == title and c["metric"] == "ece"]
    assert entry["mean"] == pytest.approx(0.01 - 0.02, abs=1e-9)
    assert entry["number"] == 5
    assert entry["p"] == 2 / 32
    heads, table = comparison_table({"comparisons": entries, "metrics": [vars(m) for m in CLASSIFICATION]})
    assert heads == ["Accuracy ↑", "NLL ↓", "ECE ↓"]
    cell = dict(table)[title][2]
    assert cell.significant
    assert cell.mean == "−0.0100"


def test_row_with_fewer_seeds_is_marked_and_never_best():
    complete = parts(
        best_mixture_position={"accuracy": 0.99, "nll": 0.1, "ece": 0.001},
        best_flow_channel={"accuracy": 0.95, "nll": 0.2, "ece": 0.01},
    )
    incomplete = SeedResults(
        complete.seeds,
        {k: entry for k, entry in complete.content.items() if k[0] != "best-mixture-position" or k[1] == 0},
    )
    for current, number in ((complete, 5), (incomplete, 1)):
        table = table_rows(current, VARIANTS, CLASSIFICATION, VGG16_CIFAR10)
        results = {"seeds": [0, 1, 2, 3, 4], "metrics": [vars(m) for m in CLASSIFICATION], "rows": table}
        (result_table,) = make_tables(results)
        row = next(row for row in result_table.rows if row.label.startswith("Best: mixture noise, position"))
        assert row.label.endswith("(1 of 5 seeds)") == (number == 1)
        # all rows have the same fourth value
        assert all(cell.best == (number == 5) for cell in row.cells[:3])
        assert sum(cell.best for table_row in result_table.rows for cell in table_row.cells) == 3
        text = answer(current, VARIANTS, CLASSIFICATION, VGG16_CIFAR10)
        assert ("Accuracy 0.9900 (Best: mixture noise, position" in text) == (number == 5)
        assert f"best recipe, {6 if number == 5 else 5} kinds of noise" in text


def test_cited_rows_are_never_best():
    table = table_rows(parts(), VARIANTS, CLASSIFICATION, VGG16_CIFAR10)
    assert table[-1]["label"] == "Target"
    results = {"seeds": [0, 1, 2, 3, 4], "metrics": [vars(m) for m in CLASSIFICATION], "rows": table}
    (result_table,) = make_tables(results)
    assert result_table.group == ""
    ibnn = next(row for row in result_table.rows if "iBNN" in row.label)
    assert ibnn.cells[1].mean == "0.1983"
    assert not any(cell.best for cell in ibnn.cells)


@pytest.mark.parametrize("published", [FASHION, LENET_CIFAR10, VGG16_CIFAR10])
def test_published_curves_end_at_published_values(published):
    for curves, row in ((published.gaussian, "gaussian"), (published.flow, "flow")):
        assert all(len(values) == len(EPOCHS) for values in curves.values())
        for name in ("accuracy", "ece"):
            assert curves[name][-1] == pytest.approx(published.rows[f"xiong-{row}-position"][name], abs=0.003)
        bound = [
            kl - likelihood for kl, likelihood in zip(curves["kl"], curves["log_likelihood"], strict=True)
        ]
        assert bound == pytest.approx(list(curves["negative_elbo"]), abs=0.03)  # read off a figure


def test_answer_names_variants_that_reach_all_targets():
    metrics = image_metrics({"mnist": "MNIST"})
    separate = {"best_flow_channel": {"accuracy": 0.95}, "best_dropout": {"ece": 0.005}}
    assert "all targets reached by: none" in answer(parts(**separate), VARIANTS, metrics, FASHION)
    together = {"best_flow_channel": {"accuracy": 0.95, "ece": 0.005}}
    assert "all targets reached by: Best: flow noise, channel." in answer(
        parts(**together), VARIANTS, metrics, FASHION
    )
    views = {"best_flow_channel": {"mirror_accuracy": 0.93, "mirror_ece": 0.006}}
    text = answer(parts(**views), VARIANTS, metrics, FASHION)
    assert (
        "With two views (image and mirror image): Accuracy 0.9300 (Best: flow noise, channel; reaches 0.915)"
        in text
    )
    assert text.count("all targets reached by: none") == 1


def test_note_states_the_ece_of_perfect_calibration():
    settings = ImageSettings()
    bins = [{"low": 0.8, "high": 1.0, "confidence": 0.9, "accuracy": 0.9, "fraction": 1.0}]
    results = parts()
    for (key, _), entry in results.content.items():
        if key == "best-plain":
            entry["bins"] = bins
    (note,) = [
        line
        for line in notes(results, VARIANTS, settings, FASHION)
        if line.startswith("Even a perfectly calibrated network")
    ]
    # of 10,000 with chance 0.9: sqrt(2 / pi * 0.09 / 10,000), as a normal number has it
    assert "on 10,000 images" in note
    assert "0.0024 (Best: LeNet, deterministic) to 0.0024" in note


def test_figure_of_a_site_needs_noise_at_that_site():
    complete = parts()
    for entry in complete.content.values():
        entry |= {
            "curves": {"elbo": [-1.0, -0.5], "log_likelihood": [-1.0, -0.5]},
            "shift": {},
            "entropy": {},
        }
    for selected_keys, titles in (
        ({"xiong-dropout", "xiong-flow-position"}, ["Figure 5 of Xiong's report, redrawn"]),
        ({"xiong-dropout"}, ["Figure 5 of Xiong's report, redrawn"]),
        (
            {"xiong-flow-position", "xiong-flow-channel"},
            ["Figure 5 of Xiong's report, redrawn", "Training with noise site channel"],
        ),
    ):
        selected = SeedResults(
            complete.seeds, {key: entry for key, entry in complete.content.items() if key[0] in selected_keys}
        )
        trained = trained_variants(selected, VARIANTS)
        sites = [("position", FASHION), ("channel", None)]
        results = [
            training_figure(
                selected,
                [v for v in trained if v.key.rpartition("-")[2] in ("dropout", site)],
                published,
                "figure 5",
                site,
            )
            for site, published in sites
        ]
        assert [result["title"] for result in results if result is not None] == titles
        assert all(
            "site ." not in result["caption"] and "each ." not in result["caption"]
            for result in results
            if result
        )


def test_influence_of_the_test_set_is_noted():
    for study in ("lenet-fashion", "lenet-cifar10", "vgg16-cifar10"):
        image_study = get_study(study)
        lines = notes(
            parts(), VARIANTS, image_study.make_settings(), image_study.published, image_study.remarks
        )
        assert image_study.remarks
        assert set(image_study.remarks) < set(lines)
        quick = notes(
            parts(),
            VARIANTS,
            image_study.make_settings(quick=True),
            image_study.published,
            image_study.remarks,
        )
        assert not set(image_study.remarks) & set(quick)


# factor of the log-odds of a method relative to the deterministic network
@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5, 2.0, 3.7])
def test_matched_nll_equals_the_exact_value(scale):
    # two images with log-odds of log 4 for the class 0, of which one is right: -(log 0.8 + log 0.2) / 2
    odds = torch.tensor([[math.log(4.0), 0.0]], dtype=torch.float64).repeat(2, 1)
    labels = torch.tensor([0, 1])
    curves = {
        "best-plain": tempering_curve(torch.log_softmax(odds, -1), labels),
        "best-swag": tempering_curve(torch.log_softmax(scale * odds, -1), labels),
    }
    content = {
        (key, 0): {"values": {"nll": 1.0}, "tempered": {"fog": [curve]}} for key, curve in curves.items()
    }
    content["best-ensemble", 0] = {"values": {"nll": 1.0}}  # a result without tempering curves
    variants = [Variant(key, key) for key in ("best-plain", "best-swag", "best-ensemble")]
    matched = add_matched_nll(SeedResults([0], content), variants, PLAIN)
    truth = -(math.log(0.8) + math.log(0.2)) / 2
    assert matched.mean("best-plain", "shift_matched_nll") == pytest.approx(truth, abs=1e-9)
    assert matched.mean("best-swag", "shift_matched_nll") == pytest.approx(truth, abs=1e-4)
    assert not matched.values("best-ensemble", "shift_matched_nll")
    # no finite temperature gives the largest entropy
    assert nll_at_entropy(curves["best-plain"], math.log(2.0)) is None
