"""ConditionerMLP and ConditionalNormal."""

import pytest
import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets import ConditionalNormal, ConditionerMLP


def randomize(net: ConditionerMLP) -> ConditionerMLP:
    """Sets the last layer to random numbers and returns the net."""
    nn.init.normal_(net.layers[-1].weight, generator=torch.Generator().manual_seed(0))
    return net


def test_mlp_starts_at_zero_and_learns() -> None:
    net = ConditionerMLP(3, 2, hidden=(8,))
    value = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net(value), torch.zeros(5, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (net(value) - 1).square().sum().backward()
        optimizer.step()
    assert all((parameter.grad != 0).any() for parameter in net.parameters())


def test_mlp_equals_its_formula() -> None:
    net = randomize(ConditionerMLP(2, 1, hidden=(3,), activation=nn.Tanh)).double()
    value = torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    first, last = net.layers[0], net.layers[2]
    expected = torch.tanh(value @ first.weight.T + first.bias) @ last.weight.T + last.bias
    torch.testing.assert_close(net(value), expected)


def test_mlp_without_hidden_layers_is_linear() -> None:
    assert [type(layer) for layer in ConditionerMLP(3, 2, hidden=()).layers] == [nn.Linear]


@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 3)], ids=str)
def test_batch_shapes_and_broadcast_context(batch: tuple[int, ...]) -> None:
    net = randomize(ConditionerMLP(3, 2, hidden=(8,), context_dim=4)).double()
    value = torch.ones(*batch, 3, dtype=torch.float64)
    context = torch.linspace(0, 1, 4, dtype=torch.float64)
    out = net(value, context)
    assert out.shape == (*batch, 2)
    assert out.dtype == torch.float64
    assert torch.equal(out, net(value, context.expand(*batch, 4)))
    if out.numel():
        assert not torch.equal(out, net(value, context + 1))


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: ConditionerMLP(0, 2), "value", "dim_in"),
        (lambda: ConditionerMLP(2, 2, hidden=(4, 0)), "value", "hidden"),
        (lambda: ConditionerMLP(2, 2, context_dim=-1), "value", "context_dim"),
        (lambda: ConditionerMLP(2, 2, context_dim=3)(torch.ones(5, 2)), "shape", "context"),
        (lambda: ConditionerMLP(2, 2, context_dim=3)(torch.ones(5, 2), torch.ones(5, 1)), "shape", "context"),
        (lambda: ConditionerMLP(2, 2, context_dim=3)(torch.ones(5, 2), torch.ones(4, 3)), "shape", "context"),
        (lambda: ConditionerMLP(2, 2, context_dim=3)(torch.ones(2), torch.ones(4, 3)), "shape", "context"),
        (lambda: ConditionalNormal(nn.Linear(2, 3))(torch.ones(5, 2)), "shape", "net"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ConditionerMLP(2, 2)(torch.ones(5, 3)),
        lambda: ConditionerMLP(2, 2)(torch.ones(5, 2, dtype=torch.float64)),
    ],
)
def test_wrong_shapes_and_dtypes_raise_errors_of_torch(call) -> None:
    with pytest.raises(RuntimeError):
        call()
