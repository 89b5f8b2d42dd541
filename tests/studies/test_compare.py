"""The comparison: its front, its costs, its table, a user's own network, and the command line."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import flowbnn as fb
from flowbnn.compare import Comparison
from flowbnn.compare.candidates import find_candidates, kept_numbers
from flowbnn.compare.results import Parts
from flowbnn.data import TensorLoader, clusters, ring
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn_studies.cli import app
from flowbnn_studies.compare import DATA, NETWORKS, prepare_data
from flowbnn_studies.report import load_results

QUICK = ["--quick", "--jobs", "1", "--no-progress", "--set", "train=60", "--set", "test=40", "--epochs", "2"]


def loaders():
    generator = torch.Generator().manual_seed(0)
    train = TensorLoader(*clusters(80, 1.2, generator), batch_size=40)
    return train, TensorLoader(*clusters(60, 1.2, generator), batch_size=40), ring(30, 18.0, generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def made(**values):
    content = {
        (key.replace("_", "-"), 0): {"values": {"train_seconds": seconds, "predict_seconds": 1.0, "nll": nll}}
        for key, (seconds, nll) in values.items()
    }
    return Parts([0], content)


def test_times_are_those_of_the_plain_network_and_the_front_follows():
    table = Comparison(
        find_candidates(["mle", "map", "mc-dropout"]),
        made(mle=(2.0, 0.5), map=(3.0, 0.6), mc_dropout=(8.0, 0.2)),
    )
    assert {row["key"]: row["training"] for row in table.rows} == {"mle": 1.0, "map": 1.5, "mc-dropout": 4.0}
    assert table.best == "mc-dropout"


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch teaches the noise nothing
def test_the_numbers_a_posterior_keeps_by_hand():
    train, _, _ = loaders()
    plain = 2 * 8 + 8 + 8 * 2 + 2
    quiet = {"progress": False, "accelerator": "cpu", "seed": 0}
    assert kept_numbers(fb.MAP(epochs=1).fit(network(), train, **quiet)) == plain
    assert kept_numbers(fb.DeepEnsemble(3, epochs=1).fit(network(), train, **quiet)) == 3 * plain
    noisy = fb.NodeNoise("gaussian", epochs=1).fit(network(), train, **quiet)
    assert kept_numbers(noisy) >= plain + 2 * (2 + 8)  # a mean and a scale for each input of a layer


def test_every_network_fits_every_set_of_images():
    for name in NETWORKS:
        bundle = prepare_data(name, "digits", seed=0, train=4, test=4)
        made = NETWORKS[name][0](bundle.shape, bundle.classes).eval()
        assert made(bundle.test[0]).shape == (4, bundle.classes)
    assert set(DATA) == {"digits", "clusters", "mnist", "fashion-mnist", "cifar10"}


def test_a_users_own_network_and_loaders(tmp_path):
    train, test, strange = loaders()
    mine = network()
    before = [parameter.clone() for parameter in mine.parameters()]
    methods = ["mc-dropout", fb.MAP(epochs=2, lr=0.1)]
    options = {"novel": strange, "methods": methods, "epochs": 2, "samples": 4, "progress": False}
    found = fb.compare(mine, train, test, **options)
    found.save(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, mine.parameters(), strict=True))
    assert {row["key"] for row in found.rows} == {"mle", "mc-dropout", "map"}
    nll = [row["nll"] for row in found.rows]
    assert nll == sorted(nll)
    assert found.best == found.rows[0]["key"]
    row = next(row for row in found.rows if row["key"] == "mle")
    assert row["training"] == row["prediction"] == 1.0
    assert row["parameters"] == 42
    assert 0 <= row["auroc"] <= 1
    text = str(found)
    assert "MAP(epochs=2, lr=0.1)" in text
    assert found.answer in text
    assert "Training" in text.splitlines()[0]
    results = load_results(tmp_path)
    assert [one["key"] for one in results["rows"]] == [one["key"] for one in found.rows]


def test_numbers_are_compared_too():
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    loader = TensorLoader(x, x**2, batch_size=20)
    methods = {"dropped": fb.MCDropout(epochs=2)}
    found = fb.compare(nn.Linear(1, 1), loader, loader, methods=methods, epochs=2, samples=3, progress=False)
    assert {"rmse", "nll", "coverage_90"} <= set(found.rows[0])
    assert {row["label"]: row["method"] for row in found.rows} == {
        "Maximum likelihood": "mle",
        "dropped": "mc-dropout",
    }
    assert "accuracy" not in found.rows[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["mapp"]}, "did you mean 'map'"),
        ({"methods": [3]}, "must hold a string or a Method, got 3"),
        ({"seeds": 0}, "seeds=..."),
        ({"seeds": [1, -1]}, "must hold an integer of at least 0"),
        ({"lr": -1.0}, "lr"),
        ({"precission": "bf16-mixed"}, "did you mean 'precision'"),
        ({"network": 3}, "network=..."),
        ({"test_loader": iter([])}, "read once for every method"),
    ],
)
def test_what_cannot_be_compared_is_told_in_a_line(change, message):
    train, test, _ = loaders()
    given = {"network": network(), "train_loader": train, "test_loader": test, "progress": False} | change
    with pytest.raises(FlowBNNError, match=message) as caught:
        fb.compare(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("epochs", [2, 3])
def test_few_epochs_suit_every_method(epochs):
    train, test, _ = loaders()
    options = {"methods": ["swag", "sgld", "laplace"], "samples": 4, "progress": False}
    found = fb.compare(network(), train, test, epochs=epochs, **options)
    assert {row["key"] for row in found.rows} == {"mle", "swag", "sgld", "laplace"}


def test_a_method_that_so_few_epochs_do_not_suit_is_left_out():
    train, test, _ = loaders()
    options = {"methods": ["swag", "map"], "samples": 4, "progress": False}
    with pytest.warns(FlowBNNWarning, match=r"SWAG \('swag'\) is left out of the comparison: .*more epochs"):
        found = fb.compare(network(), train, test, epochs=1, **options)
    assert {row["key"] for row in found.rows} == {"mle", "map"}
    assert any(note.startswith("SWAG is not in the table: ") for note in found.notes)


def test_a_method_that_fails_is_told_once_by_name():
    class Refusing(fb.MAP):
        def fit(self, *given, **options):
            if options["seed"] == 0:
                return super().fit(*given, **options)
            raise FlowBNNError("not today")

    train, test, _ = loaders()
    options = {"methods": {"mine": Refusing(epochs=1)}, "epochs": 1, "samples": 2, "progress": False}
    with pytest.warns(FlowBNNWarning) as caught:
        found = fb.compare(network(), train, test, seeds=3, **options)
    told = [str(one.message) for one in caught]
    assert told == ["mine ('mine') is left out of the comparison: not today"]
    assert found.notes == ["mine is not in the table: not today."]
    assert [row["key"] for row in found.rows] == ["mle"]


def test_a_score_worse_than_guessing_is_not_praised():
    parts, chosen = made(mle=(2.0, 0.5), map=(3.0, 0.6)), find_candidates(["mle", "map"])
    for (key, _), part in parts.content.items():
        part["values"]["auroc"] = {"mle": 0.2, "map": 0.33}[key]
    text = Comparison(chosen, parts).answer
    assert "No method detects novel inputs (best: MAP 0.330 AUROC, where 0.5 is guessing)" in text
    assert "Best at detecting" not in text
    parts.content["map", 0]["values"]["auroc"] = 0.9
    assert "Best at detecting novel inputs: MAP 0.900 (AUROC)" in Comparison(chosen, parts).answer


def test_seeds_times_and_the_call(tmp_path):
    train, test, strange = loaders()
    options = {"methods": ["map", fb.MCDropout(epochs=1)], "epochs": 1, "samples": 4, "progress": False}
    options |= {"novel": strange, "accelerator": "cpu"}
    one = fb.compare(network(), train, test, **options)
    assert "One seed has no spread" in one.answer
    assert "chance" not in one.answer
    found = fb.compare(network(), train, test, seeds=2, **options)
    found.save(tmp_path)
    assert found.parts.seeds == [0, 1]
    assert "2 seeds" in found.answer
    assert "±" in str(found)
    assert "One seed" not in found.answer
    results = load_results(tmp_path)
    assert results["command"].startswith("flowbnn.compare(network, train_loader, test_loader, ")
    assert "methods=['map', MCDropout(epochs=1)], epochs=1" in results["command"]
    assert results["seconds"] > 0


def test_the_command_line_compares_and_goes_on(tmp_path):
    words = ["compare", "--network", "mlp", "--data", "clusters", "--out", tmp_path, *QUICK]
    done = call(*words, "--methods", "map")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "compare-mlp-clusters" / "results.json").read_text())
    assert {row["key"] for row in results["rows"]} == {"mle", "map"}
    assert results["command"].startswith(
        "flowbnn compare --network mlp --data clusters --methods map --epochs 2"
    )
    assert results["title"].startswith("Which method for mlp on clusters? (tiny settings, ")
    for column in (
        "Accuracy",
        "NLL",
        "ECE",
        "Brier",
        "Novelty AUROC",
        "Training",
        "Prediction",
        "Parameters",
    ):
        assert column in done.output
    part = tmp_path / "compare-mlp-clusters" / "parts" / "map-seed0.json"
    stamp = part.stat().st_mtime_ns
    again = call(*words, "--methods", "map,mc-dropout", "--resume")
    assert again.exit_code == 0, again.output
    assert part.stat().st_mtime_ns == stamp
    assert "MC dropout" in again.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "lenett"], "did you mean 'lenet'"),
        (["--data", "digit"], "did you mean 'digits'"),
        (["--data", "clusters"], "take --network mlp"),
        (["--methods", "laplac"], "did you mean 'laplace'"),
        (["--epochs", "0"], "(epochs=...) must be an integer of at least 1"),
    ],
)
def test_bad_words_are_told_in_a_line(words, message, tmp_path):
    result = call("compare", "--quick", "--jobs", "1", "--out", tmp_path, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch):
    train, test, _ = loaders()
    fitted = []
    measured = fb.compare.__wrapped__.__globals__["measure"]

    def counting(method, *given, seed, **more):
        fitted.append((method.name, seed))
        if len(fitted) == 4:
            raise KeyboardInterrupt
        return measured(method, *given, seed=seed, **more)

    monkeypatch.setitem(fb.compare.__wrapped__.__globals__, "measure", counting)

    def run(**more):
        asked = {"methods": "map", "epochs": 1, "samples": 4, "seeds": 2, "folder": tmp_path, **more}
        return fb.compare(network(), train, test, progress=False, **asked)

    with pytest.raises(KeyboardInterrupt):
        run()
    table = run()
    assert fitted == [("mle", 0), ("mle", 1), ("map", 0), ("map", 1), ("map", 1)]
    assert [len(one["values"]["nll"]["per_seed"]) for one in table.table_rows()] == [2, 2]
    assert str(run()) == str(table)  # nothing is fitted, and nothing is lost in the file
    assert len(run(seeds=3).parts.seeds) == 3
    assert fitted[5:] == [("mle", 2), ("map", 2)]
    with pytest.warns(FlowBNNWarning, match="other settings .*samples") as caught:
        run(samples=5)
    assert len(caught) == 1
    assert len(fitted) == 11
    assert not list(tmp_path.rglob(".*"))
