"""Shared draws absorbed into the weights: the same samples as by folding, and the network untouched."""

import copy

import pytest
import torch
from compiling import drawing, plan_for, sample_outputs
from torch import nn

import flowbnn as fb
from conversion_networks import NETWORKS, Case, Residual
from flowbnn.models import LeNet
from flowbnn.noise import noise_layers
from flowbnn.noise.base import settings_of
from flowbnn.noise.passes import NoisePass
from flowbnn.posterior.noise import LEAST_WORK, SamplingPlan, ScaledWeights


class ExamplesFirst(nn.Module):
    """A network whose examples lie on another axis, behind one that has them first."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.network, self.case = case.network(), case

    def forward(self, *inputs):
        moved = (x.movedim(0, self.case.batch_axis) for x in inputs)
        return self.case.output(self.network(*moved)).movedim(self.case.batch_axis, 0)


ABSORBED = {  # how many layers' noise the weights take, at site channel and position
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
    "tied-weights": (1, 0),
    "embedding": (1, 0),
    "linear-subclass": (1, 1),
    "spectral-norm": (1, 1),
    "bare-linear": (1, 1),
    "residual": (4, 1),
}


@pytest.mark.parametrize("site", ["channel", "position"])
@pytest.mark.parametrize("case", NETWORKS, ids=lambda case: case.name)
def test_absorbed_samples_equal_folded_ones(case, site):
    torch.manual_seed(0)
    model = fb.to_stochastic(ExamplesFirst(case), {"*": fb.noise.NormalAffine(site=site)}).eval()
    inputs = tuple(x.movedim(case.batch_axis, 0) for x in case.inputs())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_for(model, inputs)
    assert len(plan.absorbed) == ABSORBED.get(case.name, (0, 0))[site == "position"]
    folded = sample_outputs(model, inputs, 5, seed=1, plan="fold")
    absorbed = sample_outputs(model, inputs, 5, seed=1, plan="absorb", max_batch=3)
    assert (absorbed - folded).abs().max() <= 1e-5 * folded.abs().max()
    assert folded.std(0).max() > 1e-3, "the samples differ"
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
    folded, absorbed = (sample_outputs(model, images, 4, seed=2, plan=plan) for plan in ("fold", "absorb"))
    torch.testing.assert_close(absorbed, folded, rtol=1e-5, atol=1e-6)


def test_double_and_bfloat16_networks():
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 3e-2)):
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        model = fb.to_stochastic(plain, {"*": fb.noise.NormalAffine()})
        x = torch.randn(5, 4)
        folded, absorbed = (sample_outputs(model, x, 4, seed=2, plan=plan) for plan in ("fold", "absorb"))
        assert absorbed.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(absorbed, folded, rtol=tolerance, atol=tolerance)


def test_the_weights_come_back_whatever_happens():
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3), 0

        def forward(self, x):
            self.calls += 1
            if len(x) == 7 and self.calls > 3:
                raise ValueError("no more")
            return self.layer(x)

    model = fb.to_stochastic(Stubborn(), {"*": fb.noise.NormalAffine()})
    weight, values = model.layer.weight, model.layer.weight.clone()
    sample_outputs(model, torch.randn(5, 4), 2, seed=0)
    with pytest.raises(ValueError, match="no more"):
        sample_outputs(model, torch.randn(7, 4), 8, seed=0, plan="absorb")
    assert model.layer.weight is weight
    assert torch.equal(weight, values)
    assert weight.requires_grad
    assert not torch.equal(*(model(torch.ones(1, 4)) for _ in range(2)))


def test_a_weight_that_something_else_reads_is_left_alone():
    """Even where the posterior is so narrow that the mistake would hardly show."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) + nn.functional.linear(x, self.layer.weight)

    model = fb.to_stochastic(Reads(), {"*": fb.noise.NormalAffine()})
    with torch.no_grad():
        noise_layers(model)["layer"].transform[0].raw_log_scale.fill_(-20.0)
    assert plan_for(model, torch.randn(3, 4)).absorbed == ()


