"""The studies on images, on generated pictures at settings of seconds."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from flowbnn.compare.results import Parts
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.models import Block
from flowbnn_studies import get_study
from flowbnn_studies.data import CORRUPTIONS, Translate, mirror
from flowbnn_studies.images import study as image_study
from flowbnn_studies.images import training
from flowbnn_studies.images.data import load_image_data
from flowbnn_studies.images.evaluation import VIEWS
from flowbnn_studies.images.settings import GROUPS, ImageSettings
from flowbnn_studies.report import load_results
from flowbnn_studies.runner.run import run_study


def small(name, **changes):
    study = get_study(name)
    given = {"generated": 40, "shift_images": 4, "*.batch": 20, "*.epochs": 1, "rounds": 1}
    given |= {"corruptions": ("noise", "blur"), **changes}  # the others are evaluated alike
    return study, study.make_settings(quick=True, **given)


def run(study, settings, folder, **options):
    options = {"seeds": 1, "progress": False, "accelerator": "cpu", **options}
    return run_study(study, settings=settings, out=folder, **options)


def check_numbers(study, results, folder):
    assert load_results(folder / study.name) == results
    rows = {row["key"]: row["values"] for row in results["rows"]}
    values = rows["xiong-flow-position"]
    assert values["accuracy"]["published"] == study.published.rows["xiong-flow-position"]["accuracy"]
    for key in study.novel:
        assert 0 <= values[f"auroc_{key}"]["mean"] <= 1
        assert 0 <= values[f"mi_{key}"]["mean"] <= 1
    assert "mi_noise" not in rows["xiong-plain"]  # the plain network has no mutual information
    assert 0 <= values["shift_accuracy"]["mean"] <= 1


@pytest.mark.parametrize("name", ["lenet-cifar10", "vgg16-cifar10"])
def test_a_study_runs_on_pictures_of_its_own(name, tmp_path):
    study, settings = small(name)
    check_numbers(study, run(study, settings, tmp_path, only=["xiong-flow-position"]), tmp_path)


def test_a_study_runs_in_parts_that_make_a_whole(tmp_path):
    study, settings = small(name := "lenet-fashion")
    only = ["xiong-longer", "xiong-flow-position", "xiong-gaussian-position", "best-mixture-channel"]
    results = run(study, settings, tmp_path, only=only)
    check_numbers(study, results, tmp_path)
    keys = [row["key"] for row in results["rows"] if not row.get("cited")]
    assert keys == ["xiong-plain", *only[:1], "xiong-gaussian-position", only[1], only[3]]
    assert any("trainings are missing: xiong-dropout" in note for note in results["notes"])
    redrawn = results["figures"][0]
    assert redrawn["kind"] == "curves"
    assert [panel["title"] for panel in redrawn["data"]["panels"]] == [
        "Negative ELBO",
        "Log-likelihood",
        "KL / N",
        "Test accuracy",
        "ECE on the test set",
    ]
    labels = [line["label"] for line in redrawn["data"]["panels"][0]["lines"]]
    assert labels == [
        "Gaussian noise, position",
        "Flow noise, position",
        "Xiong: no flow",
        "Xiong: flow noise",
    ]
    assert redrawn["data"]["panels"][4]["levels"]
    assert len(json.dumps(results)) < 400_000
    assert not list(
        (tmp_path / name / "checkpoints").glob("best-*")
    )  # no network is kept that nothing starts from
    assert list((tmp_path / name / "checkpoints").glob("xiong-plain-seed0/posterior.safetensors"))


def test_parts_are_taken_over_and_collected_wherever_they_were_made(tmp_path):
    study, settings = small("lenet-fashion")
    first = run(study, settings, tmp_path / "here", only=["best-plain", "best-flow-channel"])
    parts = tmp_path / "here" / "lenet-fashion" / "parts"
    target = tmp_path / "there" / "lenet-fashion" / "parts"
    target.mkdir(parents=True)
    for path in parts.iterdir():
        part = json.loads(path.read_text().replace('"accelerator": "cpu"', '"accelerator": "cuda"'))
        if "flow" in path.name:
            part["content"]["machine"]["acceleration"] = "graph"
        (target / path.name).write_text(json.dumps(part))
    collected = run_study(
        study, settings=settings, seeds=1, out=tmp_path / "there", progress=False, collect=True
    )
    assert collected["rows"] == first["rows"]
    assert collected["settings"]["accelerator"] == "cuda"
    assert set(collected["settings"]["acceleration"].split(" and ")) == {"graph", "not stored"}
    assert "acceleration" not in first["settings"]  # there is none on a CPU
    stamps = {path: path.stat().st_mtime_ns for path in parts.iterdir()}
    again = run(study, settings, tmp_path / "here", only=["best-plain", "best-flow-channel"], resume=True)
    assert again["rows"] == first["rows"]
    assert {path: path.stat().st_mtime_ns for path in parts.iterdir()} == stamps
    # tuning another method leaves these parts in force
    other = replace(settings, gaussian_channel=replace(settings.gaussian_channel, noise_lr=1.0))
    run(study, other, tmp_path / "here", only=["best-plain"], resume=True)
    assert {path: path.stat().st_mtime_ns for path in parts.iterdir()} == stamps
    with pytest.raises(FlowBNNError, match="matches no variant"):
        run(study, settings, tmp_path / "here", only=["best-flw"])


def test_a_training_that_is_cut_goes_on(tmp_path, monkeypatch):
    study, settings = small("lenet-fashion", **{"flow_channel.epochs": 2})
    whole = run(study, settings, tmp_path / "whole", only=["best-flow-channel"])
    batches, seen = TensorLoader.__iter__, []

    def cut(self):
        for batch in batches(self):
            seen.append(1)
            if len(seen) == 5:  # one look, and in the second epoch
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(TensorLoader, "__iter__", cut)
        with pytest.raises(KeyboardInterrupt):
            run(study, settings, tmp_path / "cut", only=["best-flow-channel"])
    again = run(study, settings, tmp_path / "cut", only=["best-flow-channel"], resume=True)
    for results in (again, whole):
        del results["rows"][0]["values"]["minutes"]
    assert again["rows"] == whole["rows"]


def test_the_cost_is_a_ratio_to_plain(tmp_path):
    study, settings = small("lenet-fashion")
    results = run(study, settings, tmp_path, only=["cost", "best-plain"])
    cost = json.loads((tmp_path / "lenet-fashion" / "parts" / "cost-seed0.json").read_text())["content"]
    assert set(cost["ratios"]) == {group.replace("_", "-") for group in GROUPS}
    assert cost["ratios"]["plain"] == {"step": 1.0, "prediction": 1.0}
    assert all(ratio["step"] > 0.1 for ratio in cost["ratios"].values())
    assert results["rows"][0]["values"]["step"]["mean"] == 1.0
    assert [figure["kind"] for figure in results["figures"]][-1] == "bars"


def test_settings_are_chosen_on_validation_images_and_the_test_set_stays_closed(tmp_path, monkeypatch):
    opened = []
    original = load_image_data.__globals__["generated_images"]

    def watched(number, name, split):
        opened.append((name, split))
        return original(number, name, split)

    monkeypatch.setitem(load_image_data.__globals__, "generated_images", watched)
    study, settings = small("lenet-fashion", choose=True, validation=16, moved=True)
    only = ["xiong-flow-channel", "best-flow-channel"]
    results = run(study, settings, tmp_path, only=only, seeds=[100])
    assert set(opened) == {("fashion-mnist", "train"), ("mnist", "test")}
    xiong, best = (row["values"] for row in results["rows"] if row["key"] in only)
    assert {"accuracy", "nll", "ece"} <= set(xiong)
    assert "mirror_nll" not in xiong  # that recipe does not mirror its images
    assert {"mirror_accuracy", "mirror_nll", "moved_ece"} <= set(best)
    drawn = results["figures"][0]["data"]["panels"][-1]
    assert drawn["title"].startswith("ECE")
    assert len(drawn["lines"][0]["mean"]) == 1  # of one epoch
    assert any("all here is evaluated on those" in note for note in results["notes"])


def test_pictures_are_the_same_for_every_method_and_kept_apart():
    settings = ImageSettings(source="generated", generated=80, validation=16)
    tested = load_image_data(settings, "cifar10", ["fashion-mnist", "noise"], "cpu")
    chosen = load_image_data(replace(settings, choose=True), "cifar10", [], "cpu")
    again = load_image_data(replace(settings, choose=True), "cifar10", [], "cpu")
    assert torch.equal(again.tested.images, chosen.tested.images)
    whole = torch.cat([chosen.learned.images, chosen.tested.images]).flatten(1).tolist()
    assert sorted(whole) == sorted(tested.learned.images.flatten(1).tolist())
    assert len(chosen.learned) == 64
    assert len(chosen.tested) == 16
    assert len(tested.tested) == 20
    assert {key: tuple(value.shape) for key, value in tested.novel(5).items()} == {
        "fashion-mnist": (5, 3, 32, 32),
        "noise": (5, 3, 32, 32),
    }
    for kind in CORRUPTIONS:
        first, second = tested.corrupted(kind, 5, 4), tested.corrupted(kind, 5, 4)
        assert torch.equal(first[0], second[0])
        assert not torch.allclose(first[0], tested.test[0][:4])


@pytest.mark.parametrize("wrong", ["plain.batch", "flow_channel.epochs", "samples", "shift_images"])
def test_settings_of_zero_are_refused(wrong):
    with pytest.raises(FlowBNNError, match="must be an integer of at least 1, got 0"):
        get_study("lenet-fashion").make_settings(quick=True, **{wrong: 0})


def test_a_run_that_cannot_start_clears_nothing(tmp_path, monkeypatch):
    study, settings = small("lenet-fashion")
    run(study, settings, tmp_path, only=["best-plain"])
    parts = sorted(tmp_path.glob("lenet-fashion/parts/*"))
    assert parts
    monkeypatch.setenv("FLOWBNN_DATA", str(tmp_path / "nowhere"))
    for changes in ({"plain.optimizer": "adagrad"}, {"plain.schedule": "steps"}, {"source": "files"}):
        with pytest.raises(FlowBNNError):
            run(study, study.make_settings(quick=True, **changes), tmp_path, only=["best-plain"])
        assert sorted(tmp_path.glob("lenet-fashion/parts/*")) == parts


def test_a_finished_run_needs_no_data_to_be_resumed(tmp_path, monkeypatch):
    study, settings = small("lenet-fashion")
    first = run(study, settings, tmp_path, only=["best-plain"])
    monkeypatch.setattr(type(study), "pictures", lambda *_, **__: pytest.fail("the data are read"))
    again = run(study, settings, tmp_path, only=["best-plain"], resume=True)
    assert again["rows"] == first["rows"]


def test_settings_are_named_by_group_and_glob():
    study = get_study("lenet-fashion")
    settings = study.make_settings(**{"flow_*.noise_lr": 1, "plain.optimizer": "sgd", "choose": True})
    assert settings.flow_channel.noise_lr == settings.flow_position.noise_lr == 1.0
    assert settings.gaussian_channel.noise_lr != 1.0
    assert settings.plain.optimizer == "sgd"
    for wrong in ({"flow_channel.noise_l": 1.0}, {"flw.noise_lr": 1.0}):
        with pytest.raises(FlowBNNError, match="no setting"):
            study.make_settings(**wrong)
    with pytest.raises(FlowBNNError, match="must be True or False"):
        study.make_settings(choose=1)
    assert settings.xiong == study.make_settings().xiong


def test_six_views_are_judged_when_asked_for(tmp_path):
    study, settings = small("lenet-cifar10", moved=True, samples=6)
    results = run(study, settings, tmp_path, only=["best-plain", "best-flow-channel"])
    for row in results["rows"]:
        if not row.get("cited") and row["key"].startswith("best-"):
            assert 0 <= row["values"]["moved_accuracy"]["mean"] <= 1
            # of other images than those of two views, so the numbers differ
            assert row["values"]["moved_nll"]["mean"] != row["values"]["mirror_nll"]["mean"]
    assert "Of six views of an image together: Accuracy" in results["answer"]
    for step, (one, other) in ((1, VIEWS[1:3]), (-1, VIEWS[3:5])):
        images = torch.rand(2, 3, 8, 8)
        assert torch.equal(one(images), Translate(step, step)(images))
        assert torch.equal(other(images), mirror(Translate(step, step)(images)))


def test_six_views_are_the_best_recipes_alone():
    with_them, without = ImageSettings(moved=True), ImageSettings(moved=False)
    for variant in ("xiong-flow-channel", "xiong-plain", "cost"):
        assert with_them.relevant(variant) == without.relevant(variant), "its stored results stay in force"
        assert not with_them.evaluating(variant).moved
    assert with_them.relevant("best-plain") != without.relevant("best-plain")
    assert with_them.evaluating("best-plain").moved


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        ("auto", "cuda", "recorded as a CUDA graph, not compiled"),
        ("graph", "cuda", "recorded as a CUDA graph, not compiled"),
        ("compile", "cuda", "compiled and recorded"),
        ("off", "cuda", "one by one"),
        ("compile", "cpu", "one by one"),
    ],
)
def test_a_cost_tells_how_its_steps_were_taken(asked, device, words):
    assert words in training._taken({"acceleration": asked}, torch.device(device))


def test_the_peak_of_memory_is_that_of_steps_on_one_batch(monkeypatch):
    """Torch's counts of a GPU's memory are played here: what is there before a method's steps is not charged to it."""
    counts = {"before": iter([10.0, 30.0]), "peak": iter([110.0, 180.0])}
    cleared = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append("cache"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: cleared.append("peak"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(counts["before"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(counts["peak"]))
    study, settings = small("lenet-fashion")
    pictures = study.pictures(settings, "cpu")
    chosen, trained = training._training(settings, "flow_channel"), []

    def train(name, training, loader):
        trained.append((name, training.epochs, len(loader)))
        assert all(batch[0] is loader[0][0] for batch in loader)
        assert cleared[-1] == "peak"  # the count begins before the steps

    assert training._peak(train, "plain", chosen, pictures) == 100.0
    assert training._peak(train, "flow-channel", chosen, pictures) == 150.0
    assert trained == [("plain", 1, training.FEW), ("flow-channel", 1, training.FEW)]
    assert cleared == ["cache", "peak"] * 2


def test_what_was_finished_is_put_aside_by_a_new_run_and_not_lost(tmp_path, capsys):
    study, settings = small("lenet-fashion")
    run(study, settings, tmp_path, only=["best-plain"])
    folder = tmp_path / "lenet-fashion"
    first = (folder / "parts" / "best-plain-seed0.json").read_bytes()
    capsys.readouterr()
    run(study, settings, tmp_path, only=["best-plain", "best-dropout"], progress=True)
    assert "Archived 1 finished trainings" in capsys.readouterr().out
    assert (folder / "earlier" / "best-plain-seed0.json").read_bytes() == first
    assert (folder / "parts" / "best-plain-seed0.json").exists()
    before = run(study, settings, tmp_path, only=["best-plain"], resume=True)
    assert [row["key"] for row in before["rows"] if not row.get("cited")] == ["best-plain", "best-dropout"]
    assert (folder / "earlier" / "best-plain-seed0.json").read_bytes() == first  # nothing new was put aside
    told = run(study, settings, tmp_path, collect=True, command="flowbnn run x --precision 32-true")
    assert told["command"] == "flowbnn run x --precision 32-true"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"xiong.prior_scale": -1.0}, "prior_scale"),
        ({"start.weight_lr": -1.0}, "weight_lr"),
        ({"xiong.positions": -3}, "positions"),
        ({"xiong.rate": 2.0}, "rate"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_cleared(changes, words):
    with pytest.raises(FlowBNNError) as caught:
        get_study("lenet-fashion").make_settings(quick=True, **changes)
    assert caught.value.argument == words


def test_a_mistaken_precision_clears_nothing_and_a_start_that_is_there_is_taken_as_it_is(tmp_path, capsys):
    study, settings = small("lenet-fashion")
    run(study, settings, tmp_path, only=["xiong-plain", "xiong-flow-channel"])
    parts = tmp_path / "lenet-fashion" / "parts"
    stamps = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    with pytest.raises(FlowBNNError, match="precision"):
        run(study, settings, tmp_path, only=["xiong-*"], precision="foo")
    assert {path.name: path.stat().st_mtime_ns for path in parts.iterdir()} == stamps
    start = next((tmp_path / "lenet-fashion" / "checkpoints").glob("xiong-plain-seed0/*.safetensors"), None)
    run(study, settings, tmp_path, only=["xiong-flow-channel"])
    plain = "xiong-plain-seed0.json"
    aside = {path.name for path in (tmp_path / "lenet-fashion" / "earlier").iterdir()}
    if start is None:  # its network was cleared away: it is trained again, and what was there is kept
        assert plain in aside
    else:
        assert (parts / plain).stat().st_mtime_ns == stamps[plain]
    assert "xiong-flow-channel-seed0.json" in aside


def test_resnet18_is_compared_with_swag_and_an_ensemble(tmp_path, monkeypatch):
    def tiny(architecture, channels, width):
        return nn.Sequential(nn.AvgPool2d(8), Block(channels, 4, 2), nn.Flatten(), nn.Linear(16, 10))

    monkeypatch.setattr(image_study, "make_network", tiny)
    monkeypatch.setattr(image_study, "NORMALIZED", 2)
    study, settings = small("resnet18-cifar10", samples=2, shift_images=2)
    every = [variant.key for variant in study.variants(settings)]
    only = ["long-joint-channel", "best-output-channel", "best-swag", "best-ensemble"]
    assert study.make_settings().corruptions == tuple(CORRUPTIONS)
    results = run(study, settings, tmp_path, only=[*only, "long-plain", "best-gaussian-channel"])
    rows = {row["key"]: row["values"] for row in results["rows"]}
    assert [key for key in rows if not key.startswith("cited")] == [
        key for key in every if key not in ("best-mixture-channel", "best-joint-channel")
    ]
    assert rows["cited-0"]["nll"]["published"] == 0.127
    for key in only:
        assert {
            "accuracy",
            "nll",
            "ece",
            "shift_nll",
            "shift_matched_nll",
            "auroc_noise",
            "mi_noise",
            "mirror_nll",
        } <= set(rows[key])
    content = {
        key: json.loads((tmp_path / study.name / "parts" / f"{key}-seed0.json").read_text())
        for key in [*only, "best-gaussian-channel"]
    }
    assert all(part["content"]["shift"]["blur"]["nll"] for part in content.values())
    assert results["answer"].startswith("Best means: NLL")  # one seed decides no comparison
    twice = Parts([0, 1], {(key, seed): part["content"] for key, part in content.items() for seed in (0, 1)})
    assert "SWAG against Gaussian noise: " in study.findings(settings, twice).answer
    assert not any("Xiong" in note for note in results["notes"])
    # the walk depends on how the plain network was trained, the noise does not
    other = study.make_settings(quick=True, **{"plain.weight_decay": 0.5})
    assert other.relevant("best-swag") != study.make_settings(quick=True).relevant("best-swag")
    assert other.relevant("best-joint-channel") == study.make_settings(quick=True).relevant(
        "best-joint-channel"
    )
