"""Tests of the study of calibrated networks on CIFAR-10 with generated images."""

import json

import pytest
from torch import nn

from flowbnn.compare.results import SeedResults
from flowbnn_studies import get_study, run_study
from flowbnn_studies.posteriors import calibrate_cifar10 as study


def tiny(architecture, channels, width):
    """Returns a small network with BatchNorm and a residual connection."""
    from flowbnn.models import ResidualBlock

    return nn.Sequential(nn.AvgPool2d(8), ResidualBlock(channels, 4, 2), nn.Flatten(), nn.Linear(16, 10))


@pytest.mark.slow
@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # networks of one epoch are under-confident
def test_study_runs_in_parts_and_reuses_results(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "make_network", tiny)
    cifar10_study = get_study("calibrate-cifar10")
    settings = cifar10_study.make_settings(quick=True)
    options = {"settings": settings, "seeds": 1, "out": tmp_path, "progress": False, "accelerator": "cpu"}
    first = run_study(cifar10_study, only=["vgg16"], **options)
    rows = {row["key"]: row["values"] for row in first["rows"]}
    assert set(rows) == {
        "plain",
        "temperature",
        "svs",
        "sms",
        "refit",
        "laplace",
        "factorized",
        "joint",
        "chosen",
    }
    names = set(study.NUMBERS) | set(study.MORE)
    assert set(rows["joint"]) == {f"{name}_vgg16" for name in names}
    assert set(rows["plain"]) == {
        f"{name}_vgg16" for name in names if name != "elbo" and not name.startswith("mi_")
    }
    assert first["answer"].startswith("VGG16, 1 seed: the NLL is")
    entry = tmp_path / "calibrate-cifar10" / "parts" / "vgg16-seed0.json"
    stamp = entry.stat().st_mtime_ns
    combined = run_study(cifar10_study, only=["vgg16", "vgg16-all"], resume=True, **options)
    assert entry.stat().st_mtime_ns == stamp
    assert "nll_vgg16" in next(row["values"] for row in combined["rows"] if row["key"] == "all")
    assert json.loads(entry.read_text())["content"]["table"]["joint"]["passes"] > 8
    # another training of the other network keeps this part valid
    changed_settings = cifar10_study.make_settings(quick=True, **{"resnet18.epochs": 2})
    run_study(cifar10_study, only=["vgg16"], resume=True, **{**options, "settings": changed_settings})
    assert entry.stat().st_mtime_ns == stamp


def without_factorized(parts):
    tables = {
        key: {name: row for name, row in entry["table"].items() if name != "factorized"}
        for key, entry in parts.content.items()
    }
    return SeedResults(
        parts.seeds, {key: {**entry, "table": tables[key]} for key, entry in parts.content.items()}
    )


def test_elbo_chooses_for_every_seed():
    def entry(factorized, joint):
        table = {
            key: {"elbo": elbo, "nll": nll, "ece": 0.01, "seconds": 2.0}
            for key, (elbo, nll) in (
                ("factorized", factorized),
                ("joint", joint),
                ("joint-fixed", (-0.1, 0.1)),
            )
        }
        others = {key: {"nll": 0.5, "ece": 0.02, "seconds": 0.0} for key in ("plain", "temperature", "svs")}
        return {"values": {}, "table": others | table, "minutes": 1.0}

    parts = SeedResults(
        [0, 1],
        {
            ("vgg16", 0): entry((-0.3, 0.4), (-0.2, 0.3)),
            ("vgg16", 1): entry((-0.2, 0.35), (-0.3, 0.2)),
            **{("vgg16-all", seed): {"values": {}, "table": {"all": {"nll": 0.2}}} for seed in (0, 1)},
        },
    )
    by_row = study.network_parts_by_row(parts)
    assert by_row.values("chosen", "nll_vgg16") == [0.3, 0.35]
    assert by_row.values("chosen", "seconds_vgg16") == [4.0, 4.0]
    assert "factorized" not in study.answer(study.network_parts_by_row(without_factorized(parts)))
    text = study.answer(by_row)
    assert "0.3250 with the noise that the ELBO chooses" in text
    assert "misses 0.008" in text
    difference = "difference of the noise: +0.1250 (95 % CI -0.1927 to +0.4427)."
    assert f"The tempered network on all images has 0.2000; {difference}" in text
