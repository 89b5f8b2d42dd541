"""Rules: which layer gets which noise, and what is refused."""

import pytest
import torch
from torch import nn

from flowbnn.convert import describe, to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.noise import Dropout, FlowNoise, Layout, NormalAffine, NormalPlanar, register_layer
from flowbnn.transforms import Radial


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def labels(model) -> dict[str, str]:
    return {row.layer: row.noise for row in describe(model)}


def test_the_more_exact_rule_wins_wherever_it_stands():
    rules = {
        "2": NormalPlanar(3),
        lambda name, module: getattr(module, "out_features", 0) == 3: NormalPlanar(4),
        nn.Linear: NormalPlanar(5),
        "*": NormalAffine(),
    }
    expected = {"0": "NormalPlanar(length=5)", "2": "NormalPlanar(length=3)", "4": "NormalPlanar(length=4)"}
    assert labels(to_stochastic(mlp(), rules)) == expected
    assert labels(to_stochastic(mlp(), dict(reversed(rules.items())))) == expected


def test_of_equal_rules_the_later_wins_and_none_leaves_plain():
    network = nn.ModuleDict({"block1": nn.Linear(2, 2), "block2": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    found = labels(
        to_stochastic(
            network, {"*": NormalAffine(), "b*": NormalPlanar(1), "bl*": NormalPlanar(3), "head": None}
        )
    )
    assert found == {"block1": "NormalPlanar(length=1)".replace("1", "3"), "block2": "NormalPlanar(length=3)"}
    found = labels(to_stochastic(network, {nn.Module: NormalAffine(), nn.Linear: NormalPlanar(1)}))
    assert set(found.values()) == {"NormalPlanar(length=1)"}


def test_the_table_counts():
    table = describe(to_stochastic(mlp(), {"0": NormalPlanar(2), "4": NormalAffine()}))
    assert [(row.layer, row.kind, row.dim, row.parameters) for row in table] == [
        ("0", "Linear", 4, 2 * 4 + 2 * 9),
        ("4", "Linear", 8, 16),
    ]
    assert "NormalAffine()" in str(table)
    assert str(table).splitlines()[-1].strip() == "42"


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ({"fc1": NormalAffine()}, "rule 'fc1' matches no layer; there are '0', '2', '4'"),
        ({"22": NormalAffine()}, "did you mean '2'"),
        ({"x*": NormalAffine()}, "rule 'x*' matches no layer"),
        ({nn.Conv2d: NormalAffine()}, "rule Conv2d matches none of the 3 layers"),
        ({"1": NormalAffine()}, "'1' is a ReLU, which cannot carry noise"),
        ({"*": None}, "leave every layer plain"),
        ({"*": NormalAffine}, r"write NormalAffine\(\) with its brackets"),
        ({"*": "planar"}, "must hold a Recipe or None .*got 'planar'"),
        ({}, "leave every layer plain"),
        (
            lambda: {"*": NormalAffine(prior_scale=0.0)},
            r"prior_scale=...\) must be a number above 0, got 0.0",
        ),
        (NormalAffine(), "must be a dictionary"),
        ({"*": FlowNoise(Radial(4))}, "FlowNoise needs a function of the dimension"),
        (
            {"*": FlowNoise(lambda dim: nn.Linear(dim, dim))},
            "that gives a flowbnn transform, .* not a Linear",
        ),
        (lambda: {"*": NormalPlanar(1.5)}, "an integer from 0 to 10000, got 1.5"),
        (lambda: {"*": NormalPlanar(-1)}, "an integer from 0 to 10000, got -1"),
        (
            lambda: {"*": NormalAffine(site="pixel")},
            "must be 'channel' or 'position' .*side='output'.*, got 'pixel'",
        ),
        (lambda: {"*": Dropout(1.0)}, "a number of at least 0 and below 1, got 1.0"),
        ({"*": FlowNoise()}, "FlowNoise needs a function of the dimension"),
    ],
)
def test_bad_rules_are_refused_in_one_line(rules, line):
    with pytest.raises(FlowBNNError, match=line.replace("x*", r"x\*")) as error:
        to_stochastic(mlp(), rules() if callable(rules) else rules)
    assert "\n" not in str(error.value)


def test_other_refusals():
    with pytest.raises(FlowBNNError, match="no layer that can carry noise"):
        to_stochastic(nn.Sequential(nn.ReLU()), {"*": NormalAffine()})
    with pytest.raises(FlowBNNError, match="noise already"):
        to_stochastic(to_stochastic(mlp(), {"*": NormalAffine()}), {"*": NormalAffine()})
    with pytest.raises(FlowBNNError) as caught:
        describe(mlp())
    assert caught.value.kind == "network"
    with pytest.raises(FlowBNNError, match="model=.*must be a Module"):
        to_stochastic("net", {"*": NormalAffine()})
    with pytest.raises(FlowBNNError, match="put the noise on '0'"):
        to_stochastic(nn.Sequential(nn.MultiheadAttention(4, 2)), {"0.out_proj": NormalAffine()})
    with pytest.raises(FlowBNNError, match=r"its layers are '0\.\*'"):
        to_stochastic(nn.Sequential(mlp()), {"0": NormalAffine()})
    with pytest.raises(FlowBNNError, match="no input width yet"):
        to_stochastic(nn.LazyLinear(3), {"*": NormalAffine()})


def test_a_network_that_cannot_be_copied_is_wrapped_in_place():
    network = mlp()
    network.cache = network[0].weight * 2  # a tensor with a history, which deepcopy refuses
    with pytest.raises(FlowBNNError, match="inplace=True"):
        to_stochastic(network, {"*": NormalAffine()})
    assert to_stochastic(network, {"*": NormalAffine()}, inplace=True) is network


def test_a_layer_of_ones_own():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight

    register_layer(Scale, lambda module: Layout(len(module.weight)))
    bayesian = to_stochastic(nn.Sequential(Scale()), {Scale: FlowNoise(Radial)})
    assert bayesian(torch.ones(3, 4)).std() > 0
