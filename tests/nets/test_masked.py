"""Masked networks: what an output depends on, by autograd."""

import pytest
import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets import MaskedMLP


def woken(net: nn.Module) -> nn.Module:
    """In float64, with every weight different from zero and the same sign of slope everywhere, so that no path cancels."""
    net = net.double()
    for parameter in net.parameters():
        nn.init.uniform_(parameter, 0.1, 1.0)
    return net


@pytest.mark.parametrize("hidden", [(), (1,), (2, 7), (40, 3, 9)], ids=str)
@pytest.mark.parametrize("order", [None, [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_an_output_depends_on_the_entries_before_it_and_on_no_other(hidden, order, interleaved) -> None:
    dim, per = 4, 3
    net = woken(MaskedMLP(dim, per, hidden, order, nn.Softplus, interleaved=interleaved))
    jacobian = torch.func.jacrev(net)(torch.randn(dim).double())
    jacobian = (
        jacobian.reshape(dim, per, dim) if interleaved else jacobian.reshape(per, dim, dim).movedim(0, 1)
    )
    place = torch.argsort(torch.tensor(order or range(dim)))
    before = (place[:, None] > place)[:, None].expand(dim, per, dim)
    if min(hidden, default=dim) >= dim - 1:  # narrower layers cannot tell all prefixes apart
        assert torch.equal(jacobian != 0, before)
    assert not (jacobian != 0)[~before].any()
    assert (jacobian != 0)[before].any()


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_every_output_depends_on_the_context(dim: int) -> None:
    net = woken(MaskedMLP(dim, 2, (8, 8), activation=nn.Softplus, context_dim=3))
    value, context = torch.randn(dim).double(), torch.randn(3).double()
    jacobian = torch.func.jacrev(lambda given: net(value, given))(context)
    assert (jacobian != 0).all()


def test_it_starts_at_zero_and_keeps_its_masks_when_loaded() -> None:
    first, second = MaskedMLP(3, 1, (8,), [2, 0, 1]), MaskedMLP(3, 1, (8,))
    value = torch.randn(5, 3)
    assert torch.equal(first(value), torch.zeros(5, 3))
    nn.init.ones_(first.layers[-1].weight)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(value), second(value))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MaskedMLP(3, 2, order=[0, 1]), "each of the 3 entries exactly once"),
        (lambda: MaskedMLP(3, 0), "at least 1"),
        (lambda: MaskedMLP(3, 1, context_dim=2)(torch.ones(3)), "context_dim=2, and is given"),
    ],
)
def test_bad_input_is_one_line(call, words: str) -> None:
    with pytest.raises(FlowBNNError, match=words):
        call()
