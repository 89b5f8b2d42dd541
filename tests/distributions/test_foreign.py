"""Transforms of torch.distributions, and modules that give them, in a flow."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions import transforms as torch_transforms
from torch.func import functional_call

from flowbnn.distributions import Flow, from_torch
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import Compose, Inverse

AffineTransform = torch_transforms.AffineTransform


class Scaled(nn.Module):
    """Gives a torch transform when it is called, as zuko's modules do."""

    def __init__(self, scale: float = 2.0, shift: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), scale))
        self.register_buffer("shift", torch.tensor([shift, -shift]))

    def forward(self, context: Tensor | None = None) -> torch_transforms.Transform:
        shift = self.shift if context is None else self.shift + context
        affine = AffineTransform(shift, self.scale, event_dim=1)
        tanh = torch_transforms.IndependentTransform(torch_transforms.TanhTransform(), 1)
        return torch_transforms.ComposeTransform([affine, tanh])


def test_a_module_is_a_part_of_the_flow():
    foreign = from_torch(Scaled())
    assert set(foreign.state_dict()) == {"source.scale", "source.shift"}
    z = torch.tensor([0.3, 0.8])
    replaced = {"source.scale": torch.full((2,), 0.5)}
    expected = torch.tanh(torch.tensor([1.0, -1.0]) + 0.5 * z)
    torch.testing.assert_close(functional_call(foreign, replaced, (z,))[0], expected)
    twin = copy.deepcopy(foreign)
    with torch.no_grad():
        twin.source.scale.fill_(5.0)
    assert not torch.equal(twin(z)[0], foreign(z)[0])
    moved = foreign.double()
    x, log_det = moved(z.double())
    assert (x.dtype, log_det.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(moved.inverse(x)[0], z.double(), rtol=0, atol=1e-10)


def test_it_is_torchs_transformed_distribution_and_trains():
    module = Scaled()
    base = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
    flow, theirs = Flow(base, from_torch(module)), TransformedDistribution(base, [module()])
    x = torch.tensor([[0.2, -0.7], [0.9, 0.1]])
    torch.testing.assert_close(flow.log_prob(x), theirs.log_prob(x))
    ours = torch.autograd.grad(flow.log_prob(x).sum(), module.scale)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(theirs.log_prob(x).sum(), module.scale)[0])
    assert ours.abs().sum() > 0
    given = Flow(base, from_torch(module), torch.ones(3, 2))
    assert given.sample().shape == (3, 2)
    assert not torch.equal(given.log_prob(x[0]), flow.log_prob(x[0]).expand(3))


def test_plain_transforms_become_chains():
    source = torch_transforms.ComposeTransform(
        [AffineTransform(1.0, 2.0), torch_transforms.ExpTransform().inv]
    )
    foreign = from_torch(source)
    assert isinstance(foreign, Compose)
    assert isinstance(foreign[1], Inverse)
    z = torch.tensor([0.3, 0.8])
    torch.testing.assert_close(foreign(z)[0], torch.log(1.0 + 2.0 * z))
    torch.testing.assert_close(copy.deepcopy(foreign).inverse(foreign(z)[0])[0], z)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (AffineTransform(torch.zeros(2), 1.0), "AffineTransform holds tensors, .* give a module"),
        (
            torch_transforms.ComposeTransform([AffineTransform(0.0, nn.Parameter(torch.ones(1)))]),
            "holds tensors",
        ),
        (torch_transforms.CumulativeDistributionTransform(Normal(0.0, 1.0)), "holds tensors"),
        (torch_transforms.CorrCholeskyTransform(), "bijection of a space onto itself, which CorrCholesky"),
        (torch_transforms.ReshapeTransform((4,), (2, 2)), "which ReshapeTransform"),
        (torch_transforms.AbsTransform(), "which AbsTransform does not declare"),
        (torch_transforms.SoftmaxTransform(), "which SoftmaxTransform"),
    ],
)
def test_what_cannot_be_a_part_is_refused(source, line):
    with pytest.raises(FlowBNNError, match=line):
        from_torch(source)


def test_what_shows_at_the_call_only_is_refused_there():
    with pytest.raises(FlowBNNError, match=r"\(2,\) into \(3,\)"):
        from_torch(torch_transforms.StickBreakingTransform())(torch.zeros(2))
    with pytest.raises(FlowBNNError, match="batch axes of the transform's parameters"):
        from_torch(Scaled())(torch.zeros(2), torch.zeros(4, 2))


def test_it_compiles():
    foreign = from_torch(Scaled())
    z = torch.tensor([[0.1, -0.3]])
    torch._dynamo.reset()
    for function in (foreign.forward, foreign.inverse):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        for found, expected in zip(compiled(z), function(z), strict=True):
            torch.testing.assert_close(found, expected)
