"""Tests of the ELBO against the exact evidence of a conjugate model."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from flowbnn import to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical, Gaussian
from flowbnn.noise import FlowNoise, NormalAffine, NormalPlanar, noise_layers
from flowbnn.noise.batched import divergences
from flowbnn.objectives import ELBO, warm_up
from flowbnn.transforms import Transform

DOUBLE = torch.float64
SIGMA = 0.3


class Matrix(Transform):
    """A full affine map, to put the exact posterior into the noise."""

    linearity = "affine"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.eye(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return z @ self.matrix.T + self.shift, torch.linalg.slogdet(self.matrix)[1].expand(z.shape[:-1])


class Conjugate:
    """A linear layer with fixed weights: its output is linear in the noise, so posterior and evidence are Gaussian."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1, bias=False).double()
        self.layer.weight.data = torch.tensor([[0.8, -0.6, 0.5]], dtype=DOUBLE)
        # a shared component correlates the inputs, and with them the posterior, so that mean field falls short of it
        self.x = 2 * torch.randn(12, 1, dtype=DOUBLE) + torch.randn(12, 3, dtype=DOUBLE)
        self.features = self.x * self.layer.weight.detach()
        self.y = self.features @ torch.tensor([0.4, 1.9, 1.2], dtype=DOUBLE) + SIGMA * torch.randn(
            12, dtype=DOUBLE
        )
        prior_precision = torch.eye(3, dtype=DOUBLE) / 0.25
        self.precision = prior_precision + self.features.T @ self.features / SIGMA**2
        self.covariance = torch.linalg.inv(self.precision)
        self.mean = self.covariance @ (prior_precision.sum(1) + self.features.T @ self.y / SIGMA**2)
        noise = 0.25 * self.features @ self.features.T + SIGMA**2 * torch.eye(12, dtype=DOUBLE)
        self.evidence = MultivariateNormal(self.features.sum(1), noise).log_prob(self.y)

    def elbo(self, model: nn.Module, repeats: int = 80, **weights: float) -> tuple[Tensor, Tensor]:
        """The ELBO of the whole data set and its standard error, through the public objective: every row has noise of its own, so
        that copies of the data are as many draws."""
        x, y = self.x.repeat(50, 1), self.y.repeat(50)
        objective = ELBO(Gaussian(SIGMA), num_data=12, **weights)
        with torch.no_grad():
            values = [12 * objective(model, x, y).elbo for _ in range(repeats)]
        stacked = torch.stack(values)
        return stacked.mean(), stacked.std() / repeats**0.5


def put(problem: Conjugate, mean: Tensor, root: Tensor) -> nn.Module:
    """The layer with noise ``N(mean, root root')``."""
    model = to_stochastic(problem.layer, {"*": FlowNoise(Matrix, base_scale=0.5)})
    (noise,) = noise_layers(model).values()
    matrix = noise.transform[1]
    with torch.no_grad():
        matrix.matrix.copy_(root / 0.5)
        matrix.shift.copy_(mean - (root / 0.5).sum(1))
    return model


def test_the_exact_posterior_reaches_the_exact_evidence():
    problem = Conjugate()
    model = put(problem, problem.mean, torch.linalg.cholesky(problem.covariance))
    found, error = problem.elbo(model)
    assert error < 0.1
    assert (found - problem.evidence).abs() < 4 * error


def test_any_other_posterior_stays_below_by_its_divergence():
    """evidence - ELBO = KL(q || exact posterior), for the mean-field optimum and for the prior."""
    problem = Conjugate()
    exact = MultivariateNormal(problem.mean, problem.covariance)
    best_mean_field = torch.diag(problem.precision.diagonal() ** -0.5)
    for mean, root in (
        (problem.mean, best_mean_field),
        (torch.ones(3, dtype=DOUBLE), 0.5 * torch.eye(3, dtype=DOUBLE)),
    ):
        gap = torch.distributions.kl_divergence(MultivariateNormal(mean, root @ root.T), exact)
        found, error = problem.elbo(put(problem, mean, root))
        assert gap > 0.1
        assert (problem.evidence - found - gap).abs() < 4 * error


def test_mean_field_is_fitted_to_its_known_optimum():
    """Mean: the exact one. Variance: the inverse of the precision's diagonal."""
    problem = Conjugate()
    model = to_stochastic(problem.layer.requires_grad_(False), {"*": NormalAffine(base_scale=0.5)})
    objective = ELBO(Gaussian(SIGMA), num_data=12)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    x, y = problem.x.repeat(100, 1), problem.y.repeat(100)
    for _ in range(600):
        optimizer.zero_grad()
        objective(model, x, y).loss.backward()
        optimizer.step()
        schedule.step()
    (noise,) = noise_layers(model).values()
    affine = noise.transform[0]
    deviation = problem.precision.diagonal() ** -0.5
    torch.testing.assert_close(0.5 * affine.log_scale.exp(), deviation, rtol=0.02, atol=0)
    assert ((1.0 + affine.shift - problem.mean).abs() < 0.03 * deviation).all()


