"""Tests of the studies on images, on generated images with tiny settings."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from flowbnn.compare.results import SeedResults
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.models import ResidualBlock
from flowbnn_studies import get_study
from flowbnn_studies.data import CORRUPTIONS, Translate, mirror
from flowbnn_studies.images import study as image_study
from flowbnn_studies.images import training
from flowbnn_studies.images.data import load_image_data
from flowbnn_studies.images.evaluation import VIEWS
from flowbnn_studies.images.settings import GROUPS, ImageSettings
from flowbnn_studies.report import load_results
from flowbnn_studies.runner.run import run_study
from slow_cases import mark_slow


def small(name, **changes):
    study = get_study(name)
    options = {"generated": 40, "shift_images": 4, "*.batch": 20, "*.epochs": 1, "cost_rounds": 1}
    options |= {"corruptions": ("noise", "blur"), **changes}  # other kinds are evaluated alike
    return study, study.make_settings(quick=True, **options)


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
    assert "mi_noise" not in rows["xiong-plain"]  # a single network has no mutual information
    assert 0 <= values["shift_accuracy"]["mean"] <= 1


@pytest.mark.parametrize("name", mark_slow(["lenet-cifar10", "vgg16-cifar10"], ["lenet-cifar10"]))
def test_study_runs_on_generated_images(name, tmp_path):
    study, settings = small(name)
    check_numbers(study, run(study, settings, tmp_path, only=["xiong-flow-position"]), tmp_path)


def test_study_runs_in_parts(tmp_path):
    study, settings = small(name := "lenet-fashion")
    only = ["xiong-longer", "xiong-flow-position", "xiong-gaussian-position", "best-mixture-channel"]
    results = run(study, settings, tmp_path, only=only)
    check_numbers(study, results, tmp_path)
    keys = [row["key"] for row in results["rows"] if not row.get("cited")]
    assert keys == ["xiong-plain", *only[:1], "xiong-gaussian-position", only[1], only[3]]
    parts = [json.loads(path.read_text())["content"] for path in (tmp_path / name / "parts").iterdir()]
    assert len(parts) == len(keys)
    assert {len(part["curves"]["log_likelihood"]) for part in parts} == {1}  # each training has its epochs
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
    # networks that nothing starts from are deleted
    assert not list((tmp_path / name / "checkpoints").glob("best-*"))
    assert list((tmp_path / name / "checkpoints").glob("xiong-plain-seed0/posterior.safetensors"))


def test_parts_are_reused_and_collected_from_any_device(tmp_path):
    study, settings = small("lenet-fashion")
    first = run(study, settings, tmp_path / "here", only=["best-plain", "best-flow-channel"])
    parts = tmp_path / "here" / "lenet-fashion" / "parts"
    target = tmp_path / "there" / "lenet-fashion" / "parts"
    target.mkdir(parents=True)
    for path in parts.iterdir():
        document = json.loads(path.read_text().replace('"accelerator": "cpu"', '"accelerator": "cuda"'))
        if "flow" in path.name:
            document["content"]["machine"]["acceleration"] = "graph"
        (target / path.name).write_text(json.dumps(document))
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
    # tuning another method keeps these parts valid
    changed = replace(settings, gaussian_channel=replace(settings.gaussian_channel, noise_lr=1.0))
    run(study, changed, tmp_path / "here", only=["best-plain"], resume=True)
    assert {path: path.stat().st_mtime_ns for path in parts.iterdir()} == stamps
    with pytest.raises(FlowBNNError) as caught:
        run(study, settings, tmp_path / "here", only=["best-flw"])
    assert caught.value.argument == "only"


def test_interrupted_training_continues(tmp_path, monkeypatch):
    study, settings = small("lenet-fashion", **{"flow_channel.epochs": 2})
    complete = run(study, settings, tmp_path / "whole", only=["best-flow-channel"])
    batches, batches_seen = TensorLoader.__iter__, []

    def cut(self):
        for batch in batches(self):
            batches_seen.append(1)
            if len(batches_seen) == 5:  # after one extra pass of the first batch, in the second epoch
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(TensorLoader, "__iter__", cut)
        with pytest.raises(KeyboardInterrupt):
            run(study, settings, tmp_path / "cut", only=["best-flow-channel"])
    again = run(study, settings, tmp_path / "cut", only=["best-flow-channel"], resume=True)
    for results in (again, complete):
        del results["rows"][0]["values"]["minutes"]
    assert again["rows"] == complete["rows"]


def test_cost_is_relative_to_the_deterministic_network(tmp_path):
    study, settings = small("lenet-fashion")
    results = run(study, settings, tmp_path, only=["cost", "best-plain"])
    cost = json.loads((tmp_path / "lenet-fashion" / "parts" / "cost-seed0.json").read_text())["content"]
    assert set(cost["ratios"]) == {group.replace("_", "-") for group in GROUPS}
    assert cost["ratios"]["plain"] == {"step": 1.0, "prediction": 1.0}
    assert all(ratio["step"] > 0.1 for ratio in cost["ratios"].values())
    assert results["rows"][0]["values"]["step"]["mean"] == 1.0
    assert [figure["kind"] for figure in results["figures"]][-1] == "bars"


def test_choosing_settings_does_not_read_the_test_set(tmp_path, monkeypatch):
    reads = []
    original = load_image_data.__globals__["generated_images"]

    def watched(number, name, split):
        reads.append((name, split))
        return original(number, name, split)

    monkeypatch.setitem(load_image_data.__globals__, "generated_images", watched)
    study, settings = small("lenet-fashion", choose=True, validation=16, six_views=True)
    only = ["xiong-flow-channel", "best-flow-channel"]
    results = run(study, settings, tmp_path, only=only, seeds=[100])
    assert set(reads) == {("fashion-mnist", "train"), ("mnist", "test")}
    xiong, best = (row["values"] for row in results["rows"] if row["key"] in only)
    assert {"accuracy", "nll", "ece"} <= set(xiong)
    assert "mirror_nll" not in xiong  # that recipe does not mirror its images
    assert {"mirror_accuracy", "mirror_nll", "moved_ece"} <= set(best)
    panel = results["figures"][0]["data"]["panels"][-1]
    assert panel["title"].startswith("ECE")
    assert len(panel["lines"][0]["mean"]) == 1  # of one epoch
    assert any("all results are for these images" in note for note in results["notes"])


def test_images_are_deterministic_and_disjoint():
    settings = ImageSettings(source="generated", generated=80, validation=16)
    data = load_image_data(settings, "cifar10", ["fashion-mnist", "noise"], "cpu")
    choice = load_image_data(replace(settings, choose=True), "cifar10", [], "cpu")
    repeated = load_image_data(replace(settings, choose=True), "cifar10", [], "cpu")
    assert torch.equal(repeated.test_set.images, choice.test_set.images)
    pixels = torch.cat([choice.train.images, choice.test_set.images]).flatten(1).tolist()
    assert sorted(pixels) == sorted(data.train.images.flatten(1).tolist())
    assert len(choice.train) == 64
    assert len(choice.test_set) == 16
    assert len(data.test_set) == 20
    assert {key: tuple(value.shape) for key, value in data.novel(5).items()} == {
        "fashion-mnist": (5, 3, 32, 32),
        "noise": (5, 3, 32, 32),
    }
    for kind in CORRUPTIONS:
        first, second = data.corrupted(kind, 5, 4), data.corrupted(kind, 5, 4)
        assert torch.equal(first[0], second[0])
        assert not torch.allclose(first[0], data.test[0][:4])


@pytest.mark.parametrize("wrong", ["plain.batch", "flow_channel.epochs", "samples", "shift_images"])
def test_zero_settings_are_refused(wrong):
    with pytest.raises(FlowBNNError) as caught:
        get_study("lenet-fashion").make_settings(quick=True, **{wrong: 0})
    assert caught.value.argument == wrong.rpartition(".")[2]


def test_invalid_run_keeps_stored_results(tmp_path, monkeypatch):
    study, settings = small("lenet-fashion")
    run(study, settings, tmp_path, only=["best-plain"])
    parts = sorted(tmp_path.glob("lenet-fashion/parts/*"))
    assert parts
    monkeypatch.setenv("FLOWBNN_DATA", str(tmp_path / "nowhere"))
    for changes in ({"plain.optimizer": "adagrad"}, {"plain.schedule": "steps"}, {"source": "files"}):
        with pytest.raises(FlowBNNError):
            run(study, study.make_settings(quick=True, **changes), tmp_path, only=["best-plain"])
        assert sorted(tmp_path.glob("lenet-fashion/parts/*")) == parts


def test_resuming_a_finished_run_reads_no_data(tmp_path, monkeypatch):
    study, settings = small("lenet-fashion")
    first = run(study, settings, tmp_path, only=["best-plain"])
    monkeypatch.setattr(type(study), "load_images", lambda *_, **__: pytest.fail("the data are read"))
    again = run(study, settings, tmp_path, only=["best-plain"], resume=True)
    assert again["rows"] == first["rows"]


def test_settings_are_addressed_by_group_and_glob():
    study = get_study("lenet-fashion")
    settings = study.make_settings(**{"flow_*.noise_lr": 1, "plain.optimizer": "sgd", "choose": True})
    assert settings.flow_channel.noise_lr == settings.flow_position.noise_lr == 1.0
    assert settings.gaussian_channel.noise_lr != 1.0
    assert settings.plain.optimizer == "sgd"
    for wrong in ({"flow_channel.noise_l": 1.0}, {"flw.noise_lr": 1.0}):
        with pytest.raises(FlowBNNError) as caught:
            study.make_settings(**wrong)
        assert caught.value.argument in ("noise_l", "flw.noise_lr")
    with pytest.raises(FlowBNNError) as caught:
        study.make_settings(choose=1)
    assert caught.value.argument == "choose"
    assert settings.xiong == study.make_settings().xiong


def test_six_views_are_evaluated_on_request(tmp_path):
    study, settings = small("lenet-cifar10", six_views=True, samples=6)
    results = run(study, settings, tmp_path, only=["best-plain", "best-flow-channel"])
    for row in results["rows"]:
        if not row.get("cited") and row["key"].startswith("best-"):
            assert 0 <= row["values"]["moved_accuracy"]["mean"] <= 1
            # the views differ from the two views, so the numbers differ
            assert row["values"]["moved_nll"]["mean"] != row["values"]["mirror_nll"]["mean"]
    assert "With six views: Accuracy" in results["answer"]
    for step, (translated, translated_and_mirrored) in ((1, VIEWS[1:3]), (-1, VIEWS[3:5])):
        images = torch.rand(2, 3, 8, 8)
        assert torch.equal(translated(images), Translate(step, step)(images))
        assert torch.equal(translated_and_mirrored(images), mirror(Translate(step, step)(images)))


def test_six_views_belong_to_the_best_recipe():
    with_them, without = ImageSettings(six_views=True), ImageSettings(six_views=False)
    for variant in ("xiong-flow-channel", "xiong-plain", "cost"):
        assert with_them.relevant(variant) == without.relevant(variant), "stored results stay valid"
        assert not with_them.evaluating(variant).six_views
    assert with_them.relevant("best-plain") != without.relevant("best-plain")
    assert with_them.evaluating("best-plain").six_views


@pytest.mark.parametrize(
    ("acceleration", "device", "words"),
    [
        ("auto", "cuda", "recorded as a CUDA graph, not compiled"),
        ("graph", "cuda", "recorded as a CUDA graph, not compiled"),
        ("compile", "cuda", "compiled and recorded"),
        ("off", "cuda", "executed one by one"),
        ("compile", "cpu", "executed one by one"),
    ],
)
def test_cost_describes_the_execution_of_steps(acceleration, device, words):
    assert words in training._describe_steps({"acceleration": acceleration}, torch.device(device))


def test_peak_memory_is_measured_on_one_batch(monkeypatch):
    """Memory that is allocated before a method's steps is not counted. The counters of torch are replaced."""
    counts = {"before": iter([10.0, 30.0]), "peak": iter([110.0, 180.0])}
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("peak"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(counts["before"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(counts["peak"]))
    study, settings = small("lenet-fashion")
    images = study.load_images(settings, "cpu")
    settings_of_method, trainings = training._cost_training(settings, "flow_channel"), []

    def train(name, training, loader):
        trainings.append((name, training.epochs, len(loader)))
        assert all(batch[0] is loader[0][0] for batch in loader)
        assert calls[-1] == "peak"  # the count begins before the steps

    assert training._peak_memory(train, "plain", settings_of_method, images) == 100.0
    assert training._peak_memory(train, "flow-channel", settings_of_method, images) == 150.0
    assert trainings == [("plain", 1, training.MEMORY_STEPS), ("flow-channel", 1, training.MEMORY_STEPS)]
    assert calls == ["cache", "peak"] * 2


def test_new_run_archives_finished_results(tmp_path, capsys):
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
    assert (folder / "earlier" / "best-plain-seed0.json").read_bytes() == first  # nothing new was archived
    collected = run(study, settings, tmp_path, collect=True, command="flowbnn run x --precision 32-true")
    assert collected["command"] == "flowbnn run x --precision 32-true"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"xiong.prior_scale": -1.0}, "prior_scale"),
        ({"start.weight_lr": -1.0}, "weight_lr"),
        ({"xiong.positions": -3}, "positions"),
        ({"xiong.dropout_rate": 2.0}, "dropout_rate"),
    ],
)
def test_invalid_settings_are_refused(changes, words):
    with pytest.raises(FlowBNNError) as caught:
        get_study("lenet-fashion").make_settings(quick=True, **changes)
    assert caught.value.argument == words


