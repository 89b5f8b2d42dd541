"""Tests of regressions of pixels: they equal regressions of rows."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.flattening import flatten_as_targets
from flowbnn.likelihoods import Gaussian

QUIET = {"progress": False}


def make_pixels(channels):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, channels, 1))


class FlatPixels(nn.Sequential):
    """Network for images whose outputs are one row for each example."""

    def forward(self, x):
        return super().forward(x).flatten(1)


@pytest.mark.parametrize("noise", ["learned", "predicted"])
def test_outputs_of_pixels_are_rows_of_targets(noise, tmp_path):
    x = torch.randn(16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    y, likelihood = 5.0 + 2.0 * x[:, :1], Gaussian(noise, dim=16)
    channels = 2 if noise == "predicted" else 1
    by_pixel = fb.MLE(epochs=3).fit(make_pixels(channels), (x, y), likelihood=likelihood, seed=0, **QUIET)
    flat = FlatPixels(*make_pixels(channels))
    by_row = fb.MLE(epochs=3).fit(flat, (x, y.flatten(1)), likelihood=likelihood, seed=0, **QUIET)
    prediction, expected = by_pixel.predict(x), by_row.predict(x)
    assert prediction.mean.shape == prediction.interval(0.9).low.shape == y.shape
    torch.testing.assert_close(prediction.mean.flatten(1), expected.mean)
    torch.testing.assert_close(prediction.variance.flatten(1), expected.variance)
    torch.testing.assert_close(prediction.nll(y), expected.nll(y.flatten(1)))
    path = by_pixel.save(tmp_path / "pixels.safetensors")
    loaded = fb.load_posterior(path, make_pixels(channels))
    torch.testing.assert_close(loaded.predict(x).mean, prediction.mean)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Gaussian(), (5, 1), (5,)),
        (Gaussian(), (1, 5), (5,)),
        (Gaussian("predicted"), (5, 2), (5,)),
        (Gaussian("predicted"), (5, 4), (5, 2)),
        (Gaussian("predicted"), (4, 3, 3), (2, 3, 3)),
        (fb.likelihoods.Poisson(), (3, 3), (1, 3, 3)),
    ],
)
def test_outputs_with_the_axes_of_targets_are_flattened(likelihood, outputs, targets):
    y, parts = torch.randn(2, *targets), likelihood.outputs_per_target
    axis = -1 if targets[-1] != outputs[-1] else 1
    values = y.reshape(2, *outputs) if parts == 1 else y
    if parts == 2:
        values = y.unsqueeze(-1) if len(outputs) > len(targets) else y
        values = torch.cat([values, values + 10.0], axis)
    flat = flatten_as_targets(network := nn.Identity(), likelihood, values, y)
    expected = y.flatten(1) if parts == 1 else torch.cat([y.flatten(1), y.flatten(1) + 10.0], 1)
    assert torch.equal(flat, expected)
    assert torch.equal(network(values), expected)


def test_outputs_with_other_axes_than_the_targets_are_refused():
    x, y = torch.randn(8, 2, 4, 4), torch.randn(8, 4, 4, 3)
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(make_pixels(3), (x, y), **QUIET)
    assert (caught.value.kind, caught.value.argument) == ("outputs", "outputs")
