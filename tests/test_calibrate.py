"""fb.calibrate: the natural-gradient fit against closed forms, and the door with its comparison."""

import math
import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.calibrate.flow import FlowFit, fit_flow, score
from flowbnn.calibrate.network import _Work
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.methods.variational import natural
from flowbnn.methods.variational.block_gaussian import BlockGaussian
from flowbnn.methods.variational.natural import NoisyNetwork, fit_gaussian
from flowbnn.noise import NormalAffine, NormalCoupling, NormalPlanar, Recipe, noise_layers
from flowbnn.noise.joint import independent_vectors

LEVEL, SCALE = 0.3, 0.5


class Regression:
    """``y = sum_i w_i z_i x_i`` with noise of known size: linear in ``z``, whose posterior is Gaussian."""

    def __init__(self, rows: int = 40) -> None:
        source = torch.Generator().manual_seed(0)
        self.network = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.network.weight.copy_(torch.randn(1, 4, generator=source))
        self.inputs = torch.randn(rows, 4, generator=source)
        self.inputs[:, 1] += 0.8 * self.inputs[:, 0]
        self.targets = 0.7 * self.network(self.inputs).detach() + LEVEL * torch.randn(
            rows, 1, generator=source
        )
        design = (self.inputs * self.network.weight.detach()).double()
        self.precision = design.mT @ design / LEVEL**2 + torch.eye(4, dtype=torch.float64) / SCALE**2
        right = design.mT @ self.targets.double()[:, 0] / LEVEL**2 + 1.0 / SCALE**2
        self.mean = torch.linalg.solve(self.precision, right)
        covariance = design @ design.mT * SCALE**2 + LEVEL**2 * torch.eye(rows, dtype=torch.float64)
        self.evidence = MultivariateNormal(design.sum(1), covariance).log_prob(self.targets.double()[:, 0])
        self.model = fb.to_stochastic(self.network, {"*": NormalAffine()})
        self.likelihood = fb.likelihoods.Gaussian(LEVEL)


def test_a_linear_network_gets_its_exact_posterior_and_evidence() -> None:
    one = Regression()
    fit = fit_gaussian(one.model, one.likelihood, one.inputs, one.targets, "full", prior="fixed", scale=SCALE)
    torch.testing.assert_close(fit.gaussian.covariance(), one.precision.inverse(), rtol=0.02, atol=1e-4)
    spread = one.precision.inverse().diagonal().sqrt()
    assert ((fit.gaussian.mean - one.mean) / spread).abs().max() < 0.2
    assert abs(fit.elbo - float(one.evidence)) < 0.1 + 3 * fit.error  # the bound is tight


def test_a_factorized_gaussian_has_the_precisions_of_the_exact_one() -> None:
    one = Regression()
    fit = fit_gaussian(
        one.model, one.likelihood, one.inputs, one.targets, "factorized", prior="fixed", scale=SCALE
    )
    q = fit.gaussian
    torch.testing.assert_close(q.variances(), 1.0 / one.precision.diagonal(), rtol=0.02, atol=1e-4)
    assert fit.elbo < float(one.evidence) - 0.1
    assert [part.shape for part in (*q.blocks, *q.roots)] == [
        (4,),
        (4,),
    ]  # no matrix: layers have thousands of channels
    torch.testing.assert_close(q.covariance_times(q.mean), q.variances() * q.mean)
    exact = MultivariateNormal(q.mean, q.covariance()), MultivariateNormal(q.loc, q.variance.diag())
    assert q.kl() == pytest.approx(float(torch.distributions.kl_divergence(*exact)))


@pytest.mark.parametrize("seed", range(3))
def test_five_examples_have_as_many_draws_as_five_hundred(seed: int) -> None:
    """With a draw for each example, means were 0.05 to 0.4 deviations off, and the bound 0.7 nats."""
    one = Regression(5)
    given = one.model, one.likelihood, one.inputs, one.targets
    fit = fit_gaussian(*given, "full", prior="fixed", scale=SCALE, seed=seed)
    spread = one.precision.inverse().diagonal().sqrt()
    assert ((fit.gaussian.mean - one.mean) / spread).abs().max() < 0.05
    assert abs(fit.elbo - float(one.evidence)) < 0.2


def chain() -> BlockGaussian:
    source = torch.Generator().manual_seed(1)
    sizes = (2, 3, 2)
    blocks = [torch.eye(size, dtype=torch.float64) * 5 for size in sizes]
    links = [
        torch.randn(after, before, generator=source, dtype=torch.float64)
        for before, after in ((2, 3), (3, 2))
    ]
    ones = torch.ones(7, dtype=torch.float64)
    return BlockGaussian(ones, blocks, links, ones, 0.25 * ones).factorize()


