"""Tests that compiled passes give the samples of uncompiled ones."""

import copy
import gc
import weakref

import pytest
import torch
from sampling_helpers import (
    MAPPED,
    MIXED,
    SinglePrecisionHead,
    compile_by,
    compiled_outputs,
    one_at_a_time,
    sample_outputs,
    sampling,
)
from torch import nn

import flowbnn as fb
from conversion_networks import NETWORKS, Residual
from flowbnn.models import VGG16, LeNet
from flowbnn.noise import noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.gaussians import SharedDraws
from flowbnn.posterior import compiled, noise
from flowbnn.posterior.compiled import forward_samples
from slow_cases import mark_slow

SITES = {
    "channel": MIXED,
    "position": MAPPED,
    "both": {**MIXED, "conv2": fb.noise.NormalInvConv(site="position")},
}


@pytest.mark.parametrize("site", mark_slow(SITES, ["both"]))
def test_compiled_samples_are_the_uncompiled_ones(site, traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), SITES[site]).eval()
    images = torch.randn(6, 3, 32, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = 7
    expected = sample_outputs(model, images, samples, seed=1)
    found = compiled_outputs(model, images, samples)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert expected.std(0).max() > 1e-3, "the samples differ"
    assert torch.equal(found, compiled_outputs(model, images, samples)), "the same seed, the same samples"
    assert not torch.allclose(found, compiled_outputs(model, images, samples, seed=2))
    assert traced["graphs"] == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


LAYERS = [f"{name} channel" for name in ("mlp", "depthwise", "grey-image", "conv1d", "tied-weights")]
LAYERS += [f"{name} position" for name in ("depthwise", "grey-image", "tied-weights", "one-feature")]


@pytest.mark.parametrize(
    "layer",
    mark_slow(LAYERS, ["depthwise channel", "tied-weights position"]),
)
def test_every_kind_of_layer(layer, traced):
    name, site = layer.split()
    torch.manual_seed(0)
    case = next(case for case in NETWORKS if case.name == name)
    model = fb.to_stochastic(case.network(), {"*": fb.noise.NormalAffine(site=site)}).eval()
    inputs = case.inputs()
    found = compiled_outputs(model, inputs, 5)
    torch.testing.assert_close(found, sample_outputs(model, inputs, 5, seed=1), rtol=1e-4, atol=1e-5)
    assert traced["graphs"] == 1


@pytest.mark.slow
def test_parts_of_the_samples_and_cut_inputs(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(
        Residual(), {"stem": fb.noise.NormalAffine(site="position"), "*": fb.noise.NormalPlanar(1)}
    )
    x = torch.randn(22, 3, 8, 8)
    expected = sample_outputs(model, x, 40, seed=5)
    with sampling(model, 40, seed=5, compile=True, max_batch=8) as draw:
        torch.testing.assert_close(draw(x, 0, 5), expected[:5], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(draw(x, 30, 40), expected[30:], rtol=1e-4, atol=1e-5)
        few = draw(x[:3], 0, 40)  # fewer than half a pass: run as they are
        torch.testing.assert_close(few, expected[:, :3], rtol=1e-4, atol=1e-5)
    assert traced["graphs"] == 1, "22 rows are 8, 8 and 6 that are padded"


def test_compiled_functions_follow_the_parameters_and_hold_no_reference_to_the_network(traced):
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bfloat16
def test_half_precision(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), {**MIXED, "conv2": fb.noise.NormalInvConv(site="position")})
    images = torch.randn(4, 3, 32, 32)
    expected = sample_outputs(model, images, 3, seed=1, precision="bf16-mixed")
    found = compiled_outputs(model, images, 3, precision="bf16-mixed")
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
    assert (found - compiled_outputs(model, images, 3)).abs().max() > 0


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_compiled_layer_that_disables_autocast(traced):
    model = fb.to_stochastic(SinglePrecisionHead(), {"*": fb.noise.NormalAffine()})
    x = torch.randn(50, 4)
    found = compiled_outputs(model, x, 4, precision="bf16-mixed")
    torch.testing.assert_close(found, sample_outputs(model, x, 4, seed=1), rtol=0.05, atol=0.05)


class Undecided(nn.Module):
    """Branches on values, which a graph cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(2, 3, 3), nn.Linear(48, 3)

    def forward(self, x):
        x = self.body(x)
        if float(x.sum()) > 1e9:
            x = -x
        return self.head(x.flatten(1))


@pytest.mark.parametrize("site", ["position", "channel"])
def test_a_network_that_does_not_compile_runs_uncompiled_with_one_warning(site, traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(Undecided(), {"*": fb.noise.NormalAffine(site=site)})
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    images = torch.randn(15, 2, 6, 6)
    expected = posterior.predict(images, 4, seed=1).samples
    for _ in range(2):
        with pytest.warns(fb.errors.FlowBNNWarning) as raised:
            found = posterior.predict(list(images.split(5)), 4, seed=1, compile=True, max_batch=5).samples
        assert [warning.message.kind for warning in raised] == ["compile"]
        assert "\n" not in str(raised[0].message)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_failing_compiler_falls_back_to_uncompiled_passes(monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    compile_by(backend, monkeypatch)
    model = fb.to_stochastic(LeNet(3), MIXED)
    images = torch.randn(4, 3, 32, 32)
    with pytest.warns(fb.errors.FlowBNNWarning, match="no compiler here"):
        found = compiled_outputs(model, images, 3)
    torch.testing.assert_close(found, sample_outputs(model, images, 3, seed=1), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_a_compiled_function_that_fails_later_falls_back_to_uncompiled_passes(monkeypatch):
    """Kernels assert how tensors lie; torch may lay them otherwise later on in the same process."""
    calls = []

    def backend(graph, inputs):
        def run(*given):
            calls.append(1)
            assert len(calls) < 3, "expected stride 64==1 at dim=1"
            return graph.forward(*given)

        return run

    compile_by(backend, monkeypatch)
    monkeypatch.setitem(compiled.FULL_PASS_FLOPS, "cpu", 0.0)  # one sample in a pass
    model = fb.to_stochastic(LeNet(3), MIXED)
    images = torch.randn(4, 3, 32, 32)
    with pytest.warns(fb.errors.FlowBNNWarning, match="expected stride"):
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
    with pytest.warns(fb.errors.FlowBNNWarning) as raised:
        found = compiled_outputs(model, x, 3)
    assert [warning.message.kind for warning in raised] == ["compile"]
    torch.testing.assert_close(found, sample_outputs(model, x, 3, seed=1), rtol=1e-5, atol=1e-6)


def test_draws_that_are_not_shared_are_not_compiled():
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    with pytest.warns(fb.errors.FlowBNNWarning) as raised:
        found = compiled_outputs(model, torch.ones(5, 4), 3, shared=False)
    assert [warning.message.kind for warning in raised] == ["compile"]
    assert (found[:, 0] - found[:, 1]).abs().max() > 1e-3


def test_auto_does_not_compile_if_most_of_the_work_is_before_the_noise(monkeypatch):
    torch.manual_seed(0)
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3)), {"1": fb.noise.NormalAffine()}
    )
    monkeypatch.setitem(noise.COMPILE_FLOPS, "cpu", 0.0)
    calls = []
    monkeypatch.setattr(
        compiled, "compile_once", lambda *args, **options: calls.append(args) or forward_samples
    )
    for compile, expected in (("auto", 0), (True, 3)):
        assert sample_outputs(model, torch.randn(5, 4), 3, compile=compile).shape == (3, 5, 3)
        assert len(calls) == expected


def test_draws_of_many_layers_are_those_of_each():
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), MIXED)
    layers = list(noise_layers(model).values())
    modes = make_noise_modes(model, "shared", samples=7, seed=3)
    shared = SharedDraws(layers, modes, torch.device("cpu"))
    for layer in layers:
        single = layer.shared_vectors(7, modes[layer.key].seed, torch.device("cpu"))
        torch.testing.assert_close(shared.vectors[layer.key], single)


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


@pytest.mark.slow
def test_noise_is_fused_into_the_kernels_of_the_network(monkeypatch):
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
        torch.compile(plain, dynamic=False)(x)
    alone = metrics.generated_kernel_count
    model = fb.to_stochastic(
        plain, {"*": fb.noise.NormalAffine(), "0.3": fb.noise.NormalAffine(site="position")}
    )
    metrics.reset()
    compiled_outputs(model, x, 3)
    noisy = metrics.generated_kernel_count
    assert 0 < noisy <= alone + 1, "the inputs themselves are multiplied by a kernel of their own"
    torch._dynamo.reset()


@pytest.mark.slow
def test_vgg16_is_traced_in_one_graph(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(VGG16(width=0.125), {"*": fb.noise.NormalAffine(site="position")})
    x = torch.randn(2, 3, 32, 32)
    found = compiled_outputs(model, x, 2)
    torch.testing.assert_close(found, sample_outputs(model, x, 2, seed=1), rtol=1e-4, atol=1e-5)
    assert traced["graphs"] == 1


# -------------------- several samples in a pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        (MIXED, ((7, 4), (100, 8))),  # powers of two that waste little
        pytest.param(MAPPED, ((100, 8),), marks=pytest.mark.slow),
        pytest.param(
            {"fc1": fb.noise.NormalPlanar(2), "fc3": fb.noise.NormalAffine()},
            ((7, 4),),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_several_samples_in_a_pass_are_the_samples_one_by_one(rules, sizes, traced, monkeypatch):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), rules).eval()
    images, samples = torch.randn(6, 3, 32, 32), 20
    expected = one_at_a_time(model, images, samples, 1)
    with sampling(model, samples) as draw:
        work = draw.prediction.measure(images).flops_per_row
    passes = []
    run = compiled.CompiledSampler.run_chunks
    monkeypatch.setattr(
        compiled.CompiledSampler,
        "run_chunks",
        lambda self, *args: passes.append(args[-1]) or run(self, *args),
    )
    for count, expected_count in sizes:
        monkeypatch.setitem(compiled.FULL_PASS_FLOPS, "cpu", work * 6 * count)
        passes.clear()
        found = compiled_outputs(model, images, samples)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert passes == [expected_count] * -(-samples // expected_count)
    assert traced["graphs"] == len(sizes), "a last pass that is not full is padded"


def test_fewer_samples_are_in_a_pass_if_memory_runs_out(traced, monkeypatch):
    torch.manual_seed(0)
    model = fb.to_stochastic(
        Residual(), {"stem": fb.noise.NormalAffine(site="position"), "*": fb.noise.NormalPlanar(1)}
    )
    x = torch.randn(8, 3, 8, 8)
    expected = sample_outputs(model, x, 10, seed=5)
    monkeypatch.setitem(compiled.FULL_PASS_FLOPS, "cpu", 1e18)
    passes = []

    def tight(model, keys, rules, draws, inputs):
        passes.append(len(draws[0]))
        if len(draws[0]) * len(x) > 24:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return forward_samples(model, keys, rules, draws, inputs)

    monkeypatch.setattr(compiled, "compile_once", lambda *args, **options: tight)
    with pytest.warns(fb.errors.FlowBNNWarning) as raised:
        found = compiled_outputs(model, x, 10, seed=5)
    assert [(warning.message.kind, warning.message.fields["rows"]) for warning in raised] == [("memory", 32)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert passes == [4, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_many_numbers_of_samples_and_of_inputs_are_compiled(traced, monkeypatch):
    """Torch stops compiling a function after eight shapes unless the limit is raised."""
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    monkeypatch.setitem(compiled.FULL_PASS_FLOPS, "cpu", 1e18)
    x = torch.randn(4, 4)
    for samples in range(2, 20):
        found = compiled_outputs(model, x, samples)
        torch.testing.assert_close(found, sample_outputs(model, x, samples, seed=1))
    assert traced["graphs"] == 5, "1, 2, 4, 8 or 16 samples in a pass"
    for number in range(5, 9):
        assert compiled_outputs(model, torch.randn(number, 4), 2).shape == (2, number, 3)
    assert traced["graphs"] == 9


def test_a_part_of_the_samples_runs_one_by_one(monkeypatch):
    """Adaptive sampling requests parts of many sizes, which would all be compiled."""
    model = fb.to_stochastic(LeNet(3), MIXED)
    monkeypatch.setitem(compiled.FULL_PASS_FLOPS, "cpu", 1e18)
    passes = []
    monkeypatch.setattr(
        compiled,
        "compile_once",
        lambda *args, **options: lambda *values: passes.append(len(values[3][0])) or forward_samples(*values),
    )
    with sampling(model, 8, seed=1, compile=True) as draw:
        draw(torch.randn(4, 3, 32, 32), 0, 3)
        draw(torch.randn(4, 3, 32, 32))
    assert passes == [1, 1, 1, 8]


@pytest.mark.slow
def test_compiled_passes_have_one_shape(traced):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(), {"conv2": fb.noise.NormalInvConv(), "*": fb.noise.NormalAffine()})
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    images = torch.randn(22, 1, 28, 28)
    plain = posterior.predict(images, 4, seed=0).samples
    options = {"seed": 0, "max_batch": 8, "compile": True}
    for _ in range(2):  # 8, 8 and 6 padded rows; then 2 rows that are run as they are
        found = posterior.predict([images, images[:2]], 4, **options).samples
        torch.testing.assert_close(found[:, :22], plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[:, 22:], plain[:, :2], rtol=1e-5, atol=1e-6)
    assert traced["graphs"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("rules", [MIXED, MAPPED])
def test_on_a_gpu_few_images_go_through_with_several_samples(rules, precision, monkeypatch):
    """Compiled, and replayed from a CUDA graph: the same samples as without compiling."""
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3).cuda(), rules).eval()
    images = torch.randn(32, 3, 32, 32, device="cuda")
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if precision == "32-true" else {"rtol": 0.05, "atol": 0.03}
    with sampling(model, 16, seed=1, precision=precision) as draw:
        expected = draw(images)
        work = 32 * draw.prediction.measure(images).flops_per_row
    apart = (expected - expected.roll(1, 0)).abs().amax((1, 2)).min()  # of any sample and the one before it
    for count in (1, 4, 16):
        monkeypatch.setitem(compiled.FULL_PASS_FLOPS, "cuda", count * work)
        for _ in range(2):
            found = compiled_outputs(model, images, 16, precision=precision)
            torch.testing.assert_close(found, expected, **tolerance)
            assert (found - expected).abs().max() < 0.5 * apart, (
                "samples in another order would be further off"
            )
