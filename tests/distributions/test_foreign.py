"""A foreign transform is a module like any other: it moves, saves, copies, and takes the parameters it is handed."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions import transforms as torch_transforms
from torch.func import functional_call

from flowbnn.distributions import DiagonalNormal, Flow, divergence, from_torch
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import Compose, Inverse

AffineTransform = torch_transforms.AffineTransform


def scaled(scale: float = 2.0, event_dim: int = 1) -> AffineTransform:
    return AffineTransform(torch.tensor([1.0, -1.0]), nn.Parameter(torch.full((2,), scale)), event_dim)


def nested() -> torch_transforms.ComposeTransform:
    inner = torch_transforms.ComposeTransform([scaled(3.0), torch_transforms.TanhTransform()])
    return torch_transforms.ComposeTransform([scaled(2.0).inv, inner])


def test_functional_call_reaches_the_parameters():
    foreign = from_torch(AffineTransform(0.0, nn.Parameter(torch.tensor([2.0])), event_dim=1))
    z = torch.ones(1)
    found, log_det = functional_call(foreign, {"parameter_0": torch.tensor([9.0])}, (z,))
    assert found.item() == 9.0
    torch.testing.assert_close(log_det, torch.tensor(9.0).log())
    assert foreign(z)[0].item() == 2.0


def test_functional_call_reaches_nested_parameters():
    foreign = from_torch(nested())
    replaced = {name: torch.full((2,), 0.5) for name, _ in foreign.named_parameters()}
    assert len(replaced) == 2
    z = torch.tensor([0.3, 0.8])
    shift = torch.tensor([1.0, -1.0])
    expected = torch.tanh(shift + 0.5 * (z - shift) / 0.5)
    torch.testing.assert_close(functional_call(foreign, replaced, (z,))[0], expected)
    gradient = torch.func.grad(lambda p: functional_call(foreign, p, (z,))[1].sum())(replaced)
    assert all(part.abs().sum() > 0 for part in gradient.values())


def test_one_parameter_in_two_places_stays_one():
    shared = nn.Parameter(torch.tensor([2.0, 3.0]))
    foreign = from_torch(AffineTransform(shared, shared, event_dim=1))
    assert list(foreign.state_dict()) == ["parameter_0"]
    found, _ = functional_call(foreign, {"parameter_0": torch.ones(2)}, (torch.ones(2),))
    assert found.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("make", [scaled, nested, lambda: scaled().inv])
def test_it_moves_with_its_dtype(make):
    foreign = from_torch(make()).double()
    assert {tensor.dtype for tensor in foreign.state_dict().values()} == {torch.float64}
    z = torch.tensor([[0.1, -0.3]], dtype=torch.float64)
    x, log_det = foreign(z)
    assert (x.dtype, log_det.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(foreign.inverse(x)[0], z, rtol=0, atol=1e-12)
    if torch.cuda.is_available():
        assert foreign.cuda()(z.cuda())[0].is_cuda


def test_a_constant_tensor_moves_to_another_device():
    foreign = from_torch(scaled()).to("meta")
    assert foreign(torch.ones(2, device="meta"))[0].device.type == "meta"


@pytest.mark.parametrize("make", [scaled, nested, lambda: scaled().inv])
def test_state_dict_round_trip(make):
    first, second = from_torch(make()), from_torch(make())
    assert {name.split(".")[-1] for name in first.state_dict()} == {"parameter_0", "buffer_0"}
    with torch.no_grad():
        for tensor in first.state_dict().values():
            tensor.add_(0.7)
    z = torch.tensor([0.2, 0.4])
    assert not torch.allclose(first(z)[0], second(z)[0])
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(z)[0], second(z)[0])


@pytest.mark.parametrize("make", [scaled, nested, lambda: scaled().inv, lambda: nested().inv])
def test_copies_and_pickles_are_whole_and_apart(make):
    foreign = from_torch(make())
    z = torch.tensor([0.2, 0.4])
    before = foreign(z)[0].detach()
    stream = io.BytesIO()
    torch.save(foreign, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(foreign), torch.load(stream, weights_only=False)):
        assert torch.equal(twin(z)[0], before)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.3)
        assert not torch.allclose(twin(z)[0], before)
        assert torch.equal(foreign(z)[0], before)


def test_the_users_object_is_left_alone():
    source = scaled()
    foreign = from_torch(source)
    foreign.double()
    assert foreign.get_parameter("parameter_0") is source.scale
    assert source.loc.dtype == torch.float32


@pytest.mark.parametrize("cache_size", [0, 1])
def test_no_stale_answers(cache_size):
    """Neither from torch's own cache nor from a transform that was put together earlier."""
    scale = nn.Parameter(torch.tensor([2.0]))
    foreign = from_torch(AffineTransform(0.0, scale, event_dim=1, cache_size=cache_size))
    z = torch.ones(1)
    assert foreign(z)[0].item() == 2.0
    with torch.no_grad():
        scale.fill_(5.0)
    assert foreign(z)[0].item() == 5.0


def test_it_is_torchs_transformed_distribution_and_trains():
    source = nested()
    base = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
    foreign = from_torch(source)
    assert isinstance(foreign, Compose)
    flow, theirs = Flow(base, foreign), TransformedDistribution(base, [source])
    x = torch.tensor([[0.2, -0.7], [0.9, 0.1]])
    torch.testing.assert_close(flow.log_prob(x), theirs.log_prob(x))
    log_prob = flow.log_prob(x).sum()
    ours = torch.autograd.grad(log_prob, list(foreign.parameters()))
    for found, parameter in zip(ours, foreign.parameters(), strict=True):
        expected = torch.autograd.grad(theirs.log_prob(x).sum(), parameter)[0]
        torch.testing.assert_close(found, expected)
        assert found.abs().sum() > 0


