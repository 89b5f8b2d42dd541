"""Tests of the layers that get noise in a calibration."""

import warnings

import pytest
import torch

from flowbnn.calibrate.problem import CalibrationProblem, read_held_out
from flowbnn.errors import FlowBNNError
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
