"""Compiled passes that are handed their draws: the same samples as without compiling, whatever the noise."""

import copy
import gc
import weakref

import pytest
import torch
from compiling import MAPPED, MIXED, compile_by, compiled_outputs, drawing, sample_outputs
from torch import nn

import flowbnn as fb
from conversion_networks import NETWORKS, Residual
from flowbnn.models import VGG16, LeNet
from flowbnn.noise import noise_layers
from flowbnn.noise.base import settings_of
from flowbnn.noise.batched import shared_draws
from flowbnn.noise.passes import NoisePass
from flowbnn.posterior import compiled, noise
from flowbnn.posterior import prediction as passes
from flowbnn.posterior.compiled import (
    MAPS,
    GivenDraws,
    HalfWeights,
    Row,
    form_for,
    pass_given,
)


@pytest.mark.parametrize(
    ("rules", "graphs"),
    [(MIXED, False), (MAPPED, True), ({**MIXED, "conv2": fb.noise.NormalInvConv(site="position")}, True)],
    ids=["channel", "position", "both"],
)
def test_compiled_samples_are_the_uncompiled_ones(rules, graphs, traced, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(compiled, "graphed", lambda device, work: graphs)
    model = fb.to_stochastic(LeNet(3), rules).eval()
    images = torch.randn(6, 3, 32, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = MAPS + 3
    expected = sample_outputs(model, images, samples, seed=1)
    found = compiled_outputs(model, images, samples)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert expected.std(0).max() > 1e-3, "the samples differ"
    assert torch.equal(found, compiled_outputs(model, images, samples)), "the same seed, the same samples"
    assert not torch.allclose(found, compiled_outputs(model, images, samples, seed=2))
    assert traced["graphs"] == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("name", "site"),
    [
        *((name, "channel") for name in ("mlp", "depthwise", "grey-image", "conv1d", "tied-weights")),
        *((name, "position") for name in ("depthwise", "grey-image", "tied-weights", "one-feature")),
    ],
)
def test_every_kind_of_layer(name, site, traced):
    torch.manual_seed(0)
    case = next(case for case in NETWORKS if case.name == name)
    model = fb.to_stochastic(case.network(), {"*": fb.noise.NormalAffine(site=site)}).eval()
    inputs = case.inputs()
    found = compiled_outputs(model, inputs, 5)
    torch.testing.assert_close(found, sample_outputs(model, inputs, 5, seed=1), rtol=1e-4, atol=1e-5)
    assert traced["graphs"] == 1


def test_parts_of_the_samples_and_cut_inputs(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(
        Residual(), {"stem": fb.noise.NormalAffine(site="position"), "*": fb.noise.NormalPlanar(1)}
    )
    x = torch.randn(22, 3, 8, 8)
    expected = sample_outputs(model, x, 40, seed=5)
    with drawing(model, 40, seed=5, compile=True, max_batch=8) as draw:
        torch.testing.assert_close(draw(x, 0, 5), expected[:5], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(draw(x, 30, 40), expected[30:], rtol=1e-4, atol=1e-5)
        few = draw(x[:3], 0, 40)  # fewer than half a pass: run as they are
        torch.testing.assert_close(few, expected[:, :3], rtol=1e-4, atol=1e-5)
    assert traced["graphs"] == 1, "22 rows are 8, 8 and 6 that are padded"


def test_what_is_compiled_follows_the_parameters_and_does_not_hold_the_network(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), MIXED)
    images = torch.randn(4, 3, 32, 32)
    before = compiled_outputs(model, images, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = compiled_outputs(model, images, 3)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, sample_outputs(model, images, 3, seed=1), rtol=1e-5, atol=1e-6)
    assert traced["graphs"] == 1
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    gone = weakref.ref(model)
    del model, parameter
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bfloat16
def test_half_precision_casts_the_weights_once(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), {**MIXED, "conv2": fb.noise.NormalInvConv(site="position")})
    images = torch.randn(4, 3, 32, 32)
    weights = [model.conv1.weight, model.fc3.weight]
    with drawing(model, 3, seed=1, precision="bf16-mixed") as draw:
        expected = draw(images)
        assert form_for(draw.prediction, images).weights is torch.preserve_format
        with HalfWeights(model, torch.bfloat16, torch.channels_last, {}):
            assert model.conv1.weight.dtype == torch.bfloat16
            assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    found = compiled_outputs(model, images, 3, precision="bf16-mixed")
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
    assert (found - compiled_outputs(model, images, 3)).abs().max() > 0
    assert model.conv1.weight is weights[0]
    assert model.fc3.weight is weights[1]
    assert weights[0].dtype == torch.float32


class Careful(nn.Module):
    """Turns autocast off, so that its last layer takes no weight in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_layer_that_needs_its_own_precision_keeps_it(traced):
    model = fb.to_stochastic(Careful(), {"*": fb.noise.NormalAffine()})
    x = torch.randn(50, 4)
    found = compiled_outputs(model, x, 4, precision="bf16-mixed")
    torch.testing.assert_close(found, sample_outputs(model, x, 4, seed=1), rtol=0.05, atol=0.05)


class Undecided(nn.Module):
    """What it does depends on what it is given, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(2, 3, 3), nn.Linear(48, 3)

    def forward(self, x):
        x = self.body(x)
        if float(x.sum()) > 1e9:
            x = -x
        return self.head(x.flatten(1))


@pytest.mark.parametrize("site", ["position", "channel"])
def test_what_does_not_compile_in_one_graph_is_predicted_and_said_once(site, traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(Undecided(), {"*": fb.noise.NormalAffine(site=site)})
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    images = torch.randn(15, 2, 6, 6)
    expected = posterior.predict(images, 4, seed=1).samples
    for _ in range(2):
        with pytest.warns(
            fb.errors.FlowBNNWarning, match="does not compile in one graph .*run as they are"
        ) as told:
            found = posterior.predict(list(images.split(5)), 4, seed=1, compile=True, max_batch=5).samples
        assert len(told) == 1
        assert "\n" not in str(told[0].message)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_compiler_that_fails_leaves_the_passes_as_they_are(monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    compile_by(backend, monkeypatch)
    model = fb.to_stochastic(LeNet(3), MIXED)
    images = torch.randn(4, 3, 32, 32)
    with pytest.warns(fb.errors.FlowBNNWarning, match="no compiler here.*run as they are"):
        found = compiled_outputs(model, images, 3)
    torch.testing.assert_close(found, sample_outputs(model, images, 3, seed=1), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_what_was_compiled_and_fails_later_leaves_the_passes_as_they_are(monkeypatch):
    """Kernels assert how tensors lie; torch may lay them otherwise later on in the same process."""
    calls = []

    def backend(graph, inputs):
        def run(*given):
            calls.append(1)
            assert len(calls) < 3, "expected stride 64==1 at dim=1"
            return graph.forward(*given)

        return run

    compile_by(backend, monkeypatch)
    model = fb.to_stochastic(LeNet(3), MIXED)
    images = torch.randn(4, 3, 32, 32)
    with pytest.warns(fb.errors.FlowBNNWarning, match="expected stride.*run as they are"):
        found = compiled_outputs(model, images, 4)
    assert len(calls) == 3
    torch.testing.assert_close(found, sample_outputs(model, images, 4, seed=1), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


class TimeFirst(nn.Module):
    """Its layer finds the examples on the second axis, where its noise takes them for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).mean(0)


def test_maps_that_grow_with_the_rows_are_predicted_uncompiled(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(TimeFirst(), {"*": fb.noise.NormalAffine(site="position")})
    x = torch.randn(6, 5, 4)
    with pytest.warns(fb.errors.FlowBNNWarning, match="does not compile in one graph"):
        found = compiled_outputs(model, x, 3)
    torch.testing.assert_close(found, sample_outputs(model, x, 3, seed=1), rtol=1e-5, atol=1e-6)


def test_draws_that_are_not_shared_are_not_compiled():
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    with pytest.warns(fb.errors.FlowBNNWarning, match="draws are not shared"):
        found = compiled_outputs(model, torch.ones(5, 4), 3, shared=False)
    assert (found[:, 0] - found[:, 1]).abs().max() > 1e-3


def test_much_work_before_the_noise_is_not_compiled_unasked(monkeypatch):
    torch.manual_seed(0)
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3)), {"1": fb.noise.NormalAffine()}
    )
    monkeypatch.setitem(noise.WORTH_COMPILING, "cpu", 0.0)
    calls = []
    monkeypatch.setattr(compiled, "compiled", lambda *args, **options: calls.append(args) or pass_given)
    for compile, expected in (("auto", 0), (True, 1)):
        with drawing(model, 3, compile=compile) as draw:
            assert draw(torch.randn(5, 4)).shape == (3, 5, 3)
        assert len(calls) == expected


def test_draws_of_many_layers_are_those_of_each():
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), MIXED)
    layers = list(noise_layers(model).values())
    state = NoisePass(settings_of(model, "shared", samples=7, seed=3))
    for layer, found in zip(layers, shared_draws(layers, state, torch.device("cpu")), strict=True):
        one = layer.shared_vectors(7, state.settings[layer.key].seed, torch.device("cpu"))
        torch.testing.assert_close(found, one)


def test_maps_drawn_together_are_those_drawn_one_by_one():
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), MAPPED)
    with torch.no_grad():
        for layer in noise_layers(model).values():
            sources = [torch.Generator().manual_seed(seed) for seed in range(3)]
            together = layer.draw_each((5, 4), iter(sources))
            for seed in range(3):
                one = layer.draw((5, 4), torch.Generator().manual_seed(seed))
                torch.testing.assert_close(together[seed], one, rtol=1e-5, atol=1e-6)


def test_rows_begin_where_wide_loads_may_and_hold_what_layers_ask_for():
    model = fb.to_stochastic(LeNet(3), MIXED).eval()
    images = torch.randn(2, 3, 32, 32)
    with drawing(model, 4, seed=0) as draw:
        form, state = form_for(draw.prediction, images), draw.sampler.state
        given = GivenDraws(draw.prediction, form, state)
        assert [ask for ask, _ in form.asks] == ["conv1", "conv2", "fc1", "fc2", "fc3"]
        assert all(start % 16 == 0 for start in given.table.starts.values())
        layer = noise_layers(model)["conv2"]
        truth = layer.shared_vectors(4, state.settings[layer.key].seed, torch.device("cpu"))
        for (first, last, high), rows in (((1, 3, 4), [1, 2]), ((2, 5, 3), [2, 2, 2])):
            found = Row(given.table, given.rows(first, last, high)).draws(layer, (1, 1), torch.device("cpu"))
            torch.testing.assert_close(found.flatten(1), truth[rows])


def test_noise_melts_into_the_kernels_that_are_there_anyway(monkeypatch):
    """As many kernels as the plain network has, by torch's own compiler; what they compute is tested on a GPU."""
    metrics, config = (pytest.importorskip(f"torch._inductor.{name}") for name in ("metrics", "config"))
    # they are counted and not built, which takes the C++ compiler half a minute
    monkeypatch.setattr(config.cpp, "vec_isa_ok", False)
    unbuilt = "torch._inductor.async_compile.AsyncCompile.cpp_pybinding"
    monkeypatch.setattr(unbuilt, lambda self, *given: lambda *arguments: None)
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)
    )
    plain = nn.Sequential(plain, nn.Flatten(), nn.Linear(200, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    x = torch.randn(4, 3, 14, 14)
    torch._dynamo.reset()
    metrics.reset()
    with torch.no_grad():
        passes.compiled(passes.PredictionCache(), graphs=False)(plain, x)
    alone = metrics.generated_kernel_count
    model = fb.to_stochastic(
        plain, {"*": fb.noise.NormalAffine(), "0.3": fb.noise.NormalAffine(site="position")}
    )
    metrics.reset()
    compiled_outputs(model, x, 3)
    noisy = metrics.generated_kernel_count
    assert 0 < noisy <= alone + 1, "the inputs themselves are multiplied by a kernel of their own"
    torch._dynamo.reset()


def test_vgg16_is_traced_in_one_graph(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(VGG16(width=0.125), {"*": fb.noise.NormalAffine(site="position")})
    x = torch.randn(2, 3, 32, 32)
    found = compiled_outputs(model, x, 2)
    torch.testing.assert_close(found, sample_outputs(model, x, 2, seed=1), rtol=1e-4, atol=1e-5)
    assert traced["graphs"] == 1
