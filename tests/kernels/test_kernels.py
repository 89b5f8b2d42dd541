"""Chains of many layers at once: values, log-dets and gradients of the reference in float64.

Run as a program this file prints the largest errors as JSON; a test has it do so with Triton's interpreter, which needs no GPU.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from flowbnn import kernels
from flowbnn.convert import to_stochastic
from flowbnn.kernels import Group, cpu, gpu, launch, reference
from flowbnn.noise import NormalInvConv
from flowbnn.noise.batched import divergences
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.transforms import PlanarLU

PLANAR, REPORT = [("planar", 2)], [("planar", 2), ("lu", 3), ("planar", 2)]
MIXED, LINEAR, THREE = [("lu", 2), ("planar", 1), ("lu", 1)], [("lu", 1)], [("planar", 3)]
LENET = [(6, REPORT), (256, PLANAR)]
VGG = [(128, REPORT), (256, REPORT), (512, REPORT), (512, PLANAR)]
CASES = {
    "short": [(6, REPORT), (20, MIXED), (1, REPORT), (6, THREE)],
    "planar": [(40, PLANAR), (130, THREE)],
    "long": [(40, REPORT), (130, MIXED), (40, LINEAR), (130, PLANAR)],
    "both": [(20, REPORT), (40, REPORT), (1, LINEAR), (6, PLANAR)],
}
MANY = [
    (70, [("planar", 3), ("lu", 1)]),
    (6, PLANAR),
    (40, MIXED),
]  # sides of one block and of two, and a short one
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device and Triton"
)


def flows_of(case, device="cpu", spread=0.3):
    """Perturbed chains, some far from the identity."""
    flows = []
    for number, (dim, runs) in enumerate(case):
        torch.manual_seed(number)
        flow = PlanarLU(dim, runs)
        for name, parameter in flow.named_parameters():
            parameter.data += spread * torch.randn_like(parameter) / (dim**0.5 if name in "wu" else 1.0)
        flows.append(flow.to(device))
    return flows


def derived(push, flows, wide, case, log_det, contiguous=False):
    """Values, log-dets, and gradients to the starts and to all parameters, of one weighted sum of them."""
    torch.manual_seed(9)
    of_x = [torch.randn(len(wide), dim).to(wide) for dim, _ in case]
    of_log_det = [torch.randn(len(wide)).to(wide) for _ in case]
    starts = wide[:, 3:].contiguous() if contiguous else wide[:, 3:]
    x, log_dets = push(flows, starts, log_det)
    total = sum((value * weight).sum() for value, weight in zip(x, of_x, strict=True))
    if log_det:
        total = total + sum((value * w).sum() for value, w in zip(log_dets, of_log_det, strict=True))
    gradients = torch.autograd.grad(total, [wide, *weights_of(flows)])
    return [value.detach() for value in (*x, *(log_dets or []), *gradients)]


def weights_of(flows):
    return [weight for flow in flows for weight in flow.chain.weights]


def one_by_one(flows, starts, log_det):
    columns = starts.split([flow.dim for flow in flows], -1)
    ends = [reference.forward(*flow.chain, z, log_det) for flow, z in zip(flows, columns, strict=True)]
    return [x for x, _ in ends], [log for _, log in ends] if log_det else None


def together(flows, starts, log_det, allow_tf32=False):
    x, log_dets = kernels.evaluate_many([Group([flow.chain for flow in flows], starts, log_det, allow_tf32)])[
        0
    ]
    return list(x.split([flow.dim for flow in flows], -1)), list(log_dets.unbind()) if log_det else None


def alone(flows, starts, log_det):
    columns = starts.split([flow.dim for flow in flows], -1)
    ends = [kernels.evaluate(flow.chain, z, log_det) for flow, z in zip(flows, columns, strict=True)]
    return [x for x, _ in ends], [log for _, log in ends] if log_det else None


def truth(flows, wide, case, log_det):
    double = flows_of(case, wide.device)
    for flow, other in zip(double, flows, strict=True):
        flow.double().load_state_dict(other.state_dict())
    return derived(one_by_one, double, wide.detach().double().requires_grad_(), case, log_det)


def error(found, expected):
    """Of float32: relative to the largest entry, or to one."""
    errors = [
        (a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)
        for a, b in zip(found, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def wide_of(case, rows, device="cpu"):
    torch.manual_seed(3)
    return torch.randn(rows, 3 + sum(dim for dim, _ in case)).to(device).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("log_det", [True, False])
def test_where_there_are_no_kernels_the_chains_are_evaluated_one_by_one(dtype, log_det):
    case = [(5, REPORT), (3, PLANAR), (4, MIXED)]
    flows, wide = [flow.to(dtype) for flow in flows_of(case)], wide_of(case, 4).to(dtype).detach()
    wide.requires_grad_()
    expected = derived(one_by_one, flows, wide, case, log_det)
    for push in (together, alone):
        torch.testing.assert_close(derived(push, flows, wide, case, log_det), expected)


def test_a_chain_without_maps_is_the_identity():
    z = torch.ones(3, 2)
    x, log_det = kernels.evaluate(PlanarLU(2, []).chain, z)
    assert torch.equal(x, z)
    assert torch.equal(log_det, torch.zeros(3))


def test_plans_survive_being_written_as_numbers():
    plans = tuple(PlanarLU(3, runs, margin=0.01, bound=3.0).plan for runs in (REPORT, MIXED, PLANAR))
    assert gpu.read(*map(tuple, gpu.write(plans))) == plans


def test_all_flows_take_a_stage_together():
    launches = launch.schedule(tuple(PlanarLU(3, runs).plan for runs in (REPORT, REPORT, PLANAR)))
    kinds = [(kind, len(pairs)) for kind, pairs in launches]
    assert kinds == [("planar", 3), *[("upper", 2), ("lower", 2)] * 3, ("planar", 2)]


@pytest.mark.parametrize("rows", [1, 512, 513, 2048, 18432, 18433, 32768, 100_000])
def test_parts_of_rows_are_few_and_none_is_empty(rows):
    parts, each = launch.row_parts(rows)
    assert (parts - 1) * each < rows <= parts * each
    assert parts <= launch.PARTS
    assert (parts == 1) == (rows <= launch.FEW)


def test_noise_that_will_be_rounded_may_be_coarse_and_its_divergence_never_is(monkeypatch):
    asked = []

    def watched(chain, z, log_det=True, allow_tf32=False):
        asked.append(allow_tf32)
        return z, z.new_zeros(len(z)) if log_det else None

    monkeypatch.setattr(kernels, "evaluate", watched)
    layer = to_stochastic(torch.nn.Conv2d(3, 4, 3), {"*": NormalInvConv(site="position")})
    images = torch.randn(2, 3, 5, 5)
    layer(images)
    assert asked == [False]
    with torch.autocast("cpu", torch.bfloat16):
        layer(images)
        assert asked == [False, True]
        noise = next(part for part in layer.modules() if isinstance(part, InputNoise))
        divergences({"layer": noise})
        noise.push(torch.zeros(2, 3))
    assert len(asked) > 2
    assert not any(asked[2:])


def plain_forward(part, keep, x, totals, kept):
    """What the launches compute, by numpy."""
    for i, end in enumerate(x.split(part.dims, -1)):
        weights = part.weights[i].values()
        value, log_det = cpu.ChainFunction.apply(part.plans[i], part.log_det, part.columns[i], *weights)
        end.copy_(value)
        if part.log_det:
            totals[i] = log_det


def plain_backward(part, kept, of_x, of_totals, of_starts, of_weights):
    found = []
    for i, of_end in enumerate(of_x.split(part.dims, -1)):
        inputs = [one.detach().requires_grad_() for one in (part.columns[i], *part.weights[i].values())]
        with torch.enable_grad():
            ends = cpu.ChainFunction.apply(part.plans[i], of_totals is not None, *inputs)
        given = [of_end] if of_totals is None else [of_end, of_totals[i]]
        of_z, *rest = torch.autograd.grad(ends[: len(given)], inputs, given)
        of_starts.split(part.dims, -1)[i].copy_(of_z)
        found += rest
    of_weights.copy_(torch.cat([found[place].flatten() for place in launch.flat_order(part.plans)]))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The operator as on a GPU, with numpy in the place of the launches."""
    monkeypatch.setattr(kernels, "available", lambda z: True)
    monkeypatch.setattr(launch, "forward", plain_forward)
    monkeypatch.setattr(launch, "backward", plain_backward)


