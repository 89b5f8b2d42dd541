"""The study of calibrated networks, on images that are generated."""

import pytest
import torch
from torch import nn

from flowbnn_studies import calibrate as study
from flowbnn_studies import get_study
from flowbnn_studies.data.images import ImageSet
from flowbnn_studies.runner.job import Job


def generated(name: str, split: str = "train") -> ImageSet:
    source = torch.Generator().manual_seed(len(split))
    labels = torch.arange(160) % 10
    images = torch.randint(0, 60, (160, 1, 28, 28), generator=source, dtype=torch.uint8)
    images[torch.arange(160), 0, labels, labels] += 150
    return ImageSet(images, labels, tuple("0123456789"), name, split, (0.2,), (0.3,))


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # a network of one epoch is under-confident
def test_the_study_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study, "load_images", generated)
    monkeypatch.setattr(
        study, "LeNet", lambda channels: nn.Sequential(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(16, 10))
    )
    one = get_study("calibrate")
    changes = {"train": (40, 40), "held_out": (30, 0), "epochs": (1, 1), "samples": 2}
    settings = one.make_settings(quick=True, **changes)
    content = {}
    for case in settings.cases():
        job = Job("calibrate", case, 0, settings, tmp_path)
        content[case, 0] = one.train(job)
    findings = one.findings(settings, study.Parts([0], content))
    rows = {row["key"]: row["values"] for row in findings.rows}
    assert set(rows) == set(study.ROWS)
    assert set(rows["joint"]) == {f"{name}_{case}" for name in study.NUMBERS for case in ("40-30", "40-same")}
    assert "nll_40-same" not in rows["all"]
    assert "40 + 30 images" in findings.answer
    assert "memorised" in findings.answer
