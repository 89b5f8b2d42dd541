"""The named flows: one module, a distribution when called, cheap where it says so."""

import warnings
from inspect import getsource

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

SOLVED = ("FFJORD", "ResidualFlow")  # the direction that is not cheap is found by a solver


def small(name: str, dim: int, context_dim: int = 0, **given) -> fb.flows.FlowModel:
    """A flow of two steps whose parameters have moved."""
    torch.manual_seed(0)
    if name in WITH_NETS:
        given["hidden"] = (8,)
    if name == "NAF":
        given["units"] = 3
    if name == "FFJORD":
        given |= {"rtol": 1e-9, "atol": 1e-9}
    flow = getattr(fb.flows, name)(dim, context_dim, length=2, **given).double()
    with torch.no_grad():
        for parameter in flow.transform.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return flow.eval()


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_draws_have_the_density_that_they_are_drawn_with(name: str, dim: int) -> None:
    flow = small(name, dim, base=StudentBase(dim, 0.0, 1.0).double())
    x, log_prob = flow().rsample_and_log_prob((20,))
    torch.testing.assert_close(flow().log_prob(x), log_prob)
    log_prob.sum().backward()
    assert all(p.grad.isfinite().all() for p in flow.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_flow_is_near_its_base(name: str) -> None:
    torch.manual_seed(0)
    flow = getattr(fb.flows, name)(4, length=1)
    z = torch.randn(20, 4)
    assert (flow.transform(z)[0] - z).abs().max() < 0.5


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_context_makes_one_distribution_for_each(name: str, dim: int) -> None:
    flow = small(name, dim, context_dim=2)
    context, x = torch.randn(5, 2).double(), torch.randn(5, dim).double()
    together = flow(context).log_prob(x)
    one_by_one = torch.stack([flow(c).log_prob(row) for c, row in zip(context, x, strict=True)])
    torch.testing.assert_close(together, one_by_one)
    assert not torch.allclose(together, flow(context + 1).log_prob(x))
    assert flow(context).rsample((7,)).shape == (7, 5, dim)


@pytest.mark.parametrize("name", ["nsf", "planar", "residualflow"])
def test_flows_compute_in_single_precision_under_autocast(name: str) -> None:
    flow = named_flows()[name](2, 3, length=1).eval()
    context, x = torch.ones(4, 3, dtype=torch.bfloat16), torch.randn(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert flow(context).rsample().dtype == torch.float32
        found = flow(context).log_prob(x)
    torch.testing.assert_close(found, flow(context).log_prob(x), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", NAMES[1:])  # the first is FFJORD, whose solver wants more digits
def test_flows_are_served_in_half_precision(name: str) -> None:
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


def test_the_mean_of_a_conditional_gaussian_follows_its_context() -> None:
    flow = small("Householder", 2, context_dim=1)
    context = torch.tensor([[0.0], [2.0]]).double()
    made, apart = flow(context), [flow(one) for one in context]
    torch.testing.assert_close(made.mean, torch.stack([one.mean for one in apart]))
    torch.testing.assert_close(made.variance, torch.stack([one.variance for one in apart]))
    lengths = made.mean.norm(dim=-1)  # which reflections alone would leave
    assert (lengths[0] - lengths[1]).abs() > 0.1


def passes(flow: fb.flows.FlowModel, direction: str) -> int:
    """How often the first network is called."""
    calls: list[int] = []
    net = next(module for module in flow.modules() if isinstance(module, nn.Sequential))
    net.register_forward_hook(lambda *_: calls.append(1))
    getattr(flow.transform, direction)(torch.zeros(2, 4).double())
    return len(calls)


@pytest.mark.parametrize("name", [name for name in WITH_NETS if name not in SOLVED])
@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_the_cheap_direction_costs_one_pass_and_the_other_one_for_each_entry(
    name: str, direction: str
) -> None:
    flow = small(name, 4)
    cheap = flow.transform.cheap in ("both", direction)
    assert passes(flow, direction) == (1 if cheap else 4)


def test_what_is_cheap_is_that_of_the_weakest_part_and_turns_around() -> None:
    maf, iaf = Autoregressive(3), Autoregressive(3, cheap="forward")
    assert [maf.cheap, iaf.cheap, Autoregressive(1).cheap] == ["inverse", "forward", "both"]
    assert [Inverse(maf).cheap, Inverse(iaf).cheap] == ["forward", "inverse"]
    assert [Compose(maf, maf).cheap, Compose(maf, iaf).cheap, Compose().cheap] == ["inverse", "none", "both"]
    assert Compose(Compose(maf, iaf), maf).cheap == "none"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fb.flows.MAF(2)(torch.ones(3)), "context_dim=0, and is given a context of shape"),
        (lambda: fb.flows.MAF(2, 3)(), "context_dim=3, and is given no context"),
        (
            lambda: fb.fit_density(Sigmoid(), torch.rand(9, 2)),
            r"Sigmoid is a transform.*FlowModel\(base, transform\)",
        ),
        (lambda: fb.fit_target(Sigmoid(), torch.sum), "Sigmoid is a transform, which has no base"),
        (
            lambda: Compose(Sigmoid(), fb.flows.NSF(2, 3).transform)(torch.zeros(5, 2)),
            "^part 1.0.1 of the flow: Coupling was made with context_dim=3, and is given no context",
        ),
        (
            lambda: fb.flows.Planar(2, 3).transform(torch.zeros(5, 2)),
            "^part 0 of the flow: Amortized was made with",
        ),
        (lambda: fb.flows.MAF(2, 3)(torch.arange(4)), r"shape \(4,\); give .*one_hot\(labels, 3\)"),
        (lambda: fb.flows.MAF(2, 1)(torch.ones(4)), r"shape \(4,\); give x\[:, None\]"),
        (lambda: fb.flows.NSF(2, base=StudentBase(3)), "needs a base of 2 real numbers, not of 3"),
        (lambda: fb.flows.NSF(2, circular=True, base=StudentBase(2)), "angles up to 3.14159, not of 2 real"),
        (
            lambda: fb.flows.NSF(2, circular=True, bound=180.0, base=CircularBase(2)),
            "up to 180, not of 2 angles",
        ),
        (lambda: fb.flows.RealNVP(2, base=CircularBase(2)), "2 real numbers, not of 2 angles"),
        (
            lambda: Amortized(Compose(Radial(4), Reshape((4,), (2, 2))), 1),
            "Amortized takes a transform of all real vectors .*, not Compose",
        ),
        (
            lambda: fb.flows.NICE(3, 2).transform(torch.ones(4, 3), torch.ones(5, 2)),
            r"part 0 .* Coupling, \(4,\)",
        ),
        (
            lambda: fb.flows.NICE(3, 2).transform(torch.ones(4, 3), torch.tensor(1.0)),
            "^part 0 of the flow: Coupling takes a context of vectors, not the number 1",
        ),
        (lambda: Amortized(Radial(2), 1)(torch.ones(4, 2), torch.ones(3, 1)), r"values of Amortized, \(4,\)"),
        (
            lambda: Amortized(Radial(2), 1)(torch.ones(()), torch.ones(3, 1)),
            "Amortized takes vectors, not a number",
        ),
        (lambda: NeuralODE(2, context_dim=1)(torch.ones(4, 2), torch.ones(3, 1)), r"of NeuralODE, \(4,\)"),
        (
            lambda: Residual(2, context_dim=1)(torch.ones(4, 2), torch.ones(3, 1)),
            r"values of Residual, \(4,\)",
        ),
        (lambda: Residual(2, context_dim=1).inverse(torch.ones(4, 2), torch.ones(3, 1)), "do not fit each"),
        (lambda: Coupling(2, AffineMap(), net=nn.Linear(1, 2)), "net of Coupling .* Linear takes no second"),
        (lambda: Autoregressive(2, net=nn.Linear(2, 4)), "net of Autoregressive is called as net.value, con"),
        (lambda: Residual(2, net=nn.Sequential(nn.Linear(2, 2))), "net of Residual .* Sequential takes no"),
        (lambda: NeuralODE(2, net=nn.Linear(2, 2)), "net of NeuralODE .* such as flowbnn.nets.MLP do"),
        (lambda: fb.flows.NSF(2, bins=1), "at least 2"),
        (lambda: fb.flows.NSF(2)().log_prob(torch.ones(3)), "vectors of length 2"),
        (
            lambda: fb.flows.NSF(2, 3)(torch.ones(5, 3)).log_prob(torch.ones(4, 2)),
            r"\(4,\), .* \(5,\), do not fit",
        ),
    ],
)
def test_bad_input_is_one_line(call, words: str) -> None:
    with pytest.raises(FlowBNNError, match=words):
        call()


