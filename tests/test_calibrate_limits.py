"""fb.calibrate at its limits: narrow posteriors, priors of the rules, what it refuses; against closed forms."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.noise.joint import independent_vectors

SCALE = 0.5


@pytest.mark.parametrize("structure", ["full", "factorized"])
@pytest.mark.parametrize("level", [1e-4, 1e-6])
def test_data_that_tell_the_noise_to_a_millionth_give_a_posterior_as_narrow(
    structure: str, level: float
) -> None:
    """Bounded log-scales ended at 3e-5; in a single dimension both structures are exact."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, generator=source, dtype=torch.float64)
    y = 1.5 * x + level * torch.randn(50, 1, generator=source, dtype=torch.float64)
    network = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(network.weight)
    precision = float(x.square().sum()) / level**2 + 1.0 / SCALE**2
    mean = (float((x * y).sum()) / level**2 + 1.0 / SCALE**2) / precision
    given = {"likelihood": fb.likelihoods.Gaussian(level), "structure": structure, "prior": "fixed"}
    posterior = fb.calibrate(network, [(x, y)], folds=0, progress=False, **given)
    ((vector, _),) = independent_vectors(posterior.model)
    normal = vector.requires_grad_(False).posterior()
    assert float(normal.mean) == pytest.approx(mean, abs=0.05 * precision**-0.5)
    assert float(normal.stddev) == pytest.approx(precision**-0.5, rel=1e-3)
    evidence = MultivariateNormal(x[:, 0], level**2 * torch.eye(50).double() + SCALE**2 * x @ x.T)
    found = fb.quality.pareto_k(posterior, [(x, y)], samples=50)
    if level == 1e-4:  # beyond, the exact evidence is lost in rounding
        assert found.elbo == pytest.approx(float(evidence.log_prob(y[:, 0])), abs=0.01)
    assert found.verdict == "good"
    with pytest.raises(fb.FlowBNNError, match=r"does not fit into float32.*float64"):
        fb.calibrate(
            network.float(),
            [(x.float(), y.float())],
            folds=0,
            **given | {"likelihood": fb.likelihoods.Gaussian(1e-8)},
        )
