"""Tests of ``fb.compare`` and of its result."""

import pytest
import torch
from tests.compare.problems import make_loaders, make_network
from torch import nn

import flowbnn as fb
from flowbnn.compare import Comparison
from flowbnn.compare.candidates import find_candidates
from flowbnn.compare.results import SeedResults
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn_studies.report import load_results

COMPARE_GLOBALS = fb.compare.__wrapped__.__globals__  # of the module, whose name the function shadows


def make_parts(**results: tuple[float, float]) -> SeedResults:
    """Returns results of one seed from the training time and the NLL of each method."""
    content = {
        (key.replace("_", "-"), 0): {"values": {"train_seconds": seconds, "predict_seconds": 1.0, "nll": nll}}
        for key, (seconds, nll) in results.items()
    }
    return SeedResults([0], content)


def test_times_are_multiples_of_the_baseline():
    table = Comparison(
        find_candidates(["mle", "map", "mc-dropout"]),
        make_parts(mle=(2.0, 0.5), map=(3.0, 0.6), mc_dropout=(8.0, 0.2)),
    )
    assert {row["key"]: row["training"] for row in table.rows} == {"mle": 1.0, "map": 1.5, "mc-dropout": 4.0}
    assert table.best == "mc-dropout"


def test_compare_a_classification(tmp_path):
    train, test, novel = make_loaders()
    network = make_network()
    before = [parameter.clone() for parameter in network.parameters()]
    methods = ["mc-dropout", fb.MAP(epochs=2, lr=0.1)]
    options = {"novel": novel, "methods": methods, "epochs": 2, "samples": 4, "progress": False}
    table = fb.compare(network, train, test, **options)
    table.save(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert {row["key"] for row in table.rows} == {"mle", "mc-dropout", "map"}
    nll = [row["nll"] for row in table.rows]
    assert nll == sorted(nll)
    assert table.best == table.rows[0]["key"]
    baseline = next(row for row in table.rows if row["key"] == "mle")
    assert baseline["training"] == baseline["prediction"] == 1.0
    assert baseline["parameters"] == 42
    assert 0 <= baseline["auroc"] <= 1
    text = str(table)
    assert "MAP(epochs=2, lr=0.1)" in text
    assert table.answer in text
    assert "Training" in text.splitlines()[0]
    results = load_results(tmp_path)
    assert [row["key"] for row in results["rows"]] == [row["key"] for row in table.rows]


def test_compare_a_regression():
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    loader = TensorLoader(x, x**2, batch_size=20)
    options = {"methods": {"dropout": fb.MCDropout(epochs=2)}, "epochs": 2, "samples": 3, "progress": False}
    table = fb.compare(nn.Linear(1, 1), loader, loader, **options)
    assert {"rmse", "nll", "coverage_90"} <= set(table.rows[0])
    assert {row["label"]: row["method"] for row in table.rows} == {
        "Maximum likelihood": "mle",
        "dropout": "mc-dropout",
    }
    assert "accuracy" not in table.rows[0]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"methods": ["mapp"]}, "methods"),
        ({"methods": [3]}, "methods"),
        ({"methods": []}, "methods"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": [1, -1]}, "seeds"),
        ({"seeds": []}, "seeds"),
        ({"lr": -1.0}, "lr"),
        ({"precission": "bf16-mixed"}, "precission"),
        ({"network": 3}, "network"),
        ({"test_loader": iter([])}, "test_loader"),
    ],
)
def test_bad_arguments_are_refused(change, argument):
    train, test, _ = make_loaders()
    arguments = {"network": make_network(), "train_loader": train, "test_loader": test, "progress": False}
    with pytest.raises(FlowBNNError) as caught:
        fb.compare(**arguments | change)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("epochs", [2, 3])
def test_every_method_runs_with_few_epochs(epochs):
    train, test, _ = make_loaders()
    options = {"methods": ["swag", "sgld", "laplace"], "samples": 4, "progress": False}
    table = fb.compare(make_network(), train, test, epochs=epochs, **options)
    assert {row["key"] for row in table.rows} == {"mle", "swag", "sgld", "laplace"}


def test_method_that_needs_more_epochs_is_left_out():
    train, test, _ = make_loaders()
    options = {"methods": ["swag", "map"], "samples": 4, "progress": False}
    with pytest.warns(FlowBNNWarning) as caught:
        table = fb.compare(make_network(), train, test, epochs=1, **options)
    assert (caught[0].message.kind, caught[0].message.fields["method"]) == ("left out", "swag")
    assert {row["key"] for row in table.rows} == {"mle", "map"}
    assert any(note.startswith("SWAG is left out: ") for note in table.notes)