@pytest.mark.parametrize("event_dim", [0, 1])
def test_torchs_affine_map_has_a_closed_form(event_dim):
    source = AffineTransform(torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 0.5]), event_dim)
    base = DiagonalNormal(torch.zeros(2), torch.ones(2))
    flow = Flow(base, from_torch(source))
    plain = Independent(Normal(source.loc, source.scale.abs()), 1)
    torch.testing.assert_close(flow.mean, plain.mean)
    torch.testing.assert_close(flow.stddev, plain.stddev)
    torch.testing.assert_close(flow.entropy(), plain.entropy())
    expected = torch.distributions.kl_divergence(plain, Independent(Normal(base.loc, base.scale), 1))
    torch.testing.assert_close(divergence(flow, base).kl, expected)
    inverse = Flow(base, Inverse(from_torch(source)))
    torch.testing.assert_close(inverse.stddev, 1 / source.scale.abs())


def test_modules_and_distributions_inside_a_transform():
    class Bent(torch_transforms.Transform):
        bijective = True
        domain = codomain = torch.distributions.constraints.real_vector

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 2)

        def _call(self, x):
            return x + self.net.bias

        def _inverse(self, y):
            return y - self.net.bias

        def log_abs_det_jacobian(self, x, y):
            return x.new_zeros(x.shape[:-1])

    foreign = from_torch(Bent())
    assert len(list(foreign.parameters())) == 2
    found = functional_call(foreign, {"module_0.bias": torch.full((2,), 7.0)}, (torch.zeros(2),))[0]
    assert found.tolist() == [7.0, 7.0]
    twin = copy.deepcopy(foreign)
    with torch.no_grad():
        twin.module_0.bias.fill_(4.0)
    assert twin(torch.zeros(2))[0].tolist() == [4.0, 4.0]

    scale = nn.Parameter(torch.tensor(2.0))
    uniform = from_torch(torch_transforms.CumulativeDistributionTransform(Normal(0.0, scale)))
    assert dict(uniform.named_parameters())["parameter_0"] is scale
    expected = Normal(0.0, 4.0).cdf(torch.tensor(1.0))
    found, _ = functional_call(uniform, {"parameter_0": torch.tensor(4.0)}, (torch.tensor(1.0),))
    torch.testing.assert_close(found, expected)


def test_a_transform_that_is_a_module_too():
    class Both(torch_transforms.Transform, nn.Module):
        bijective = True
        domain = codomain = torch.distributions.constraints.real_vector
        __hash__ = nn.Module.__hash__

        def __init__(self):
            torch_transforms.Transform.__init__(self)
            nn.Module.__init__(self)
            self.shift = nn.Parameter(torch.ones(2))
            self._inv, self._cache_size = None, 0

        def _call(self, x):
            return x + self.shift

        def _inverse(self, y):
            return y - self.shift

        def log_abs_det_jacobian(self, x, y):
            return x.new_zeros(x.shape[:-1])

    foreign = from_torch(Both())
    found = functional_call(foreign, {"source.shift": torch.full((2,), 3.0)}, (torch.zeros(2),))[0]
    assert found.tolist() == [3.0, 3.0]
    assert foreign.inverse(torch.ones(2))[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (torch_transforms.StickBreakingTransform(), "StickBreakingTransform changes the shape"),
        (torch_transforms.StickBreakingTransform().inv, "StickBreakingTransform changes the shape"),
        (
            torch_transforms.ComposeTransform([scaled(), torch_transforms.StickBreakingTransform()]),
            "ComposeTransform changes the shape",
        ),
        (torch_transforms.CorrCholeskyTransform(), "CorrCholeskyTransform changes the shape"),
        (torch_transforms.ReshapeTransform((4,), (2, 2)), "ReshapeTransform changes the shape"),
        (torch_transforms.AbsTransform(), "AbsTransform is declared with bijective = False"),
        (torch_transforms.SoftmaxTransform(), "SoftmaxTransform is declared with bijective = False"),
    ],
)
def test_what_is_no_map_of_a_space_onto_itself_is_refused(source, line):
    with pytest.raises(FlowBNNError, match=line):
        from_torch(source)


def test_what_shows_at_the_call_only_is_refused_there():
    class Lazy(nn.Module):
        def forward(self, context):
            return torch_transforms.StickBreakingTransform()

    with pytest.raises(FlowBNNError, match=r"\(2,\) into \(3,\)"):
        from_torch(Lazy())(torch.zeros(2), torch.zeros(1))
    batched = from_torch(AffineTransform(torch.zeros(4, 2), 1.0, event_dim=1))
    with pytest.raises(FlowBNNError, match="batch axes of the transform's parameters"):
        batched(torch.zeros(2))
    assert batched(torch.zeros(4, 2))[1].shape == (4,)


def test_there_and_back_through_the_simplex_is_a_map_of_the_plane():
    stick = torch_transforms.StickBreakingTransform()
    foreign = from_torch(torch_transforms.ComposeTransform([stick, stick.inv]))
    z = torch.tensor([0.3, -0.4])
    x, log_det = foreign(z)
    torch.testing.assert_close(x, z)
    torch.testing.assert_close(log_det, torch.zeros(()), rtol=0, atol=1e-5)


def test_it_compiles():
    foreign = from_torch(nested())
    z = torch.tensor([[0.1, -0.3]])
    torch._dynamo.reset()
    for function in (foreign.forward, foreign.inverse):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        for found, expected in zip(compiled(z), function(z), strict=True):
            torch.testing.assert_close(found, expected)
