"""WaveNet and PixelCNN: dependence of outputs on inputs, by autograd, and autoregressive transforms with them."""

import pytest
import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets import ConditionerMLP, MaskedMLP, PixelCNN, WaveNet
from flowbnn.transforms import AffineMap, Autoregressive, SplineMap


def randomize(net: nn.Module, spread: float = 0.4) -> nn.Module:
    net = net.double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += spread * torch.randn_like(parameter)
    return net


def dependence(net: nn.Module, shape: tuple[int, ...], params_per_entry: int) -> Tensor:
    """Returns whether each output depends on each input, ``[entries, params_per_entry, entries]``, in the order of the event."""
    jacobian = torch.func.jacrev(net)(torch.randn(shape).double())
    places, channels = torch.Size(shape[:-1]).numel(), shape[-1]
    jacobian = jacobian.reshape(places, params_per_entry, channels, -1).movedim(1, 2)
    return jacobian.reshape(places * channels, params_per_entry, places * channels) != 0


@pytest.mark.parametrize("kernel", [2, 3])
def test_wavenet_steps_depend_only_on_earlier_steps(kernel: int) -> None:
    actual = dependence(randomize(WaveNet(2, 3, hidden=6, layers=3, kernel=kernel)), (8, 2), 3)
    step = torch.arange(8).repeat_interleave(2)
    assert torch.equal(actual, (step[:, None] > step)[:, None].expand(16, 3, 16))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_depend_only_on_earlier_pixels_and_channels(channels: int) -> None:
    actual = dependence(randomize(PixelCNN(channels, 2, hidden=4, layers=4)), (4, 5, channels), 2)
    entry = torch.arange(20 * channels)
    assert torch.equal(actual, (entry[:, None] > entry)[:, None].expand(len(entry), 2, len(entry)))


CASES = {
    "wavenet": (lambda: WaveNet(2, 2, hidden=4, layers=2), (4, 2), AffineMap()),
    "pixelcnn": (lambda: PixelCNN(2, 2, hidden=2, layers=2), (2, 3, 2), AffineMap()),
    "pixelcnn-spline": (lambda: PixelCNN(2, 8, hidden=2, layers=2), (2, 3, 2), SplineMap(bins=3)),
    "made-spline": (lambda: MaskedMLP(3, 8, hidden=(6,)), (3,), SplineMap(bins=3)),
    "made-affine": (lambda: MaskedMLP(3, 2, hidden=(6,), interleaved=True), (3,), AffineMap()),
}


@pytest.mark.parametrize("cheap", ["forward", "inverse"])
@pytest.mark.parametrize("name", CASES)
def test_autoregressive_transform_is_a_bijection_with_the_exact_log_det(name: str, cheap: str) -> None:
    build, shape, univariate = CASES[name]
    flow = Autoregressive(shape[-1], univariate, cheap, net=randomize(build(), 0.2))
    assert flow.event_dim == len(shape)
    assert flow.cheap == cheap
    z = torch.randn(3, *shape).double()
    x, log_det = flow(z)
    back, log_det_back = flow.inverse(x)
    torch.testing.assert_close(back, z)
    torch.testing.assert_close(log_det_back, -log_det)
    jacobian = torch.func.jacrev(lambda event: flow(event)[0])(z[0]).reshape(z[0].numel(), -1)
    torch.testing.assert_close(log_det[0], torch.linalg.slogdet(jacobian).logabsdet)
    torch.testing.assert_close(flow(z[0])[0], x[0])
    assert flow(z[:0])[1].shape == (0,)
    assert flow(z.expand(2, 3, *shape))[1].shape == (2, 3)


@pytest.mark.parametrize("kind", [WaveNet, PixelCNN])
def test_outputs_start_at_zero_and_depend_on_the_context(kind) -> None:
    net, shape = kind(2, 1, hidden=4, layers=2, context_dim=3), (3, 2, 2)[-2 if kind is WaveNet else -3 :]
    value, context = torch.randn(5, *shape).double(), torch.randn(5, 3).double()
    assert torch.equal(net.double()(value, context), torch.zeros(5, *shape).double())
    net = randomize(net)
    jacobian = torch.func.jacrev(lambda context: net(value[0], context))(context[0])
    assert (jacobian != 0).any(-1).all()
    torch.testing.assert_close(net(value, context)[1], net(value[1], context[1]))
    with pytest.raises(FlowBNNError) as caught:
        net(value)
    assert (caught.value.kind, caught.value.argument) == ("shape", "context")


def test_net_without_passes_raises() -> None:
    with pytest.raises(FlowBNNError) as caught:
        Autoregressive(2, net=ConditionerMLP(2, 4))
    assert caught.value.argument == "net"