def test_a_chain_is_the_gaussian_of_its_precision() -> None:
    q = chain()
    precision = torch.block_diag(*q.blocks) + torch.diag(1.0 / q.variance)
    precision[2:5, :2], precision[5:, 2:5] = q.links[0], q.links[1]
    precision = precision.tril() + precision.tril(-1).mT
    covariance = precision.inverse()
    torch.testing.assert_close(q.covariance(), covariance)
    torch.testing.assert_close(q.variances(), covariance.diagonal())
    vector = torch.arange(7, dtype=torch.float64)
    torch.testing.assert_close(q.covariance_times(vector), covariance @ vector)
    prior = MultivariateNormal(q.loc, q.variance.diag())
    exact = torch.distributions.kl_divergence(MultivariateNormal(q.mean, covariance), prior)
    assert q.kl() == pytest.approx(float(exact))


def classes(rows: int = 240) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, 2, generator=source)
    return inputs, (inputs[:, 0] * inputs[:, 1] + 0.7 * torch.randn(rows, generator=source) > 0).long()


@pytest.fixture(scope="module")
def memorised() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that has memorised sixty examples, and the others."""
    inputs, targets = classes()
    torch.manual_seed(0)
    network = fb.models.MLP(2, (30, 10), 2)
    plain = fb.MLE(epochs=150, lr=0.01).fit(
        network, [(inputs[:60], targets[:60])], seed=0, progress=False, accelerator="cpu"
    )
    return plain.model, inputs[60:], targets[60:]


def test_gradients_and_gauss_newton_are_those_of_autograd(
    memorised: tuple[nn.Module, Tensor, Tensor],
) -> None:
    network, inputs, targets = memorised
    model = fb.to_stochastic(network, {"*": NormalAffine()}).double()
    noisy = NoisyNetwork(model, fb.likelihoods.Categorical())
    vectors = torch.rand(3, 42, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    some, truth = inputs[:3].double(), targets[:3]
    outputs, fitted, gradient, roots = noisy.derivatives(some, truth, vectors.clone(), torch.Generator())
    jacobian = torch.autograd.functional.jacobian(lambda z: noisy.outputs(some, z), vectors)
    jacobian = torch.stack([jacobian[i, :, i] for i in range(3)])
    p = outputs.softmax(-1)
    torch.testing.assert_close(fitted, p.log().gather(1, truth[:, None])[:, 0])
    residual = nn.functional.one_hot(truth, 2) - p
    torch.testing.assert_close(gradient, torch.einsum("bc,bcd->d", residual, jacobian))
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    torch.testing.assert_close(roots.mT @ roots, torch.einsum("bcd,bce,bef->df", jacobian, hessian, jacobian))


@pytest.mark.parametrize("structure", ["full", "chain", "layers", "factorized"])
def test_a_calibrated_network(structure: str, memorised: tuple[nn.Module, Tensor, Tensor], tmp_path) -> None:
    network, inputs, targets = memorised
    before = {name: value.clone() for name, value in network.state_dict().items()}
    loader = fb.data.TensorLoader(inputs[:100], targets[:100], batch_size=40, shuffle=True)
    posterior = fb.calibrate(network, loader, structure=structure, folds=2, progress=False, accelerator="cpu")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    report = posterior.calibration
    assert report.nll["calibrated"] < report.nll["plain"]
    assert (report.structure, report.examples, report.dimensions) == (structure, 100, 42)
    assert report.temperature > 1.0
    test = (inputs[100:], targets[100:])
    point = fb.posterior.PointPosterior(network, posterior.likelihood)
    assert (
        fb.evaluate(posterior, test, progress=False)["nll"] < fb.evaluate(point, test, progress=False)["nll"]
    )
    loaded = fb.load_posterior(posterior.save(tmp_path / "calibrated.safetensors"), network)
    kept = [noise.whole.prior.scale for noise in noise_layers(posterior.model).values()]
    for noise, scale in zip(noise_layers(loaded.model).values(), kept, strict=True):
        assert torch.equal(noise.whole.prior.scale, scale)
    predicted = posterior.predict(inputs[:5], 8, seed=0).probabilities
    assert torch.equal(loaded.predict(inputs[:5], 8, seed=0).probabilities, predicted)


def test_richer_structures_have_the_larger_bound(memorised: tuple[nn.Module, Tensor, Tensor]) -> None:
    network, inputs, targets = memorised
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    fits = [
        fit_gaussian(model, fb.likelihoods.Categorical(), inputs, targets, structure, prior="fixed")
        for structure in ("factorized", "layers", "full")
    ]
    for poorer, richer in pairwise(fits):
        assert richer.elbo > poorer.elbo - 3 * math.hypot(richer.error, poorer.error)
    assert fits[2].elbo > fits[0].elbo + 1.0


def test_a_fitted_prior_has_the_larger_bound(memorised: tuple[nn.Module, Tensor, Tensor]) -> None:
    network, inputs, targets = memorised
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    some = inputs[:40], targets[:40]
    fixed, fitted = (
        fit_gaussian(model, fb.likelihoods.Categorical(), *some, "full", prior=prior)
        for prior in ("fixed", "fitted")
    )
    assert fitted.elbo > fixed.elbo
    assert fitted.gaussian.variance.unique().numel() == 3  # one width a layer


def test_a_regression_learns_its_noise_level() -> None:
    one = Regression(200)
    loader = fb.data.TensorLoader(one.inputs, one.targets, batch_size=50)
    posterior = fb.calibrate(one.network, loader, folds=2, progress=False, accelerator="cpu")
    assert posterior.likelihood.log_scale.exp().item() == pytest.approx(LEVEL, rel=0.15)
    assert not posterior.calibration.ece
    assert posterior.calibration.nll["calibrated"] < posterior.calibration.nll["plain"] - 0.1


@pytest.mark.parametrize("level", [None, 0.5])
@pytest.mark.filterwarnings("ignore:calibration is hard to tell by 4:flowbnn.FlowBNNWarning")
def test_a_plain_regression_is_scored_with_its_own_noise_level(level: float | None) -> None:
    """By hand: residuals .1, -.2 | -.4, .3 in two folds, of which one tells the level of the other, unless the network has one."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    inputs = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    data = [(inputs, inputs + torch.tensor([[0.1], [0.3], [-0.2], [-0.4]]))]
    likelihood: fb.likelihoods.Likelihood | str = "auto"
    if level is not None:
        likelihood = fb.likelihoods.Gaussian()
        nn.init.constant_(likelihood.log_scale, math.log(level))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda count, generator: torch.tensor([0, 1, 2, 3]))
        report = fb.calibrate(
            network, data, folds=2, likelihood=likelihood, progress=False, accelerator="cpu"
        ).calibration
    folds = (
        (0.1**2, 0.2**2),
        (0.3**2, 0.4**2),
    )  # squares of the first, third and of the second, fourth example
    loss = {"plain": 0.0, "temperature": 0.0}
    for out, kept in (folds, folds[::-1]):
        size = sum(kept) / 2
        for name, variance in (("plain", size if level is None else level**2), ("temperature", size)):
            loss[name] += sum(0.5 * (math.log(2 * math.pi * variance) + one / variance) for one in out) / 4
    for name, value in loss.items():
        assert report.nll[name] == pytest.approx(value, rel=1e-5)
    assert report.temperature == pytest.approx(1.0 if level is None else 0.075**0.5 / level, rel=1e-5)


