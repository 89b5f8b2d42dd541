"""Tests of schedules, optimizers and noise of the studies on images."""

import pytest
from torch import nn

from flowbnn import to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers
from flowbnn_studies.images.settings import Training, image_variants, make_network, rules_for
from flowbnn_studies.images.training import make_optimizer, make_schedule


@pytest.mark.parametrize(
    ("architecture", "flows"),
    [
        ("lenet", {"conv2": "NormalInvConv", "fc1": "NormalPlanar"}),
        (
            "vgg16",
            {
                "conv4": "NormalInvConv",
                "conv8": "NormalInvConv",
                "conv11": "NormalInvConv",
                "fc2": "NormalPlanar",
            },
        ),
    ],
)
def test_flows_are_at_the_layers_of_the_report(architecture, flows):
    network = make_network(architecture, 3, width=0.0625)
    rules = rules_for(architecture, "xiong-flow-position", Training(prior_scale=0.3, positions=7))
    model = to_stochastic(network, rules)
    layers = noise_layers(model)
    assert len(layers) == {"lenet": 5, "vgg16": 16}[architecture]
    for name, layer in layers.items():
        assert type(layer.recipe).__name__ == flows.get(name, "NormalAffine")
        assert layer.site == "position"
        assert layer.recipe.prior_scale == 0.3
        assert layer.recipe.positions == 7


def test_rules_of_dropout_mixture_and_deterministic_network():
    model = to_stochastic(
        make_network("lenet", 1), rules_for("lenet", "best-dropout", Training(dropout_rate=0.3))
    )
    assert list(noise_layers(model)) == ["fc1", "fc2", "fc3"]
    mixture = rules_for("lenet", "best-mixture-channel", Training(components=3))
    assert mixture["*"].components == 3
    assert rules_for("lenet", "xiong-longer", Training()) == {}


def test_variants_follow_those_they_start_from():
    variants = image_variants("LeNet", (3, 5))
    keys = [variant.key for variant in variants]
    assert len(set(keys)) == len(keys) == 18
    assert [variant.seeds for variant in variants].count(5) == 8
    for place, variant in enumerate(variants):
        assert variant.start_from is None or variant.start_from in keys[:place]


def test_learning_rates_follow_the_schedule():
    layer = nn.Linear(1, 1)
    training = Training(optimizer="sgd", schedule="linear", lr_warmup=0.25)
    optimizer = make_optimizer(training)([{"params": list(layer.parameters()), "lr": 2.0}])
    schedule = make_schedule(training)(optimizer, 7)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    # at eighths 1 to 7 of the run: linear warmup over a quarter, then linear decay
    assert rates == pytest.approx([2.0 * f for f in (0.5, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)])
    assert make_schedule(Training()) is None
    for wrong in (
        {"schedule": "cosin"},
        {"lr_warmup": 1.0},
        {"lr_warmup": -0.1},
        {"optimizer": "admw"},
    ):
        with pytest.raises(FlowBNNError) as caught:
            Training(**wrong)
        assert caught.value.argument in wrong
