"""Diagnostics on a network whose output is linear in its noise: the evidence and the posterior have closed forms."""

import math
import random
import warnings
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.diagnostics.agreement import Ranks, sliced_wasserstein
from flowbnn.diagnostics.evidence import GROUPS, Evidence, warn_of_disagreement
from flowbnn.diagnostics.noise_chains import NoiseChains, seconds_for
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.diagnostics.report import Report
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import MemberPosterior
from flowbnn.methods.mcmc.posterior import ChainPosterior
from flowbnn.methods.temperature import TemperedPosterior
from flowbnn.noise.joint import independent_vectors
from flowbnn.posterior import PointPosterior
from flowbnn.posterior.noise import NoisePosterior

NOISE, SIZES = 0.3, [3, 2]  # of the data, and of the layers


class TwoLayers(nn.Module):
    """Two layers beside each other: linear in the noise of both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 1), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x[:, :3]) + self.two(x[:, 3:])


class Known:
    """Data, exact evidence, exact posterior, and a stochastic network for it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.network = TwoLayers()
        self.inputs = torch.randn(20, 5) @ (torch.eye(5) + 0.5)  # correlated, and so is the noise
        self.targets = self.network(self.inputs).detach() + NOISE * torch.randn(20, 1)
        self.loader = [(self.inputs[:12], self.targets[:12]), (self.inputs[12:], self.targets[12:])]
        weights = torch.cat([self.network.one.weight, self.network.two.weight], 1).detach()[0]
        features = (self.inputs * weights).double()
        self.features, loc, scale = features, 1.0, 0.5
        rest = self.targets[:, 0].double() - self.network.one.bias.item()
        mean = features.sum(1) * loc
        marginal = NOISE**2 * torch.eye(20).double() + scale**2 * features @ features.T
        self.evidence = float(MultivariateNormal(mean, marginal).log_prob(rest))
        self.precision = features.T @ features / NOISE**2 + torch.eye(5).double() / scale**2
        self.covariance = torch.linalg.inv(self.precision)
        self.mean = self.mean_for(self.targets)

    def mean_for(self, targets: Tensor) -> Tensor:
        rest = targets[:, 0].double() - self.network.one.bias.item()
        return self.covariance @ (self.features.T @ rest / NOISE**2 + 1.0 / 0.5**2)

    def posterior(self, mean: Tensor, covariance: Tensor) -> NoisePosterior:
        model = fb.to_stochastic(self.network, {"*": fb.noise.NormalAffine()}, joint="full")
        ((vector, _),) = independent_vectors(model)
        vector.set_gaussian(mean, [torch.linalg.cholesky(covariance)])
        return NoisePosterior(model, Gaussian(NOISE))

    @cached_property
    def exact(self) -> NoisePosterior:
        return self.posterior(self.mean, self.covariance)

    @cached_property
    def factorized(self) -> NoisePosterior:
        return self.posterior(self.mean, (1.0 / self.precision.diagonal()).diag())

    @cached_property
    def wide(self) -> NoisePosterior:
        return self.posterior(self.mean, 2.0 * self.covariance)

    @cached_property
    def report(self) -> Report:
        with pytest.MonkeyPatch.context() as patch:  # shorter chains than a user's
            few = partial(fb.diagnostics.noise_chains, samples=250, warmup=40)
            patch.setattr("flowbnn.diagnostics.report.noise_chains", few)
            return fb.diagnose(self.factorized, self.loader, progress=False)

    @property
    def chains(self) -> NoiseChains:
        return self.report.chains


@pytest.fixture(scope="module")
def known() -> Known:
    return Known()


def test_the_exact_posterior_has_equal_weights(known):
    found = fb.diagnostics.pareto_k(known.exact, known.loader, samples=200)
    assert found.elbo == pytest.approx(known.evidence, abs=1e-3)
    assert found.evidence == pytest.approx(known.evidence, abs=1e-3)
    assert found.effective > 199