def test_data_of_the_weights_are_warned_of(memorised: tuple[nn.Module, Tensor, Tensor]) -> None:
    network, _, _ = memorised
    inputs, targets = classes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fb.calibrate(network, [(inputs[:60], targets[:60])], folds=0, progress=False, accelerator="cpu")
    told = [one.message for one in caught if isinstance(one.message, fb.FlowBNNWarning)]
    lines = [str(one) for one in told if one.fields["kind"] == "memorised"]
    assert len(lines) == 1
    assert "If the weights have seen them" in lines[0]  # which a temperature alone cannot tell


def test_what_cannot_be_is_one_line(memorised: tuple[nn.Module, Tensor, Tensor]) -> None:
    network, inputs, targets = memorised
    with pytest.raises(fb.FlowBNNError, match="has noise already"):
        fb.calibrate(fb.to_stochastic(network, {"*": NormalAffine()}), [(inputs, targets)])
    with pytest.raises(fb.FlowBNNError, match="empty|no batch|without"):
        fb.calibrate(network, [])
    augment = lambda x, source: x + torch.randn(x.shape, generator=source)  # noqa: E731
    changing = fb.data.TensorLoader(inputs, targets, batch_size=8, augment=augment)
    with pytest.raises(fb.FlowBNNError, match=r"for calibration give different examples.*fixed data"):
        fb.calibrate(network, changing)
    for folds in (1, 2.5):
        with pytest.raises(fb.FlowBNNError, match="folds"):
            fb.calibrate(network, [(inputs, targets)], folds=folds)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(7000, 2))
    with pytest.raises(fb.FlowBNNError, match=r"7,000 x 7,000 numbers.*structure='factorized'"):
        fb.calibrate(wide, [(torch.randn(4, 7000), torch.tensor([0, 1, 0, 1]))], structure="full")
    for recipe, named in (
        (NormalAffine(site="position"), "NormalAffine"),
        (fb.noise.Dropout(0.1), "Dropout"),
    ):
        for structure in ("auto", "factorized"):
            with pytest.raises(fb.FlowBNNError, match=rf"a Gaussian .* not {named}\(.*'; give rules"):
                fb.calibrate(network, [(inputs, targets)], rules={"*": recipe}, structure=structure)
    with pytest.raises(fb.FlowBNNError, match=r"targets of shape \(9,\).*one target for each"):
        fb.calibrate(network, [(inputs, targets[:9])])


