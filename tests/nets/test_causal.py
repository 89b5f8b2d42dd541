"""WaveNet and PixelCNN: what an output depends on, by autograd, and the maps that they condition."""

import pytest
import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets import MLP, MaskedMLP, PixelCNN, WaveNet
from flowbnn.transforms import AffineMap, Autoregressive, SplineMap


def woken(net: nn.Module, spread: float = 0.4) -> nn.Module:
    net = net.double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += spread * torch.randn_like(parameter)
    return net


def dependence(net: nn.Module, shape: tuple[int, ...], params_per_entry: int) -> Tensor:
    """Whether an output's entry depends on an input's, both in the order of the event, ``[entries, params_per_entry, entries]``."""
    jacobian = torch.func.jacrev(net)(torch.randn(shape).double())
    places, channels = torch.Size(shape[:-1]).numel(), shape[-1]
    jacobian = jacobian.reshape(places, params_per_entry, channels, -1).movedim(1, 2)
    return jacobian.reshape(places * channels, params_per_entry, places * channels) != 0


@pytest.mark.parametrize("kernel", [2, 3])
def test_a_step_depends_on_the_steps_before_it_and_on_no_other(kernel: int) -> None:
    found = dependence(woken(WaveNet(2, 3, hidden=6, layers=3, kernel=kernel)), (8, 2), 3)
    step = torch.arange(8).repeat_interleave(2)
    assert torch.equal(found, (step[:, None] > step)[:, None].expand(16, 3, 16))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_pixel_depends_on_those_above_and_to_the_left_and_on_its_channels_so_far(channels: int) -> None:
    found = dependence(woken(PixelCNN(channels, 2, hidden=4, layers=4)), (4, 5, channels), 2)
    entry = torch.arange(20 * channels)
    assert torch.equal(found, (entry[:, None] > entry)[:, None].expand(len(entry), 2, len(entry)))


CASES = {
    "wavenet": (lambda: WaveNet(2, 2, hidden=4, layers=2), (4, 2), AffineMap()),
    "pixelcnn": (lambda: PixelCNN(2, 2, hidden=2, layers=2), (2, 3, 2), AffineMap()),
    "pixelcnn-spline": (lambda: PixelCNN(2, 8, hidden=2, layers=2), (2, 3, 2), SplineMap(bins=3)),
    "made-spline": (lambda: MaskedMLP(3, 8, hidden=(6,)), (3,), SplineMap(bins=3)),
    "made-affine": (lambda: MaskedMLP(3, 2, hidden=(6,), interleaved=True), (3,), AffineMap()),
}


@pytest.mark.parametrize("cheap", ["forward", "inverse"])
@pytest.mark.parametrize("name", CASES)
def test_the_map_is_a_bijection_with_the_log_det_of_its_jacobian(name: str, cheap: str) -> None:
    build, shape, univariate = CASES[name]
    flow = Autoregressive(shape[-1], univariate, cheap, net=woken(build(), 0.2))
    assert flow.event_dim == len(shape)
    assert flow.cheap == cheap
    z = torch.randn(3, *shape).double()
    x, log_det = flow(z)
    back, log_det_back = flow.inverse(x)
    torch.testing.assert_close(back, z)
    torch.testing.assert_close(log_det_back, -log_det)
    jacobian = torch.func.jacrev(lambda one: flow(one)[0])(z[0]).reshape(z[0].numel(), -1)
    torch.testing.assert_close(log_det[0], torch.linalg.slogdet(jacobian).logabsdet)
    torch.testing.assert_close(flow(z[0])[0], x[0])
    assert flow(z[:0])[1].shape == (0,)
    assert flow(z.expand(2, 3, *shape))[1].shape == (2, 3)


@pytest.mark.parametrize("kind", [WaveNet, PixelCNN])
def test_every_output_depends_on_the_context_and_starts_at_zero(kind) -> None:
    net, shape = kind(2, 1, hidden=4, layers=2, context_dim=3), (3, 2, 2)[-2 if kind is WaveNet else -3 :]
    value, context = torch.randn(5, *shape).double(), torch.randn(5, 3).double()
    assert torch.equal(net.double()(value, context), torch.zeros(5, *shape).double())
    net = woken(net)
    jacobian = torch.func.jacrev(lambda given: net(value[0], given))(context[0])
    assert (jacobian != 0).any(-1).all()
    torch.testing.assert_close(net(value, context)[1], net(value[1], context[1]))
    with pytest.raises(FlowBNNError, match="context_dim=3, and is given"):
        net(value)


def test_a_net_that_does_not_say_its_passes_is_refused() -> None:
    with pytest.raises(FlowBNNError, match="says its passes.*MLP does not"):
        Autoregressive(2, net=MLP(2, 4))