def test_which_plan_is_taken():
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    grey, colour = (fb.to_stochastic(LeNet(c), {"*": fb.noise.NormalAffine()}) for c in (1, 3))
    first, second = plan_for(grey, torch.randn(2, 1, 28, 28)), plan_for(colour, torch.randn(2, 3, 32, 32))
    # 24 x 24 places x 6 x 25 and 8 x 8 x 16 x 150 multiplications, each with an addition, and three linear layers
    assert first.work == 2 * (24 * 24 * 150 + 8 * 8 * 16 * 150 + 256 * 120 + 120 * 84 + 84 * 10)
    assert first.before == pytest.approx(2 * 24 * 24 * 150 / first.work)
    assert (second.fold, second.before, len(second.absorbed)) == ("input", 0.0, 5)
    assert not first.absorbs(10_000, cpu), "a grey image's first convolution is better computed once"
    assert second.absorbs(512, cpu)
    assert not second.absorbs(1, cpu), "128 passes of one row would be all overhead"
    assert not SamplingPlan("late").absorbs(10**6, cpu)
    assert SamplingPlan("input", absorbed=("fc",), work=LEAST_WORK["cuda"]).absorbs(1, torch.device("cuda"))


def test_one_row_folds_too():
    torch.manual_seed(0)
    model = fb.to_stochastic(Residual(), {"*": fb.noise.NormalAffine()}).eval()
    assert plan_for(model, torch.randn(1, 3, 8, 8)).fold == "input"

    class One(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(1, 4))

    alone = fb.to_stochastic(One(4, 3), {"*": fb.noise.NormalAffine()})
    assert plan_for(alone, torch.randn(1, 4)).fold == ""
    assert sample_outputs(alone, torch.randn(1, 4), 5).shape == (5, 1, 3)


def test_mixed_networks_multiply_what_no_weight_takes():
    torch.manual_seed(0)
    rules = {"stem": fb.noise.NormalAffine(site="position"), "*": fb.noise.NormalAffine()}
    model = fb.to_stochastic(Residual(), rules).eval()
    x = torch.randn(4, 3, 8, 8)
    plan = plan_for(model, x)
    assert set(plan.absorbed) == {"conv1", "conv2", "head"}
    torch.testing.assert_close(
        sample_outputs(model, x, 5, seed=1, plan="absorb"),
        sample_outputs(model, x, 5, seed=1, plan="fold"),
        rtol=1e-5,
        atol=1e-6,
    )


def test_parts_of_the_samples_are_those_of_the_whole():
    torch.manual_seed(0)
    model = fb.to_stochastic(Residual(), {"*": fb.noise.NormalPlanar(1)}).eval()
    x = torch.randn(4, 3, 8, 8)
    for plan in ("absorb", "fold"):
        with drawing(model, 9, seed=5, plan=plan) as draw:
            whole = draw(x)
            torch.testing.assert_close(draw(x[1:3], 2, 7), whole[2:7, 1:3], rtol=1e-5, atol=1e-6)


def test_stand_ins_lie_in_memory_as_the_weights_do():
    model = fb.to_stochastic(LeNet(3), {"conv2": fb.noise.NormalAffine()}).to(
        memory_format=torch.channels_last
    )
    weights = ScaledWeights(model, ("conv2",), NoisePass(settings_of(model, "shared", samples=2, seed=0)))
    assert weights.places[0][3].stride() == model.conv2.weight.stride()


def test_a_copy_after_prediction_is_a_plain_copy():
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    sample_outputs(model, torch.randn(5, 4), 4, plan="absorb")
    twin = copy.deepcopy(model)
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert twin.weight is not model.weight


class Recording(nn.Linear):
    """Lists the precisions it is given."""

    seen: list[torch.dtype]

    def forward(self, x):
        self.seen.append(x.dtype)
        return super().forward(x)


