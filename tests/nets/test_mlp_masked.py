"""Masked networks: dependence of outputs on inputs, by autograd."""

import pytest
import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets import MaskedMLP


def randomize(net: nn.Module) -> nn.Module:
    """Returns the net in float64 with positive weights, so that no path cancels."""
    net = net.double()
    for parameter in net.parameters():
        nn.init.uniform_(parameter, 0.1, 1.0)
    return net


@pytest.mark.parametrize("hidden", [(), (1,), (2, 7), (40, 3, 9)], ids=str)
@pytest.mark.parametrize("order", [None, [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_outputs_depend_only_on_earlier_entries(hidden, order, interleaved) -> None:
    dim, per = 4, 3
    net = randomize(MaskedMLP(dim, per, hidden, order, nn.Softplus, interleaved=interleaved))
    jacobian = torch.func.jacrev(net)(torch.randn(dim).double())
    jacobian = (
        jacobian.reshape(dim, per, dim) if interleaved else jacobian.reshape(per, dim, dim).movedim(0, 1)
    )
    place = torch.argsort(torch.tensor(order or range(dim)))
    expected = (place[:, None] > place)[:, None].expand(dim, per, dim)
    if min(hidden, default=dim) >= dim - 1:  # narrower layers cannot separate all prefixes
        assert torch.equal(jacobian != 0, expected)
    assert not (jacobian != 0)[~expected].any()
    assert (jacobian != 0)[expected].any()


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_outputs_depend_on_the_context(dim: int) -> None:
    net = randomize(MaskedMLP(dim, 2, (8, 8), activation=nn.Softplus, context_dim=3))
    value, context = torch.randn(dim).double(), torch.randn(3).double()
    jacobian = torch.func.jacrev(lambda context: net(value, context))(context)
    assert (jacobian != 0).all()


def test_net_starts_at_zero_and_loads_its_masks() -> None:
    first, second = MaskedMLP(3, 1, (8,), [2, 0, 1]), MaskedMLP(3, 1, (8,))
    value = torch.randn(5, 3)
    assert torch.equal(first(value), torch.zeros(5, 3))
    nn.init.ones_(first.layers[-1].weight)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(value), second(value))


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: MaskedMLP(3, 2, order=[0, 1]), "value", "order"),
        (lambda: MaskedMLP(3, 0), "value", "params_per_entry"),
        (lambda: MaskedMLP(3, 1, context_dim=2)(torch.ones(3)), "shape", "context"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)
