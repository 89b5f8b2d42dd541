"""Tests of the conversion to stochastic networks and back."""

import copy
import warnings

import pytest
import torch
from torch import nn

from conversion_networks import NETWORKS, Case, ScaledLinear
from flowbnn.convert import to_deterministic, to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.noise import (
    NormalAffine,
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    freeze,
    noise_layers,
    noise_mode,
    noise_parameters,
    parameter_groups,
    unfreeze,
    weight_parameters,
)
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.contexts import NoiseContext, NoiseMode


@pytest.fixture(params=NETWORKS, ids=lambda case: case.name)
def case(request) -> Case:
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=[NormalAffine(), NormalPlanar(2), NormalInvConv()], ids=str)
def recipe(request):
    return request.param


def convert(case: Case, recipe):
    network = case.network().eval()
    return network, to_stochastic(network, {"*": recipe})


def test_noise_at_one_is_the_original(case, recipe):
    network, bayesian = convert(case, recipe)
    with noise_mode(bayesian, "off"):
        for mode in (False, True):
            torch.manual_seed(1)
            expected = case.output(network.train(mode)(*case.inputs()))
            torch.manual_seed(1)
            found = case.output(bayesian.train(mode)(*case.inputs()))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_noise_is_active_in_eval_mode_without_gradients(case):
    """torch's fused attention and transformer paths must not bypass the layers."""
    network, bayesian = convert(case, NormalAffine())
    with torch.no_grad():
        plain, noisy = case.output(network(*case.inputs())), case.output(bayesian(*case.inputs()))
    assert (plain - noisy).abs().max() > 1e-3


def test_every_layer_reaches_the_output(case):
    """Each layer's noise alone changes the result: nothing is wrapped and then passed by."""
    network, bayesian = convert(case, NormalAffine())
    plain = case.output(network(*case.inputs()))
    for layer in noise_layers(bayesian).values():
        with NoiseContext({**make_noise_modes(bayesian, "off"), layer.key: NoiseMode("sample")}):
            assert (case.output(bayesian(*case.inputs())) - plain).abs().max() > 1e-5


@pytest.mark.parametrize("site", ["channel", "position"])
def test_different_draws_for_different_examples(case, site):
    _, bayesian = convert(case, NormalAffine(site=site))
    same = case.same_examples()
    rows = case.output(bayesian(*same)).movedim(case.batch_axis, 0)
    assert (rows[0] - rows[1]).abs().max() > 1e-4
    with noise_mode(bayesian, "mean"):
        rows = case.output(bayesian(*same)).movedim(case.batch_axis, 0)
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-5)


def test_gradients_reach_the_noise(case, recipe):
    _, bayesian = convert(case, recipe)
    case.output(bayesian.train()(*case.inputs())).square().sum().backward()
    for name, layer in noise_layers(bayesian).items():
        for parameter_name, parameter in layer.named_parameters():
            assert parameter.grad is not None, f"{name}: {parameter_name}"
        total = sum(p.grad.abs().sum() for p in layer.parameters())
        assert torch.isfinite(total), name
        assert total > 0, name


def test_to_deterministic_restores_the_plain_network(case):
    network, bayesian = convert(case, NormalPlanar(2))
    plain = to_deterministic(bayesian)
    assert list(plain.state_dict()) == list(network.state_dict())
    assert [type(m) for m in plain.modules()] == [type(m) for m in network.modules()]
    torch.testing.assert_close(
        case.output(plain.eval()(*case.inputs())), case.output(network.eval()(*case.inputs())), rtol=0, atol=0
    )
    assert noise_layers(bayesian), "the stochastic network is left as it was"


def test_state_dict_round_trips(case):
    _, bayesian = convert(case, NormalPlanar(2))
    other = to_stochastic(case.network().eval(), {"*": NormalPlanar(2)})
    other.load_state_dict(bayesian.state_dict())
    with noise_mode(bayesian, "shared", seed=3), noise_mode(other, "shared", seed=3):
        found, expected = (case.output(model.eval()(*case.inputs())) for model in (other, bayesian))
    torch.testing.assert_close(found, expected)


def test_deepcopy_copies_the_noise(case):
    _, bayesian = convert(case, NormalAffine())
    duplicate = copy.deepcopy(bayesian)
    with torch.no_grad():
        for parameter in noise_parameters(bayesian):
            parameter.fill_(float("nan"))
    assert torch.isfinite(case.output(duplicate(*case.inputs()))).all()
    assert torch.isnan(case.output(bayesian(*case.inputs()))).any()


