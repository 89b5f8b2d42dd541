"""The study of calibrated networks, on pictures that are generated."""

import pytest
import torch
from torch import nn

from flowbnn.calibrate.flow import fit_flow
from flowbnn.results import Parts
from flowbnn_studies import calibrate as study
from flowbnn_studies import get_study
from flowbnn_studies.images import evaluation
from flowbnn_studies.runner.job import Job


def tiny(channels: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(16, 10))


def table(name: str, split: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(split)
    inputs = torch.randn(60, 3, generator=source)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1, generator=source)
    return inputs[:40], targets[:40], inputs[40:], targets[40:]


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # a network of one epoch is under-confident
def test_the_study_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study, "LeNet", tiny)
    monkeypatch.setattr(study, "load_uci", table)
    monkeypatch.setattr(evaluation, "STRENGTHS", (1,))
    monkeypatch.setitem(fit_flow.__kwdefaults__, "steps", 1)
    one = get_study("calibrate")
    fits = ("factorized", "joint", "flow-joint")
    changes = {"tables": ("energy",), "table_epochs": 3, "fits": fits, "flow_rows": 20}
    settings = one.make_settings(quick=True, **changes)
    content = {}
    for variant in one.variants(settings):
        job = Job("calibrate", variant.key, 0, settings, tmp_path)
        content[variant.key, 0] = one.train(job)
    findings = one.findings(settings, Parts([0], content))
    rows = {row["key"]: row["values"] for row in findings.rows}
    assert set(rows) == {"plain", "temperature", "vector", "laplace", *fits, "all"}
    images = {f"{name}_{case}" for name in (*study.NUMBERS, *study.BEYOND) for case in ("80-60", "80-same")}
    assert set(rows["flow-joint"]) == {
        f"{name}_energy" for name in study.TABLE
    }  # the pictures are too many for it
    assert set(rows["joint"]) == images | {f"{name}_energy" for name in study.TABLE}
    assert "nll_80-same" not in rows["all"]
    assert "nll_energy" not in rows["vector"]
    assert "temperature scaling, 1 seed: undecided with one seed on 80 + 60 (" in findings.answer
    assert "memorised" in findings.answer
    assert "energy (" in findings.answer
