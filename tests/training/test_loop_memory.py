"""Tests of the memory that a training step with noise keeps for its backward pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.objectives import ELBO

ROWS, WIDTH, SIDE, LAYERS = 8, 8, 32, 2
MAP_BYTES, IMAGE_BYTES = ROWS * WIDTH * SIDE * SIDE * 8, ROWS * 3 * SIDE * SIDE * 8  # float64
RULES = {"*": fb.noise.NormalAffine(), "3": fb.noise.NormalPlanar(1)}


def _network(noisy: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(LAYERS):
        channels = 3 if index == 0 else WIDTH
        layers += [nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 5))
    network = fb.to_stochastic(network, RULES) if noisy else network
    return network.double().train()


def _loss(network: nn.Module, noisy: bool) -> Callable[[Tensor, Tensor], Tensor]:
    likelihood, objective = fb.likelihoods.Categorical(), ELBO(fb.likelihoods.Categorical(), num_data=1000)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        if not noisy:
            return -likelihood.log_prob(network(images), labels).mean()
        return objective(network, images, labels).loss

    return loss


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return images, torch.arange(ROWS) % 5


def _compiled(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Compiles a loss into forward and backward graphs as the default compiler does, without a C++ compiler."""
    torch._dynamo.reset()
    return torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")


def _saved_bytes(noisy: bool, compiled: bool) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Returns the bytes saved for the backward pass (without parameters and batch), the loss and its gradients."""
    network, batch, saved = _network(noisy), _batch(), []
    loss = _loss(network, noisy)
    loss = _compiled(loss) if compiled else loss

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = loss(*batch)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    for tensor in (*network.parameters(), *network.buffers(), *batch):
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    result.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    assert not noisy or loss(*batch) != result  # every call draws new noise
    return sum(sizes.values()), result.detach(), gradients


@pytest.mark.slow
def test_compiled_steps_save_one_copy_of_the_feature_maps_and_have_equal_gradients() -> None:
    plain, _, _ = _saved_bytes(False, compiled=True)
    noisy, value, grads = _saved_bytes(True, compiled=True)
    assert plain > (2 * LAYERS - 1) * MAP_BYTES  # outputs and inputs of the convolutions
    assert noisy - plain - IMAGE_BYTES < MAP_BYTES / 8  # the images times their noise, and vectors

    network = _network(True)
    torch.manual_seed(2)
    expected = _loss(network, True)(*_batch())
    expected.backward()
    expected_grads = {name: parameter.grad for name, parameter in network.named_parameters()}
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-12)
    assert any("noise" in name for name in grads)
    for name, gradient in expected_grads.items():
        assert gradient is not None, name
        torch.testing.assert_close(grads[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


def test_uncompiled_steps_save_a_second_copy() -> None:
    """The products of feature maps and noise are one more copy, which shows that the test above measures it."""
    extra = _saved_bytes(True, compiled=False)[0] - _saved_bytes(False, compiled=False)[0]
    assert (LAYERS - 1) * MAP_BYTES <= extra < LAYERS * MAP_BYTES


@pytest.mark.slow
def test_noise_at_positions_is_saved_in_half_precision_under_autocast() -> None:
    """At site ``position`` there is one normal number for every value of the feature map."""
    torch.manual_seed(0)
    layer = fb.to_stochastic(
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1), {"*": fb.noise.NormalAffine(site="position")}
    )
    images = torch.randn(ROWS, WIDTH, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def run(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(images)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        compiled(images)
    maps = [t for t in saved if t.numel() == images.numel() and t.data_ptr() != images.data_ptr()]
    assert maps
    assert all(t.dtype == torch.bfloat16 for t in maps)