@pytest.mark.parametrize("log_det", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_operator_puts_everything_in_its_place(case, log_det, as_on_a_gpu):
    flows, wide = [flow.double() for flow in flows_of(case)], wide_of(case, 5).detach().double()
    expected = derived(one_by_one, flows, wide.requires_grad_(), case, log_det)
    ways = [together, alone]
    if case is CASES["both"]:  # short chains and long ones, which is all that is traced
        compiled = torch.compile(
            lambda wide: together(flows, wide[:, 3:], log_det),
            fullgraph=True,
            backend="aot_eager" if log_det else "eager",
        )
        ways.append(lambda *_: compiled(wide))
    for push in ways:
        torch.testing.assert_close(derived(push, flows, wide, case, log_det), expected)


def test_second_derivatives_of_the_operator_are_those_of_the_reference(as_on_a_gpu):
    case, second = CASES["both"], []
    flows, wide = [flow.double() for flow in flows_of(case)], wide_of(case, 3).detach().double()
    wide.requires_grad_()
    for push in (together, one_by_one):
        x, log_dets = push(flows, wide[:, 3:], True)
        total = sum(value.square().sum() for value in (*x, *log_dets))
        (gradient,) = torch.autograd.grad(total, wide, create_graph=True)
        second.append(torch.autograd.grad(gradient.square().sum(), [wide, *weights_of(flows)]))
    torch.testing.assert_close(second[0], second[1])


@needs_triton
def test_the_kernels_agree_with_the_chains_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "unable" in found:
        pytest.skip(f"Triton's interpreter does not run here: {found['unable']}")
    assert len(found["errors"]) == 3 * len(CASES) + 2
    assert found["parts"] == 3
    assert max(found["errors"].values()) < 1e-5, found["errors"]
    assert found["tanh"] < 2.5
    assert found["edges"] < 1e-5
    assert found["compiled"] == found["again"] == found["many again"] == 0.0
    assert found["groups"] == [True, True]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 19, 128])
