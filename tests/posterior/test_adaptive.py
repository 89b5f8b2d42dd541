"""Tests of adaptive sampling."""

import math

import pytest
import torch
from small_problem import blobs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.posterior import Posterior
from flowbnn.posterior.adaptive import adaptive_outputs
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive


def logits_of(lead: torch.Tensor) -> torch.Tensor:
    """Two classes of probabilities ``(1 + lead) / 2`` and ``(1 - lead) / 2``."""
    return torch.stack([torch.log1p(lead), torch.log1p(-lead)], -1)


def drawing(outputs: torch.Tensor, asked: list | None = None):
    """A sampler whose samples are known: the inputs are the columns to take."""

    def draw(inputs, samples):
        if asked is not None:
            asked.append((len(inputs), samples.start, samples.stop))
        return outputs[samples.start : samples.stop, inputs]

    return draw


def test_easy_inputs_cost_few_samples_and_hard_ones_all():
    lead = (
        torch.tensor([0.9, 0.5, 0.0])
        + torch.tensor([0.01, 0.3, 0.3]) * torch.tensor([1.0, -1.0]).repeat(32)[:, None]
    )
    asked: list = []
    rule = fb.posterior.Adaptive(tolerance=0.01, certainty=0.99, start=4, growth=2)
    outputs, sample_counts = adaptive_outputs(
        drawing(logits_of(lead), asked), torch.arange(3), 64, rule, CategoricalPredictive
    )
    assert sample_counts.tolist() == [4, 8, 64]
    assert asked == [(3, 0, 4), (2, 4, 8), (1, 8, 16), (1, 16, 32), (1, 32, 64)]
    for index, count in enumerate(sample_counts.tolist()):
        torch.testing.assert_close(outputs[:count, index], logits_of(lead)[:count, index])
        assert outputs[count:, index].isnan().all()


def test_numbers_of_samples_at_each_look():
    assert fb.posterior.Adaptive(start=8, growth=2).test_sizes(128) == [8, 16, 32, 64, 128]
    assert fb.posterior.Adaptive(start=8, growth=2).test_sizes(100) == [8, 16, 32, 64, 100]
    assert fb.posterior.Adaptive(start=8, growth=2).test_sizes(8) == [8]
    assert fb.posterior.Adaptive(start=8, growth=2).test_sizes(1) == [1]
    assert fb.posterior.Adaptive(start=2, growth=1.1).test_sizes(6) == [2, 3, 4, 5, 6]


@pytest.mark.slow
def test_skipped_samples_rarely_change_the_decision():
    """Of inputs whose classes are all but tied, no more than 1 - certainty are answered otherwise than with all samples."""
    generator = torch.Generator().manual_seed(0)
    inputs, samples, certainty = 20_000, 64, 0.8
    means = 0.02 * torch.randn(inputs, generator=generator)
    lead = (means + 0.1 * torch.randn(samples, inputs, generator=generator)).clamp(-0.99, 0.99)
    rule = fb.posterior.Adaptive(certainty=certainty, criterion="decision", start=4)
    outputs, sample_counts = adaptive_outputs(
        drawing(logits_of(lead)), torch.arange(inputs), samples, rule, CategoricalPredictive
    )
    found = CategoricalPredictive(outputs, sample_counts)
    full = CategoricalPredictive(logits_of(lead))
    mistakes = float((found.labels != full.labels).double().mean())
    assert 0.0 < mistakes < 1 - certainty
    assert sample_counts.double().mean() < 0.9 * samples
    early = sample_counts < samples
    assert early.any()
    assert torch.equal(found.labels[~early], full.labels[~early])


def test_a_near_tie_continues_after_its_probabilities_have_settled():
    """Leads from -0.02 to 0.02 whose noise is far below the tolerance: only the order of the two classes is open."""
    generator = torch.Generator().manual_seed(0)
    inputs, samples = 4000, 64
    lead = 0.04 * torch.rand(inputs, generator=generator) - 0.02
    lead = lead + 0.01 * torch.randn(samples, inputs, generator=generator)
    full = CategoricalPredictive(logits_of(lead)).labels
    turned, cost = {}, {}
    for number in (0.0, 1.0, 2.0):
        rule = fb.posterior.Adaptive(tolerance=0.01, certainty=0.999, start=8, lead=number)
        outputs, sample_counts = adaptive_outputs(
            drawing(logits_of(lead)), torch.arange(inputs), samples, rule, CategoricalPredictive
        )
        turned[number] = float((CategoricalPredictive(outputs, sample_counts).labels != full).double().mean())
        cost[number] = float(sample_counts.double().mean()) / samples
    assert cost[0.0] == 8 / samples
    assert turned[2.0] < turned[1.0] < turned[0.0] / 2
    assert cost[0.0] < cost[1.0] < cost[2.0] < 0.5


def test_identical_samples_stop_early():
    rule = fb.posterior.Adaptive(start=4)
    _, sample_counts = adaptive_outputs(
        drawing(torch.zeros(64, 3, 2)), torch.arange(3), 64, rule, CategoricalPredictive
    )
    assert sample_counts.tolist() == [4, 4, 4]