def test_invalid_precision_keeps_results_and_stored_start_is_reused(tmp_path, capsys):
    study, settings = small("lenet-fashion")
    run(study, settings, tmp_path, only=["xiong-plain", "xiong-flow-channel"])
    parts = tmp_path / "lenet-fashion" / "parts"
    stamps = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    with pytest.raises(FlowBNNError) as caught:
        run(study, settings, tmp_path, only=["xiong-*"], precision="foo")
    assert caught.value.argument == "precision"
    assert {path.name: path.stat().st_mtime_ns for path in parts.iterdir()} == stamps
    start = next((tmp_path / "lenet-fashion" / "checkpoints").glob("xiong-plain-seed0/*.safetensors"), None)
    run(study, settings, tmp_path, only=["xiong-flow-channel"])
    plain = "xiong-plain-seed0.json"
    archived = {path.name for path in (tmp_path / "lenet-fashion" / "earlier").iterdir()}
    if start is None:  # its network was deleted: it is trained again, and the old result is archived
        assert plain in archived
    else:
        assert (parts / plain).stat().st_mtime_ns == stamps[plain]
    assert "xiong-flow-channel-seed0.json" in archived


@pytest.mark.slow
def test_resnet18_is_compared_with_swag_and_an_ensemble(tmp_path, monkeypatch):
    def tiny(architecture, channels, width):
        return nn.Sequential(nn.AvgPool2d(8), ResidualBlock(channels, 4, 2), nn.Flatten(), nn.Linear(16, 10))

    monkeypatch.setattr(image_study, "make_network", tiny)
    monkeypatch.setattr(image_study, "BATCH_NORM_DRAWS", 2)
    study, settings = small("resnet18-cifar10", samples=2, shift_images=2)
    all_keys = [variant.key for variant in study.variants(settings)]
    only = ["long-joint-channel", "best-output-channel", "best-swag", "best-ensemble"]
    assert study.make_settings().corruptions == tuple(CORRUPTIONS)
    results = run(study, settings, tmp_path, only=[*only, "long-plain", "best-gaussian-channel"])
    rows = {row["key"]: row["values"] for row in results["rows"]}
    assert [key for key in rows if not key.startswith("cited")] == [
        key
        for key in all_keys
        if key not in ("best-mixture-channel", "best-joint-channel", "best-repeated-channel")
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
    assert all(document["content"]["shift"]["blur"]["nll"] for document in content.values())
    assert results["answer"].startswith("Best mean values: NLL")  # one seed decides no comparison
    two_seeds = SeedResults(
        [0, 1], {(key, seed): document["content"] for key, document in content.items() for seed in (0, 1)}
    )
    assert "SWAG versus Gaussian noise: " in study.findings(settings, two_seeds).answer
    assert not any("Xiong" in note for note in results["notes"])
    # SWAG depends on the training of the deterministic network, the noise does not
    changed = study.make_settings(quick=True, **{"plain.weight_decay": 0.5})
    assert changed.relevant("best-swag") != study.make_settings(quick=True).relevant("best-swag")
    assert changed.relevant("best-joint-channel") == study.make_settings(quick=True).relevant(
        "best-joint-channel"
    )