def test_method_that_fails_is_left_out_with_one_warning():
    class Failing(fb.MAP):
        def fit(self, *args, **options):
            if options["seed"] == 0:
                return super().fit(*args, **options)
            raise FlowBNNError("not today")

    train, test, _ = make_loaders()
    options = {"methods": {"mine": Failing(epochs=1)}, "epochs": 1, "samples": 2, "progress": False}
    with pytest.warns(FlowBNNWarning) as caught:
        table = fb.compare(make_network(), train, test, seeds=3, **options)
    assert [entry.message.kind for entry in caught] == ["left out"]
    assert table.notes == ["mine is left out: not today."]
    assert [row["key"] for row in table.rows] == ["mle"]


def test_answer_mentions_novelty_detection_below_chance_level():
    parts, candidates = make_parts(mle=(2.0, 0.5), map=(3.0, 0.6)), find_candidates(["mle", "map"])
    for (key, _), result in parts.content.items():
        result["values"]["auroc"] = {"mle": 0.2, "map": 0.33}[key]
    answer = Comparison(candidates, parts).answer
    assert "Best novelty detection: MAP 0.330 (AUROC, below chance level)" in answer
    parts.content["map", 0]["values"]["auroc"] = 0.9
    assert "Best novelty detection: MAP 0.900 (AUROC)" in Comparison(candidates, parts).answer


def test_several_seeds_have_a_spread(tmp_path):
    train, test, novel = make_loaders()
    options = {"methods": ["map", fb.MCDropout(epochs=1)], "epochs": 1, "samples": 4, "progress": False}
    options |= {"novel": novel, "accelerator": "cpu"}
    single = fb.compare(make_network(), train, test, **options)
    assert "based on one seed" in single.answer
    table = fb.compare(make_network(), train, test, seeds=2, **options)
    table.save(tmp_path)
    assert table.parts.seeds == [0, 1]
    assert "2 seeds" in table.answer
    assert "±" in str(table)
    assert "one seed" not in table.answer
    results = load_results(tmp_path)
    assert results["command"].startswith("flowbnn.compare(network, train_loader, test_loader, ")
    assert "methods=['map', MCDropout(epochs=1)], epochs=1" in results["command"]
    assert results["seconds"] > 0


def test_comparison_continues_after_an_interruption(tmp_path, monkeypatch):
    train, test, _ = make_loaders()
    fits = []
    measure = COMPARE_GLOBALS["measure"]

    def interrupted(method, *args, seed, **options):
        fits.append((method.name, seed))
        if len(fits) == 4:
            raise KeyboardInterrupt
        return measure(method, *args, seed=seed, **options)

    monkeypatch.setitem(COMPARE_GLOBALS, "measure", interrupted)

    def run(**options):
        options = {"methods": "map", "epochs": 1, "samples": 4, "seeds": 2, "folder": tmp_path, **options}
        return fb.compare(make_network(), train, test, progress=False, **options)

    with pytest.raises(KeyboardInterrupt):
        run()
    table = run()
    assert fits == [("mle", 0), ("mle", 1), ("map", 0), ("map", 1), ("map", 1)]
    assert [len(row["values"]["nll"]["per_seed"]) for row in table.table_rows()] == [2, 2]
    assert str(run()) == str(table)  # all results are loaded
    assert len(run(seeds=3).parts.seeds) == 3
    assert fits[5:] == [("mle", 2), ("map", 2)]
    with pytest.warns(FlowBNNWarning) as caught:
        run(samples=5)
    assert [entry.message.kind for entry in caught] == ["changed settings"]
    assert "samples" in caught[0].message.fields["changed"]
    assert len(fits) == 11
    assert not list(tmp_path.rglob(".*"))


def test_the_baseline_is_not_compared_with_itself():
    alone = Comparison(find_candidates(["mle"]), make_parts(mle=(2.0, 0.5)))
    assert "times" not in alone.answer
    assert "lowest" not in alone.answer
    best = Comparison(find_candidates(["mle", "map"]), make_parts(mle=(2.0, 0.5), map=(3.0, 0.6)))
    assert "times" not in best.answer
    assert "lowest" in best.answer
