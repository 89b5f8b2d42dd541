"""The two strategies of NoiseSampler give the same samples and leave the network unchanged."""

import copy

import pytest
import torch
from sampling_helpers import SinglePrecisionHead, one_at_a_time, sample_outputs, sampling
from torch import nn

import flowbnn as fb
from conversion_networks import NETWORKS, Case, Residual
from flowbnn.errors import FlowBNNError
from flowbnn.models import LeNet
from flowbnn.noise import noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.posterior.noise import ScaledWeights
from flowbnn.posterior.prediction import PredictionCache


class ExamplesFirst(nn.Module):
    """Moves the examples of a network to the first axis."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.network, self.case = case.network(), case

    def forward(self, *inputs):
        moved = (x.movedim(0, self.case.batch_axis) for x in inputs)
        return self.case.output(self.network(*moved)).movedim(self.case.batch_axis, 0)


ABSORBED = {  # number of layers whose weights hold the noise, at site channel and position
    "mlp": (2, 2),
    "conv-batchnorm-without-bias": (2, 0),
    "non-square-kernel": (1, 0),
    "grouped": (1, 0),
    "depthwise": (2, 0),
    "padding-same": (1, 0),
    "padding-reflect": (1, 0),
    "grey-image": (1, 0),
    "one-feature": (2, 2),
    "depthwise-transposed": (1, 0),
    "conv1d": (1, 0),
    "conv3d": (1, 0),
    "transposed": (1, 0),
    "transformer-encoder-layer": (2, 0),
    "transformer-encoder-layer-sequence-first": (2, 0),
    "transformer-encoder": (4, 0),
    "tied-weights": (2, 0),
    "embedding": (1, 0),
    "reads-anothers-weight": (1, 1),
    "linear-subclass": (1, 1),
    "spectral-norm": (1, 1),
    "bare-linear": (1, 1),
    "residual": (4, 1),
}
# vmap has no rules for torch's recurrent kernels and fused attention
SEQUENTIAL = {
    "lstm",
    "lstm-time-first",
    "gru",
    "gru-time-first",
    "gru-cell",
    "attention",
    "attention-sequence-first",
}
SEQUENTIAL |= {name for name in ABSORBED if name.startswith("transformer")}


@pytest.mark.parametrize("site", [pytest.param("channel", marks=pytest.mark.slow), "position"])
@pytest.mark.parametrize("case", NETWORKS, ids=lambda case: case.name)
def test_both_strategies_give_the_networks_one_at_a_time(case, site):
    torch.manual_seed(0)
    model = fb.to_stochastic(ExamplesFirst(case), {"*": fb.noise.NormalAffine(site=site)}).eval()
    inputs = tuple(x.movedim(case.batch_axis, 0) for x in case.inputs())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    truth = one_at_a_time(model, inputs, 5, 1)
    with sampling(model, 5, seed=1) as draw:
        chosen, trace = draw(inputs), draw.prediction.measure(inputs)
        assert len(draw.sampler.absorbed_layers(trace)) == ABSORBED.get(case.name, (0, 0))[site == "position"]
        assert bool(trace.vmap_error) == (case.name in SEQUENTIAL), trace.vmap_error
    sequential = sample_outputs(model, inputs, 5, seed=1, strategy="sequential", max_batch=3)
    for outputs in (chosen, sequential):
        assert (outputs - truth).abs().max() <= 1e-5 * truth.abs().max()
    assert truth.std(0).max() > 1e-3, "the samples differ"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_flows_and_dropout_are_absorbed_like_gaussians():
    torch.manual_seed(0)
    rules = {
        "conv1": fb.noise.Dropout(0.3, site="channel"),
        "conv2": fb.noise.NormalInvConv(),
        "fc1": fb.noise.NormalPlanar(2),
    }
    model = fb.to_stochastic(LeNet(3), {**rules, "fc2": fb.noise.NormalAffine(components=2)}).eval()
    images = torch.randn(6, 3, 32, 32)
    vmap, sequential = (
        sample_outputs(model, images, 4, seed=2, strategy=strategy) for strategy in ("vmap", "sequential")
    )
    torch.testing.assert_close(sequential, vmap, rtol=1e-5, atol=1e-6)


def test_double_and_bfloat16_networks():
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 3e-2)):
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        model = fb.to_stochastic(plain, {"*": fb.noise.NormalAffine()})
        x = torch.randn(5, 4)
        vmap, sequential = (
            sample_outputs(model, x, 4, seed=2, strategy=strategy) for strategy in ("vmap", "sequential")
        )
        assert sequential.dtype == vmap.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(sequential, vmap, rtol=tolerance, atol=tolerance)


def test_the_network_is_unchanged_after_an_error():
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            if len(x) == 7:
                raise ValueError("no more")
            return self.layer(x)

    model = fb.to_stochastic(Stubborn(), {"*": fb.noise.NormalAffine()})
    weight, values = model.layer.weight, model.layer.weight.clone()
    sample_outputs(model, torch.randn(5, 4), 2, seed=0)
    with pytest.raises(ValueError, match="no more"):
        sample_outputs(model, torch.randn(7, 4), 8, seed=0, strategy="sequential")
    assert model.layer.weight is weight
    assert torch.equal(weight, values)
    assert weight.requires_grad
    assert "forward" not in vars(model.layer)
    assert not torch.equal(*(model(torch.ones(1, 4)) for _ in range(2)))


class Reads(nn.Module):
    """Reads the weight of a noisy layer a second time, without its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.layer.weight
        self.call = lambda x: self.layer(x)

    def forward(self, x):
        return self.call(x) + nn.functional.linear(x, self.layer.weight) * self.other(x)


