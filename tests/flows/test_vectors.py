"""Named flows: densities, contexts, precision and cost."""

import warnings

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.distributions import CircularBase, NormalBase, StudentBase
from flowbnn.errors import FlowBNNError
from flowbnn.flows import named_flows
from flowbnn.transforms import (
    AffineMap,
    Amortized,
    Autoregressive,
    Compose,
    Coupling,
    Inverse,
    NeuralODE,
    Radial,
    Reshape,
    Residual,
    Sigmoid,
)

NAMES = [name for name in fb.flows.__all__ if name.lower() in named_flows()]
WITH_NETS = [name for name in NAMES if name not in ("Planar", "Radial", "Sylvester", "Householder")]

SOLVED = ("FFJORD", "ResidualFlow")  # flows with a solver in one direction or both


def small(name: str, dim: int, context_dim: int = 0, **options) -> fb.flows.FlowModel:
    """Returns a flow of two steps with perturbed parameters."""
    torch.manual_seed(0)
    if name in WITH_NETS:
        options["hidden"] = (8,)
    if name == "NAF":
        options["units"] = 3
    if name == "FFJORD":
        options |= {"rtol": 1e-9, "atol": 1e-9}
    flow = getattr(fb.flows, name)(dim, context_dim, length=2, **options).double()
    with torch.no_grad():
        for parameter in flow.transform.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return flow.eval()


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_density_of_draws_equals_that_of_the_forward_pass(name: str, dim: int) -> None:
    flow = small(name, dim, base=StudentBase(dim, 0.0, 1.0).double())
    x, log_prob = flow().rsample_and_log_prob((20,))
    torch.testing.assert_close(flow().log_prob(x), log_prob)
    log_prob.sum().backward()
    assert all(p.grad.isfinite().all() for p in flow.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", NAMES)
def test_flows_start_near_the_identity(name: str) -> None:
    torch.manual_seed(0)
    flow = getattr(fb.flows, name)(4, length=1)
    z = torch.randn(20, 4)
    assert (flow.transform(z)[0] - z).abs().max() < 0.5


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_context_makes_one_distribution_for_each_vector(name: str, dim: int) -> None:
    flow = small(name, dim, context_dim=2)
    context, x = torch.randn(5, 2).double(), torch.randn(5, dim).double()
    log_prob = flow(context).log_prob(x)
    expected = torch.stack([flow(c).log_prob(row) for c, row in zip(context, x, strict=True)])
    torch.testing.assert_close(log_prob, expected)
    assert not torch.allclose(log_prob, flow(context + 1).log_prob(x))
    assert flow(context).rsample((7,)).shape == (7, 5, dim)


@pytest.mark.parametrize("name", ["nsf", "planar", "residualflow"])
def test_flows_compute_in_single_precision_under_autocast(name: str) -> None:
    flow = named_flows()[name](2, 3, length=1).eval()
    context, x = torch.ones(4, 3, dtype=torch.bfloat16), torch.randn(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert flow(context).rsample().dtype == torch.float32
        log_prob = flow(context).log_prob(x)
    torch.testing.assert_close(log_prob, flow(context).log_prob(x), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", NAMES[1:])  # without FFJORD, whose solver needs more digits
def test_flows_work_in_half_precision(name: str) -> None:
    torch.manual_seed(0)
    exact = getattr(fb.flows, name)(3, length=1)
    flow = getattr(fb.flows, name)(3, length=1).bfloat16()
    flow.load_state_dict(exact.state_dict())
    x = torch.randn(20, 3).bfloat16()
    for mode in (True, False):
        log_prob = flow.train(mode)().log_prob(x)
        log_prob.sum().backward()
        assert log_prob.dtype == flow().rsample().dtype == torch.bfloat16
        torch.testing.assert_close(
            log_prob.float(), exact.train(mode)().log_prob(x.float()), rtol=0.05, atol=0.1
        )


def test_mean_of_a_conditional_gaussian_depends_on_the_context() -> None:
    flow = small("Householder", 2, context_dim=1)
    context = torch.tensor([[0.0], [2.0]]).double()
    batch, singles = flow(context), [flow(row) for row in context]
    torch.testing.assert_close(batch.mean, torch.stack([single.mean for single in singles]))
    torch.testing.assert_close(batch.variance, torch.stack([single.variance for single in singles]))
    lengths = batch.mean.norm(dim=-1)  # reflections alone would not change them
    assert (lengths[0] - lengths[1]).abs() > 0.1


def passes(flow: fb.flows.FlowModel, direction: str) -> int:
    """Returns the number of calls of the first network."""
    calls: list[int] = []
    net = next(module for module in flow.modules() if isinstance(module, nn.Sequential))
    net.register_forward_hook(lambda *_: calls.append(1))
    getattr(flow.transform, direction)(torch.zeros(2, 4).double())
    return len(calls)


@pytest.mark.parametrize("name", [name for name in WITH_NETS if name not in SOLVED])
@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_cheap_direction_costs_one_pass_and_the_other_one_for_each_entry(name: str, direction: str) -> None:
    flow = small(name, 4)
    cheap = flow.transform.cheap in ("both", direction)
    assert passes(flow, direction) == (1 if cheap else 4)


def test_cheap_direction_of_compositions_and_inverses() -> None:
    maf, iaf = Autoregressive(3), Autoregressive(3, cheap="forward")
    assert [maf.cheap, iaf.cheap, Autoregressive(1).cheap] == ["inverse", "forward", "both"]
    assert [Inverse(maf).cheap, Inverse(iaf).cheap] == ["forward", "inverse"]
    assert [Compose(maf, maf).cheap, Compose(maf, iaf).cheap, Compose().cheap] == ["inverse", "none", "both"]
    assert Compose(Compose(maf, iaf), maf).cheap == "none"


NSF, MAF, NICE = fb.flows.NSF, fb.flows.MAF, fb.flows.NICE


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: MAF(2)(torch.ones(3)), "shape", "context"),
        (lambda: MAF(2, 3)(), "shape", "context"),
        (lambda: MAF(2, 3)(torch.arange(4)), "shape", "context"),
        (lambda: MAF(2, 1)(torch.ones(4)), "shape", "context"),
        (lambda: fb.fit_density(Sigmoid(), torch.rand(9, 2)), "value", "flow"),
        (lambda: fb.fit_target(Sigmoid(), torch.sum), "value", "flow"),
        (lambda: NSF(2, base=StudentBase(3)), "shape", "base"),
        (lambda: NSF(2, circular=True, base=StudentBase(2)), "shape", "base"),
        (lambda: NSF(2, circular=True, bound=180.0, base=CircularBase(2)), "shape", "base"),
        (lambda: fb.flows.RealNVP(2, base=CircularBase(2)), "shape", "base"),
        (lambda: Amortized(Compose(Radial(4), Reshape((4,), (2, 2))), 1), "value", "transform"),
        (lambda: Amortized(Radial(2), 1)(torch.ones(4, 2), torch.ones(3, 1)), "shape", "context"),
        (lambda: Amortized(Radial(2), 1)(torch.ones(()), torch.ones(3, 1)), "shape", None),
        (lambda: NeuralODE(2, context_dim=1)(torch.ones(4, 2), torch.ones(3, 1)), "shape", "context"),
        (lambda: Residual(2, context_dim=1)(torch.ones(4, 2), torch.ones(3, 1)), "shape", "context"),
        (lambda: Residual(2, context_dim=1).inverse(torch.ones(4, 2), torch.ones(3, 1)), "shape", "context"),
        (lambda: Coupling(2, AffineMap(), net=nn.Linear(1, 2)), "value", "net"),
        (lambda: Autoregressive(2, net=nn.Linear(2, 4)), "value", "net"),
        (lambda: Residual(2, net=nn.Sequential(nn.Linear(2, 2))), "value", "net"),
        (lambda: NeuralODE(2, net=nn.Linear(2, 2)), "value", "net"),
        (lambda: NSF(2, bins=1), "value", "bins"),
        (lambda: NSF(2)().log_prob(torch.ones(3)), "shape", None),
        (lambda: NSF(2, 3)(torch.ones(5, 3)).log_prob(torch.ones(4, 2)), "shape", "context"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "path", "owner"),
    [
        (lambda: Compose(Sigmoid(), NSF(2, 3).transform)(torch.zeros(5, 2)), (1, 0, 1), "Coupling"),
        (lambda: fb.flows.Planar(2, 3).transform(torch.zeros(5, 2)), (0,), "Amortized"),
        (lambda: NICE(3, 2).transform(torch.ones(4, 3), torch.ones(5, 2)), (0,), "Coupling"),
        (lambda: NICE(3, 2).transform(torch.ones(4, 3), torch.tensor(1.0)), (0,), "Coupling"),
    ],
)
def test_errors_of_the_context_name_the_transform(call, path: tuple[int, ...], owner: str) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.argument, caught.value.fields["path"]) == ("context", path)
    assert owner in str(caught.value)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: MAF(2, 3)(torch.arange(4)), "one_hot(labels, 3)"),
        (lambda: MAF(2, 1)(torch.ones(4)), "x[:, None]"),
        (lambda: fb.fit_density(Sigmoid(), torch.rand(9, 2)), "FlowModel(base, transform)"),
        (lambda: NeuralODE(2, net=nn.Linear(2, 2)), "flowbnn.nets.ConditionerMLP"),
    ],
)
def test_messages_contain_a_remedy(call, hint: str) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert hint in str(caught.value)


