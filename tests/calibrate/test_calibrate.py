"""Tests of ``fb.calibrate``: results against closed forms, warnings, and errors."""

import warnings

import pytest
import torch
from tests.calibrate.problems import NOISE_SCALE, PRIOR_SCALE, LinearRegression
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.noise import Dropout, NormalAffine, NormalPlanar, noise_layers
from flowbnn.noise.joint import independent_vectors
from slow_cases import mark_slow

QUICK = {"folds": 0, "progress": False, "accelerator": "cpu"}


def warning_kinds(caught: list[warnings.WarningMessage]) -> list[str]:
    """Returns the kinds of the library's own warnings."""
    return [entry.message.kind for entry in caught if isinstance(entry.message, FlowBNNWarning)]


# -------------------- results


STRUCTURES = ["full", "chain", "layers", "factorized"]


@pytest.mark.parametrize("structure", mark_slow(STRUCTURES, ["full"]))
def test_calibration_improves_held_out_predictions(structure, memorized, tmp_path):
    network, inputs, targets, _ = memorized
    before = {name: value.clone() for name, value in network.state_dict().items()}
    loader = fb.data.TensorLoader(inputs[:100], targets[:100], batch_size=40, shuffle=True)
    options = {**QUICK, "folds": 2, "candidates": ["noise"]}
    posterior = fb.calibrate(network, loader, structure=structure, **options)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    report = posterior.calibration
    assert report.choice == "noise"
    assert report.nll["noise"] < report.nll["plain"]
    assert (report.structure, report.examples, report.dimensions) == (structure, 100, 42)
    assert report.temperature > 1.0
    test = (inputs[100:], targets[100:])
    point = fb.posterior.PointPosterior(network, posterior.likelihood)
    nll, point_nll = (fb.evaluate(q, test, progress=False)["nll"] for q in (posterior, point))
    assert nll < point_nll
    loaded = fb.load_posterior(posterior.save(tmp_path / "calibrated.safetensors"), network)
    for name, noise in noise_layers(loaded.model).items():
        saved = noise_layers(posterior.model)[name]
        assert torch.equal(noise.joint_noise.prior.scale, saved.joint_noise.prior.scale)
    expected = posterior.predict(inputs[:5], 8, seed=0).probabilities
    assert torch.equal(loaded.predict(inputs[:5], 8, seed=0).probabilities, expected)


def test_noise_scale_of_a_regression_is_learned():
    problem = LinearRegression(200)
    loader = fb.data.TensorLoader(problem.inputs, problem.targets, batch_size=50)
    posterior = fb.calibrate(problem.network, loader, **{**QUICK, "folds": 2})
    assert posterior.calibration.choice in ("refit", "noise")
    assert posterior.likelihood.log_scale.exp().item() == pytest.approx(NOISE_SCALE, rel=0.15)
    report = posterior.calibration
    assert not report.ece
    assert list(report.nll) == ["plain", "temperature", "refit", "noise"]
    assert report.nll["noise"] < report.nll["plain"] - 0.1


@pytest.mark.usefixtures("unrefined")
@pytest.mark.parametrize(("structure", "noise_scale"), [("full", 1e-4), ("factorized", 1e-6)])
def test_posterior_can_be_very_narrow(structure, noise_scale):
    """Both structures are exact in one dimension. Bounded log-scales ended at 3e-5."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    y = 1.5 * x + noise_scale * torch.randn(50, 1, generator=generator, dtype=torch.float64)
    network = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(network.weight)
    precision = float(x.square().sum()) / noise_scale**2 + 1.0 / PRIOR_SCALE**2
    mean = (float((x * y).sum()) / noise_scale**2 + 1.0 / PRIOR_SCALE**2) / precision
    options = {"folds": 0, "progress": False, "structure": structure, "prior": "fixed"}
    likelihood = fb.likelihoods.Gaussian(noise_scale)
    posterior = fb.calibrate(network, (x, y), likelihood=likelihood, **options)
    ((vector, _),) = independent_vectors(posterior.model)
    normal = vector.requires_grad_(False).posterior()
    assert float(normal.mean) == pytest.approx(mean, abs=0.05 * precision**-0.5)
    assert float(normal.stddev) == pytest.approx(precision**-0.5, rel=1e-3)
    covariance = noise_scale**2 * torch.eye(50).double() + PRIOR_SCALE**2 * x @ x.T
    result = fb.diagnostics.pareto_k(posterior, (x, y), samples=50)
    assert result.verdict == "good"
    if noise_scale == 1e-4:  # rounding hides the exact evidence at smaller scales
        evidence = MultivariateNormal(x[:, 0], covariance).log_prob(y[:, 0])
        assert result.elbo == pytest.approx(float(evidence), abs=0.01)


def test_posterior_that_is_too_narrow_for_float32_is_refused():
    x = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    options = {"likelihood": fb.likelihoods.Gaussian(1e-8), "prior": "fixed", **QUICK}
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(network, [(x, 1.5 * x)], **options)
    assert caught.value.kind == "precision"


class UnusedLayers(nn.Module):
    """Network whose output does not depend on its noise, so that the posterior is the prior."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(0.0 * x[:, :2]) + self.two(0.0 * x[:, :1])