def test_half_precision_is_for_the_layers_not_for_the_noise():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Recording(8, 3))
    plain[2].seen = []
    model = fb.to_stochastic(plain, {"0": fb.noise.NormalPlanar(1)})
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    x = torch.randn(50, 4)
    drawn = []
    layer = noise_layers(model)["0"]
    original = layer.draw_each
    layer.draw_each = lambda *args: drawn.append(original(*args)) or drawn[-1]
    exact = posterior.predict(x, 6, seed=0).samples
    model[2].seen.clear()
    rough = posterior.predict(x, 6, seed=0, precision="bf16-mixed").samples
    assert torch.bfloat16 in model[2].seen
    assert {draw.dtype for draw in drawn} == {torch.float32}
    assert rough.dtype == torch.float32
    gap = (rough - exact).abs().max()
    assert 0 < gap < 0.02


def test_a_layer_that_turns_autocast_off_still_predicts():
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.body(x)
            with torch.autocast("cpu", enabled=False):
                return self.head(x.float())

    model = fb.to_stochastic(Careful(), {"*": fb.noise.NormalAffine()})
    x = torch.randn(50, 4)
    with drawing(model, 4, seed=0, precision="bf16-mixed", plan="absorb") as draw:
        rough = draw(x)
    torch.testing.assert_close(rough, sample_outputs(model, x, 4, seed=0), rtol=0.05, atol=0.05)


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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "bf16"}, r"predict\(precision=.* did you mean 'bf16-mixed'"),
        ({"compile": "yes"}, "compile=.* must be True or False or 'auto', got 'yes'"),
        ({"max_batch": 0}, "max_batch=.* must be an integer of at least 1"),
    ],
)
def test_bad_options(options, line):
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    for posterior in (
        fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()),
        fb.posterior.PointPosterior(nn.Linear(4, 3), fb.likelihoods.Categorical()),
    ):
        with pytest.raises(fb.FlowBNNError, match=line):
            posterior.predict(torch.ones(2, 4), **options)


class Tied(nn.Module):
    """Reads a noisy layer's weight a second time, so that draws cannot be absorbed into it."""

    def __init__(self):
        super().__init__()
        self.e, self.m = nn.Linear(784, 512, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, x):
        return torch.nn.functional.linear(torch.relu(self.m(torch.relu(self.e(x)))), self.e.weight.t())


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_plan_is_not_accepted_because_the_first_rows_tell_nothing_or_outputs_are_small(scale):
    torch.manual_seed(0)
    model = fb.to_stochastic(Tied(), {"*": fb.noise.NormalAffine()})
    with torch.no_grad():
        model.m.weight.mul_(scale)
    x = torch.randn(600, 784)
    blank = x.clone()
    blank[:2] = 0
    truth = (
        fb.posterior.NoisePosterior(model, fb.likelihoods.Gaussian()).predict(x, samples=4, seed=0).mean[5:]
    )
    other = copy.deepcopy(model)
    found = (
        fb.posterior.NoisePosterior(other, fb.likelihoods.Gaussian())
        .predict(blank, samples=4, seed=0)
        .mean[5:]
    )
    assert (found - truth).abs().max() < 1e-5 * truth.abs().max()
    assert "e" not in plan_for(other, blank).absorbed


class Fastidious(nn.Module):
    """Takes positive numbers only: rows moved at random are refused, or give NaN."""

    def __init__(self, refuses):
        super().__init__()
        self.refuses, self.first, self.second = refuses, nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        if self.refuses and bool((x < 0.5).any()):
            raise ValueError("inputs are at least 0.5")
        return self.second(torch.tanh(self.first((x - 0.5).sqrt())))


@pytest.mark.parametrize("refuses", [True, False])
def test_a_network_that_takes_certain_inputs_only_is_tried_on_those_it_was_given(refuses):
    torch.manual_seed(0)
    model = fb.to_stochastic(Fastidious(refuses), {"*": fb.noise.NormalAffine()})
    x = 0.5 + torch.rand(20, 3) * torch.tensor([1.0, 10.0, 100.0])
    assert plan_for(model, x).fold == ("" if refuses else "input")  # what decides by values is not folded
    outputs = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()).predict(x, samples=3, seed=1)
    assert torch.isfinite(outputs.probabilities).all()