class Positions(nn.Module):
    """Adds a learned vector for each position, which no example has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.last = nn.Embedding(4, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x + self.place(torch.arange(4))).flatten(1))


@pytest.mark.filterwarnings("ignore:the input of layer 'place' does not depend:flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("structure", ["full", "factorized"])
def test_a_layer_without_examples_is_refused(structure: str) -> None:
    """Its noise would be drawn anew, whatever vector it is given."""
    data = [(torch.randn(24, 4, 3), torch.arange(24) % 2)]
    with pytest.raises(fb.FlowBNNError, match="one noise vector for each example"):
        fb.calibrate(Positions(), data, structure=structure, folds=0, progress=False, accelerator="cpu")
    rules = {"place": None, "*": NormalAffine()}
    calibrated = fb.calibrate(
        Positions(), data, structure=structure, rules=rules, folds=0, progress=False, accelerator="cpu"
    )
    assert calibrated.calibration.dimensions == 12


@pytest.mark.parametrize("seed", [0, 2])
def test_hopeless_examples_of_a_wide_proposal_are_no_excuse_for_it(seed):
    """In a deep network wide noise multiplies up: a few examples lose everything, and their own spread must not hide the loss."""
    torch.manual_seed(seed)
    network = fb.models.MLP(3, (8,) * 12, 3)
    for parameter in network.parameters():
        gain = (2.8 / 8) ** 0.5 if parameter.ndim == 2 else 0.0
        parameter.data = gain * torch.randn(parameter.shape)
    inputs, targets = torch.randn(30, 3), torch.randint(3, (30,))
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    given = model, fb.likelihoods.Categorical(), inputs, targets
    fit = fit_gaussian(*given, "full", prior="fixed", scale=2.0)
    assert min(fit.trace[1:]) > fit.trace[0]
    assert fit.elbo > max(fit.trace) - 10.0
    assert torch.isfinite(fit.gaussian.covariance()).all()


# -------------------- a flow on top of the Gaussian


def few(seed: int, examples: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    """An untrained network and so few examples that the posterior of its noise is far from Gaussian under a wide prior."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, 2, generator=source)
    torch.manual_seed(seed)
    return fb.models.MLP(2, (3,), 2), inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()


def on_top(
    seed: int, prior_scale: float, recipe: Recipe, **training: float
) -> tuple[FlowFit, fb.posterior.NoisePosterior, list[tuple[Tensor, Tensor]]]:
    network, inputs, targets = few(seed)
    work = _Work(
        network.requires_grad_(False),
        fb.likelihoods.Categorical(),
        inputs,
        targets,
        None,
        recipe,
        prior_scale,
        "full",
        8,
        seed,
        inputs,
        True,
    )
    gaussian = work.fit(torch.arange(len(targets)), "fixed")
    plain = work.posterior(gaussian)
    fit = fit_flow(plain, work.posterior(gaussian, work.with_flow), inputs, targets, seed=seed, **training)  # type: ignore[arg-type]
    return fit, plain, [(inputs, targets)]


def test_a_flow_never_ends_below_its_gaussian() -> None:
    """Over ten seeds, a short training and a long step: what is worse is not taken."""
    taken = 0
    for seed in range(10):
        recipe = NormalPlanar(4) if seed % 2 else NormalCoupling()
        fit, plain, data = on_top(seed, 0.5, recipe, steps=6, draws=8, lr=0.05)
        taken += fit.better
        assert (fit.posterior is plain) != fit.better
        ours, theirs = (fb.diagnostics.pareto_k(one, data, 400, seed=99) for one in (fit.posterior, plain))
        assert ours.elbo > theirs.elbo - 3 * math.hypot(ours.elbo_error, theirs.elbo_error)
    assert taken < 10  # the test would be idle if none had to be left out