def test_importance_sampling_finds_the_evidence(known):
    found = fb.diagnostics.pareto_k(known.wide, known.loader, samples=4000)
    assert found.verdict == "good"
    assert abs(found.evidence - known.evidence) < 4 * found.evidence_error < 0.2
    found = fb.diagnostics.pareto_k(known.factorized, known.loader, samples=4000)
    gap = 0.5 * float(known.precision.diagonal().log().sum() - torch.linalg.slogdet(known.precision)[1])
    assert abs(known.evidence - found.elbo - gap) < 4 * found.elbo_error
    narrow = known.posterior(known.mean, 0.05 * known.covariance)
    assert fb.diagnostics.pareto_k(narrow, known.loader).verdict == "bad"


def test_chains_are_the_exact_posterior(known):
    chains = known.chains
    assert chains.certified
    assert chains.divergences == 0
    vectors = chains.vectors.flatten(0, 1)
    error = (known.covariance.diagonal() / chains.effective).sqrt()
    assert bool(((vectors.mean(0) - known.mean).abs() < 4 * error).all())
    root = torch.linalg.cholesky(known.precision)
    white = root.T @ vectors.T.cov() @ root  # the unit matrix, but for a standard error of sqrt(2 / draws)
    assert torch.allclose(white, torch.eye(5).double(), atol=4 * math.sqrt(2 / chains.effective))
    assert [part.shape[-1] for part in chains.draws.values()] == SIZES
    assert list(chains.draws) == ["one", "two"]


def test_evidence_by_three_methods(known):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in ("bridge", "psis", "tempered"):
            found = fb.diagnostics.evidence(known.wide, known.loader, method, known.chains, samples=2000)
            assert found.trusted
            assert abs(found.value - known.evidence) < 4 * found.error + 1e-3, method
            assert found.error < 0.3


def test_groups_of_particles_are_enough_for_four_standard_errors_to_be_no_chance():
    """An error from so few groups makes the deviation a Student t."""
    assert 2 * scipy.stats.t.sf(4.0, GROUPS - 1) < 0.01


def test_methods_that_disagree_are_told():
    one, other = (Evidence(value, 0.01, "psis", True) for value in (0.0, 1.0))
    with pytest.warns(FlowBNNWarning, match="1.00 nats apart") as told:
        warn_of_disagreement(one, other)
    assert told[0].message.fields["kind"] == "evidence"


def test_the_gap_is_split_into_what_correlation_gains(known):
    blocks = [torch.linalg.slogdet(known.precision[part, part])[1] for part in (slice(0, 3), slice(3, 5))]
    diagonal, whole = known.precision.diagonal().log().sum(), torch.linalg.slogdet(known.precision)[1]
    within, across = 0.5 * float(diagonal - sum(blocks)), 0.5 * float(sum(blocks) - whole)
    assert min(within, across) > 0.1
    gap = fb.diagnostics.elbo_gap(known.factorized, known.loader, known.chains, samples=4000)
    assert gap.within == pytest.approx(within, abs=0.05)
    assert gap.across == pytest.approx(across, abs=0.05)
    assert abs(gap.rest) < 0.15
    assert gap.per_example == pytest.approx(gap.nats / 20)
    assert gap.per_dimension == pytest.approx(gap.nats / 5)