def test_beta_gamma_and_the_number_of_examples():
    model = to_stochastic(nn.Linear(3, 2), {"*": NormalAffine(base_scale=0.5)})
    (noise,) = noise_layers(model).values()
    with torch.no_grad():
        noise.transform[0].shift.add_(0.7)
    inputs, targets = torch.ones(4, 3), torch.tensor([0, 1, 1, 0])
    kl, entropy = noise.divergence()
    terms = ELBO(Categorical(), 50, beta=0.3, gamma=0.2)(model, inputs, targets)
    likelihood = -nn.functional.cross_entropy(terms.outputs, targets)
    torch.testing.assert_close(terms.elbo, likelihood - 0.3 * kl / 50 + 0.2 * entropy / 50)
    torch.testing.assert_close(kl, torch.tensor(3 * 0.5 * 0.7**2 / 0.25))
    torch.testing.assert_close(entropy, torch.tensor(3 * 0.5 * math.log(2 * math.pi * math.e * 0.25)))
    warmed = ELBO(Categorical(), 50)(model, inputs, targets, scale=0.5)
    likelihood = -nn.functional.cross_entropy(warmed.outputs, targets)
    torch.testing.assert_close(warmed.elbo, likelihood - 0.5 * kl / 50)
    assert {"elbo", "log_likelihood", "kl", "entropy", "kl/", "entropy/"} == set(terms.logs())
    assert warm_up(0.1, 0.2) == 0.5


def test_the_kl_is_summed_over_layers_and_reported_for_each():
    model = to_stochastic(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)),
        {"0": NormalPlanar(2, base_scale=0.5), "1": NormalAffine(base_scale=0.5)},
    )
    terms = ELBO(Categorical(), 10)(model, torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    assert list(terms.layers) == ["0", "1"]
    torch.testing.assert_close(terms.kl, terms.layers["0"].kl + terms.layers["1"].kl)


def test_packed_layers_are_the_layers():
    """Gaussians done all at once, with their own centres, priors, sites and sizes, equal those done one by one."""
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2), nn.Conv1d(2, 3, 1)).double()
    rules = {
        "0": NormalAffine(prior_scale=0.3, prior_loc=0.9),
        "1": NormalAffine(base_loc=0.5, base_scale=0.7),
        "2": NormalPlanar(1),
        "3": NormalAffine(site="position", positions=6),
    }
    model = to_stochastic(network, rules)
    layers = noise_layers(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    together = divergences(layers)
    assert list(together) == ["0", "1", "2", "3"]
    for name in ("0", "1", "3"):
        torch.testing.assert_close(together[name].kl, layers[name].divergence().kl, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            together[name].entropy, layers[name].divergence().entropy, rtol=0, atol=1e-12
        )
    parameters = [p for name in ("0", "1", "3") for p in layers[name].parameters()]
    packed = torch.autograd.grad(sum(together[name].kl for name in ("0", "1", "3")), parameters)
    alone = torch.autograd.grad(sum(layers[name].divergence().kl for name in ("0", "1", "3")), parameters)
    for first, second in zip(packed, alone, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_forward_stores_nothing_on_the_noise():
    """The KL is a function of posterior and prior alone: the same before and after any number of passes."""
    model = to_stochastic(nn.Linear(3, 2), {"*": NormalAffine(base_scale=0.5)})
    (noise,) = noise_layers(model).values()
    before, state = noise.divergence(), set(vars(noise))
    model(torch.ones(7, 3))
    assert noise.divergence() == before
    assert set(vars(noise)) == state


def test_positions_temper_or_count():
    layer = nn.Conv2d(3, 2, 1)
    kl = {}
    for positions in ("mean", 49):
        model = to_stochastic(
            layer, {"*": NormalAffine(site="position", positions=positions, prior_scale=0.25)}
        )
        (noise,) = noise_layers(model).values()
        kl[positions] = noise.divergence().kl
    torch.testing.assert_close(kl[49], 49 * kl["mean"])


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: ELBO(Categorical(), 0), "num_data"),
        (lambda: ELBO(Categorical(), 5, beta=-1.0), "beta"),
        (
            lambda: ELBO(Categorical(), 5)(nn.Linear(3, 2), torch.zeros(4, 3), torch.zeros(3).long()),
            "targets",
        ),
    ],
)
def test_bad_arguments_of_the_elbo_are_refused(call, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)