@pytest.mark.parametrize("scale", [0.0, -20.0])
def test_a_weight_that_something_else_reads_has_no_noise_there(scale):
    """The error would hardly show in a narrow posterior."""
    torch.manual_seed(0)
    model = fb.to_stochastic(Reads(), {"layer": fb.noise.NormalAffine()}, inplace=True).eval()
    with torch.no_grad():
        noise_layers(model)["layer"].transform[0].raw_log_scale.fill_(scale)
    x = torch.randn(3, 4)
    truth = one_at_a_time(model, x, 4, 1)
    for strategy in ("sequential", "vmap"):
        torch.testing.assert_close(sample_outputs(model, x, 4, strategy, seed=1), truth)


def test_the_faster_strategy_is_chosen():
    torch.manual_seed(0)
    grey, color = (fb.to_stochastic(LeNet(c), {"*": fb.noise.NormalAffine()}) for c in (1, 3))
    with sampling(grey, 4) as draw:
        trace = draw.prediction.measure(draw.prediction.to_device(torch.randn(2, 1, 28, 28)))
        # 24 x 24 positions x 6 x 25 and 8 x 8 x 16 x 150 multiplications, each with an addition, and three linear layers
        assert trace.flops_per_row == 2 * (24 * 24 * 150 + 8 * 8 * 16 * 150 + 256 * 120 + 120 * 84 + 84 * 10)
        assert trace.prefix_share == pytest.approx(2 * 24 * 24 * 150 / trace.flops_per_row)
        assert draw.sampler.prefers_vmap(10_000, trace), "the first convolution is computed once"
    with sampling(color, 4) as draw:
        trace = draw.prediction.measure(draw.prediction.to_device(torch.randn(2, 3, 32, 32)))
        assert (trace.prefix_share, len(draw.sampler.absorbed_layers(trace))) == (0.0, 5)
        assert not draw.sampler.prefers_vmap(600, trace), "one sample fills the pass"
        assert draw.sampler.prefers_vmap(1, trace), "passes of one row are mostly overhead"