def test_coupling_accepts_a_traced_net() -> None:
    class Net(nn.Module):
        def forward(self, value, context):
            return torch.cat([value, context], -1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        net = torch.jit.trace(Net(), (torch.ones(3, 1), torch.ones(3, 1)))
    x, log_det = Coupling(2, AffineMap(), net=net)(torch.zeros(4, 2), torch.ones(4, 1))
    assert x.tolist() == [[0.0, 1.0]] * 4
    assert log_det.tolist() == [0.0] * 4


def test_flow_of_sequences_needs_a_base_of_all_numbers() -> None:
    wave = Autoregressive(1, net=fb.nets.WaveNet(1, 2))
    with pytest.raises(FlowBNNError) as caught:
        fb.flows.FlowModel(NormalBase(1), wave)()
    assert (caught.value.kind, caught.value.argument) == ("shape", "base")
    flow = fb.flows.FlowModel(NormalBase(7), Compose(Reshape((7,), (7, 1)), wave))
    assert flow().log_prob(flow().sample((3,))).shape == (3,)


# without FFJORD, whose solver raises an error
@pytest.mark.parametrize("name", [name for name in NAMES if name != "FFJORD"])
def test_density_is_zero_where_the_inverse_overflows(name: str) -> None:
    signs = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
    flow = small(name, 3).float()
    for size in (1e25, 1e38, 3e38):
        assert flow().log_prob(size * signs).tolist() == [-torch.inf, -torch.inf]
    assert flow().log_prob(torch.tensor([torch.nan, 3e38, 1.0])).isnan()
    with torch.no_grad():
        next(flow.parameters()).fill_(torch.nan)  # not an overflow
    assert flow().log_prob(signs).isnan().all()