RULES = {"one": NormalAffine(prior_scale=0.2, prior_loc=0.9), "two": NormalAffine(prior_scale=2.0)}
UNUSED_DATA = [(torch.ones(30, 2), torch.linspace(-1.0, 1.0, 30).unsqueeze(1))]
UNUSED_OPTIONS = {"likelihood": fb.likelihoods.Gaussian(1.0), "prior": "fixed", "progress": False, "folds": 0}


@pytest.mark.usefixtures("unrefined")
@pytest.mark.parametrize("structure", ["full", "factorized"])
def test_every_layer_has_the_prior_of_its_rule(structure):
    posterior = fb.calibrate(UnusedLayers(), UNUSED_DATA, rules=RULES, structure=structure, **UNUSED_OPTIONS)
    scales = {}
    for vector, names in independent_vectors(posterior.model):
        sizes = [2, 1] if structure == "full" else [len(vector.prior.scale)]
        scales |= dict(zip(names, vector.prior.scale.split(sizes), strict=True))
    assert scales["one"].tolist() == pytest.approx([0.2, 0.2])
    assert scales["two"].tolist() == pytest.approx([2.0])
    draws = posterior.draws(4000, seed=0)
    assert draws["one"].mean() == pytest.approx(0.9, abs=0.02)
    assert draws["one"].std() == pytest.approx(0.2, rel=0.1)
    assert draws["two"].std() == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("rules", "options", "argument"),
    [
        (RULES, {"prior_scale": 1.0}, "prior_scale"),
        (RULES | {"two": NormalAffine(side="output")}, {"structure": "chain"}, "rules"),
    ],
)
def test_conflicting_rules_are_refused(rules, options, argument):
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(UnusedLayers(), UNUSED_DATA, rules=rules, **UNUSED_OPTIONS, **options)
    assert (caught.value.kind, caught.value.argument) == ("rules", argument)


@pytest.mark.usefixtures("unrefined")
@pytest.mark.parametrize("folds", [0, 2])
def test_report_is_saved_with_the_posterior(folds, tmp_path):
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    data = [(x, (x.sum(1) + torch.linspace(-2, 2, 40) > 0).long())]
    network = nn.Linear(2, 2, bias=False).requires_grad_(False)
    network.weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    posterior = fb.calibrate(network, data, prior="fixed", folds=folds, progress=False)
    loaded = type(posterior).load(posterior.save(tmp_path / "calibrated.safetensors"), network)
    assert bool(posterior.calibration.nll) == (folds > 0)
    assert str(loaded.calibration) == str(posterior.calibration)
    assert loaded.calibration == posterior.calibration
    assert (posterior.calibration.gain is None) == (folds == 0)


@pytest.mark.usefixtures("unrefined")
def test_exact_targets_keep_a_noise_scale():
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    network = nn.Linear(2, 1).requires_grad_(False)
    posterior = fb.calibrate(network, [(x, network(x))], folds=0, prior="fixed", progress=False)
    relative_scale = posterior.likelihood.log_scale.detach().exp() / network(x).std()
    assert 5e-5 < float(relative_scale) < 1e-3
    assert float(posterior.predict(x, 32, seed=0).nll(network(x)).mean()) < 0.0