def test_data_that_change_and_posteriors_without_a_density_are_refused(known):
    class Augmented(torch.utils.data.Dataset):
        def __init__(self, draw):
            self.draw = draw

        def __len__(self):
            return 20

        def __getitem__(self, index):
            return known.inputs[index] + 0.1 * self.draw(), known.targets[index]

    moved = [
        lambda: torch.randn(5),
        random.random,
        np.random.rand,
    ]  # by the generators of torch, Python and numpy
    shuffled = fb.data.TensorLoader(known.inputs, known.targets, batch_size=8, shuffle=True)
    same = fb.diagnostics.pareto_k(known.exact, shuffled, samples=50)
    assert same.elbo == pytest.approx(known.evidence, abs=1e-3)
    dropout = fb.MCDropout(epochs=1, rate=0.01).fit(known.network, known.loader, seed=0, progress=False)
    cases = [
        *(
            (known.exact, torch.utils.data.DataLoader(Augmented(draw), batch_size=5), "fixed data", "loader")
            for draw in moved
        ),
        (known.exact, [(torch.ones(0, 5), torch.ones(0, 1))], "^batch 1: tensor '0' has no rows", "batch"),
        (known.exact, [], "empty", "loader"),
        (known.exact, torch.utils.data.DataLoader([]), "no examples", "loader"),
        (dropout, known.loader, "no density|posterior of noise", "unsupported"),
        (TemperedPosterior(known.exact, 1.5), known.loader, r"tempered: give its \.posterior", "unsupported"),
        (
            fb.MLE(epochs=1).fit(known.network, known.loader, progress=False),
            known.loader,
            "posterior of noise",
            "unsupported",
        ),
    ]
    for posterior, loader, text, kind in cases:
        with pytest.raises(FlowBNNError, match=text) as told:
            fb.diagnostics.pareto_k(posterior, loader)
        assert told.value.kind == kind
        assert "\n" not in str(told.value)
    for ask in (fb.diagnose, fb.diagnostics.agreement):  # before chains are run
        for test, text in (
            ([], "empty: .* test data"),
            ([(torch.ones(3, 7), torch.ones(3, 1))], r"\(3, 7\)"),
        ):
            with pytest.raises(FlowBNNError, match=text):
                ask(known.exact, known.loader, test=test)


def test_predictions_of_the_exact_posterior_are_within_the_floor(known):
    exact = fb.diagnostics.agreement(known.exact, known.loader, known.chains, samples=1600)
    assert exact.variation < 1.5 * exact.variation_floor < 0.05
    assert exact.agreement == 1.0
    assert exact.wasserstein < 2 * exact.wasserstein_floor
    assert abs(exact.excess) < 0.02
    moved = known.posterior(known.mean + 0.5, known.covariance)
    away = fb.diagnostics.agreement(moved, known.loader, known.chains)
    # each input's predictive is a normal whose mean has moved
    features = known.features
    spread = (NOISE**2 + ((features @ known.covariance) * features).sum(1)).sqrt()
    shift = (0.5 * features.sum(1)).abs() / spread
    assert away.variation == pytest.approx(float(torch.erf(shift / 8**0.5).mean()), abs=0.02)
    assert away.wasserstein > 3 * away.wasserstein_floor


def test_diagnose_tells_a_good_posterior_from_one_that_lacks_correlation(known, capsys):
    good = fb.diagnose(known.exact, known.loader, seconds=0.0)
    assert good.good
    assert good.chains is None
    assert good.richer == "nothing" or good.pareto.k >= 0.5
    assert "log-evidence" in capsys.readouterr().out
    report = known.report
    assert report.chains.certified
    assert abs(report.gap.evidence.value - known.evidence) < 4 * report.gap.evidence.error + 1e-3
    assert report.richer == max(("within", "across"), key=lambda name: getattr(report.gap, name))
    assert "could matter" in report.sentence
    assert "total variation" in str(report)
    assert (report.modes, report.missed) == (1, 0)
    assert "modes" not in report.sentence
    blind = replace(report, modes=2, missed=1)
    assert not blind.judged
    assert "the chains have missed 1 of 2 modes" in blind.sentence
    for k in (0.1, 0.9):  # importance weights do not see what their draws have missed
        unseen = replace(blind, pareto=replace(report.pareto, k=k))
        assert not unseen.good
        assert unseen.richer == "unknown"
        assert unseen.sentence.startswith("Importance sampling cannot vouch for this posterior (the chains")


def test_a_posterior_that_is_too_wide_is_not_good_for_its_k_hat(known):
    """Weights that are bounded make importance sampling work, however far the draws themselves are from the exact posterior."""
    wide = known.posterior(known.mean, 4.0 * known.covariance)
    report = fb.diagnose(wide, known.loader, seconds=0.0, progress=False)
    away = 0.5 * 5 * (4.0 - 1.0 - math.log(4.0))
    assert report.pareto.verdict == "good"
    assert report.pareto.gap == pytest.approx(away, rel=0.2)
    assert not report.good
    assert report.richer == "unknown"
    assert f"{report.pareto.gap:.2f}" in str(report)
    assert report.sentence.startswith("Importance sampling cannot vouch for this posterior, and whether")


