"""Tests of flowbnn.posterior.operation_rules: the same results as torch, in any memory format."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flowbnn as fb
from flowbnn.posterior.operation_rules import OperationRules


def random_batch_norm(layer):
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
        if layer.affine:
            layer.weight.normal_()
            layer.bias.normal_()
    return layer.eval()


def vmap_by_rules(function):
    def run(x):
        with OperationRules():
            return function(x)

    return torch.vmap(run)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (4,)), (nn.BatchNorm1d, (4, 5)), (nn.BatchNorm2d, (4, 5, 6))]
)
def test_batch_norm_equals_one_sample_at_a_time(kind, shape, affine):
    torch.manual_seed(0)
    layer, x = random_batch_norm(kind(4, affine=affine)), torch.randn(3, 2, *shape)
    with torch.no_grad():
        assert torch.equal(vmap_by_rules(layer)(x), torch.stack([layer(sample) for sample in x]))


def test_batch_norm_keeps_the_memory_format_and_reads_inputs_without_samples():
    torch.manual_seed(0)
    layer = random_batch_norm(nn.BatchNorm2d(4))
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    strides = []

    def forward(scale):
        with OperationRules():
            outputs = layer(layer(x) * scale)  # the first call is the same for all samples
            strides.append(outputs.stride())
            return outputs

    scales = torch.randn(3)
    with torch.no_grad():
        outputs = torch.vmap(forward)(scales)
        expected = torch.stack([layer(layer(x) * scale) for scale in scales])
    assert strides == [x.stride()]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.MaxPool2d(2), (2, 3, 9, 8)),
        (nn.MaxPool2d((3, 2), (2, 1)), (3, 9, 9)),
        (nn.MaxPool2d(2, padding=1), (2, 3, 8, 8)),
        (nn.MaxPool2d(2, dilation=2), (2, 3, 8, 8)),
        (nn.MaxPool2d(3, 2, ceil_mode=True), (2, 3, 8, 8)),
        (nn.MaxPool1d(3, 2), (2, 3, 8)),
        (nn.AdaptiveAvgPool2d((4, None)), (2, 3, 8, 7)),
        (nn.AdaptiveAvgPool2d(5), (2, 3, 8, 8)),
        (nn.AdaptiveAvgPool2d(8), (2, 3, 8, 8)),
        (nn.AdaptiveAvgPool1d(4), (2, 3, 8)),
        (nn.AdaptiveAvgPool1d((4,)), (2, 3, 8)),
    ],
)
@pytest.mark.parametrize("has_nan", [False, True])
def test_pools_equal_those_of_torch(pool, shape, has_nan):
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    if has_nan:
        x[..., 0, 1] = torch.nan
    expected = torch.stack([pool(sample) for sample in x])
    torch.testing.assert_close(vmap_by_rules(pool)(x), expected, rtol=0, atol=1e-6, equal_nan=True)
    with OperationRules():
        outputs = pool(x[0])
    torch.testing.assert_close(outputs, expected[0], rtol=0, atol=1e-6, equal_nan=True)


def test_pools_with_gradients_or_windows_larger_than_the_input_are_left_to_torch():
    x = torch.zeros(2, 3, 4, 4, requires_grad=True)
    with OperationRules():
        (gradient,) = torch.autograd.grad(F.max_pool2d(x, 2).sum(), x)
        with pytest.raises(RuntimeError):
            F.max_pool2d(x.detach(), 5)
        values, indices = F.max_pool2d(x.detach(), 2, return_indices=True)
    (expected,) = torch.autograd.grad(F.max_pool2d(x, 2).sum(), x)
    assert torch.equal(gradient, expected)  # of tied entries only the first has a gradient
    assert values.shape == indices.shape == (2, 3, 2, 2)


def test_adaptive_pool_of_the_same_size_does_not_return_its_input():
    x = torch.zeros(2, 3, 4, 4)
    with OperationRules():
        F.adaptive_avg_pool2d(x, 4).add_(1.0)
    assert not x.any()


def test_batch_norm_by_batch_statistics_is_left_to_torch():
    torch.manual_seed(0)
    layer, x = nn.BatchNorm1d(4, track_running_stats=False), torch.randn(3, 8, 4)
    with torch.no_grad():
        expected = torch.stack([layer(sample) for sample in x])
        torch.testing.assert_close(vmap_by_rules(layer)(x), expected)


def test_batch_norm_compiles_to_the_same_values():
    torch.manual_seed(0)
    layer, x = random_batch_norm(nn.BatchNorm2d(4)), torch.randn(3, 2, 4, 5, 6)
    with torch.no_grad():
        compiled = torch.compile(vmap_by_rules(layer), fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(compiled, torch.stack([layer(sample) for sample in x]))


@pytest.mark.parametrize("size", [1, (1, 1), [1, 1], (2, 3), (None, 1)])
def test_adaptive_pooling_of_channels_last_equals_one_sample_at_a_time(size):
    x = torch.randn(3, 2, 4, 5, 6).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    expected = torch.stack([F.adaptive_avg_pool2d(sample, size) for sample in x])
    assert torch.equal(vmap_by_rules(nn.AdaptiveAvgPool2d(size))(x), expected)


def test_convolutions_convert_their_bias_to_the_dtype_of_the_input():
    x, weight, bias = (
        torch.randn(3, 2, 4, 5, 6).bfloat16(),
        torch.randn(2, 4, 3, 3).bfloat16(),
        torch.randn(2),
    )
    outputs = vmap_by_rules(lambda x: F.conv2d(x, weight, bias=bias, padding=1))(x)
    expected = torch.stack([F.conv2d(sample, weight, bias.bfloat16(), padding=1) for sample in x])
    torch.testing.assert_close(outputs, expected)


def test_a_residual_network_in_channels_last_is_predicted_by_vmap(monkeypatch):
    """Such networks used to run one sampled network after the other."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), random_batch_norm(nn.BatchNorm2d(8)), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )  # fmt: skip
    model = fb.to_stochastic(network, {"*": fb.noise.NormalPlanar(1)}).to(memory_format=torch.channels_last)
    posterior = fb.posterior.NoisePosterior(model.eval(), fb.likelihoods.Categorical())
    images = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    expected = posterior.predict(images, 3, seed=0, max_batch=4).samples  # one sample fills the pass
    monkeypatch.setattr(fb.posterior.noise.NoiseSampler, "run_sequentially", None)
    torch.testing.assert_close(posterior.predict(images, 3, seed=0).samples, expected)