def test_rows_stay_together_up_to_the_row_limit():
    model = fb.to_stochastic(LeNet(3), {"*": fb.noise.NormalAffine()})
    with sampling(model, 64, max_batch=100) as draw:
        trace = draw.prediction.measure(draw.prediction.to_device(torch.randn(2, 3, 32, 32)))
        assert draw.sampler.chunk_sizes(100, 64, trace) == (100, 1)
        assert draw.sampler.chunk_sizes(30, 64, trace) == (30, 3)
        assert draw.sampler.chunk_sizes(120, 64, trace) == (60, 1)


def test_a_network_for_a_single_row():
    class One(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(1, 4))

    model = fb.to_stochastic(One(4, 3), {"*": fb.noise.NormalAffine()})
    assert sample_outputs(model, torch.randn(1, 4), 5).shape == (5, 1, 3)


def test_hooks_multiply_where_the_weights_cannot():
    torch.manual_seed(0)
    rules = {"stem": fb.noise.NormalAffine(site="position"), "*": fb.noise.NormalAffine()}
    model = fb.to_stochastic(Residual(), rules).eval()
    x = torch.randn(4, 3, 8, 8)
    with sampling(model, 5, seed=1, strategy="sequential") as draw:
        outputs = draw(x)
        names = draw.sampler.absorbed_layers(draw.prediction.measure(x))
    assert set(names) == {"conv1", "conv2", "head"}
    torch.testing.assert_close(
        outputs, sample_outputs(model, x, 5, seed=1, strategy="vmap"), rtol=1e-5, atol=1e-6
    )


def test_some_samples_are_those_of_all():
    torch.manual_seed(0)
    model = fb.to_stochastic(Residual(), {"*": fb.noise.NormalPlanar(1)}).eval()
    x = torch.randn(4, 3, 8, 8)
    for strategy in ("sequential", "vmap"):
        with sampling(model, 9, seed=5, strategy=strategy) as draw:
            every = draw(x)
            torch.testing.assert_close(draw(x[1:3], 2, 7), every[2:7, 1:3], rtol=1e-5, atol=1e-6)


def test_scaled_weights_have_the_memory_format_of_the_weights():
    model = fb.to_stochastic(LeNet(3), {"conv2": fb.noise.NormalAffine()}).to(
        memory_format=torch.channels_last
    )
    weights = ScaledWeights(model, ("conv2",), make_noise_modes(model, "shared", samples=2, seed=0))
    _, weight, scaled, _ = weights.scaled[0]
    assert scaled.stride() == weight.stride() == model.conv2.weight.stride()


def test_a_copy_after_a_prediction_is_a_plain_copy():
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    sample_outputs(model, torch.randn(5, 4), 4, strategy="sequential")
    other = copy.deepcopy(model)
    assert other.state_dict().keys() == model.state_dict().keys()
    assert other.weight is not model.weight


class DtypeRecorder(nn.Linear):
    """Records the precisions of its inputs."""

    dtypes: list[torch.dtype]

    def forward(self, x):
        self.dtypes.append(x.dtype)
        return super().forward(x)


def test_half_precision_is_for_the_layers_and_not_for_the_noise():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), DtypeRecorder(8, 3))
    plain[2].dtypes = []
    model = fb.to_stochastic(plain, {"0": fb.noise.NormalPlanar(1)}).eval()
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    x = torch.randn(50, 4)
    draws = []
    layer = noise_layers(model)["0"]
    original = layer.draw_each
    layer.draw_each = lambda *args: draws.append(original(*args)) or draws[-1]
    exact = posterior.predict(x, 6, seed=0).samples
    model[2].dtypes.clear()
    rough = posterior.predict(x, 6, seed=0, precision="bf16-mixed").samples
    assert torch.bfloat16 in model[2].dtypes
    assert {draw.dtype for draw in draws} == {torch.float32}
    assert rough.dtype == torch.float32
    gap = (rough - exact).abs().max()
    assert 0 < gap < 0.02


