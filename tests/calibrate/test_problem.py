"""Tests of the layers that get noise in a calibration."""

import sys
import warnings

import pytest
import torch
from torch import nn

from flowbnn.calibrate.problem import CalibrationProblem, read_held_out
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Gaussian
from flowbnn.noise import NormalAffine, noise_layers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import BertConfig, BertForSequenceClassification


@pytest.fixture
def bert():
    """Transformer whose embedding of positions has the same input for all examples."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=11, max_position_embeddings=6, **sizes))


def sentences(count=12):
    return torch.arange(4 * count).view(count, 4) % 11, torch.arange(count) % 2


def test_embeddings_of_positions_stay_plain(bert):
    problem = CalibrationProblem(read_held_out(bert, sentences(), "auto", "cpu", 0))
    layers = noise_layers(problem.network)
    assert {"bert.embeddings.word_embeddings", "bert.pooler.dense", "classifier"} <= set(layers)
    assert "bert.embeddings.position_embeddings" not in layers


def test_layer_without_batch_axis_is_named(bert):
    layer = "bert.embeddings.position_embeddings"
    data = read_held_out(bert, sentences(), "auto", "cpu", 0)
    rules = {"*": NormalAffine(), layer: NormalAffine(batch_axis="none")}
    with pytest.raises(FlowBNNError) as caught:
        CalibrationProblem(data, rules)
    assert (caught.value.kind, caught.value.argument, caught.value.layer) == ("rules", "rules", layer)


def test_the_noise_of_a_regression_does_not_start_at_the_temperature(monkeypatch):
    """It scales the observation noise, which is a tenth of the residuals here."""
    calls = []
    monkeypatch.setattr(
        sys.modules[CalibrationProblem.__module__],
        "fit_gaussian",
        lambda *args, **kwargs: calls.append(kwargs["temperature"]),
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 1, generator=generator)
    targets = inputs + torch.randn(40, 1, generator=generator)
    rows = torch.arange(40)
    for likelihood, labels in ((Gaussian(0.1), targets), ("auto", targets[:, 0].gt(0).long())):
        torch.manual_seed(0)
        data = read_held_out(
            nn.Linear(1, 1 if likelihood != "auto" else 2), (inputs, labels), likelihood, "cpu", 0
        )
        assert data.fit_temperature(rows).temperature != pytest.approx(1.0, abs=0.1)
        CalibrationProblem(data).fit_gaussian(rows, "fixed")
        calls.append(data.fit_temperature(rows).temperature)
    assert calls[0] == 1.0
    assert calls[2] == calls[3]