def test_a_flow_gains_where_the_posterior_is_not_gaussian() -> None:
    fit, plain, data = on_top(1, 2.0, NormalCoupling(), steps=80, draws=32, lr=0.02)
    assert fit.better
    ours, theirs = (fb.diagnostics.pareto_k(one, data, 2000, seed=99) for one in (fit.posterior, plain))
    assert ours.elbo > theirs.elbo + 0.1 + 2 * math.hypot(ours.elbo_error, theirs.elbo_error)


def test_the_gradient_has_no_variance_at_the_exact_posterior() -> None:
    """A linear network under a flow that is the identity: every draw says that nothing is to be changed."""
    one = Regression()
    model = fb.to_stochastic(one.network.requires_grad_(False), {"*": NormalCoupling()}, joint="full")
    posterior = fb.posterior.NoisePosterior(model.double(), one.likelihood)
    ((vector, _),) = independent_vectors(posterior.model)
    vector.set_gaussian(one.mean, [torch.linalg.cholesky(one.precision.inverse())])
    target = NoiseTarget(posterior, [(one.inputs.double(), one.targets.double())])
    drawn, _ = vector.posterior().rsample_and_log_prob((5,))
    _, slopes = target.gradient(drawn.detach())
    assert slopes.abs().max() > 1.0
    torch.testing.assert_close(slopes, score(vector, drawn), rtol=0, atol=1e-4)


def test_a_flow_is_asked_for_by_name(memorised: tuple[nn.Module, Tensor, Tensor], monkeypatch) -> None:
    monkeypatch.setitem(fit_flow.__kwdefaults__, "steps", 2)
    network, inputs, targets = memorised
    given = {"progress": False, "accelerator": "cpu", "folds": 0}
    posterior = fb.calibrate(network, [(inputs[:40], targets[:40])], flow="radial", **given)
    report = posterior.calibration
    assert math.isfinite(report.flow_gain)
    assert (
        ("radial" in str(report).lower())
        == (report.flow is not None)
        == (report.flow_gain > 2 * report.flow_error)
    )
    posterior = fb.calibrate(network, [(inputs[:40], targets[:40])], flow="nsf", **given)
    assert math.isfinite(posterior.calibration.flow_gain)
    with pytest.raises(fb.FlowBNNError, match="must be 'gaussian', 'planar'"):
        fb.calibrate(network, [(inputs, targets)], flow="river", **given)


# -------------------- folds


def test_what_is_left_out_has_no_part_in_its_own_prediction(
    memorised: tuple[nn.Module, Tensor, Tensor], monkeypatch
) -> None:
    """Two classes: with the labels of a fold exchanged, its examples get what is left of the probabilities, to the last bit."""
    monkeypatch.setattr(natural, "DRAWS", 1)  # which saves time
    network, inputs, targets = memorised
    fold = torch.randperm(60, generator=torch.Generator().manual_seed(0))[::6]
    likelihoods = []
    for labels in (targets[:60], targets[:60].index_copy(0, fold, 1 - targets[fold])):
        work = _Work(
            network,
            fb.likelihoods.Categorical(),
            inputs[:60],
            labels,
            None,
            None,
            SCALE,
            "auto",
            8,
            0,
            inputs[:2],
            True,
        )
        whole = work.fit(torch.arange(60), "fixed")
        scores = work.cross_validate(["fixed"], whole, 6, False)[1]
        likelihoods.append(scores["fixed"][: len(fold)].neg().exp())
    torch.testing.assert_close(likelihoods[0] + likelihoods[1], torch.ones(10, dtype=torch.float64))


def test_memory_that_runs_out_makes_the_chunks_smaller(monkeypatch) -> None:
    whole, asked = NoisyNetwork.derivatives, []

    def small(self, inputs, targets, *more, **given):
        asked.append(len(targets))
        if len(targets) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, inputs, targets, *more, **given)

    monkeypatch.setattr(NoisyNetwork, "derivatives", small)
    one = Regression()
    fit = fit_gaussian(one.model, one.likelihood, one.inputs, one.targets, "full", prior="fixed", scale=SCALE)
    torch.testing.assert_close(fit.gaussian.covariance(), one.precision.inverse(), rtol=0.02, atol=1e-4)
    assert asked[:5] == [256, 128, 64, 32, 16]
