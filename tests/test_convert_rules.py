"""Tests of the rules of a conversion."""

from threading import Lock

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
    ("rules", "argument"),
    [
        ({"fc": NormalAffine()}, "rules"),
        ({"x*": NormalAffine()}, "rules"),
        ({nn.Conv2d: NormalAffine()}, "rules"),
        ({"1": NormalAffine()}, "rules"),
        ({"*": None}, "rules"),
        ({"*": NormalAffine}, "rules"),
        ({"*": "planar"}, "rules"),
        ({}, "rules"),
        (NormalAffine(), "rules"),
        (lambda: {"*": NormalAffine(prior_scale=0.0)}, "prior_scale"),
        ({"*": FlowNoise(Radial(4))}, "factory"),
        ({"*": FlowNoise(lambda dim: nn.Linear(dim, dim))}, "factory"),
        ({"*": FlowNoise()}, "factory"),
        (lambda: {"*": NormalPlanar(1.5)}, "length"),
        (lambda: {"*": NormalPlanar(-1)}, "length"),
        (lambda: {"*": NormalAffine(site="pixel")}, "site"),
        (lambda: {"*": Dropout(1.0)}, "rate"),
    ],
)
def test_bad_rules_are_refused(rules, argument):
    with pytest.raises(FlowBNNError) as caught:
        to_stochastic(mlp(), rules() if callable(rules) else rules)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "suggestion"), [({"fc": NormalAffine()}, "'0'"), ({"*": NormalAffine}, "NormalAffine()")]
)
def test_messages_suggest_what_to_write(rules, suggestion):
    with pytest.raises(FlowBNNError) as caught:
        to_stochastic(mlp(), rules)
    assert suggestion in str(caught.value)


@pytest.mark.parametrize(
    ("convert", "kind", "argument"),
    [
        (lambda: to_stochastic(nn.Sequential(nn.ReLU()), {"*": NormalAffine()}), "model", "model"),
        (
            lambda: to_stochastic(to_stochastic(mlp(), {"*": NormalAffine()}), {"*": NormalAffine()}),
            "model",
            None,
        ),
        (lambda: describe(mlp()), "network", None),
        (lambda: to_stochastic("net", {"*": NormalAffine()}), "value", "model"),
        (
            lambda: to_stochastic(nn.Sequential(nn.MultiheadAttention(4, 2)), {"0.out_proj": NormalAffine()}),
            "rules",
            "rules",
        ),
        (lambda: to_stochastic(nn.Sequential(mlp()), {"0": NormalAffine()}), "rules", "rules"),
    ],
)
def test_other_refusals(convert, kind, argument):
    with pytest.raises(FlowBNNError) as caught:
        convert()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)


def test_lazy_layers_are_refused():
    with pytest.raises(FlowBNNError) as caught:
        to_stochastic(nn.LazyLinear(3), {"*": NormalAffine()})
    assert caught.value.kind in ("layer", "network")


def test_a_network_that_cannot_be_copied_is_wrapped_in_place():
    network = mlp()
    network.lock = Lock()  # which deepcopy refuses
    with pytest.raises(FlowBNNError) as caught:
        to_stochastic(network, {"*": NormalAffine()})
    assert (caught.value.kind, caught.value.argument) == ("network", "network")
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


class RawWeights(nn.Module):
    """Module whose weights belong to no layer, beside one layer."""

    def __init__(self, layer=True):
        super().__init__()
        self.token = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2) if layer else nn.Identity()

    def forward(self, x):
        return self.head(x * self.token)


@pytest.mark.parametrize(("rule", "suggestion"), [("token", "'head'"), ("head.weight", "'head'")])
def test_rule_of_a_parameter_is_explained(rule, suggestion):
    with pytest.raises(FlowBNNError) as caught:
        to_stochastic(RawWeights(), {rule: NormalAffine()})
    assert (caught.value.kind, caught.value.argument) == ("rules", "rules")
    assert "(Parameter)" in str(caught.value)
    assert suggestion in str(caught.value)


def test_network_of_raw_parameters_is_refused():
    with pytest.raises(FlowBNNError) as caught:
        to_stochastic(RawWeights(layer=False), {"*": NormalAffine()})
    assert (caught.value.kind, caught.value.argument) == ("model", "model")
    assert caught.value.fields["layers"] == [""]
    assert "'token'" in str(caught.value)
