"""Tests of SWAG: moments of the iterates, density of its Gaussian, BatchNorm statistics of every draw."""

import pytest
import torch
from problems import QUIET, blobs, lines, loader, normalized, small
from test_ensemble import InterruptedLoader
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


def test_moments_of_collected_weights():
    network = nn.Linear(3, 1, bias=False).double()
    moments = Moments(network, rank=3)
    steps = 1000.0 + 1e-3 * torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    for weights in steps:
        network.weight.data.copy_(weights)
        moments.collect(network)
    mean, variance, deviations = moments.result()
    assert torch.allclose(mean, steps.mean(0), rtol=1e-14)
    # accurate although the mean is a million times larger
    assert torch.allclose(variance, steps.var(0, correction=0), rtol=1e-6)
    running = [steps[: i + 1].mean(0) for i in range(7)]
    last = torch.stack([steps[i] - running[i] for i in (4, 5, 6)])
    assert torch.allclose(deviations.sort(0).values, last.sort(0).values, rtol=0, atol=1e-12)


def test_log_prob_is_exact():
    posterior, truth = gaussian()
    draws = posterior.draws(6, seed=1)
    flat = torch.cat([draws["weight"].flatten(1), draws["bias"].flatten(1)], 1)
    assert torch.allclose(posterior.log_prob(draws), truth.log_prob(flat), rtol=1e-10)
    with pytest.raises(FlowBNNError) as error:
        posterior.log_prob({"weight": draws["weight"]})
    assert (error.value.argument, error.value.fields["missing"]) == ("values", ["bias"])


def test_draws_have_the_covariance():
    posterior, truth = gaussian()
    draws = torch.stack([posterior.flat_draw(index, 0) for index in range(8000)])
    root = torch.linalg.cholesky(truth.precision_matrix)
    white = (draws - truth.mean) @ root
    assert white.mean(0).abs().max() < 5 / 8000**0.5
    assert (torch.cov(white.T) - torch.eye(4)).abs().max() < 5 * (2 / 8000) ** 0.5


def test_snapshots_are_evenly_spaced():
    counts = []
    for snapshots_per_epoch, epochs in ((1, 4), (3, 4), (2, 3)):
        method = fb.SWAG(epochs=epochs, begin=0.0, snapshots_per_epoch=snapshots_per_epoch)
        posterior = method.fit(small(), loader(blobs()), seed=0, **QUIET)
        counts.append(posterior.rank)
        assert posterior.history.epochs == epochs
    assert counts == [4, 12, 6]


def test_interrupted_run_resumes(tmp_path, capsys):
    method = fb.SWAG(epochs=6, rank=4, snapshots_per_epoch=2)
    expected = method.fit(small(2), loader(lines()), seed=2, **QUIET)
    options = {"seed": 2, "checkpoint": tmp_path, "checkpoint_every": 1, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        method.fit(small(2), InterruptedLoader(loader(lines()), 16), **options)
    assert {path.name for path in tmp_path.iterdir()} == {"training.safetensors", "sgd.safetensors"}
    resumed = method.fit(small(2), loader(lines()), resume=True, **options)
    for name in ("mean", "variance", "deviations"):
        assert torch.equal(getattr(expected, name), getattr(resumed, name)), name
    assert resumed.history.epochs == 6
    capsys.readouterr()


def test_run_interrupted_after_training_resumes(tmp_path):
    def fit(resume):
        generator = torch.Generator().manual_seed(0)
        data = fb.data.TensorLoader(*lines().tensors, batch_size=8, shuffle=True, generator=generator)
        return fb.SWAG(epochs=4).fit(small(2), data, seed=2, checkpoint=tmp_path, resume=resume, **QUIET)

    expected = fit(resume=False)
    (tmp_path / "sgd.safetensors").unlink()
    assert torch.equal(fit(resume=True).mean, expected.mean)


def test_every_draw_has_its_own_batch_norm_statistics(tmp_path):
    data = blobs()
    method = fb.SWAG(epochs=8, batch_norm_samples=3, swag_lr=0.05)
    posterior = method.fit(normalized(), loader(data), seed=0, **QUIET)
    assert posterior.default_samples == 3
    draws = posterior.draws(3)
    inputs = data.tensors[0]
    for index in range(3):
        hidden = inputs @ draws["0.weight"][index].T + draws["0.bias"][index]
        # three batches of equal size: the mean of their means is the mean
        assert torch.allclose(draws["1.running_mean"][index], hidden.mean(0), atol=1e-5)
        assert draws["1.num_batches_tracked"][index] == 3
    hidden = posterior.model[0](inputs)
    assert torch.allclose(posterior.model[1].running_mean, hidden.mean(0), atol=1e-5)
    path = posterior.save(tmp_path / "a.safetensors")
    assert torch.equal(
        fb.load_posterior(path, normalized()).predict(inputs).log_samples,
        posterior.predict(inputs).log_samples,
    )
    assert torch.equal(posterior.predict(inputs, seed=1).samples, posterior.predict(inputs, seed=2).samples)


@pytest.mark.parametrize(
    "settings",
    [{"rank": 1}, {"rank": -1}, {"begin": 1.0}, {"momentum": 1.0}, {"swag_lr": 0.0}, {"scale": -0.5}],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(FlowBNNError) as error:
        fb.SWAG(**settings)
    assert error.value.argument == next(iter(settings))


def test_one_snapshot_is_refused():
    with pytest.raises(FlowBNNError) as error:
        fb.SWAG(epochs=2).fit(small(), loader(blobs()), **QUIET)
    assert error.value.argument == "epochs"


def test_loaded_posterior_has_the_same_frozen_weights(tmp_path):
    network = small()
    network[0].requires_grad_(False)
    posterior = fb.SWAG(epochs=4).fit(network, loader(blobs()), seed=0, **QUIET)
    loaded = fb.load_posterior(posterior.save(tmp_path / "a.safetensors"), small())
    assert list(loaded.draws(1)) == list(posterior.draws(1)) == ["2.weight", "2.bias"]


def test_rank_zero_has_a_diagonal_covariance():
    posterior = fb.SWAG(0, epochs=6).fit(small(2), loader(lines()), seed=0, **QUIET)
    draws = posterior.draws(2, seed=0)
    flat = torch.cat([draws[name].flatten(1) for name in draws], 1).double()
    truth = torch.distributions.Normal(posterior.mean.double(), (0.5 * posterior.variance.double()).sqrt())
    assert posterior.rank == 0
    assert torch.allclose(posterior.log_prob(draws), truth.log_prob(flat).sum(-1), rtol=1e-10)
