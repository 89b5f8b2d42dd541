"""SWAG: the moments of the walk, the density of its Gaussian, BatchNorm statistics of every draw."""

import pytest
import torch
from problems import QUIET, blobs, lines, loader, normalized, small
from test_ensemble import Stopped
from torch import nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods.swag import Moments, SWAGPosterior


def gaussian() -> tuple[SWAGPosterior, MultivariateNormal]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(4, generator=generator).double()
    variance = torch.rand(4, generator=generator).double() + 0.1
    deviations = torch.randn(3, 4, generator=generator).double()
    posterior = SWAGPosterior(
        nn.Linear(3, 1).double(), fb.likelihoods.Gaussian(1.0), mean, variance, deviations, scale=0.5
    )
    covariance = 0.5 * (torch.diag(variance) + deviations.T @ deviations / 2)
    return posterior, MultivariateNormal(mean, covariance)


def test_the_moments_are_those_of_what_was_collected():
    network = nn.Linear(3, 1, bias=False).double()
    moments = Moments(network, rank=3)
    steps = 1000.0 + 1e-3 * torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    for weights in steps:
        network.weight.data.copy_(weights)
        moments.collect(network)
    mean, variance, deviations = moments.result()
    assert torch.allclose(mean, steps.mean(0), rtol=1e-14)
    assert torch.allclose(
        variance, steps.var(0, correction=0), rtol=1e-6
    )  # though the mean is a million times larger
    running = [steps[: i + 1].mean(0) for i in range(7)]
    last = torch.stack([steps[i] - running[i] for i in (4, 5, 6)])
    assert torch.allclose(deviations.sort(0).values, last.sort(0).values, rtol=0, atol=1e-12)


def test_the_density_is_that_of_the_whole_covariance():
    posterior, truth = gaussian()
    drawn = posterior.draws(6, seed=1)
    flat = torch.cat([drawn["weight"].flatten(1), drawn["bias"].flatten(1)], 1)
    assert torch.allclose(posterior.log_prob(drawn), truth.log_prob(flat), rtol=1e-10)
    with pytest.raises(FlowBNNError, match="'bias' is not given"):
        posterior.log_prob({"weight": drawn["weight"]})


def test_draws_have_the_covariance():
    posterior, truth = gaussian()
    drawn = torch.stack([posterior.flat_draw(index, 0) for index in range(8000)])
    root = torch.linalg.cholesky(truth.precision_matrix)
    white = (drawn - truth.mean) @ root
    assert white.mean(0).abs().max() < 5 / 8000**0.5
    assert (torch.cov(white.T) - torch.eye(4)).abs().max() < 5 * (2 / 8000) ** 0.5


def test_weights_are_collected_at_even_distances():
    counts = []
    for per_epoch, epochs in ((1, 4), (3, 4), (2, 3)):
        method = fb.SWAG(epochs=epochs, begin=0.0, per_epoch=per_epoch)
        posterior = method.fit(small(), loader(blobs()), seed=0, **QUIET)
        counts.append(posterior.rank)
        assert posterior.history.epochs == epochs
    assert counts == [4, 12, 6]


def test_an_interrupted_walk_goes_on_where_it_was(tmp_path, capsys):
    method = fb.SWAG(epochs=6, rank=4, per_epoch=2)
    whole = method.fit(small(2), loader(lines()), seed=2, **QUIET)
    options = {"seed": 2, "checkpoint": tmp_path, "checkpoint_every": 1, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        method.fit(small(2), Stopped(loader(lines()), 16), **options)
    assert {path.name for path in tmp_path.iterdir()} == {"training.safetensors", "walk.safetensors"}
    resumed = method.fit(small(2), loader(lines()), resume=True, **options)
    for name in ("mean", "variance", "deviations"):
        assert torch.equal(getattr(whole, name), getattr(resumed, name)), name
    assert resumed.history.epochs == 6
    capsys.readouterr()


def test_a_run_that_was_killed_before_its_walk_draws_on_from_the_training(tmp_path):
    def fit(resume):
        source = torch.Generator().manual_seed(0)
        data = fb.data.TensorLoader(*lines().tensors, batch_size=8, shuffle=True, generator=source)
        return fb.SWAG(epochs=4).fit(small(2), data, seed=2, checkpoint=tmp_path, resume=resume, **QUIET)

    whole = fit(resume=False)
    (tmp_path / "walk.safetensors").unlink()
    assert torch.equal(fit(resume=True).mean, whole.mean)


def test_every_draw_has_the_statistics_of_the_data_under_it(tmp_path):
    data = blobs()
    method = fb.SWAG(epochs=8, batch_norm_samples=3, swag_lr=0.05)
    posterior = method.fit(normalized(), loader(data), seed=0, **QUIET)
    assert posterior.default_samples == 3
    drawn = posterior.draws(3)
    inputs = data.tensors[0]
    for index in range(3):
        hidden = inputs @ drawn["0.weight"][index].T + drawn["0.bias"][index]
        # three batches of equal size: the mean of their means is the mean
        assert torch.allclose(drawn["1.running_mean"][index], hidden.mean(0), atol=1e-5)
        assert drawn["1.num_batches_tracked"][index] == 3
    hidden = posterior.model[0](inputs)
    assert torch.allclose(posterior.model[1].running_mean, hidden.mean(0), atol=1e-5)
    path = posterior.save(tmp_path / "a.safetensors")
    assert torch.equal(
        fb.load_posterior(path, normalized()).predict(inputs).log_samples,
        posterior.predict(inputs).log_samples,
    )
    assert torch.equal(posterior.predict(inputs, seed=1).samples, posterior.predict(inputs, seed=2).samples)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rank": 1}, "rank=.* must be 0 or an integer of at least 2, got 1"),
        ({"rank": -1}, "rank"),
        ({"begin": 1.0}, "begin"),
        ({"momentum": 1.0}, "momentum"),
        ({"swag_lr": 0.0}, "swag_lr"),
        ({"scale": -0.5}, "scale"),
    ],
)
def test_refusals(settings, told):
    with pytest.raises(FlowBNNError, match=told):
        fb.SWAG(**settings)


def test_a_walk_of_one_set_of_weights_has_no_variance():
    with pytest.raises(
        FlowBNNError, match="1 of 2 epochs are left for the walk, which gives one set of weights"
    ):
        fb.SWAG(epochs=2).fit(small(), loader(blobs()), **QUIET)


def test_a_network_is_loaded_frozen_as_it_was(tmp_path):
    network = small()
    network[0].requires_grad_(False)
    posterior = fb.SWAG(epochs=4).fit(network, loader(blobs()), seed=0, **QUIET)
    loaded = fb.load_posterior(posterior.save(tmp_path / "a.safetensors"), small())
    assert list(loaded.draws(1)) == list(posterior.draws(1)) == ["2.weight", "2.bias"]


def test_a_diagonal_alone_will_do():
    posterior = fb.SWAG(0, epochs=6).fit(small(2), loader(lines()), seed=0, **QUIET)
    drawn = posterior.draws(2, seed=0)
    flat = torch.cat([drawn[name].flatten(1) for name in drawn], 1).double()
    truth = torch.distributions.Normal(posterior.mean.double(), (0.5 * posterior.variance.double()).sqrt())
    assert posterior.rank == 0
    assert torch.allclose(posterior.log_prob(drawn), truth.log_prob(flat).sum(-1), rtol=1e-10)