def test_the_original_is_unchanged(case):
    network = case.network().eval()
    before = copy.deepcopy(network.state_dict())
    to_stochastic(network, {"*": NormalAffine()})
    assert list(network.state_dict()) == list(before)
    assert not noise_layers(network)


MADE_OF_OTHERS = (  # what is traced of them is traced in other networks too
    "non-square-kernel",
    "depthwise",
    "padding-same",
    "padding-reflect",
    "one-feature",
    "conv1d",
    "transformer-encoder-layer-sequence-first",
    "transformer-encoder",
    "embedding",
    "linear-subclass",
    "residual",
)
COMPILED = [case for case in NETWORKS if case.compiles and case.name not in MADE_OF_OTHERS]


# dynamo's own look at the hook's product, where the root is noisy
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    "cases",
    [pytest.param(COMPILED[i::3], marks=pytest.mark.slow if i else ()) for i in range(3)],
    ids=lambda cases: cases[0].name,
)
def test_compiles_without_a_graph_break(cases):
    """Several networks in one graph, since a start of the compiler takes as long as a network."""
    torch._dynamo.reset()
    given = [(*convert(case, NormalAffine(base_scale=1e-4)), case.inputs()) for case in cases]
    outputs = torch.compile(
        lambda: [bayesian(*inputs) for _, bayesian, inputs in given], fullgraph=True, backend="eager"
    )()
    for case, (network, _, inputs), output in zip(cases, given, outputs, strict=True):
        expected = case.output(network(*inputs))
        apart = (case.output(output) - expected).abs().max() / expected.abs().max()
        assert 1e-6 < apart < 2e-3, f"noise of 1e-4, on what the network {case.name} computes"


# --- the converted network is still what it was -------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def test_weights_read_and_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    bayesian = to_stochastic(Tied(), {"*": NormalAffine()})
    assert bayesian.head.weight is bayesian.embedding.weight
    assert len(weight_parameters(bayesian)) == 1
    bayesian(torch.arange(4)).sum().backward()
    assert bayesian.embedding.weight.grad is not None


def test_hooks_of_users_are_called():
    seen = []
    network = mlp()
    network[2].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    network[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    bayesian = to_stochastic(network, {"*": NormalAffine()})
    bayesian(torch.ones(5, 4))
    assert seen == [(5, 8), (5, 8)]


def test_a_shared_module_has_one_noise_under_both_names():
    layer = nn.Linear(4, 4)
    network = nn.Sequential(layer, nn.ReLU(), layer)
    bayesian = to_stochastic(network, {"2": NormalPlanar(1)})
    assert bayesian[0] is bayesian[2]
    assert len(noise_layers(bayesian)) == 1


def test_absorbing_the_mean_gives_the_mean_network():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2),
        nn.Flatten(),
        nn.Linear(4 * 49, 3),
    )
    bayesian = to_stochastic(network, {"*": NormalAffine()})
    with torch.no_grad():
        for parameter in noise_parameters(bayesian):
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 4, 8, 8)
    with noise_mode(bayesian, "mean"):
        expected = bayesian(x)
    torch.testing.assert_close(to_deterministic(bayesian, absorb=True)(x), expected, rtol=1e-5, atol=1e-6)


def test_tied_weights_do_not_absorb_means():
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    network[2].weight = network[0].weight
    plain = to_deterministic(to_stochastic(network, {"*": NormalAffine()}), absorb=True)
    assert plain[2].weight is plain[0].weight
    assert torch.equal(plain[0].weight, network[0].weight)


def test_to_deterministic_of_a_converted_submodule():
    outer = nn.Sequential(to_stochastic(mlp(), {"*": NormalAffine()}), nn.Linear(3, 2))
    plain = to_deterministic(outer)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())
    before = torch.get_rng_state()
    plain(torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_padded_transformer_is_the_original_where_it_is_not_padded():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    bayesian = to_stochastic(encoder, {"*": NormalAffine()})
    x, mask = (
        torch.randn(3, 5, 8),
        torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]]),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        expected = encoder(x, src_key_padding_mask=mask)
        with noise_mode(bayesian, "off"):
            found = bayesian(x, src_key_padding_mask=mask)
        noisy = bayesian(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[~mask], expected[~mask], rtol=0, atol=1e-6)
    assert (noisy[~mask] - expected[~mask]).abs().max() > 1e-3
    assert to_deterministic(bayesian).use_nested_tensor