@pytest.mark.parametrize("count", [1, 12, 21])
def test_other_numbers_of_targets_than_of_inputs_are_one_line(known, count):
    targets = known.targets[:1].expand(count, 1)
    with pytest.raises(
        FlowBNNError, match=rf"inputs of shape \(20, 5\) and targets of shape \({count}, 1\).*one target"
    ):
        fb.diagnose(known.exact, [(known.inputs, targets)])
    with pytest.raises(FlowBNNError, match=r"targets of shape \(\)"):
        fb.diagnose(known.exact, [(known.inputs, targets[0, 0])])


def test_chains_that_would_take_too_long_are_left_out(known):
    target = NoiseTarget(known.exact, known.loader)
    assert seconds_for(target, 1e-6) == math.inf
    assert 0.0 < seconds_for(target, math.inf) < math.inf
    report = fb.diagnose(known.exact, known.loader, seconds=1e-3, progress=False)
    assert report.chains is None
    poor = replace(report, pareto=replace(report.pareto, k=0.9))
    assert "(which are run where seconds= allows)" in poor.sentence
    assert "(which should take 400 s: give more seconds=)" in replace(poor, needed=400.0).sentence
    assert "(which run up to 6,000 dimensions)" in replace(poor, dimensions=7000).sentence


def test_sliced_wasserstein_of_two_normals():
    source = torch.Generator().manual_seed(0)
    normal, other = torch.randn(2, 4000, 6, generator=source, dtype=torch.float64)
    # along every direction the distance of N(0, 1) and N(0, 9) is 2 E|z|
    distance = sliced_wasserstein(normal, 3.0 * other)
    assert distance == pytest.approx(2.0 * math.sqrt(2.0 / math.pi), rel=0.02)
    assert sliced_wasserstein(normal, other) < 0.05


def test_any_posterior_is_compared_with_chains_over_weights(known):
    network = nn.Linear(2, 1, bias=False)
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 2, generator=source)
    targets = inputs.sum(1, keepdim=True) + torch.randn(40, 1, generator=source)
    covariance = torch.linalg.inv(
        inputs.T @ inputs + torch.eye(2)
    )  # of the weights, under a standard normal prior
    mean = covariance @ inputs.T @ targets[:, 0]
    network.weight.data.copy_(mean)

    def draws(number: int) -> dict[str, Tensor]:
        normal = torch.randn(number, 1, 2, generator=source)
        return {"weight": mean + normal @ torch.linalg.cholesky(covariance).T}

    record = {
        name: torch.zeros(2, 400) for name in ("energy", "divergent", "acceptance", "gradients", "depth")
    }
    record |= {"outputs": torch.randn(2, 400, 3, generator=source), "step_size": torch.ones(2)}
    chains = ChainPosterior(network, Gaussian(1.0), draws(800), record=record, sampler={"method": "nuts"})
    loader = [(inputs, targets)]
    exact = MemberPosterior(network, Gaussian(1.0), draws(800))
    same = fb.diagnostics.agreement(exact, loader, chains, samples=800)
    assert same.variation < 2 * same.variation_floor < 0.05
    assert same.agreement == 1.0
    assert abs(same.excess) < 0.01
    assert math.isnan(same.wasserstein)
    # one network has the same means, and a variance of 1 where the exact predictions have more
    test = [(3.0 * inputs, 3.0 * targets)]
    point = fb.diagnostics.agreement(
        PointPosterior(network, Gaussian(1.0)), loader, chains, test, samples=800
    )
    spread = (1.0 + ((3.0 * inputs @ covariance) * 3.0 * inputs).sum(1)).sqrt()
    cross = (
        2.0 * spread.square() * spread.log() / (spread.square() - 1.0)
    ).sqrt()  # where both densities are equal
    far = torch.erf(cross / 2**0.5) - torch.erf(cross / spread / 2**0.5)
    assert point.variation == pytest.approx(float(far.mean()), abs=0.01)
    square = (3.0 * (targets[:, 0] - inputs @ mean)).square()
    excess = 0.5 * (square - square / spread.square() - 2.0 * spread.log()).mean()
    assert point.excess == pytest.approx(float(excess), abs=0.1)
    labels = PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical())
    with pytest.raises(FlowBNNError, match="predict different things"):
        fb.diagnostics.agreement(labels, loader, chains)


