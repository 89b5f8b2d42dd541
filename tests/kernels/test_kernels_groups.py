"""Groups of chains give the same results together as one by one."""

import pytest
import torch
from test_kernels import PLANAR, REPORT, make_flows, needs_gpu

from flowbnn.kernels import Group, evaluate, evaluate_many, flow_chains, gpu, reference

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


def make_groups(cases, device="cpu", allow_tf32=False, dtype=torch.float32):
    torch.manual_seed(2)
    return [
        Group(
            [flow.to(dtype).chain for flow in make_flows(case, device)],
            torch.randn(rows, sum(dim for dim, _ in case)).to(device, dtype).requires_grad_(),
            log_det,
            allow_tf32 and not log_det,
        )
        for case, rows, log_det in cases
    ]


def results_and_gradients(push, groups):
    """Returns values, log-determinants and all gradients of a weighted sum."""
    results = push(groups)
    torch.manual_seed(5)
    total = 0.0
    for x, log_dets in results:
        total = total + (x * torch.randn(x.shape).to(x)).sum()
        if log_dets is not None:
            total = total + (log_dets * torch.randn(log_dets.shape).to(x)).sum()
    inputs = [group.vectors for group in groups]
    inputs += [weight for group in groups for chain in group.chains for weight in chain.weights]
    values = [value.detach() for pair in results for value in pair if value is not None]
    return [*values, *torch.autograd.grad(total, inputs)]


def evaluate_one_by_one(groups):
    return [pair for group in groups for pair in evaluate_many([group])]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("allow_tf32", [False, True])
def test_groups_are_evaluated_one_by_one_without_kernels(allow_tf32):
    groups = make_groups(SMALL, allow_tf32=allow_tf32, dtype=torch.float64)
    actual = results_and_gradients(evaluate_many, groups)
    for group, (x, log_dets) in zip(groups, evaluate_many(groups), strict=True):
        vectors = group.vectors.split([chain.shape.dim for chain in group.chains], -1)
        expected = [evaluate(chain, start) for chain, start in zip(group.chains, vectors, strict=True)]
        torch.testing.assert_close(x, torch.cat([end for end, _ in expected], -1))
        if group.log_det:
            torch.testing.assert_close(log_dets, torch.stack([log_det_row for _, log_det_row in expected]))
        else:
            assert log_dets is None
    assert len(actual) == 4 + 3 + sum(len(chain.weights) for group in groups for chain in group.chains)


def test_group_without_kernels_does_not_affect_the_others(monkeypatch):
    launched = []
    monkeypatch.setattr(flow_chains, "available", lambda vectors: True)
    monkeypatch.setattr(flow_chains, "gpu", gpu, raising=False)  # imported only if Triton is installed
    monkeypatch.setattr(flow_chains, "_fits_kernels", lambda chain, vectors: chain.shape.dim < 40)
    monkeypatch.setattr(
        gpu,
        "evaluate_groups",
        lambda groups: launched.extend(g[2:] for g in groups) or [(g.vectors, None) for g in groups],
    )
    groups = make_groups([SMALL[1], SMALL[2]], allow_tf32=True)
    (without_kernels, _), (_, _) = evaluate_many(groups)
    assert launched == [(False, True)]
    torch.testing.assert_close(
        without_kernels, reference.forward(*groups[0].chains[0], groups[0].vectors, False)[0]
    )


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("cases", [SMALL, [KL, *POSITION]], ids=["small", "vgg"])
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_gpu_groups_are_bitwise_equal_to_single_groups(cases, allow_tf32):
    groups = make_groups(cases, "cuda", allow_tf32)
    expected = results_and_gradients(evaluate_one_by_one, groups)
    for _ in range(5):
        assert equal(results_and_gradients(evaluate_many, groups), expected)


@needs_gpu
@pytest.mark.gpu
def test_gpu_groups_compile_without_a_graph_break():
    groups = make_groups([KL, *POSITION], "cuda")
    expected = results_and_gradients(evaluate_one_by_one, groups)
    compiled = torch.compile(evaluate_many, fullgraph=True)
    assert equal(results_and_gradients(compiled, groups), expected)


@needs_gpu
@pytest.mark.gpu
def test_gpu_groups_can_be_captured_in_a_graph():
    """Parameters, warm-up, capture and comparison use one side stream, as torch recommends."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        groups = make_groups([KL, *POSITION], "cuda")
        weights = [weight for group in groups for chain in group.chains for weight in chain.weights]

        def gradients():
            results = evaluate_many(groups)
            total = sum(x.square().sum() for x, _ in results) + results[0][1].sum()
            return torch.autograd.grad(total, [group.vectors for group in groups] + weights)

        gradients()  # warm-up: kernels are compiled and loaded here
        with torch.cuda.graph(graph, stream=stream):
            captured = gradients()
        with torch.no_grad():
            for group in groups:
                group.vectors.mul_(0.5)
        for _ in range(3):
            graph.replay()
        expected = gradients()
    torch.cuda.synchronize()
    assert equal(captured, expected)