def test_a_layer_that_disables_autocast():
    model = fb.to_stochastic(SinglePrecisionHead(), {"*": fb.noise.NormalAffine()})
    x = torch.randn(50, 4)
    rough = sample_outputs(model, x, 4, "sequential", seed=0, precision="bf16-mixed")
    torch.testing.assert_close(rough, sample_outputs(model, x, 4, seed=0), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("argument", "value"), [("precision", "bf16"), ("compile", "yes"), ("max_batch", 0)])
def test_bad_options(argument, value):
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    for posterior in (
        fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()),
        fb.posterior.PointPosterior(nn.Linear(4, 3), fb.likelihoods.Categorical()),
    ):
        with pytest.raises(FlowBNNError) as caught:
            posterior.predict(torch.ones(2, 4), **{argument: value})
        assert caught.value.argument == argument


class Tied(nn.Module):
    """Reads the weight of a noisy layer a second time."""

    def __init__(self):
        super().__init__()
        self.e, self.m = nn.Linear(784, 512, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, x):
        return torch.nn.functional.linear(torch.relu(self.m(torch.relu(self.e(x)))), self.e.weight.t())


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_predictions_do_not_depend_on_uninformative_first_rows_or_small_outputs(scale):
    torch.manual_seed(0)
    model = fb.to_stochastic(Tied(), {"*": fb.noise.NormalAffine()})
    with torch.no_grad():
        model.m.weight.mul_(scale)
    x = torch.randn(600, 784)
    blank = x.clone()
    blank[:2] = 0
    means = []
    for inputs in (x, blank):
        posterior = fb.posterior.NoisePosterior(copy.deepcopy(model), fb.likelihoods.Gaussian())
        means.append(posterior.predict(inputs, samples=4, seed=0).mean[5:])
    assert (means[1] - means[0]).abs().max() < 1e-5 * means[0].abs().max()


class Fastidious(nn.Module):
    """Accepts inputs of at least 0.5 only."""

    def __init__(self, refuses):
        super().__init__()
        self.refuses, self.first, self.second = refuses, nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        if self.refuses and bool((self.first(x) > 1e9).any()):
            raise ValueError("inputs are too large")
        return self.second(torch.tanh(self.first((x - 0.5).sqrt())))


@pytest.mark.parametrize("refuses", [True, False])
def test_a_network_that_branches_on_values_runs_sequentially(refuses):
    torch.manual_seed(0)
    model = fb.to_stochastic(Fastidious(refuses), {"*": fb.noise.NormalAffine()})
    x, cache = 0.5 + torch.rand(20, 3) * torch.tensor([1.0, 10.0, 100.0]), PredictionCache()
    with sampling(model, 3, cache=cache, seed=1) as draw:
        outputs = draw(x)
        assert bool(draw.prediction.measure(x).vmap_error) == refuses
    assert torch.isfinite(outputs).all()
    torch.testing.assert_close(outputs, one_at_a_time(model.eval(), x, 3, 1))


class UnusedLayer(nn.Module):
    """Network whose first layer never runs."""

    def __init__(self):
        super().__init__()
        self.unused, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_layers_that_never_run_do_not_prevent_vmap():
    torch.manual_seed(0)
    model = fb.to_stochastic(UnusedLayer(), {"*": fb.noise.NormalAffine()}).eval()
    x = torch.randn(20, 3)
    with sampling(model, 3, seed=1) as draw:
        outputs, trace = draw(x), draw.prediction.measure(x)
    assert trace.vmap_works, trace.vmap_error
    torch.testing.assert_close(outputs, one_at_a_time(model, x, 3, 1))


def test_random_numbers_in_the_network_are_drawn_by_each_sample():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x + torch.randn_like(x))

    model = fb.to_stochastic(Random(), {"*": fb.noise.NormalAffine()})
    with torch.no_grad():
        noise_layers(model)["layer"].transform[0].raw_log_scale.fill_(-20.0)
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        outputs = sample_outputs(model, torch.zeros(4, 3), 6)
    assert [entry.message.kind for entry in caught] == ["random"]
    assert outputs.std(0).min() > 1e-3
