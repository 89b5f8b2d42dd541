"""What a compiled step with noise keeps for its backward pass: hardly more than the plain network's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.objectives import ELBO

ROWS, WIDTH, SIDE, LAYERS = 8, 8, 32, 2
A_MAP, IMAGES = ROWS * WIDTH * SIDE * SIDE * 8, ROWS * 3 * SIDE * SIDE * 8  # bytes of float64
RULES = {"*": fb.noise.NormalAffine(), "3": fb.noise.NormalPlanar(1)}  # of site channel


def _network(noisy: bool) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for index in range(LAYERS):
        before = 3 if index == 0 else WIDTH
        parts += [nn.Conv2d(before, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    network = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 5))
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
    """Cut into forward and backward as for the default compiler, but run by torch's own operations: no waiting for a C++ compiler."""
    torch._dynamo.reset()
    return torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")


def _kept(noisy: bool, compiled: bool) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Bytes held for the backward pass, without parameters and batch; the loss and its gradients."""
    network, batch, held = _network(noisy), _batch(), []
    loss = _loss(network, noisy)
    loss = _compiled(loss) if compiled else loss

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = loss(*batch)
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    for known in (*network.parameters(), *network.buffers(), *batch):
        found.pop(known.untyped_storage().data_ptr(), None)
    result.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    assert not noisy or loss(*batch) != result  # draws anew at every call
    return sum(found.values()), result.detach(), gradients


def test_a_compiled_step_keeps_no_second_copy_of_the_feature_maps_and_has_the_same_gradients() -> None:
    plain, _, _ = _kept(False, compiled=True)
    noisy, value, grads = _kept(True, compiled=True)
    assert plain > (2 * LAYERS - 1) * A_MAP  # what a convolution gives, and what the next one is given
    assert noisy - plain - IMAGES < A_MAP / 8  # the images times their noise; else vectors, and no map

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


def test_an_uncompiled_step_keeps_the_products_too() -> None:
    """The yardstick of the test above: the products are one more copy."""
    extra = _kept(True, compiled=False)[0] - _kept(False, compiled=False)[0]
    assert (LAYERS - 1) * A_MAP <= extra < LAYERS * A_MAP


def test_normals_that_half_precision_rounds_anyway_are_kept_in_half() -> None:
    """Site position under autocast: a normal number for every number of the feature map, two bytes each and not four."""
    torch.manual_seed(0)
    layer = fb.to_stochastic(
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1), {"*": fb.noise.NormalAffine(site="position")}
    )
    images = torch.randn(ROWS, WIDTH, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    def run(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(images)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(images)
    maps = [t for t in held if t.numel() == images.numel() and t.data_ptr() != images.data_ptr()]
    assert maps
    assert all(t.dtype == torch.bfloat16 for t in maps)