def test_float64_and_half_networks():
    x = torch.randn(3, 4)
    assert to_stochastic(mlp().double(), {"*": NormalPlanar(2)})(x.double()).dtype == torch.float64
    half = to_stochastic(mlp().bfloat16(), {"*": NormalPlanar(2)})
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert {p.dtype for p in noise_parameters(half)} == {torch.float32}


def test_autocast_keeps_the_flow_in_float32():
    bayesian = to_stochastic(mlp(), {"*": NormalGlow(1)})
    dtypes = []
    for layer in noise_layers(bayesian).values():
        for step in layer.transform:
            step.register_forward_hook(lambda module, args, output: dtypes.append(output[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bayesian(torch.ones(2, 4))
    assert set(dtypes) == {torch.float32}


def test_modes():
    torch.manual_seed(0)
    bayesian = to_stochastic(mlp(), {"*": NormalPlanar(2)}).eval()
    x = torch.randn(3, 4)
    assert not torch.equal(bayesian(x), bayesian(x))
    with noise_mode(bayesian, "shared", samples=2, seed=1):
        twice = torch.cat([x, x])
        first, again = bayesian(twice), bayesian(twice)
        assert torch.equal(first, again), "shared draws are fixed"
        assert not torch.allclose(first[:3], first[3:]), "the two draws differ"
        one_by_one = torch.cat([bayesian(torch.stack([row, row])) for row in x])
        torch.testing.assert_close(one_by_one[0::2], first[:3])
        torch.testing.assert_close(one_by_one[1::2], first[3:])
        with pytest.raises(FlowBNNError) as caught:
            bayesian(x)
        assert caught.value.kind == "shape"
    assert not torch.equal(bayesian(x), bayesian(x))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    results = []
    for generator in generators:
        with noise_mode(bayesian, "sample", generator=generator):
            results.append(bayesian(x))
    assert torch.equal(*results)


def test_position_noise_differs_over_the_map_and_channel_noise_does_not():
    x = torch.ones(1, 3, 5, 5)
    for site, varies in (("position", True), ("channel", False)):
        bayesian = to_stochastic(nn.Conv2d(3, 2, 1), {"*": NormalAffine(site=site)})
        assert (bayesian(x).std((2, 3)) > 1e-4).all().item() is varies


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 4, 3), (5, 1, 6, 6)),
        (nn.Conv2d(6, 12, 3, groups=6, bias=False), (5, 6, 6, 6)),
        (nn.ConvTranspose2d(4, 8, 2, groups=4), (5, 4, 3, 3)),
        (nn.Linear(1, 3), (5, 1)),
        (nn.Linear(1, 3), (5, 7, 1)),
        (nn.Conv1d(2, 2, 1, groups=2), (2, 9)),
        (ScaledLinear(1, 3), (5, 1)),
    ],
    ids=str,
)
def test_noise_on_the_output_of_one_to_one_layers_is_noise_on_their_input(layer, shape):
    """If every output reads one input, the noise multiplies the output, with the same outputs and gradients."""
    x = torch.randn(shape)
    bayesian = to_stochastic(layer, {"*": NormalAffine()})
    (module,) = noise_layers(bayesian).values()
    batched = len(shape) > module.layout.unbatched_ndim
    with noise_mode(bayesian, "shared", samples=shape[0] if batched else 1, seed=4):
        found = bayesian(x)
        expected = layer(module.multiply((x,))[0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if not batched:
        return
    with noise_mode(bayesian, "sample", seed=1):
        bayesian(x).square().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with noise_mode(bayesian, "sample", seed=1):
        layer(module.multiply((x,))[0]).square().sum().backward()
    for first, second in zip(gradients, [p.grad for p in module.parameters()], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_freezing_and_parameter_groups():
    bayesian = to_stochastic(mlp(), {"*": NormalAffine()})
    groups = parameter_groups(bayesian, weight_lr=0.1, noise_lr=0.2)
    assert [(g["name"], g["lr"], len(g["params"])) for g in groups] == [
        ("weights", 0.1, 6),
        ("noise", 0.2, 6),
    ]
    freeze(bayesian, "weights")
    assert [g["name"] for g in parameter_groups(bayesian)] == ["noise"]
    unfreeze(bayesian, "weights")
    freeze(bayesian, "noise")
    assert [g["name"] for g in parameter_groups(bayesian)] == ["weights"]
