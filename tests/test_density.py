"""Densities by maximum likelihood, and targets by variational inference, against what is known in closed form."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.density import Density
from flowbnn.density.target import TargetFit
from flowbnn.distributions import DiagonalNormal
from flowbnn.transforms import ActNorm, Affine, Compose, Dequantization, Exp

FEW = {"epochs": 2, "seed": 0, "progress": False, "accelerator": "cpu"}
ONE = {**FEW, "epochs": 1}


class Gaussian(nn.Module):
    """A learned diagonal normal, whose mean is the context where it has one."""

    def __init__(self, dim: int = 2, context_dim: int = 0) -> None:
        super().__init__()
        self.context_dim = context_dim
        self.loc = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))

    def forward(self, context: Tensor | None = None) -> DiagonalNormal:
        return DiagonalNormal(self.loc if context is None else self.loc + context, self.log_scale.exp())


INTEGERS = fb.flows.FlowModel(fb.distributions.NormalBase(2, 0.0, 1.0), Compose(Affine(2), Dequantization()))
POSITIVE = fb.flows.FlowModel(fb.distributions.NormalBase(2, 0.0, 1.0), Compose(Affine(2), Exp()))


def points(count: int = 400) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.tensor([5.0, -300.0]) + torch.tensor([0.01, 70.0]) * torch.randn(
        count, 2, generator=generator
    )


def test_a_density_has_the_units_of_the_data() -> None:
    data = points()
    density = fb.fit_density(Gaussian(), data, **FEW)
    loc, scale = density.loc, density.scale
    expected = DiagonalNormal(
        loc + scale * density.flow.loc, scale * density.flow.log_scale.exp()
    )  # a linear map of a normal
    torch.testing.assert_close(density.log_prob(data), expected.log_prob(data), rtol=1e-4, atol=1e-4)
    # the mean and deviation of the data, within their own standard errors
    drawn = density.sample(20_000, seed=0)
    assert ((drawn.mean(0) - data.mean(0)).abs() < 0.2 * data.std(0)).all()
    assert ((drawn.std(0) / data.std(0) - 1).abs() < 0.2).all()
    torch.testing.assert_close(drawn, density.sample(20_000, seed=0), rtol=0, atol=0)


def test_angles_and_positive_numbers_keep_their_units() -> None:
    angles = torch.remainder(torch.randn(200, 1, generator=torch.Generator().manual_seed(0)), 2 * math.pi)
    density = fb.fit_density(fb.flows.NSF(1, circular=True), angles - math.pi, **ONE)
    turn = torch.linspace(-math.pi, math.pi, 1001)
    mass = torch.trapezoid(density.score(turn.unsqueeze(-1)).exp(), turn)
    assert abs(float(mass) - 1.0) < 1e-3
    assert float(density.sample(500, seed=0).abs().max()) <= math.pi

    base = fb.distributions.NormalBase(1, 0.0, 1.0)
    positive = fb.flows.FlowModel(base, Compose(Affine(1), Exp()))
    density = fb.fit_density(positive, angles + 0.1, **ONE)
    assert float(density.sample(500, seed=0).min()) > 0


def test_units_of_numbers_far_from_zero_and_of_a_constant() -> None:
    noise = torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.cat([1.7e9 + noise, torch.full_like(noise, 1e5 / 3)], 1)
    flow = fb.flows.RealNVP(2).double()
    with pytest.warns(fb.FlowBNNWarning, match=r"not vary.*: drop 'data\[:, 1\]'$"):
        density = fb.fit_density(flow, data, validation=0, batch_size=200, **ONE)
    truth = torch.cat([data[:, :1].std(0, correction=0), torch.ones(1)])
    torch.testing.assert_close(density.scale, truth, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_may_be_small(dtype: torch.dtype) -> None:
    data = 1e-17 * points()[:, :1].sub(5.0).div(0.01).to(dtype)
    density = fb.fit_density(Gaussian(1), data, **ONE)
    torch.testing.assert_close(density.scale, data.std(0), rtol=0.2, atol=0.0)


def test_integers_are_refused_by_a_density_with_units() -> None:
    counts = torch.randint(5, (50, 2))
    with pytest.raises(fb.FlowBNNError, match="dequantize"):
        fb.fit_density(Gaussian(), counts, standardize=True, **ONE)


@pytest.mark.parametrize("kind", ["tensor", "array", "rows"])
def test_data_in_double_precision_are_scaled_before_they_are_rounded(kind: str) -> None:
    noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = 1e9 + 1e-3 * noise  # float32 tells apart numbers of this size that are 64 apart
    given = {"tensor": data, "array": data.numpy(), "rows": data.tolist()}[kind]
    density = fb.fit_density(Gaussian(), given, **ONE, validation=0)
    near = data - 1e9  # exactly
    loc, scale = near.mean(0), near.std(0, correction=0)
    torch.testing.assert_close(density.scale, scale, rtol=1e-6, atol=0.0)
    scaled = ((near - loc) / scale).float()
    expected = density.flow().log_prob(scaled) - scale.log().sum()
    torch.testing.assert_close(density.log_prob(given), expected, rtol=0, atol=1e-3, check_dtype=False)
    assert (density.sample(50, seed=0) - 1e9).abs().max() < 0.02


def test_validation_data_come_with_their_context() -> None:
    x, context = torch.randn(60, 2), torch.randn(60, 3)
    density = fb.fit_density(fb.flows.RealNVP(2, 3), x, context=context, validation=(x, context), **ONE)
    nll = -float(density.score(x, context).double().mean())
    assert density.history.records[-1]["validation_nll"] == pytest.approx(nll, abs=1e-6)
    # labels beside the examples are no examples
    density = fb.fit_density(fb.flows.RealNVP(2), x, validation=(x, 100.0 + x), **ONE)
    assert density.history.records[-1]["validation_nll"] < 10


def test_maximum_likelihood_is_found() -> None:
    data = points(300)
    density = fb.fit_density(Gaussian(), data, **FEW | {"epochs": 60}, validation=0, lr=0.05, batch_size=300)
    best = DiagonalNormal(data.mean(0), data.std(0, correction=0)).log_prob(data).mean()
    torch.testing.assert_close(density.score(data).mean(), best, rtol=0, atol=1e-3)
    assert fb.fit_density(Gaussian(), data.numpy(), **FEW).history.epochs == 2


def test_held_out_data_stop_the_run_and_keep_its_best_epoch() -> None:
    data = points()
    held_out = data[:50] + torch.tensor(
        [0.0, 1e4]
    )  # what training cannot reach: every epoch is worse than the first
    options = FEW | {"epochs": 30}
    density = fb.fit_density(Gaussian(), data[50:], **options, validation=held_out, patience=3, lr=0.1)
    values = density.history["validation_nll"]
    assert density.history.stopped_early
    assert -density.score(held_out).mean().item() == pytest.approx(min(values), rel=1e-5)


def test_a_conditional_density_takes_its_context() -> None:
    context = torch.randn(300, 2, generator=torch.Generator().manual_seed(1))
    data = context + 0.1 * torch.randn(300, 2, generator=torch.Generator().manual_seed(2))
    options = FEW | {"epochs": 150, "lr": 0.1, "batch_size": 300, "validation": 0}
    density = fb.fit_density(Gaussian(2, 2), data, context=context, standardize=False, **options)
    residuals = data - context
    best = DiagonalNormal(residuals.mean(0), residuals.std(0, correction=0)).log_prob(residuals).mean()
    torch.testing.assert_close(density.score(data, context).mean(), best, rtol=0, atol=5e-3)
    pairs = fb.data.TensorLoader(data, context, batch_size=300)
    torch.testing.assert_close(density.score(pairs), density.score(data, context))
    assert density.sample(4, context[:3]).shape == (4, 3, 2)


def test_a_run_resumes_to_the_same_density(tmp_path) -> None:
    options = FEW | {"epochs": 4, "checkpoint": tmp_path / "whole"}
    whole = fb.fit_density(Gaussian(), points(), **options)

    class Stop(Exception):
        pass

    class Stopping(Gaussian):
        calls = 0

        def forward(self, context: Tensor | None = None) -> DiagonalNormal:
            self.calls += 1
            if self.calls == 5:
                raise Stop
            return super().forward(context)

    options["checkpoint"] = tmp_path / "parts"
    with pytest.raises(Stop):
        fb.fit_density(Stopping(), points(), **options)
    again = fb.fit_density(Gaussian(), points(), resume=True, **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_a_longer_run_resumes_without_a_warning_of_its_rate(tmp_path) -> None:
    options = FEW | {"batch_size": 4, "checkpoint": tmp_path}  # 90 steps in an epoch: the rate begins low
    fb.fit_density(Gaussian(), points(), **options)
    longer = fb.fit_density(Gaussian(), points(), resume=True, **options | {"epochs": 4})
    assert longer.history.epochs == 4
    with pytest.warns(fb.errors.FlowBNNWarning, match=r"lr stays 0.002, not 0.1"):
        fb.fit_density(Gaussian(), points(), resume=True, **options | {"epochs": 5, "lr": 0.1})


def test_save_and_load(tmp_path) -> None:
    data = points()
    density = fb.fit_density(Gaussian(), data, **FEW)
    loaded = fb.load_density(density.save(tmp_path / "density.safetensors"), Gaussian())
    assert torch.equal(loaded.log_prob(data), density.log_prob(data))
    assert loaded.history.epochs == density.history.epochs
    with pytest.raises(fb.FlowBNNError, match=r"log_scale|shape"):
        fb.load_density(tmp_path / "density.safetensors", Gaussian(3))


def test_bits_per_dimension_of_a_known_density() -> None:
    density = Density(Gaussian(3))
    data = torch.zeros(5, 3)
    assert density.bits_per_dimension(data) == pytest.approx(0.5 * math.log2(2 * math.pi))


def test_p_values_of_novelty_by_hand() -> None:
    density = Density(Gaussian(1))
    held_out = torch.tensor([[0.0], [1.0], [-2.0], [3.0]])  # as strange as their size
    detector = density.novelty(held_out, rate=0.4)
    assert detector.p_value(torch.tensor([[0.5], [2.0], [-5.0], [0.0]])).tolist() == pytest.approx(
        [4 / 5, 3 / 5, 1 / 5, 1.0]
    )
    assert detector.is_novel(torch.tensor([[2.5], [5.0], [0.1]])).tolist() == [True, True, False]
    typical = density.novelty(torch.tensor([[1.0], [-1.0], [0.9], [1.1], [1.05]]), rate=0.4, by="typicality")
    assert typical.is_novel(torch.tensor([[0.0], [1.0], [4.0]])).tolist() == [True, False, True]


@pytest.mark.parametrize("by", ["density", "typicality"])
def test_an_example_without_a_density_is_novel(by) -> None:
    density = Density(Gaussian(1))
    detector = density.novelty(torch.linspace(-2.0, 2.0, 39)[:, None], rate=0.05, by=by)
    strange = torch.tensor(
        [[math.nan], [math.inf], [1e30], [0.6]]
    )  # log-densities of NaN and of minus infinity
    assert detector.is_novel(strange).tolist() == [True, True, True, False]
    assert torch.equal(detector.strangeness(strange).argsort(descending=True)[-1], torch.tensor(3))
    one_far = torch.cat([torch.linspace(-2.0, 2.0, 38), torch.tensor([1e30])])[:, None]
    assert density.novelty(one_far, by=by).p_value(strange)[:3].tolist() == pytest.approx([2 / 40] * 3)
    with pytest.raises(fb.FlowBNNError, match="held-out"):
        density.novelty(strange)


def test_scores_of_no_examples_and_of_one_without_its_axis() -> None:
    density = Density(Gaussian(2))
    assert density.score(torch.zeros(0, 2)).shape == (0,)
    with pytest.raises(fb.FlowBNNError, match="held-out examples"):
        density.novelty(torch.zeros(0, 2))
    with pytest.raises(fb.FlowBNNError, match=r"a batch of shape \(2,\)"):
        density.score(torch.zeros(2))


def test_a_context_is_brought_to_the_precision_of_the_flow() -> None:
    density = Density(fb.flows.RealNVP(2, 1, length=1, hidden=(4,)))
    context = torch.ones(3, 1, dtype=torch.float64)
    x = torch.zeros(3, 2, dtype=torch.float64)
    torch.testing.assert_close(density.log_prob(x, context), density.score(x, context))
    assert density.sample(2, context).shape == (2, 3, 2)
    arrays = x.numpy(), context.numpy()
    arrays[0].flags.writeable = False  # as those of pandas are
    torch.testing.assert_close(density.log_prob(*arrays), density.score(*arrays))
    assert density.sample(2, context.numpy()).shape == (2, 3, 2)


def test_familiar_examples_are_rarely_novel() -> None:
    generator = torch.Generator().manual_seed(0)
    density = Density(Gaussian(2))  # of the wrong width: the rate holds nevertheless
    detector = density.novelty(3.0 * torch.randn(999, 2, generator=generator), rate=0.05)
    assert repr(detector) == "NoveltyDetector(rate=0.05, by='density')"
    share = detector.is_novel(3.0 * torch.randn(20_000, 2, generator=generator)).double().mean().item()
    # given 999 held-out examples the share is a beta variable of standard deviation 0.0069
    assert share == pytest.approx(0.05, abs=4 * 0.007)


@pytest.mark.parametrize("by", ["density", "typicality"])
@pytest.mark.parametrize("number", [1, 4, 9])
def test_the_rate_holds_with_few_held_out_examples(number: int, by: str) -> None:
    """Of one more example than were held out, each in turn as the new one, exactly one is the strangest."""
    density, rate = Density(Gaussian(2)), 1 / (1 + number)
    for seed in range(20):
        x = torch.randn(1 + number, 2, generator=torch.Generator().manual_seed(seed))
        others = [torch.cat([x[:i], x[i + 1 :]]) for i in range(1 + number)]
        found = [
            density.novelty(other, rate, by).p_value(one[None]) for one, other in zip(x, others, strict=True)
        ]
        expected = torch.arange(1, 2 + number) / (1 + number)
        if number == 1 and by == "typicality":  # two are equally far from their mean
            expected = torch.ones(2)
        torch.testing.assert_close(torch.cat(found).sort().values.float(), expected)


def test_a_rate_that_no_example_can_reach_is_warned_of() -> None:
    with pytest.warns(fb.FlowBNNWarning, match="at least 19 held-out examples; with 10"):
        detector = Density(Gaussian(1)).novelty(torch.randn(10, 1), rate=0.05)
    assert not detector.is_novel(torch.tensor([[1e3]]))
    Density(Gaussian(1)).novelty(torch.randn(19, 1), rate=0.05)


def test_evidence_of_a_target_is_exact_where_the_flow_is() -> None:
    fitted = TargetFit(Gaussian(), lambda x: 1.7 + DiagonalNormal(torch.zeros(2), 1.0).log_prob(x), None)
    found = fitted.evidence(100)
    assert found["elbo"] == pytest.approx(1.7, abs=1e-5)
    assert found["log_evidence"] == pytest.approx(1.7, abs=1e-5)
    assert found["elbo_error"] == pytest.approx(0, abs=1e-5)


def test_a_target_is_found_with_its_constant() -> None:
    def log_density(x: Tensor) -> Tensor:
        return DiagonalNormal(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 3.0])).log_prob(x) - 4.0

    options = {"epochs": 4, "seed": 0, "progress": False, "lr": 0.05, "samples": 64, "accelerator": "cpu"}
    fitted = fb.fit_target(Gaussian(), log_density, **options)
    assert repr(fitted) == "TargetFit(Gaussian, 4 epochs)"
    found = fitted.evidence(2000)
    assert found["elbo"] <= found["log_evidence"] + 1e-9
    assert found["log_evidence"] == pytest.approx(-4.0, abs=0.01)
    assert found["k_hat"] < 0.5
    torch.testing.assert_close(fitted.flow.loc.detach(), torch.tensor([2.0, -1.0]), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fb.fit_density(Gaussian(), torch.zeros(8, 2), validation=1.5), "validation"),
        (lambda: fb.fit_density(Gaussian(), torch.full((8, 2), math.nan)), "NaN"),
        (lambda: fb.fit_density(Gaussian(), points(), epoch=3), "did you mean 'epochs'"),
        (lambda: fb.fit_density(Gaussian(), 3), "loader"),
        (lambda: fb.fit_density(Gaussian(), [points()], context=points()), "leave out context"),
        (lambda: fb.fit_density("nsf", points()), "flow"),
        (
            lambda: fb.fit_density(fb.flows.NSF(2)(), points()),
            "got a Flow; give the module, not what it returns",
        ),
        (lambda: fb.fit_density(Gaussian(), points(), learning_rate=1.0), "did you mean 'lr'"),
        (lambda: fb.fit_density(fb.flows.NSF(1), points()[:, 0]), r"x\[:, None\]"),
        (lambda: fb.fit_density(fb.flows.NSF(3), points()), r"NSF is made for .* \(3,\), .* \(256, 2\)"),
        (
            lambda: fb.fit_target(Gaussian(), lambda x: -x.detach().sum(-1), progress=False),
            "no gradient .*detach",
        ),
        (
            lambda: fb.fit_target(Gaussian(), lambda x: x.detach().numpy().sum(-1), progress=False),
            "must give a tensor",
        ),
        (lambda: fb.fit_target(INTEGERS, lambda x: -x.float().sum(-1), progress=False), "carry no gradient"),
        (
            lambda: fb.fit_target(fb.flows.IDF(2), torch.sum, progress=False),
            "draws are integers, which carry no",
        ),
        (lambda: Density(Gaussian(2, 2)).score([(points(), points())], points()), "leave out context"),
        (lambda: fb.fit_density(Gaussian(), points(), context=points()), "no context_dim"),
        (lambda: fb.fit_density(Gaussian(), points(), validation=points() * math.nan), "validation data"),
        (lambda: fb.fit_density(Gaussian(), points(), validation="0.1"), "validation must be .*a loader"),
        (lambda: fb.fit_density(Gaussian(), points(), validation=points(0)), "validation has no batches"),
        (lambda: fb.fit_density(Gaussian(), points(), validation=iter([points()])), "validation .*once only"),
        (
            lambda: fb.fit_density(Gaussian(), points(), validation=points()[:, :1]),
            r"of validation .*\(400, 1\)",
        ),
        (lambda: fb.fit_density(Gaussian(), points(1)), "validation=0"),
        (lambda: Density(Gaussian()).score(points(), points()), "no context_dim"),
        (lambda: Density(Gaussian(), torch.zeros(2), torch.ones(2)).log_prob(torch.zeros(5, 1)), "shape"),
        (lambda: fb.fit_target(Gaussian(), lambda x: x, progress=False), "one number for each point"),
        (lambda: fb.fit_target(Gaussian(), lambda x: None, progress=False), "not a NoneType"),
        (lambda: fb.fit_target(Gaussian(), lambda x: 1.5, progress=False), "not 1.5"),
        (
            lambda: fb.fit_target(Gaussian(), lambda x: x.sum(-1) - math.inf, progress=False),
            "'log_density' is not",
        ),
        (lambda: Density(Gaussian()).novelty(points(), rate=2), "rate"),
        (lambda: fb.fit_density(fb.flows.RealNVP(2), list(points())), "torch.stack"),
        (
            lambda: fb.fit_density(fb.flows.RealNVP(2), [(points()[0], 1)]),
            r"of shape \(2,\), and a batch of data has shape \(2,\)",
        ),
        (lambda: fb.fit_density(POSITIVE, points(), **FEW), "part 1 of the flow: the inverse of Exp"),
    ],
)
def test_bad_input_ends_in_one_line(call, words) -> None:
    with pytest.raises(fb.FlowBNNError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_seed_draws_the_same_in_every_thread():
    density = Density(fb.flows.RealNVP(3))
    alone = [density.sample(50, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        several = list(pool.map(lambda number: density.sample(50, seed=number % 8), range(160)))
    assert all(torch.equal(drawn, alone[number % 8]) for number, drawn in enumerate(several))


def test_a_training_that_diverged_is_warned_of() -> None:
    data = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    given = {**FEW, "epochs": 4, "rise": 0.5, "batch_size": 20, "validation": 0}
    with pytest.warns(fb.FlowBNNWarning, match=r"the training diverged.*validation=0.1"):
        fb.fit_density(Gaussian(), data, lr=10.0, **given)
    fb.fit_density(Gaussian(), data, lr=0.01, **given)


def test_scales_of_actnorm_learn_five_times_as_fast() -> None:
    """The first step of Adam is the rate, whatever the gradient."""
    flow = fb.flows.FlowModel(fb.distributions.NormalBase(2, 0.0, 1.0), ActNorm(2, data_init=False))
    given = {"batch_size": 64, "lr": 1e-3, "rise": 0.0, "weight_decay": 0.0, "validation": 0.0}
    fit = fb.fit_density(flow, points(64), standardize=False, **given, **ONE)
    learned = fit.flow.transform
    torch.testing.assert_close(learned.raw_log_scale.abs(), torch.full((2,), 5e-3), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(learned.shift.abs(), torch.full((2,), 1e-3), rtol=1e-3, atol=0.0)