def test_chains_of_another_density_are_refused(known):
    other = [(known.inputs, known.targets + 1.0)]
    with pytest.raises(FlowBNNError, match="another network, prior or data"):
        fb.diagnostics.elbo_gap(known.exact, other, known.chains)


def test_ranks_of_simulated_noise_are_uniform_for_exact_fits_only(known):
    def fit(width: float, batches: list) -> NoisePosterior:
        ((_, targets),) = batches
        return known.posterior(known.mean_for(targets), width * known.covariance)

    ranks = [
        fb.diagnostics.simulation_ranks(known.exact, known.loader, partial(fit, width))
        for width in (1.0, 0.2, 5.0)
    ]
    assert ranks[0].ranks.shape == (64, 5)
    assert repr(ranks[0]).startswith("Ranks(64 simulations x 5 dimensions, 63 draws; p-value ")
    assert ranks[0].p_value > 0.01
    assert max(ranks[1].p_value, ranks[2].p_value) < 1e-4
    with pytest.raises(FlowBNNError, match="fit must give posteriors of the noise .* of 5 numbers, not of 0"):
        fb.diagnostics.simulation_ranks(known.exact, known.loader, lambda batches: None)


@pytest.mark.parametrize("draws", [1, 5, 10, 63])
def test_uniform_ranks_are_rejected_as_often_as_the_level_says(draws):
    uniform = torch.randint(draws + 1, (400, 64, 2), generator=torch.Generator().manual_seed(0))
    rejected = sum(Ranks(ranks, draws).p_value < 0.05 for ranks in uniform)
    assert rejected < 0.05 * 400 + 3 * (0.05 * 0.95 * 400) ** 0.5
    assert Ranks(torch.zeros(64, 2, dtype=torch.long), draws).p_value < 1e-6


def test_too_many_dimensions_for_a_mass_matrix_are_refused_in_one_line(known, monkeypatch):
    monkeypatch.setattr("flowbnn.diagnostics.noise_target.DENSE", 3)
    with pytest.raises(FlowBNNError, match="5 numbers of noise .* pareto_k") as told:
        fb.diagnostics.noise_chains(known.exact, known.loader)
    assert told.value.kind == "size"
    assert fb.diagnostics.pareto_k(known.exact, known.loader, samples=50).samples == 50


def test_the_prior_is_that_of_the_noise_and_may_differ_by_layer(known):
    loc, scale = torch.tensor([0.8] * 3 + [1.2] * 2).double(), torch.tensor([0.3] * 3 + [0.7] * 2).double()
    features, rest = known.features, known.targets[:, 0].double() - known.network.one.bias.item()
    marginal = NOISE**2 * torch.eye(20).double() + (features * scale**2) @ features.T
    evidence = float(MultivariateNormal(features @ loc, marginal).log_prob(rest))
    covariance = torch.linalg.inv(features.T @ features / NOISE**2 + (1 / scale**2).diag())
    posterior = known.posterior(covariance @ (features.T @ rest / NOISE**2 + loc / scale**2), covariance)
    ((vector, _),) = independent_vectors(posterior.model)
    vector.prior.loc.copy_(loc)
    vector.prior.scale.copy_(scale)
    found = fb.diagnostics.pareto_k(posterior, known.loader, samples=100)
    assert found.elbo == pytest.approx(evidence, abs=1e-3)
    assert found.effective > 99
