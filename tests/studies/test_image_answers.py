"""What the studies on images say is made of the numbers: turn the numbers round and the words turn."""

import math

import pytest
import torch

from flowbnn.compare.results import CLASSIFICATION
from flowbnn_studies import Parts, get_study
from flowbnn_studies.images.evaluation import add_matched_nll, image_metrics, nll_at_entropy, tempering_curve
from flowbnn_studies.images.findings import (
    PLAIN,
    answer,
    comparisons,
    notes,
    table_rows,
    trained_variants,
    training_figure,
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
    return Parts(list(range(5)), content)


def test_the_answer_counts_who_wins():
    better = {"accuracy": 0.95, "nll": 0.2, "ece": 0.005}
    flows = {
        f"{recipe}_flow_{site}": better for recipe in ("xiong", "best") for site in ("position", "channel")
    }
    good = answer(parts(**flows), VARIANTS, CLASSIFICATION, FASHION)
    assert good.startswith("Does the flow beat Gaussian noise? Yes: of 12 comparisons")
    assert "better by more than chance in 12" in good
    assert "ECE 0.0050" in good
    assert "reaches 0.008" in good
    worse = {name: {"accuracy": 0.8, "nll": 0.5, "ece": 0.1} for name in flows}
    bad = answer(parts(**worse), VARIANTS, CLASSIFICATION, FASHION)
    assert "Gaussian noise? No: " in bad
    assert "worse in 12" in bad
    assert "misses 0.008" in bad
    level = answer(parts(), VARIANTS, CLASSIFICATION, FASHION)
    assert "Gaussian noise? Not by more than chance: of 12 comparisons" in level
    assert "within chance in 12" in level


def test_an_answer_of_a_few_parts_speaks_of_those():
    whole = parts()
    few = Parts(
        whole.seeds, {key: part for key, part in whole.content.items() if key[0].startswith("best-flow")}
    )
    assert [variant.key for variant in trained_variants(few, VARIANTS)] == [
        "best-flow-position",
        "best-flow-channel",
    ]
    assert answer(few, VARIANTS, CLASSIFICATION, FASHION).startswith("Best means: Accuracy 0.9000")
    assert comparisons(few, CLASSIFICATION) == []


def test_comparisons_pair_the_seeds_that_both_have():
    found = comparisons(parts(best_flow_channel={"ece": 0.01}), CLASSIFICATION)
    title = "Best: flow − Gaussian, channel"
    (one,) = [c for c in found if c["title"] == title and c["metric"] == "ece"]
    assert one["mean"] == pytest.approx(0.01 - 0.02, abs=1e-9)
    assert one["number"] == 5
    assert one["p"] == 2 / 32
    heads, table = comparison_table({"comparisons": found, "metrics": [vars(m) for m in CLASSIFICATION]})
    assert heads == ["Accuracy ↑", "NLL ↓", "ECE ↓"]
    cell = dict(table)[title][2]
    assert cell.significant
    assert cell.mean == "−0.0100"


def test_a_row_with_fewer_seeds_than_others_says_so_and_wins_nothing():
    whole = parts(
        best_mixture_position={"accuracy": 0.99, "nll": 0.1, "ece": 0.001},
        best_flow_channel={"accuracy": 0.95, "nll": 0.2, "ece": 0.01},
    )
    few = Parts(
        whole.seeds,
        {k: part for k, part in whole.content.items() if k[0] != "best-mixture-position" or k[1] == 0},
    )
    for found, number in ((whole, 5), (few, 1)):
        table = table_rows(found, VARIANTS, CLASSIFICATION, VGG16_CIFAR10)
        results = {"seeds": [0, 1, 2, 3, 4], "metrics": [vars(m) for m in CLASSIFICATION], "rows": table}
        (made,) = make_tables(results)
        row = next(row for row in made.rows if row.label.startswith("Best: mixture noise, position"))
        assert row.label.endswith("(1 of 5 seeds)") == (number == 1)
        assert all(cell.best == (number == 5) for cell in row.cells[:3])  # of the fourth all have the same
        assert sum(cell.best for one in made.rows for cell in one.cells) == 3
        told = answer(found, VARIANTS, CLASSIFICATION, VGG16_CIFAR10)
        assert ("Accuracy 0.9900 (Best: mixture noise, position" in told) == (number == 5)
        assert f"best recipe, {6 if number == 5 else 5} kinds of noise" in told


def test_cited_rows_stand_for_themselves_and_are_never_the_best():
    table = table_rows(parts(), VARIANTS, CLASSIFICATION, VGG16_CIFAR10)
    assert table[-1]["label"] == "To be reached"
    results = {"seeds": [0, 1, 2, 3, 4], "metrics": [vars(m) for m in CLASSIFICATION], "rows": table}
    (made,) = make_tables(results)
    assert made.group == ""
    ibnn = next(row for row in made.rows if "iBNN" in row.label)
    assert ibnn.cells[1].mean == "0.1983"
    assert not any(cell.best for cell in ibnn.cells)


@pytest.mark.parametrize("published", [FASHION, LENET_CIFAR10, VGG16_CIFAR10])
def test_the_published_curves_end_where_its_rows_say(published):
    for curves, row in ((published.gaussian, "gaussian"), (published.flow, "flow")):
        assert all(len(values) == len(EPOCHS) for values in curves.values())
        for name in ("accuracy", "ece"):
            assert curves[name][-1] == pytest.approx(published.rows[f"xiong-{row}-position"][name], abs=0.003)
        bound = [
            kl - likelihood for kl, likelihood in zip(curves["kl"], curves["log_likelihood"], strict=True)
        ]
        assert bound == pytest.approx(list(curves["negative_elbo"]), abs=0.03)  # as read off a picture


def test_the_answer_tells_who_reaches_all_targets_at_once():
    metrics = image_metrics({"mnist": "MNIST"})
    apart = {"best_flow_channel": {"accuracy": 0.95}, "best_dropout": {"ece": 0.005}}
    assert "all at once: none" in answer(parts(**apart), VARIANTS, metrics, FASHION)
    one = {"best_flow_channel": {"accuracy": 0.95, "ece": 0.005}}
    assert "all at once: Best: flow noise, channel." in answer(parts(**one), VARIANTS, metrics, FASHION)
    views = {"best_flow_channel": {"mirror_accuracy": 0.93, "mirror_ece": 0.006}}
    told = answer(parts(**views), VARIANTS, metrics, FASHION)
    assert (
        "Of an image and its mirror image together: Accuracy 0.9300 (Best: flow noise, channel; reaches 0.915)"
        in told
    )
    assert told.count("all at once: none") == 1


def test_a_note_tells_what_chance_makes_of_the_ece():
    settings = ImageSettings()
    bars = [{"low": 0.8, "high": 1.0, "confidence": 0.9, "accuracy": 0.9, "fraction": 1.0}]
    known = parts()
    for (key, _), part in known.content.items():
        if key == "best-plain":
            part["bins"] = bars
    (note,) = [
        line for line in notes(known, VARIANTS, settings, FASHION) if line.startswith("No ECE is zero")
    ]
    # of 10,000 with chance 0.9: sqrt(2 / pi * 0.09 / 10,000), as a normal number has it
    assert "on 10,000 images" in note
    assert "0.0024 (Best: LeNet, plain) to 0.0024" in note


def test_a_figure_of_a_site_needs_noise_at_that_site():
    known = parts()
    for part in known.content.values():
        part |= {"curves": {"elbo": [-1.0, -0.5], "log_likelihood": [-1.0, -0.5]}, "shift": {}, "entropy": {}}
    for keep, titles in (
        ({"xiong-dropout", "xiong-flow-position"}, ["Figure 5 of Xiong's report, redrawn"]),
        ({"xiong-dropout"}, ["Figure 5 of Xiong's report, redrawn"]),
        (
            {"xiong-flow-position", "xiong-flow-channel"},
            ["Figure 5 of Xiong's report, redrawn", "The same at site channel"],
        ),
    ):
        some = Parts(known.seeds, {key: part for key, part in known.content.items() if key[0] in keep})
        shown = trained_variants(some, VARIANTS)
        sites = [("position", FASHION), ("channel", None)]
        found = [
            training_figure(
                some,
                [v for v in shown if v.key.rpartition("-")[2] in ("dropout", site)],
                given,
                "figure 5",
                site,
            )
            for site, given in sites
        ]
        assert [one["title"] for one in found if one is not None] == titles
        assert all("site ." not in one["caption"] and "each ." not in one["caption"] for one in found if one)


def test_what_the_test_set_had_a_hand_in_is_told():
    for study in ("lenet-fashion", "lenet-cifar10", "vgg16-cifar10"):
        chosen = get_study(study)
        lines = notes(parts(), VARIANTS, chosen.make_settings(), chosen.published, chosen.remarks)
        assert chosen.remarks
        assert set(chosen.remarks) < set(lines)
        quick = notes(parts(), VARIANTS, chosen.make_settings(quick=True), chosen.published, chosen.remarks)
        assert not set(chosen.remarks) & set(quick)


@pytest.mark.parametrize(
    "times", [0.5, 1.0, 1.5, 2.0, 3.7]
)  # a method that is more or less certain than the plain network
def test_nll_at_matched_entropy_is_that_of_the_temperature_worked_by_hand(times):
    # two images with log-odds of log 4 for the class 0, of which one is right: -(log 0.8 + log 0.2) / 2
    odds = torch.tensor([[math.log(4.0), 0.0]], dtype=torch.float64).repeat(2, 1)
    labels = torch.tensor([0, 1])
    curves = {
        "best-plain": tempering_curve(torch.log_softmax(odds, -1), labels),
        "best-swag": tempering_curve(torch.log_softmax(times * odds, -1), labels),
    }
    content = {
        (key, 0): {"values": {"nll": 1.0}, "tempered": {"fog": [curve]}} for key, curve in curves.items()
    }
    content["best-ensemble", 0] = {"values": {"nll": 1.0}}  # of a run before there was such a value
    variants = [Variant(key, key) for key in ("best-plain", "best-swag", "best-ensemble")]
    made = add_matched_nll(Parts([0], content), variants, PLAIN)
    truth = -(math.log(0.8) + math.log(0.2)) / 2
    assert made.mean("best-plain", "shift_matched_nll") == pytest.approx(truth, abs=1e-9)
    assert made.mean("best-swag", "shift_matched_nll") == pytest.approx(truth, abs=1e-4)
    assert not made.values("best-ensemble", "shift_matched_nll")
    assert nll_at_entropy(curves["best-plain"], math.log(2.0)) is None  # no temperature makes it know nothing