@pytest.mark.parametrize("name", [*NAMES, "IDF"])
def test_a_name_is_at_most_twenty_lines_over_the_general_mechanism(name: str) -> None:
    text, _, code = getsource(getattr(fb.flows, name)).partition('    """')[2].partition('"""\n')
    assert text
    assert len(code.strip().splitlines()) + 2 <= 20  # and the two lines of its head


def test_a_traced_net_is_taken() -> None:
    class Net(nn.Module):
        def forward(self, value, context):
            return torch.cat([value, context], -1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        net = torch.jit.trace(Net(), (torch.ones(3, 1), torch.ones(3, 1)))
    x, log_det = Coupling(2, AffineMap(), net=net)(torch.zeros(4, 2), torch.ones(4, 1))
    assert x.tolist() == [[0.0, 1.0]] * 4
    assert log_det.tolist() == [0.0] * 4


def test_sequences_have_a_base_of_as_many_numbers() -> None:
    wave = Autoregressive(1, net=fb.nets.WaveNet(1, 2))
    with pytest.raises(FlowBNNError, match="begin the flow with Reshape"):
        fb.flows.FlowModel(NormalBase(1), wave)()
    flow = fb.flows.FlowModel(NormalBase(7), Compose(Reshape((7,), (7, 1)), wave))
    assert flow().log_prob(flow().sample((3,))).shape == (3,)


# the solver of FFJORD says that it fails
@pytest.mark.parametrize("name", [name for name in NAMES if name != "FFJORD"])
def test_the_density_far_out_is_zero_where_the_way_there_overflows(name: str) -> None:
    signs = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
    flow = small(name, 3).float()
    for size in (1e25, 1e38, 3e38):
        assert flow().log_prob(size * signs).tolist() == [-torch.inf, -torch.inf]
    assert flow().log_prob(torch.tensor([torch.nan, 3e38, 1.0])).isnan()
    with torch.no_grad():
        next(flow.parameters()).fill_(torch.nan)  # which is no overflow
    assert flow().log_prob(signs).isnan().all()
