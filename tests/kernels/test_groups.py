"""Groups of flows side by side give what they give one after the other."""

import pytest
import torch
from test_kernels import PLANAR, REPORT, flows_of, needs_gpu

from flowbnn import kernels
from flowbnn.kernels import Group, evaluate, evaluate_many, gpu, reference

POSITION = [
    ([(128, REPORT)], 32768, False),
    ([(256, REPORT)], 2048, False),
    ([(512, REPORT)], 512, False),
]
KL = ([(128, REPORT), (256, REPORT), (512, REPORT), (512, PLANAR)], 16, True)
SMALL = [
    ([(40, REPORT), (6, PLANAR)], 19, True),
    ([(40, REPORT)], 70, False),
    ([(6, REPORT)], 33, False),
]


def groups_of(cases, device="cpu", allow_tf32=False, dtype=torch.float32):
    torch.manual_seed(2)
    return [
        Group(
            [flow.to(dtype).chain for flow in flows_of(case, device)],
            torch.randn(rows, sum(dim for dim, _ in case)).to(device, dtype).requires_grad_(),
            log_det,
            allow_tf32 and not log_det,
        )
        for case, rows, log_det in cases
    ]


def derived(push, groups):
    """Values, log-dets and all gradients of a weighted sum."""
    found = push(groups)
    torch.manual_seed(5)
    total = 0.0
    for x, lines in found:
        total = total + (x * torch.randn(x.shape).to(x)).sum()
        if lines is not None:
            total = total + (lines * torch.randn(lines.shape).to(x)).sum()
    inputs = [group.starts for group in groups]
    inputs += [weight for group in groups for chain in group.chains for weight in chain.weights]
    values = [value.detach() for pair in found for value in pair if value is not None]
    return [*values, *torch.autograd.grad(total, inputs)]


def one_by_one(groups):
    return [pair for group in groups for pair in evaluate_many([group])]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("allow_tf32", [False, True])
def test_without_kernels_the_groups_go_one_after_the_other(allow_tf32):
    groups = groups_of(SMALL, allow_tf32=allow_tf32, dtype=torch.float64)
    found = derived(evaluate_many, groups)
    for group, (x, lines) in zip(groups, evaluate_many(groups), strict=True):
        starts = group.starts.split([chain.plan.dim for chain in group.chains], -1)
        expected = [evaluate(chain, start) for chain, start in zip(group.chains, starts, strict=True)]
        torch.testing.assert_close(x, torch.cat([end for end, _ in expected], -1))
        if group.log_det:
            torch.testing.assert_close(lines, torch.stack([line for _, line in expected]))
        else:
            assert lines is None
    assert len(found) == 4 + 3 + sum(len(chain.weights) for group in groups for chain in group.chains)


def test_a_flow_without_kernels_leaves_the_other_groups_theirs(monkeypatch):
    launched = []
    monkeypatch.setattr(kernels, "_on_gpu", lambda chain, start, first: chain.plan.dim < 40)
    monkeypatch.setattr(
        gpu,
        "push",
        lambda groups: launched.extend(g[2:] for g in groups) or [(g.starts, None) for g in groups],
    )
    groups = groups_of([SMALL[1], SMALL[2]], allow_tf32=True)
    (alone, _), (_, _) = evaluate_many(groups)
    assert launched == [(False, True)]
    torch.testing.assert_close(alone, reference.forward(*groups[0].chains[0], groups[0].starts, False)[0])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("cases", [SMALL, [KL, *POSITION]], ids=["small", "vgg"])
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_on_a_gpu_side_by_side_is_the_same_to_the_last_bit(cases, allow_tf32):
    groups = groups_of(cases, "cuda", allow_tf32)
    expected = derived(one_by_one, groups)
    for _ in range(5):
        assert same(derived(evaluate_many, groups), expected)


@needs_gpu
@pytest.mark.gpu
def test_on_a_gpu_side_by_side_compiles_and_is_captured_in_a_graph():
    groups = groups_of([KL, *POSITION], "cuda")
    expected = derived(one_by_one, groups)
    compiled = torch.compile(evaluate_many, fullgraph=True)
    assert same(derived(compiled, groups), expected)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    weights = [weight for group in groups for chain in group.chains for weight in chain.weights]

    def gradients():
        found = evaluate_many(groups)
        total = sum(x.square().sum() for x, _ in found) + found[0][1].sum()
        return torch.autograd.grad(total, [group.starts for group in groups] + weights)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = gradients()
    with torch.no_grad():
        for group in groups:
            group.starts.mul_(0.5)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert same(captured, gradients())