def test_probabilities_are_within_the_tolerance_the_standard_error_promises():
    """The error of those that stopped is that of a mean with the asked standard error, not more."""
    generator = torch.Generator().manual_seed(1)
    inputs, samples, tolerance = 5000, 256, 0.01
    lead = (0.3 + 0.12 * torch.randn(samples, inputs, generator=generator)).clamp(-0.99, 0.99)
    rule = fb.posterior.Adaptive(tolerance, criterion="probabilities", start=16)
    outputs, sample_counts = adaptive_outputs(
        drawing(logits_of(lead)), torch.arange(inputs), samples, rule, CategoricalPredictive
    )
    found = CategoricalPredictive(outputs, sample_counts)
    assert sample_counts.max() < samples
    assert (found.sampling_error <= tolerance).all()
    error = (found.probabilities[:, 0] - 0.65).abs()
    assert float((error > 2.6 * tolerance).double().mean()) < 0.02


def test_regression_settles_by_its_standard_deviation():
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([0.01, 1.0])[:, None] * torch.randn(64, 2, 1, generator=generator)
    _, sample_counts = adaptive_outputs(
        drawing(means),
        torch.arange(2),
        64,
        fb.posterior.Adaptive(0.05),
        lambda values: GaussianPredictive(values, 1.0),
    )
    assert sample_counts.tolist() == [18, 64]  # the first look with 16 samples or more, and all
    with pytest.raises(fb.FlowBNNError) as caught:
        adaptive_outputs(
            drawing(means),
            torch.arange(2),
            64,
            fb.posterior.Adaptive(criterion="decision"),
            lambda values: GaussianPredictive(values, 1.0),
        )
    assert caught.value.argument == "criterion"


@pytest.fixture(scope="module")
def posterior() -> fb.posterior.NoisePosterior:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    data = DataLoader(blobs(), batch_size=40, shuffle=True)
    model = fb.to_stochastic(network, {"0": fb.noise.NormalPlanar(2), "*": fb.noise.NormalAffine()})
    return fb.fit(model, data, epochs=15, weight_lr=0.01, progress=False, accelerator="cpu", validation=None)


@pytest.mark.parametrize("as_loader", [False, True])
def test_a_posterior_samples_adaptively(posterior, as_loader):
    generator = torch.Generator().manual_seed(5)
    x = blobs().tensors[0].repeat(3, 1) + 0.7 * torch.randn(720, 4, generator=generator)
    full = posterior.predict(x, 128, seed=1)
    inputs = list(x.split(50)) if as_loader else x
    found = posterior.predict(inputs, 128, seed=1, adaptive=fb.posterior.Adaptive(0.01, 0.99, growth=2.0))
    sample_counts = found.sample_counts
    assert sample_counts.shape == (720,)
    assert set(sample_counts.tolist()) <= {8, 16, 32, 64, 128}
    assert sample_counts.double().mean() < 128 / 4
    # a mistake has probability below 0.01 for each input; three deviations of the number of mistakes above that
    assert int((found.labels != full.labels).sum()) <= 720 * 0.01 + 3 * math.sqrt(720 * 0.01 * 0.99)
    for count in sample_counts.unique().tolist():
        own = posterior_prefix(full, count)
        chosen = sample_counts == count
        torch.testing.assert_close(
            found.probabilities[chosen], own.probabilities[chosen], rtol=1e-4, atol=1e-5
        )
    assert found.evaluate(torch.zeros(720, dtype=torch.long)).keys() == {"accuracy", "nll", "brier", "ece"}


def posterior_prefix(full: CategoricalPredictive, count: int) -> CategoricalPredictive:
    return CategoricalPredictive(full.log_samples[:count])


def test_evaluate_supports_adaptive_sampling(posterior):
    report = fb.evaluate(posterior, blobs().tensors, adaptive=0.01, progress=False)
    assert 8 <= report["sample_counts"] < 128
    assert report["accuracy"] > 0.9
    assert "sample_counts" not in fb.evaluate(posterior, blobs().tensors, samples=4, progress=False)


def test_a_smaller_tolerance_takes_more_samples(posterior):
    x = blobs().tensors[0]
    counts = [
        float(posterior.predict(x, 128, seed=0, adaptive=rule).sample_counts.double().mean())
        for rule in (
            fb.posterior.Adaptive(0.05),
            fb.posterior.Adaptive(0.005, criterion="probabilities"),
            fb.posterior.Adaptive(1e-9, criterion="probabilities"),
        )
    ]
    assert counts[0] < counts[1] <= counts[2] == 128


def test_a_point_and_a_regression():
    point = fb.posterior.PointPosterior(nn.Linear(4, 3), fb.likelihoods.Categorical())
    assert point.predict(torch.randn(5, 4), adaptive=0.01).sample_counts.tolist() == [1] * 5
    model = fb.to_stochastic(nn.Linear(4, 1), {"*": fb.noise.NormalAffine()})
    regression = fb.posterior.NoisePosterior(model, fb.likelihoods.Gaussian(noise=0.1))
    found = regression.predict([torch.randn(30, 4), torch.zeros(1, 4)], 64, seed=0, adaptive=0.2)
    assert found.sample_counts[-1] == 8, "the noise does not change an input of zeros"
    assert (found.standard_error[:, 0] / found.std[:, 0])[found.sample_counts < 64].max() <= 0.2


