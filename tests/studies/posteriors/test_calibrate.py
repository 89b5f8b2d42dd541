"""Tests of the study of calibrated networks on generated images."""

import pytest
import torch
from torch import nn

from flowbnn.calibrate.flow import fit_flow
from flowbnn.compare.results import SeedResults
from flowbnn_studies import get_study
from flowbnn_studies.images import evaluation
from flowbnn_studies.posteriors import calibrate as study
from flowbnn_studies.runner.study import Job


def tiny(channels: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(16, 10))


def table(name: str, split: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(split)
    inputs = torch.randn(60, 3, generator=source)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1, generator=source)
    return inputs[:40], targets[:40], inputs[40:], targets[40:]


@pytest.mark.slow
@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # a network of one epoch is under-confident
def test_study_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study, "LeNet", tiny)
    monkeypatch.setattr(study, "load_uci", table)
    monkeypatch.setattr(evaluation, "STRENGTHS", (1,))
    monkeypatch.setitem(fit_flow.__kwdefaults__, "steps", 1)
    calibrate_study = get_study("calibrate")
    fits = ("factorized", "joint", "flow-joint")
    changes = {"tables": ("energy",), "table_epochs": 3, "fits": fits, "flow_rows": 20}
    settings = calibrate_study.make_settings(quick=True, **changes)
    content = {}
    for variant in calibrate_study.variants(settings):
        job = Job("calibrate", variant.key, 0, settings, tmp_path)
        content[variant.key, 0] = calibrate_study.train(job)
    findings = calibrate_study.findings(settings, SeedResults([0], content))
    rows = {row["key"]: row["values"] for row in findings.rows}
    assert set(rows) == {"plain", "temperature", "svs", "sms", "refit", "laplace", *fits, "all"}
    images = {f"{name}_{case}" for name in (*study.NUMBERS, *study.SHIFTED) for case in ("80-60", "80-same")}
    assert set(rows["flow-joint"]) == {
        f"{name}_energy" for name in study.TABLE
    }  # there are too many images for flows
    assert set(rows["joint"]) == images | {f"{name}_energy" for name in study.TABLE}
    assert "nll_80-same" not in rows["all"]
    assert "nll_energy" not in rows["svs"]
    assert "temperature scaling, 1 seed: undecided with one seed on 80 + 60 (" in findings.answer
    assert "memorized" in findings.answer
    assert "energy (" in findings.answer


def test_joint_noise_is_compared_with_rivals() -> None:
    calibrate_study = get_study("calibrate")
    rows = {"joint": (0.5, 0.6), "temperature": (0.6, 0.8), "all": (0.4, 0.6)}
    content = {
        ("1000", seed): {"values": {}, "table": {"1000-100": {key: {"nll": row[seed]} for key, row in rows.items()}}}
        for seed in (0, 1)
    }  # fmt: skip
    findings = calibrate_study.findings(calibrate_study.make_settings(), SeedResults([0, 1], content))
    entries = {(entry["title"], entry["metric"]): entry for entry in findings.comparisons}
    assert [title for title, _ in entries] == [
        "joint noise − temperature scaling",
        "joint noise − a deterministic network on all data",
    ]
    first = entries["joint noise − temperature scaling", "nll_1000-100"]
    # differences -0.1 and -0.2: mean -0.15, and t quantile 12.706 (one degree of freedom) times 0.05
    assert first["mean"] == pytest.approx(-0.15)
    assert first["high"] == pytest.approx(-0.15 + 12.7062 * 0.05, rel=1e-4)
    assert "a deterministic network on all data, 2 seeds: not significant on 1,000 + 100" in findings.answer
