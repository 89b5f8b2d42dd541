"""Tests of the selection of random weights and of their gradient estimators."""

import math

import pytest
import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.methods.variational.multiplicative_layers import layer_specs
from flowbnn.methods.variational.weight_selection import initial_scales, select_estimators, select_weights


def test_auto_uses_local_reparameterization_only_where_it_is_exact():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Flatten(),
        nn.Linear(18, 6),
        nn.Unflatten(1, (2, 3)),
        nn.Linear(3, 3),
        nn.Flatten(),
        nn.Linear(6, 2),
    )
    choice = select_estimators(network, select_weights(network, None), "auto", torch.zeros(4, 1, 5, 5))
    # neither the convolution nor the linear layer with several positions
    assert choice.layers == {"2": "local", "6": "local"}


def test_auto_does_not_use_local_reparameterization_for_repeated_layers():
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    network = nn.Sequential(block, block, nn.Linear(3, 2))
    choice = select_estimators(network, select_weights(network, None), "auto", torch.zeros(4, 3))
    assert choice.layers == {"2": "local"}


class Centered(nn.Module):
    """Network whose outputs depend on the other examples of the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden - hidden.mean(0))


def test_one_draw_serves_examples_that_interact():
    network, inputs = Centered(), torch.randn(4, 3)
    names = select_weights(network, None)
    assert select_estimators(network, names, "auto", inputs).layers == {}
    with pytest.raises(FlowBNNError) as error:
        select_estimators(network, names, "local", inputs)
    assert (error.value.kind, error.value.argument) == ("layer", "estimator")
    assert {spec.estimator for spec in layer_specs(network, ["first", "second"], inputs)} == {
        "reparameterization"
    }
    assert {spec.estimator for spec in layer_specs(network, ["first", "second"], inputs[:1])} == {"local"}


def test_initial_scales_follow_the_size_of_the_weights():
    mean = {"a": torch.full((4,), 2.0), "b": torch.zeros(4)}
    scales = initial_scales(mean, 0.1, 1.0)
    assert scales["a"].tolist() == pytest.approx([0.2] * 4)
    assert scales["b"].tolist() == pytest.approx([0.1 * math.sqrt(2.0)] * 4)
    assert initial_scales({"b": torch.zeros(2)}, 0.1, 3.0)["b"].tolist() == pytest.approx([0.3, 0.3])