@pytest.mark.usefixtures("unrefined")
def test_outputs_of_one_logit_may_be_squeezed():
    torch.manual_seed(0)
    inputs = torch.randn(240, 2)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    squeezed = nn.Sequential(*network, nn.Flatten(0))
    data = [(inputs[:40], torch.arange(40) % 2)]
    first, second = (fb.calibrate(model, data, prior="fixed", **QUICK) for model in (network, squeezed))
    assert first.history[-1] == second.history[-1]
    assert fb.diagnostics.pareto_k(first, data, 50) == fb.diagnostics.pareto_k(second, data, 50)
    assert torch.equal(*(q.predict(inputs, seed=0).probabilities for q in (first, second)))


# -------------------- warnings


@pytest.mark.usefixtures("unrefined")
def test_training_data_are_warned_about(memorized):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fb.calibrate(memorized.network, [memorized.training], **QUICK)
    assert warning_kinds(caught) == ["memorized"]


def test_data_that_are_all_classified_correctly_are_warned_about_once():
    x = torch.linspace(-1.0, 1.0, 40)[:, None]
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[-5.0], [5.0]]))
        network.bias.zero_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fb.calibrate(
            network, [(x, (x[:, 0] > 0).long())], folds=4, candidates=["temperature"], progress=False
        )
    assert warning_kinds(caught) == ["memorized"]


@pytest.mark.usefixtures("unrefined")
def test_other_units_than_the_targets_are_warned_about():
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    network = nn.Linear(2, 1)
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.calibrate(network, [(x, 1000.0 * network(x).detach() + 5000.0)], **QUICK)
    assert "units" in warning_kinds(caught.list)
    assert torch.equal(fb.to_deterministic(posterior.model)(x), network(x))
    assert not [name for name, _ in posterior.model.named_buffers() if "flowbnn" in name]


def test_one_example_is_counted_in_the_singular():
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.calibrate(
            nn.Linear(2, 2), [(torch.ones(1, 2), torch.tensor([0]))], prior="fixed", progress=False
        )
    assert warning_kinds(caught.list) == ["classes"]
    *reasons, conclusion = str(posterior.calibration).splitlines()
    assert conclusion == "plain, fitted to 1 held-out example without a comparison."
    assert len(reasons) == len(posterior.calibration.excluded)


@pytest.mark.usefixtures("unrefined")
def test_fit_that_does_not_converge_is_warned_about():
    """With logits in the tens of thousands every step is rejected."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 8, generator=generator)
    labels = (x.sum(1) + torch.randn(100, generator=generator) > 0).long()
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).requires_grad_(False)
    network[2].weight.mul_(1e5)
    with pytest.warns(FlowBNNWarning) as caught:
        fb.calibrate(network, [(x, labels)], prior="fixed", folds=0, progress=False)
    assert "convergence" in warning_kinds(caught.list)


# -------------------- errors


def augment(inputs: Tensor, generator: torch.Generator) -> Tensor:
    return inputs + torch.randn(inputs.shape, generator=generator)


@pytest.mark.parametrize(
    ("held_out", "kind"),
    [
        (lambda x, y: [], "loader"),
        (lambda x, y: fb.data.TensorLoader(x, y, batch_size=8, augment=augment), "loader"),
        (lambda x, y: [(x, y[:9])], "targets"),
    ],
)
def test_bad_data_are_refused(held_out, kind, memorized):
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(memorized.network, held_out(memorized.inputs, memorized.targets))
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_network_with_noise_is_refused(memorized):
    model = fb.to_stochastic(memorized.network, {"*": NormalAffine()})
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(model, [(memorized.inputs, memorized.targets)])
    assert (caught.value.kind, caught.value.argument) == ("network", "network")


@pytest.mark.parametrize("folds", [1, 2.5])
def test_bad_numbers_of_folds_are_refused(folds, memorized):
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(memorized.network, [(memorized.inputs, memorized.targets)], folds=folds)
    assert caught.value.argument == "folds"


def test_structure_that_does_not_fit_into_memory_is_refused():
    network = nn.Sequential(nn.Flatten(), nn.Linear(7000, 2))
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(
            network,
            [(torch.randn(4, 7000), torch.tensor([0, 1, 0, 1]))],
            candidates=["noise"],
            structure="full",
        )
    assert caught.value.argument == "structure"


@pytest.mark.parametrize("structure", ["auto", "factorized"])
@pytest.mark.parametrize(
    "recipe",
    [
        NormalAffine(site="position"),
        NormalAffine(prior_df=4.0),
        NormalAffine(components=2),
        NormalPlanar(),
        Dropout(0.1),
    ],
    ids=str,
)
def test_noise_that_is_not_gaussian_is_refused(recipe, structure, memorized):
    data = [(memorized.inputs[:40], memorized.targets[:40])]
    options = {"candidates": ["plain", "noise"], "progress": False}
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(memorized.network, data, rules={"*": recipe}, structure=structure, **options)
    assert (caught.value.kind, caught.value.argument) == ("rules", "rules")
    assert caught.value.layer is not None


class PositionEmbedding(nn.Module):
    """Adds a learned vector for each position. The input of the embedding has no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.last = nn.Embedding(4, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x + self.place(torch.arange(4))).flatten(1))


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("structure", ["full", "factorized"])
def test_layer_without_an_axis_of_examples_stays_plain(structure):
    data = [(torch.randn(24, 4, 3), torch.arange(24) % 2)]
    for rules in (None, {"place": None, "*": NormalAffine()}):
        posterior = fb.calibrate(PositionEmbedding(), data, structure=structure, rules=rules, **QUICK)
        assert posterior.calibration.dimensions == 12


