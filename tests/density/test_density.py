"""Tests of maximum-likelihood densities and of variational fits to a target, against closed forms."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.density import Density
from flowbnn.density.target import TargetFit
from flowbnn.distributions import DiagonalNormal
from flowbnn.errors import FlowBNNError
from flowbnn.training import load_tensors, save_tensors
from flowbnn.transforms import ActNorm, Affine, Compose, Dequantization, Exp

TWO_EPOCHS = {"epochs": 2, "seed": 0, "progress": False, "accelerator": "cpu"}
ONE_EPOCH = {**TWO_EPOCHS, "epochs": 1}


class Gaussian(nn.Module):
    """Learned diagonal normal. A context is added to its mean."""

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
    """Returns normal points with very different scales."""
    generator = torch.Generator().manual_seed(0)
    return torch.tensor([5.0, -300.0]) + torch.tensor([0.01, 70.0]) * torch.randn(
        count, 2, generator=generator
    )


def test_density_has_units_of_data() -> None:
    data = points()
    density = fb.fit_density(Gaussian(), data, **TWO_EPOCHS)
    loc, scale = density.loc, density.scale
    # a linear map of a normal is normal
    expected = DiagonalNormal(loc + scale * density.flow.loc, scale * density.flow.log_scale.exp())
    torch.testing.assert_close(density.log_prob(data), expected.log_prob(data), rtol=1e-4, atol=1e-4)
    # mean and deviation of the data, within their standard errors
    draws = density.sample(20_000, seed=0)
    assert ((draws.mean(0) - data.mean(0)).abs() < 0.2 * data.std(0)).all()
    assert ((draws.std(0) / data.std(0) - 1).abs() < 0.2).all()
    torch.testing.assert_close(draws, density.sample(20_000, seed=0), rtol=0, atol=0)


def test_angles_and_positive_numbers_are_not_standardized() -> None:
    angles = torch.remainder(torch.randn(200, 1, generator=torch.Generator().manual_seed(0)), 2 * math.pi)
    density = fb.fit_density(fb.flows.NSF(1, circular=True), angles - math.pi, **ONE_EPOCH)
    turn = torch.linspace(-math.pi, math.pi, 1001)
    mass = torch.trapezoid(density.score(turn.unsqueeze(-1)).exp(), turn)
    assert abs(float(mass) - 1.0) < 1e-3
    assert float(density.sample(500, seed=0).abs().max()) <= math.pi

    base = fb.distributions.NormalBase(1, 0.0, 1.0)
    positive = fb.flows.FlowModel(base, Compose(Affine(1), Exp()))
    density = fb.fit_density(positive, angles + 0.1, **ONE_EPOCH)
    assert float(density.sample(500, seed=0).min()) > 0


def test_scale_of_large_numbers_and_of_constant_column() -> None:
    noise = torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.cat([1.7e9 + noise, torch.full_like(noise, 1e5 / 3)], 1)
    flow = fb.flows.RealNVP(2).double()
    with pytest.warns(fb.FlowBNNWarning) as caught:
        density = fb.fit_density(flow, data, validation=0, batch_size=200, **ONE_EPOCH)
    assert caught[0].message.kind == "constant"
    assert caught[0].message.fields["columns"] == ["data[:, 1]"]
    truth = torch.cat([data[:, :1].std(0, correction=0), torch.ones(1)])
    torch.testing.assert_close(density.scale, truth, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_of_small_numbers(dtype: torch.dtype) -> None:
    data = 1e-17 * points()[:, :1].sub(5.0).div(0.01).to(dtype)
    density = fb.fit_density(Gaussian(1), data, **ONE_EPOCH)
    torch.testing.assert_close(density.scale, data.std(0), rtol=0.2, atol=0.0)


def test_standardized_density_refuses_integers() -> None:
    counts = torch.randint(5, (50, 2))
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.fit_density(Gaussian(), counts, standardize=True, **ONE_EPOCH)
    assert caught.value.kind == "dtype"


@pytest.mark.parametrize("container", ["tensor", "array", "rows"])
def test_double_precision_data_are_scaled_before_rounding(container: str) -> None:
    noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = 1e9 + 1e-3 * noise  # float32 numbers of this size are 64 apart
    values = {"tensor": data, "array": data.numpy(), "rows": data.tolist()}[container]
    density = fb.fit_density(Gaussian(), values, **ONE_EPOCH, validation=0)
    near = data - 1e9  # exact
    loc, scale = near.mean(0), near.std(0, correction=0)
    torch.testing.assert_close(density.scale, scale, rtol=1e-6, atol=0.0)
    scaled = ((near - loc) / scale).float()
    expected = density.flow().log_prob(scaled) - scale.log().sum()
    torch.testing.assert_close(density.log_prob(values), expected, rtol=0, atol=1e-3, check_dtype=False)
    assert (density.sample(50, seed=0) - 1e9).abs().max() < 0.02


def test_validation_data_with_context() -> None:
    x, context = torch.randn(60, 2), torch.randn(60, 3)
    density = fb.fit_density(fb.flows.RealNVP(2, 3), x, context=context, validation=(x, context), **ONE_EPOCH)
    nll = -float(density.score(x, context).double().mean())
    assert density.history.records[-1]["validation_nll"] == pytest.approx(nll, abs=1e-6)
    assert repr(density) == f"Density(RealNVP, 1 epoch, validation NLL {nll:.4g} nats)"
    # labels of the validation data are ignored
    density = fb.fit_density(fb.flows.RealNVP(2), x, validation=(x, 100.0 + x), **ONE_EPOCH)
    assert density.history.records[-1]["validation_nll"] < 10


def test_fit_reaches_maximum_likelihood() -> None:
    data = points(300)
    density = fb.fit_density(
        Gaussian(), data, **TWO_EPOCHS | {"epochs": 60}, validation=0, lr=0.05, batch_size=300
    )
    best = DiagonalNormal(data.mean(0), data.std(0, correction=0)).log_prob(data).mean()
    torch.testing.assert_close(density.score(data).mean(), best, rtol=0, atol=1e-3)
    assert fb.fit_density(Gaussian(), data.numpy(), **TWO_EPOCHS).history.epochs == 2


def test_early_stopping_restores_best_epoch() -> None:
    data = points()
    # training cannot reach these: every epoch is worse than the first
    held_out = data[:50] + torch.tensor([0.0, 1e4])
    options = TWO_EPOCHS | {"epochs": 30}
    density = fb.fit_density(Gaussian(), data[50:], **options, validation=held_out, patience=3, lr=0.1)
    values = density.history["validation_nll"]
    assert density.history.stopped_early
    assert -density.score(held_out).mean().item() == pytest.approx(min(values), rel=1e-5)


def test_conditional_density() -> None:
    context = torch.randn(300, 2, generator=torch.Generator().manual_seed(1))
    data = context + 0.1 * torch.randn(300, 2, generator=torch.Generator().manual_seed(2))
    options = TWO_EPOCHS | {"epochs": 150, "lr": 0.1, "batch_size": 300, "validation": 0}
    density = fb.fit_density(Gaussian(2, 2), data, context=context, standardize=False, **options)
    residuals = data - context
    best = DiagonalNormal(residuals.mean(0), residuals.std(0, correction=0)).log_prob(residuals).mean()
    torch.testing.assert_close(density.score(data, context).mean(), best, rtol=0, atol=5e-3)
    pairs = fb.data.TensorLoader(data, context, batch_size=300)
    torch.testing.assert_close(density.score(pairs), density.score(data, context))
    assert density.sample(4, context[:3]).shape == (4, 3, 2)


def test_resumed_fit_gives_same_density(tmp_path) -> None:
    options = TWO_EPOCHS | {"epochs": 4, "checkpoint": tmp_path / "uninterrupted"}
    uninterrupted = fb.fit_density(Gaussian(), points(), **options)

    class Stop(Exception):
        pass

    class Stopping(Gaussian):
        calls = 0

        def forward(self, context: Tensor | None = None) -> DiagonalNormal:
            self.calls += 1
            if self.calls == 5:
                raise Stop
            return super().forward(context)

    options["checkpoint"] = tmp_path / "interrupted"
    with pytest.raises(Stop):
        fb.fit_density(Stopping(), points(), **options)
    resumed = fb.fit_density(Gaussian(), points(), resume=True, **options)
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_resume_with_more_epochs_warns_only_about_changed_rate(tmp_path) -> None:
    options = TWO_EPOCHS | {
        "batch_size": 4,
        "checkpoint": tmp_path,
    }  # 90 steps per epoch, so the warm-up has a low first rate
    fb.fit_density(Gaussian(), points(), **options)
    longer = fb.fit_density(Gaussian(), points(), resume=True, **options | {"epochs": 4})
    assert longer.history.epochs == 4
    with pytest.warns(fb.FlowBNNWarning) as caught:
        fb.fit_density(Gaussian(), points(), resume=True, **options | {"epochs": 5, "lr": 0.1})
    assert caught[0].message.kind == "changed settings"


def test_save_and_load(tmp_path) -> None:
    data = points()
    density = fb.fit_density(Gaussian(), data, **TWO_EPOCHS)
    loaded = fb.load_density(density.save(tmp_path / "density.safetensors"), Gaussian())
    assert torch.equal(loaded.log_prob(data), density.log_prob(data))
    assert loaded.history.epochs == density.history.epochs
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.load_density(tmp_path / "density.safetensors", Gaussian(3))
    assert caught.value.kind == "architecture"


def test_bits_per_dimension_of_a_known_density() -> None:
    density = Density(Gaussian(3))
    data = torch.zeros(5, 3)
    assert density.bits_per_dimension(data) == pytest.approx(0.5 * math.log2(2 * math.pi))


def test_novelty_p_values_by_hand() -> None:
    density = Density(Gaussian(1))
    held_out = torch.tensor([[0.0], [1.0], [-2.0], [3.0]])  # strangeness grows with the absolute value
    detector = density.novelty(held_out, rate=0.4)
    assert detector.p_value(torch.tensor([[0.5], [2.0], [-5.0], [0.0]])).tolist() == pytest.approx(
        [4 / 5, 3 / 5, 1 / 5, 1.0]
    )
    assert detector.is_novel(torch.tensor([[2.5], [5.0], [0.1]])).tolist() == [True, True, False]
    typical = density.novelty(
        torch.tensor([[1.0], [-1.0], [0.9], [1.1], [1.05]]), rate=0.4, criterion="typicality"
    )
    assert typical.is_novel(torch.tensor([[0.0], [1.0], [4.0]])).tolist() == [True, False, True]


@pytest.mark.parametrize("criterion", ["density", "typicality"])
def test_example_with_nan_density_is_novel(criterion) -> None:
    density = Density(Gaussian(1))
    detector = density.novelty(torch.linspace(-2.0, 2.0, 39)[:, None], rate=0.05, criterion=criterion)
    # the first three have log-densities of NaN or minus infinity
    strange = torch.tensor([[math.nan], [math.inf], [1e30], [0.6]])
    assert detector.is_novel(strange).tolist() == [True, True, True, False]
    assert torch.equal(detector.novelty_score(strange).argsort(descending=True)[-1], torch.tensor(3))
    one_far = torch.cat([torch.linspace(-2.0, 2.0, 38), torch.tensor([1e30])])[:, None]
    assert density.novelty(one_far, criterion=criterion).p_value(strange)[:3].tolist() == pytest.approx(
        [2 / 40] * 3
    )
    with pytest.raises(fb.FlowBNNError) as caught:
        density.novelty(strange)
    assert (caught.value.kind, caught.value.argument) == ("data", "held_out")


def test_scores_of_empty_data_and_of_single_example() -> None:
    density = Density(Gaussian(2))
    assert density.score(torch.zeros(0, 2)).shape == (0,)
    with pytest.raises(fb.FlowBNNError) as caught:
        density.novelty(torch.zeros(0, 2))
    assert (caught.value.kind, caught.value.argument) == ("data", "held_out")
    with pytest.raises(fb.FlowBNNError) as caught:
        density.score(torch.zeros(2))
    assert (caught.value.kind, caught.value.argument) == ("shape", "data")


def test_context_is_cast_to_precision_of_flow() -> None:
    density = Density(fb.flows.RealNVP(2, 1, length=1, hidden=(4,)))
    context = torch.ones(3, 1, dtype=torch.float64)
    x = torch.zeros(3, 2, dtype=torch.float64)
    torch.testing.assert_close(density.log_prob(x, context), density.score(x, context))
    assert density.sample(2, context).shape == (2, 3, 2)
    arrays = x.numpy(), context.numpy()
    arrays[0].flags.writeable = False  # arrays from pandas are read-only
    torch.testing.assert_close(density.log_prob(*arrays), density.score(*arrays))
    assert density.sample(2, context.numpy()).shape == (2, 3, 2)


def test_false_alarm_rate() -> None:
    generator = torch.Generator().manual_seed(0)
    density = Density(Gaussian(2))  # too narrow, yet the rate holds
    detector = density.novelty(3.0 * torch.randn(999, 2, generator=generator), rate=0.05)
    assert repr(detector) == "NoveltyDetector(rate=0.05, criterion='density')"
    share = detector.is_novel(3.0 * torch.randn(20_000, 2, generator=generator)).double().mean().item()
    # with 999 held-out examples the share has a beta distribution with standard deviation 0.0069
    assert share == pytest.approx(0.05, abs=4 * 0.007)


@pytest.mark.parametrize("criterion", ["density", "typicality"])
@pytest.mark.parametrize("number", [1, 4, 9])
def test_false_alarm_rate_with_few_held_out_examples(number: int, criterion: str) -> None:
    """If each of n + 1 examples is the new one in turn, exactly one of them is the strangest."""
    density, rate = Density(Gaussian(2)), 1 / (1 + number)
    for seed in range(6):
        x = torch.randn(1 + number, 2, generator=torch.Generator().manual_seed(seed))
        others = [torch.cat([x[:i], x[i + 1 :]]) for i in range(1 + number)]
        p_values = [
            density.novelty(other, rate, criterion).p_value(new[None])
            for new, other in zip(x, others, strict=True)
        ]
        expected = torch.arange(1, 2 + number) / (1 + number)
        if number == 1 and criterion == "typicality":  # two examples are equally far from their mean
            expected = torch.ones(2)
        torch.testing.assert_close(torch.cat(p_values).sort().values.float(), expected)


def test_novelty_warns_about_unreachable_rate() -> None:
    with pytest.warns(fb.FlowBNNWarning) as caught:
        detector = Density(Gaussian(1)).novelty(torch.randn(10, 1), rate=0.05)
    assert caught[0].message.fields == {"kind": "data", "argument": "held_out", "minimum": 19}
    assert not detector.is_novel(torch.tensor([[1e3]]))
    Density(Gaussian(1)).novelty(torch.randn(19, 1), rate=0.05)


def test_evidence_is_exact_for_exact_flow() -> None:
    fitted = TargetFit(Gaussian(), lambda x: 1.7 + DiagonalNormal(torch.zeros(2), 1.0).log_prob(x), None)
    evidence = fitted.evidence(100)
    assert evidence["elbo"] == pytest.approx(1.7, abs=1e-5)
    assert evidence["log_evidence"] == pytest.approx(1.7, abs=1e-5)
    assert evidence["elbo_error"] == pytest.approx(0, abs=1e-5)


def test_fit_target_finds_target_and_constant() -> None:
    def log_density(x: Tensor) -> Tensor:
        return DiagonalNormal(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 3.0])).log_prob(x) - 4.0

    options = {"epochs": 4, "seed": 0, "progress": False, "lr": 0.05, "samples": 64, "accelerator": "cpu"}
    fitted = fb.fit_target(Gaussian(), log_density, **options)
    assert repr(fitted) == f"TargetFit(Gaussian, 4 epochs, ELBO {fitted.history.last['elbo']:.4g} nats)"
    evidence = fitted.evidence(2000)
    assert evidence["elbo"] <= evidence["log_evidence"] + 1e-9
    assert evidence["log_evidence"] == pytest.approx(-4.0, abs=0.01)
    assert evidence["k_hat"] < 0.5
    torch.testing.assert_close(fitted.flow.loc.detach(), torch.tensor([2.0, -1.0]), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: fb.fit_density(Gaussian(), torch.zeros(8, 2), validation=1.5), "value", "validation"),
        (lambda: fb.fit_density(Gaussian(), torch.full((8, 2), math.nan)), "finite", None),
        (lambda: fb.fit_density(Gaussian(), points(), epoch=3), "unknown setting", "epoch"),
        (lambda: fb.fit_density(Gaussian(), 3), "value", "data"),
        (lambda: fb.fit_density(Gaussian(), [points()], context=points()), "value", "context"),
        (lambda: fb.fit_density("nsf", points()), "value", "flow"),
        (
            lambda: fb.fit_density(fb.flows.NSF(2)(), points()),
            "value",
            "flow",
        ),
        (lambda: fb.fit_density(Gaussian(), points(), learning_rate=1.0), "unknown setting", "learning_rate"),
        (lambda: fb.fit_density(fb.flows.NSF(1), points()[:, 0]), "shape", "data"),
        (lambda: fb.fit_density(fb.flows.NSF(3), points()), "shape", "data"),
        (
            lambda: fb.fit_target(Gaussian(), lambda x: -x.detach().sum(-1), progress=False),
            "gradient",
            "log_density",
        ),
        (
            lambda: fb.fit_target(Gaussian(), lambda x: x.detach().numpy().sum(-1), progress=False),
            "gradient",
            "log_density",
        ),
        (lambda: fb.fit_target(INTEGERS, lambda x: -x.float().sum(-1), progress=False), "gradient", "flow"),
        (
            lambda: fb.fit_target(fb.flows.IDF(2), torch.sum, progress=False),
            "gradient",
            "flow",
        ),
        (lambda: Density(Gaussian(2, 2)).score([(points(), points())], points()), "value", "context"),
        (lambda: fb.fit_density(Gaussian(), points(), context=points()), "value", "context"),
        (lambda: fb.fit_density(Gaussian(), points(), validation=points() * math.nan), "finite", None),
        (lambda: fb.fit_density(Gaussian(), points(), validation="0.1"), "value", "validation"),
        (lambda: fb.fit_density(Gaussian(), points(), validation=points(0)), "data", "validation"),
        (lambda: fb.fit_density(Gaussian(), points(), validation=iter([points()])), "loader", "validation"),
        (
            lambda: fb.fit_density(Gaussian(), points(), validation=points()[:, :1]),
            "shape",
            "validation",
        ),
        (lambda: fb.fit_density(Gaussian(), points(1)), "data", "validation"),
        (lambda: Density(Gaussian()).score(points(), points()), "value", "context"),
        (
            lambda: Density(Gaussian(), torch.zeros(2), torch.ones(2)).log_prob(torch.zeros(5, 1)),
            "shape",
            "x",
        ),
        (lambda: fb.fit_target(Gaussian(), lambda x: x, progress=False), "shape", "log_density"),
        (lambda: fb.fit_target(Gaussian(), lambda x: None, progress=False), "shape", "log_density"),
        (lambda: fb.fit_target(Gaussian(), lambda x: 1.5, progress=False), "shape", "log_density"),
        (
            lambda: fb.fit_target(Gaussian(), lambda x: x.sum(-1) - math.inf, progress=False),
            "not finite",
            None,
        ),
        (lambda: Density(Gaussian()).novelty(points(), rate=2), "value", "rate"),
        (lambda: fb.fit_density(fb.flows.RealNVP(2), list(points())), "shape", "data"),
        (lambda: fb.fit_density(POSITIVE, points(), **TWO_EPOCHS), "range", None),
    ],
)
def test_bad_input_raises_an_error_of_one_line(call, kind, argument) -> None:
    with pytest.raises(fb.FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


def test_seeded_samples_are_the_same_in_every_thread():
    density = Density(fb.flows.RealNVP(3))
    sequential = [density.sample(50, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        concurrent = list(pool.map(lambda number: density.sample(50, seed=number % 8), range(160)))
    assert all(torch.equal(draws, sequential[number % 8]) for number, draws in enumerate(concurrent))


def test_warns_about_diverged_training() -> None:
    data = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    options = {**TWO_EPOCHS, "epochs": 4, "warmup_fraction": 0.5, "batch_size": 20, "validation": 0}
    with pytest.warns(fb.FlowBNNWarning) as caught:
        fb.fit_density(Gaussian(), data, lr=10.0, **options)
    assert caught[0].message.kind == "divergence"
    fb.fit_density(Gaussian(), data, lr=0.01, **options)


def test_actnorm_scales_have_five_times_the_learning_rate() -> None:
    """The first step of Adam has the size of the learning rate, for any gradient."""
    flow = fb.flows.FlowModel(fb.distributions.NormalBase(2, 0.0, 1.0), ActNorm(2, data_init=False))
    options = {"batch_size": 64, "lr": 1e-3, "warmup_fraction": 0.0, "weight_decay": 0.0, "validation": 0.0}
    fit = fb.fit_density(flow, points(64), standardize=False, **options, **ONE_EPOCH)
    transform = fit.flow.transform
    torch.testing.assert_close(transform.raw_log_scale.abs(), torch.full((2,), 5e-3), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(transform.shift.abs(), torch.full((2,), 1e-3), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    "other",
    [
        lambda: fb.flows.NSF(2, length=2, bound=4.0),
        lambda: fb.flows.NSF(2, length=2, base=fb.distributions.LaplaceBase(2, 0.0, 1.0)),
    ],
)
def test_densities_with_another_base_or_bound_are_refused(tmp_path, other) -> None:
    flow = fb.flows.NSF(2, length=2)
    path = fb.density.Density(flow).save(tmp_path / "density.safetensors")
    assert torch.equal(fb.load_density(path, flow).score(torch.ones(1, 2)), flow().log_prob(torch.ones(1, 2)))
    with pytest.raises(FlowBNNError) as caught:
        fb.load_density(path, other())
    assert caught.value.kind == "architecture"


@pytest.mark.parametrize("missing", ["loc", "scale"])
def test_densities_without_one_of_their_units_are_refused(tmp_path, missing) -> None:
    flow = fb.flows.NSF(2, length=2)
    path = fb.density.Density(flow, torch.ones(2), torch.full((2,), 3.0)).save(
        tmp_path / "density.safetensors"
    )
    assert fb.load_density(path, flow).scale.tolist() == [3.0, 3.0]
    tensors, document = load_tensors(path)
    save_tensors(path, {name: value for name, value in tensors.items() if name != missing}, document)
    with pytest.raises(FlowBNNError) as caught:
        fb.load_density(path, flow)
    assert caught.value.kind == "architecture"


def test_densities_with_nan_are_refused(tmp_path) -> None:
    density = fb.density.Density(fb.flows.NSF(2, length=2))
    with torch.no_grad():
        next(density.parameters()).fill_(torch.nan)
    path = density.save(tmp_path / "density.safetensors")
    with pytest.raises(FlowBNNError) as caught:
        fb.load_density(path, fb.flows.NSF(2, length=2))
    assert caught.value.kind == "not finite"


def test_mappings_in_memory_are_examples():
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    options = {"epochs": 1, "seed": 0, "batch_size": 20, "progress": False}
    density = fb.fit_density(fb.flows.RealNVP(2), {"x": x, "labels": torch.zeros(60)}, **options)
    scores = density.score({"x": x, "labels": torch.zeros(60)})
    assert torch.allclose(scores, density.log_prob(x.numpy()))
    same = fb.fit_density(fb.flows.RealNVP(2), (x, None), **options)
    assert same.log_prob(x.numpy()).shape == (60,)
    with pytest.raises(fb.FlowBNNError):  # labels alone
        fb.fit_density(fb.flows.RealNVP(2), {"labels": x}, **options)


@pytest.mark.parametrize(
    "data", [points(), [(points(), torch.ones(len(points())))]], ids=["tensor", "loader"]
)
def test_validation_tensor_is_one_batch(data):
    """Its rows are examples with either kind of training data, although a tensor can be iterated."""
    density = fb.fit_density(fb.flows.RealNVP(2), data, validation=points(), standardize=False, **TWO_EPOCHS)
    last = density.history["validation_nll"][-1]
    assert last == pytest.approx(-float(density.log_prob(points()).detach().mean()), rel=1e-6)


def test_examples_with_labels_are_fitted():
    examples = [(row, 1) for row in points()]
    density = fb.fit_density(fb.flows.RealNVP(2), examples, validation=None, **TWO_EPOCHS)
    assert density.score(points()).isfinite().all()