@pytest.mark.parametrize("case", [*CASES.values(), LENET, VGG], ids=[*CASES, "lenet", "vgg"])
def test_on_a_gpu_values_and_gradients_are_right_and_the_same_again(case, rows):
    flows, wide = flows_of(case, "cuda"), wide_of(case, rows, "cuda")
    assert kernels.available(wide)
    for log_det in (True, False):
        first, second, third = (
            derived(push, flows, wide, case, log_det) for push in (together, together, alone)
        )
        assert error(first, truth(flows, wide, case, log_det)) < 1e-5
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert error(third, [value.double() for value in first]) < 1e-5


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "rows"),
    [(CASES["both"], 513), (MANY, 1000), (VGG, 600), ([(6, REPORT)], 18432), ([(128, REPORT)], 32768)],
    ids=["both", "many", "vgg", "lenet position", "vgg position"],
)
def test_on_a_gpu_many_rows_are_added_up_in_parts(case, rows):
    flows, wide = flows_of(case, "cuda"), wide_of(case, rows, "cuda")
    first, second = (derived(together, flows, wide, case, True) for _ in range(2))
    assert error(first, truth(flows, wide, case, True)) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "rows"), [(128, 32768), (256, 2048), (512, 512), (40, 600)])
def test_on_a_gpu_coarse_products_are_good_to_a_thousandth_and_few_rows_stay_exact(dim, rows):
    case = [(dim, REPORT)]
    flows, wide = flows_of(case, "cuda"), wide_of(case, rows, "cuda")

    def allow_tf32(flows, starts, log_det):
        return together(flows, starts, log_det, allow_tf32=True)

    first, again = (derived(allow_tf32, flows, wide, case, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert 1e-5 < error(first, truth(flows, wide, case, True)) < 5e-3
    few = wide_of(case, 100, "cuda")
    exact, same = (derived(push, flows, few, case, True) for push in (together, allow_tf32))
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES["both"], LENET], ids=["both", "lenet"])
def test_on_a_gpu_it_compiles_without_a_break_and_is_captured_in_a_graph(case):
    flows, wide = flows_of(case, "cuda"), wide_of(case, 19, "cuda")
    expected = derived(together, flows, wide, case, True)

    def push(wide):
        return together(flows, wide[:, 3:], True)

    compiled = torch.compile(push, fullgraph=True)
    found = derived(lambda flows, starts, log_det: compiled(wide), flows, wide, case, True)
    assert error(found, [value.double() for value in expected]) < 1e-6

    graph, weights = torch.cuda.CUDAGraph(), weights_of(flows)
    given, stream = wide.detach().clone().requires_grad_(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        derived(together, flows, given, case, True)  # what is launched first is compiled and loaded first
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        x, log_dets = push(given)
        total = sum(value.square().sum() for value in x) + sum(value.sum() for value in log_dets)
        gradients = torch.autograd.grad(total, [given, *weights])
    with torch.no_grad():
        given.mul_(0.5)
    graph.replay()
    x, log_dets = push(given)
    total = sum(value.square().sum() for value in x) + sum(value.sum() for value in log_dets)
    expected = torch.autograd.grad(total, [given, *weights])
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def many_rows(errors):
    """The way of many rows, taken by few: three parts, the last one short."""
    before = launch.FEW, launch.PART
    launch.FEW, launch.PART = 16, 32
    flows = flows_of(MANY)
    try:
        wide = wide_of(MANY, 141)
        first, again = (derived(push, flows, wide, MANY, True) for push in (together, together))
        errors["many"] = error(first, truth(flows, wide, MANY, True))
        return {"many again": error(again, first), "parts": launch.row_parts(141)[0]}
    finally:
        launch.FEW, launch.PART = before


def side_by_side():
    """Whether groups of flows give what they give alone, compiled too."""
    from test_groups import SMALL, groups_of, one_by_one, same
    from test_groups import derived as derived_in_groups

    groups = groups_of(SMALL)
    expected = derived_in_groups(one_by_one, groups)
    compiled = torch.compile(kernels.evaluate_many, fullgraph=True, backend="aot_eager")
    return [same(derived_in_groups(push, groups), expected) for push in (kernels.evaluate_many, compiled)]


def report(bend):
    """The errors of the kernels in the interpreter."""
    near = torch.logspace(-8, 1.3, 2048)
    given = torch.cat([near, -near])
    found = torch.empty_like(given)
    try:
        bend[(1,)](given, found, torch.tensor([2]), LENGTH=2048)
    except Exception as problem:
        return {"unable": str(problem)[:200]}
    true = given.double().tanh()
    unit = torch.nextafter(true.abs().float(), torch.tensor(2.0)).double() - true.abs().float().double()
    result = {"tanh": float(((found.double() - true).abs() / unit).max()), "errors": {}}
    for name, case in CASES.items():
        flows = flows_of(case)
        for rows, log_det in ((1, True), (16, False), (19, True), (128, True))[: 4 if name == "short" else 3]:
            wide = wide_of(case, rows)
            found = derived(together, flows, wide, case, log_det, contiguous=rows == 16)
            result["errors"][f"{name} {rows}"] = error(found, truth(flows, wide, case, log_det))

    case = CASES["both"]
    flows, wide = flows_of(case), wide_of(case, 3)
    first, again = (derived(push, flows, wide, case, True) for push in (together, together))
    compiled = torch.compile(
        lambda wide: together(flows, wide[:, 3:], True),
        fullgraph=True,
        backend="aot_eager",
    )
    third = derived(lambda *_: compiled(wide), flows, wide, case, True)
    result["again"], result["compiled"] = (error(other, first) for other in (again, third))

    result.update(many_rows(result["errors"]))
    result["groups"] = side_by_side()

    with torch.no_grad():  # the squeeze at its margin, and a short w
        for flow in flows:
            if flow.plan.planar:
                for k, length in ((0, 3.0), (1, 1e-2)):
                    flow.w[k] *= length
                    flow.u[k] = -20.0 * flow.w[k] / flow.w[k].square().sum() * (1.0 if k == 0 else 1e-3)
    result["edges"] = error(derived(together, flows, wide, case, True), truth(flows, wide, case, True))
    return result


if __name__ == "__main__":
    from flowbnn.kernels.triton_kernels import tanh, tl, triton

    @triton.jit
    def bend(given, found, counts, LENGTH: tl.constexpr):
        places = tl.arange(0, LENGTH)
        for i in range(tl.load(counts)):
            at = i * LENGTH + places
            tl.store(found + at, tanh(tl.load(given + at)))

    torch.set_num_threads(1)
    print(json.dumps(report(bend)))