def point_posterior():
    """Returns the posterior of one linear network."""
    return fb.posterior.PointPosterior(nn.Linear(4, 3), fb.likelihoods.Categorical())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tolerance", 0.0),
        ("tolerance", "a"),
        ("certainty", 1.0),
        ("criterion", "sure"),
        ("start", 1),
        ("growth", 1.0),
        ("lead", -1.0),
    ],
)
def test_invalid_settings_are_refused(argument, value):
    with pytest.raises(fb.FlowBNNError) as error:
        fb.posterior.Adaptive(**{argument: value})
    assert (error.value.kind, error.value.argument) == ("value", argument)
    assert f"got {value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"adaptive": True}, "value"),
        ({"adaptive": "fast"}, "value"),
        ({"adaptive": 0.01, "shared": False}, "unsupported"),
    ],
)
def test_invalid_options_of_predict_are_refused(options, kind):
    with pytest.raises(fb.FlowBNNError) as error:
        point_posterior().predict(torch.ones(2, 4), **options)
    assert (error.value.kind, error.value.argument) == (kind, "adaptive")


def test_adaptive_sampling_of_a_user_defined_posterior():
    class Coins(Posterior):
        def outputs(self, inputs, samples, prediction):
            generator = torch.Generator().manual_seed(prediction.seed)
            every = torch.randn(prediction.samples, len(inputs), 2, generator=generator) + inputs
            return every[samples.start : samples.stop]

    coins = Coins(nn.Linear(1, 1), fb.likelihoods.Categorical())
    x = torch.tensor([[4.0, 0.0], [0.0, 0.0]])
    found = coins.predict(x, 64, seed=0, adaptive=0.02)
    assert found.sample_counts[0] < found.sample_counts[1]
    with pytest.raises(fb.FlowBNNError) as caught:
        coins.predict(x, compile=True)
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "compile")
    loader = DataLoader(TensorDataset(x, torch.tensor([0, 1])), batch_size=1)
    assert len(coins.predict(loader, 8)) == 2


def population(kind: str, inputs: int, samples: int = 128) -> torch.Tensor:
    """Logits of inputs with spreads of all sizes: of two classes that are tied, or of some of which the first leads."""
    generator = torch.Generator().manual_seed(0)
    if kind == "tied":
        spread = 0.05 + 0.3 * torch.rand(inputs, 1, generator=generator)
        return 2 * spread * torch.randn(samples, inputs, 1, generator=generator) * torch.tensor([1.0, -1.0])
    classes, lead = map(int, kind.split("-"))
    spread = 2 * torch.rand(inputs, 1, generator=generator)
    logits = spread * torch.randn(samples, inputs, classes, generator=generator)
    logits[..., 0] += lead
    return logits


def adaptively(
    logits: torch.Tensor, rule
) -> tuple[CategoricalPredictive, CategoricalPredictive, torch.Tensor]:
    """The adaptive answer, the full one, and which inputs stopped early."""
    outputs, sample_counts = adaptive_outputs(
        drawing(logits), torch.arange(logits.shape[1]), len(logits), rule, CategoricalPredictive
    )
    found = CategoricalPredictive(outputs[: int(sample_counts.max())], sample_counts)
    return found, CategoricalPredictive(logits), sample_counts < len(logits)


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("tied", 0.03), ("2-2", 0.03), ("2-4", 0.03), ("2-4", 0.01), ("10-2", 0.03)]
)
def test_at_most_5_percent_of_stopped_inputs_exceed_the_tolerance(kind, tolerance):
    rule = fb.posterior.Adaptive(tolerance, criterion="probabilities")
    found, full, early = adaptively(population(kind, 2000), rule)
    gap = (found.probabilities - full.probabilities).abs().amax(-1)[early]
    assert 0.02 < early.float().mean() < 0.98
    assert (gap > tolerance).float().mean() < 0.05
    assert (gap > 2 * tolerance).float().mean() < 0.01
    assert int(found.sample_counts.min()) >= 16


@pytest.mark.parametrize(("kind", "errors"), [("tied", 2.0), ("2-2", 0.3), ("2-4", 0.3), ("10-2", 0.3)])
def test_confidence_error_covers_the_bias_of_optional_stopping(kind, errors):
    found, full, early = adaptively(population(kind, 2000), fb.posterior.Adaptive(criterion="decision"))
    higher = (found.confidence - full.confidence)[early].mean()
    assert 0 < higher < errors * found.confidence_error[early].mean()
    assert f" ± {float(found.confidence_error.double().mean()):.3f}, entropy" in repr(found)
    assert "±" not in repr(full)
    lower = found.epistemic[early].mean() / full.epistemic[early].mean()
    assert 0.75 < lower < 0.95