def batch_norm_network(track_running_stats: bool) -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=track_running_stats)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2))


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the network is not trained
def test_network_that_mixes_the_rows_of_a_batch_is_refused():
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    data, likelihood = [(x, (x.sum(1) > 0).long())], fb.likelihoods.Categorical()
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(batch_norm_network(False), data, likelihood=likelihood, **QUICK)
    assert caught.value.kind == "network"
    model = fb.to_stochastic(batch_norm_network(False), {"*": NormalAffine()})
    with pytest.raises(FlowBNNError) as caught:
        fb.diagnostics.pareto_k(fb.posterior.NoisePosterior(model, likelihood), data)
    assert caught.value.kind == "network"
    fb.calibrate(batch_norm_network(True), data, likelihood=likelihood, **QUICK)


class SquareRoot(nn.Module):
    """Multiplies by the square root of 1.05 - z, which is NaN for wide noise z."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, 1, bias=False), nn.Linear(3, 2)
        nn.init.ones_(self.one.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(x) * (1.05 - self.one(torch.ones_like(x[:, :1]))).sqrt()


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the network is not trained
def test_nan_likelihoods_are_refused():
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    data = [(x, (x.sum(1) > 0).long())]
    posterior = fb.calibrate(SquareRoot(), data, rules={"two": NormalAffine()}, folds=0, progress=False)
    assert posterior.predict(x, 4).probabilities.isfinite().all()
    wide_model = fb.to_stochastic(SquareRoot(), {"*": NormalAffine()})
    wide = fb.posterior.NoisePosterior(wide_model, posterior.likelihood)
    broken_network = SquareRoot()
    calls = [
        lambda: fb.calibrate(SquareRoot(), data, folds=0, progress=False),
        lambda: fb.diagnostics.pareto_k(wide, data),
        lambda: fb.diagnostics.pareto_k(posterior, data),
        lambda: fb.calibrate(broken_network, data, folds=0, progress=False),
    ]
    for index, call in enumerate(calls):
        if index == 2:  # the last two have NaN in their weights
            for model in (broken_network, posterior.model):
                nn.init.constant_(model.two.weight, float("nan"))
        with pytest.raises(FlowBNNError) as caught:
            call()
        assert caught.value.kind == "not finite"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("count", "prior"), [(60, "fitted"), (240, "fixed")])
def test_prior_depends_on_the_number_of_examples_of_classes(count, prior):
    """The noise has ten dimensions, and eight examples for each are enough for a fixed prior."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), 3.0 * torch.randn(count, 2)
    labels = torch.multinomial(network(x).softmax(-1), 1)[:, 0]
    options = {"candidates": ["noise"], "samples": 4, "progress": False}
    posterior = fb.calibrate(network, (x, labels), folds=2, **options)
    assert posterior.calibration.prior == prior
    assert posterior.calibration.dimensions == 10
