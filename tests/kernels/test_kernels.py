"""Kernels for chains of many layers against the reference in float64: values, log-determinants and gradients.

As a program this file prints the largest errors as JSON. A test runs it with Triton's interpreter, which needs no GPU.
"""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from flowbnn import kernels
from flowbnn.convert import to_stochastic
from flowbnn.kernels import Group, flow_chains, gpu, launch, reference, tasks
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
]  # matrices of one and of two blocks, and a short chain
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device and Triton"
)


def make_flows(case, device="cpu", spread=0.3):
    """Returns perturbed chains, some far from the identity."""
    flows = []
    for number, (dim, runs) in enumerate(case):
        torch.manual_seed(number)
        flow = PlanarLU(dim, runs)
        for name, parameter in flow.named_parameters():
            parameter.data += spread * torch.randn_like(parameter) / (dim**0.5 if name in "wu" else 1.0)
        flows.append(flow.to(device))
    return flows


def results_and_gradients(push, flows, inputs, case, log_det, contiguous=False):
    """Returns values, log-determinants, and the gradients of a weighted sum of them to the inputs and all parameters."""
    torch.manual_seed(9)
    x_weights = [torch.randn(len(inputs), dim).to(inputs) for dim, _ in case]
    log_det_weights = [torch.randn(len(inputs)).to(inputs) for _ in case]
    vectors = inputs[:, 3:].contiguous() if contiguous else inputs[:, 3:]
    x, log_dets = push(flows, vectors, log_det)
    total = sum((value * weight).sum() for value, weight in zip(x, x_weights, strict=True))
    if log_det:
        total = total + sum((value * w).sum() for value, w in zip(log_dets, log_det_weights, strict=True))
    gradients = torch.autograd.grad(total, [inputs, *all_weights(flows)])
    return [value.detach() for value in (*x, *(log_dets or []), *gradients)]


def all_weights(flows):
    return [weight for flow in flows for weight in flow.chain.weights]


def evaluate_one_by_one(flows, vectors, log_det):
    columns = vectors.split([flow.dim for flow in flows], -1)
    outputs = [reference.forward(*flow.chain, z, log_det) for flow, z in zip(flows, columns, strict=True)]
    return [x for x, _ in outputs], [log for _, log in outputs] if log_det else None


def evaluate_together(flows, vectors, log_det, allow_tf32=False):
    x, log_dets = kernels.evaluate_many(
        [Group([flow.chain for flow in flows], vectors, log_det, allow_tf32)]
    )[0]
    return list(x.split([flow.dim for flow in flows], -1)), list(log_dets.unbind()) if log_det else None


def evaluate_each(flows, vectors, log_det):
    columns = vectors.split([flow.dim for flow in flows], -1)
    outputs = [kernels.evaluate(flow.chain, z, log_det) for flow, z in zip(flows, columns, strict=True)]
    return [x for x, _ in outputs], [log for _, log in outputs] if log_det else None


def float64_results(flows, inputs, case, log_det):
    double = make_flows(case, inputs.device)
    for flow, other in zip(double, flows, strict=True):
        flow.double().load_state_dict(other.state_dict())
    return results_and_gradients(
        evaluate_one_by_one, double, inputs.detach().double().requires_grad_(), case, log_det
    )


def error(actual, expected):
    """Returns the largest error relative to the largest entry, or to one if that is larger."""
    errors = [
        (a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)
        for a, b in zip(actual, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def make_inputs(case, rows, device="cpu"):
    torch.manual_seed(3)
    return torch.randn(rows, 3 + sum(dim for dim, _ in case)).to(device).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("log_det", [True, False])
def test_chains_are_evaluated_one_by_one_without_kernels(dtype, log_det):
    case = [(5, REPORT), (3, PLANAR), (4, MIXED)]
    flows, inputs = [flow.to(dtype) for flow in make_flows(case)], make_inputs(case, 4).to(dtype).detach()
    inputs.requires_grad_()
    expected = results_and_gradients(evaluate_one_by_one, flows, inputs, case, log_det)
    for push in (evaluate_together, evaluate_each):
        torch.testing.assert_close(results_and_gradients(push, flows, inputs, case, log_det), expected)


def test_chain_without_maps_is_the_identity():
    z = torch.ones(3, 2)
    x, log_det = kernels.evaluate(PlanarLU(2, []).chain, z)
    assert torch.equal(x, z)
    assert torch.equal(log_det, torch.zeros(3))


@pytest.mark.parametrize("dim", [8, 96])
def test_torch_computes_large_products(dim, monkeypatch):
    torch.manual_seed(0)
    sizes = []
    original = torch.from_numpy

    def from_numpy(array):
        sizes.append(array.shape)
        return original(array)

    a, b = np.random.default_rng(0).normal(size=(2, dim, dim))
    expected = a @ b
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    assert np.allclose(flow_chains._product(a, b.T.copy().T), expected)
    assert len(sizes) == (2 if dim == 96 else 0)


def test_chains_of_large_products_equal_the_formulas():
    torch.manual_seed(0)
    maps = PlanarLU(96, [("planar", 2), ("lu", 2)]).double()
    with torch.no_grad():
        for parameter in maps.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    z = torch.randn(64, 96, dtype=torch.float64, requires_grad=True)
    shape, weights = maps.chain
    found = flow_chains.evaluate(maps.chain, z)
    expected = flow_chains.reference.forward(shape, weights, z, True)
    torch.testing.assert_close(found, expected)
    parameters = [z, *maps.parameters()]
    gradients = [
        torch.autograd.grad(x.square().sum() + log_det.sum(), parameters, retain_graph=True)
        for x, log_det in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_shapes_are_encoded_and_decoded():
    shapes = tuple(PlanarLU(3, runs, margin=0.01, bound=3.0).chain_shape for runs in (REPORT, MIXED, PLANAR))
    assert gpu.decode_shapes(*map(tuple, gpu.encode_shapes(shapes))) == shapes


def test_all_flows_share_the_launch_of_a_stage():
    launches = tasks.schedule(tuple(PlanarLU(3, runs).chain_shape for runs in (REPORT, REPORT, PLANAR)))
    kinds = [(kind, len(pairs)) for kind, pairs in launches]
    assert kinds == [("planar", 3), *[("upper", 2), ("lower", 2)] * 3, ("planar", 2)]


@pytest.mark.parametrize("rows", [1, 512, 513, 2048, 18432, 18433, 32768, 100_000])
def test_blocks_of_rows_are_few_and_not_empty(rows):
    blocks, size = launch.row_blocks(rows)
    assert (blocks - 1) * size < rows <= blocks * size
    assert blocks <= 64
    assert (blocks == 1) == (rows <= 512)


def test_tf32_is_allowed_for_half_precision_noise_and_never_for_its_divergence(monkeypatch):
    calls = []

    def record_call(chain, z, log_det=True, allow_tf32=False):
        calls.append(allow_tf32)
        return z, z.new_zeros(len(z)) if log_det else None

    monkeypatch.setattr(kernels, "evaluate", record_call)
    layer = to_stochastic(torch.nn.Conv2d(3, 4, 3), {"*": NormalInvConv(site="position")})
    images = torch.randn(2, 3, 5, 5)
    layer(images)
    assert calls == [False]
    with torch.autocast("cpu", torch.bfloat16):
        layer(images)
        assert calls == [False, True]
        noise = next(module for module in layer.modules() if isinstance(module, InputNoise))
        divergences({"layer": noise})
        noise.push(torch.zeros(2, 3))
    assert len(calls) > 2
    assert not any(calls[2:])


def numpy_forward(task, save, x, log_dets, saved):
    """Computes the same as ``launch.forward`` by numpy."""
    for i, end in enumerate(x.split(task.dims, -1)):
        weights = task.weights[i].values()
        value, log_det = flow_chains.ChainFunction.apply(
            task.shapes[i], task.log_det, task.columns[i], *weights
        )
        end.copy_(value)
        if task.log_det:
            log_dets[i] = log_det


def numpy_backward(task, saved, grad_x, grad_log_dets, grad_vectors, grad_weights):
    """Computes the same as ``launch.backward`` by numpy."""
    weight_grads = []
    for i, output_grad in enumerate(grad_x.split(task.dims, -1)):
        leaves = [t.detach().requires_grad_() for t in (task.columns[i], *task.weights[i].values())]
        with torch.enable_grad():
            outputs = flow_chains.ChainFunction.apply(task.shapes[i], grad_log_dets is not None, *leaves)
        grads = [output_grad] if grad_log_dets is None else [output_grad, grad_log_dets[i]]
        z_grad, *others = torch.autograd.grad(outputs[: len(grads)], leaves, grads)
        grad_vectors.split(task.dims, -1)[i].copy_(z_grad)
        weight_grads += others
    order = tasks.flat_order(task.shapes)
    grad_weights.copy_(torch.cat([weight_grads[position].flatten() for position in order]))


@pytest.fixture
def gpu_operator(monkeypatch):
    """Uses the operator of GPUs, with numpy instead of the launches."""
    monkeypatch.setattr(flow_chains, "available", lambda z: True)
    monkeypatch.setattr(flow_chains, "gpu", gpu, raising=False)  # imported only if Triton is installed
    monkeypatch.setattr(launch, "forward", numpy_forward)
    monkeypatch.setattr(launch, "backward", numpy_backward)


@pytest.mark.parametrize("log_det", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_operator_equals_the_reference(case, log_det, gpu_operator):
    flows, inputs = [flow.double() for flow in make_flows(case)], make_inputs(case, 5).detach().double()
    expected = results_and_gradients(evaluate_one_by_one, flows, inputs.requires_grad_(), case, log_det)
    functions = [evaluate_together, evaluate_each]
    if case is CASES["both"]:  # short and long chains, which cover all that is traced
        compiled = torch.compile(
            lambda inputs: evaluate_together(flows, inputs[:, 3:], log_det),
            fullgraph=True,
            backend="aot_eager" if log_det else "eager",
        )
        functions.append(lambda *_: compiled(inputs))
    for push in functions:
        torch.testing.assert_close(results_and_gradients(push, flows, inputs, case, log_det), expected)


def test_second_derivatives_of_the_operator_equal_those_of_the_reference(gpu_operator):
    case, second = CASES["both"], []
    flows, inputs = [flow.double() for flow in make_flows(case)], make_inputs(case, 3).detach().double()
    inputs.requires_grad_()
    for push in (evaluate_together, evaluate_one_by_one):
        x, log_dets = push(flows, inputs[:, 3:], True)
        total = sum(value.square().sum() for value in (*x, *log_dets))
        (gradient,) = torch.autograd.grad(total, inputs, create_graph=True)
        second.append(torch.autograd.grad(gradient.square().sum(), [inputs, *all_weights(flows)]))
    torch.testing.assert_close(second[0], second[1])


@needs_triton
def test_kernels_in_the_interpreter_agree_with_the_reference():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    report = json.loads(process.stdout.splitlines()[-1])
    if "failure" in report:
        pytest.skip(f"Triton's interpreter does not run here: {report['failure']}")
    assert len(report["errors"]) == 3 * len(CASES) + 2
    assert report["blocks"] == 3
    assert max(report["errors"].values()) < 1e-5, report["errors"]
    assert report["tanh"] < 2.5
    assert report["edges"] < 1e-5
    assert report["compiled"] == report["repeated"] == report["many_repeated"] == 0.0
    assert report["groups"] == [True, True]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 19, 128])
@pytest.mark.parametrize("case", [*CASES.values(), LENET, VGG], ids=[*CASES, "lenet", "vgg"])
def test_gpu_results_are_accurate_and_reproducible(case, rows):
    flows, inputs = make_flows(case, "cuda"), make_inputs(case, rows, "cuda")
    assert kernels.available(inputs)
    for log_det in (True, False):
        first, second, third = (
            results_and_gradients(push, flows, inputs, case, log_det)
            for push in (evaluate_together, evaluate_together, evaluate_each)
        )
        assert error(first, float64_results(flows, inputs, case, log_det)) < 1e-5
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert error(third, [value.double() for value in first]) < 1e-5


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "rows"),
    [(CASES["both"], 513), (MANY, 1000), (VGG, 600), ([(6, REPORT)], 18432), ([(128, REPORT)], 32768)],
    ids=["both", "many", "vgg", "lenet position", "vgg position"],
)
def test_gpu_sums_over_many_rows_are_accurate_and_reproducible(case, rows):
    flows, inputs = make_flows(case, "cuda"), make_inputs(case, rows, "cuda")
    first, second = (results_and_gradients(evaluate_together, flows, inputs, case, True) for _ in range(2))
    assert error(first, float64_results(flows, inputs, case, True)) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "rows"), [(128, 32768), (256, 2048), (512, 512), (40, 600)])
def test_gpu_tf32_products_are_accurate_to_a_thousandth_and_few_rows_stay_exact(dim, rows):
    case = [(dim, REPORT)]
    flows, inputs = make_flows(case, "cuda"), make_inputs(case, rows, "cuda")

    def evaluate_tf32(flows, vectors, log_det):
        return evaluate_together(flows, vectors, log_det, allow_tf32=True)

    first, repeated = (results_and_gradients(evaluate_tf32, flows, inputs, case, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert 1e-5 < error(first, float64_results(flows, inputs, case, True)) < 5e-3
    few = make_inputs(case, 100, "cuda")
    exact, same = (
        results_and_gradients(push, flows, few, case, True) for push in (evaluate_together, evaluate_tf32)
    )
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES["both"], LENET], ids=["both", "lenet"])
def test_gpu_kernels_compile_without_a_graph_break(case):
    flows, inputs = make_flows(case, "cuda"), make_inputs(case, 19, "cuda")
    expected = results_and_gradients(evaluate_together, flows, inputs, case, True)

    def push(inputs):
        return evaluate_together(flows, inputs[:, 3:], True)

    compiled = torch.compile(push, fullgraph=True)
    actual = results_and_gradients(lambda *_: compiled(inputs), flows, inputs, case, True)
    assert error(actual, [value.double() for value in expected]) < 1e-6


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES["both"], LENET], ids=["both", "lenet"])
def test_gpu_kernels_can_be_captured_in_a_graph(case):
    """Parameters, warm-up, capture and comparison use one side stream.

    torch remembers the stream on which a parameter first joins a graph and warns if its gradient comes from another stream.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flows, inputs = make_flows(case, "cuda"), make_inputs(case, 19, "cuda")

        def gradients():
            x, log_dets = evaluate_together(flows, inputs[:, 3:], True)
            total = sum(value.square().sum() for value in x) + sum(value.sum() for value in log_dets)
            return torch.autograd.grad(total, [inputs, *all_weights(flows)])

        gradients()  # warm-up: kernels are compiled and loaded here
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = gradients()
        with torch.no_grad():
            inputs.mul_(0.5)
        graph.replay()
        expected = gradients()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def many_rows(errors):
    """Tests sums over several blocks of rows with few rows: three blocks, of which the last is short."""
    row_blocks = launch.row_blocks
    launch.row_blocks = partial(row_blocks, single_block_rows=16, block_rows=32)
    flows = make_flows(MANY)
    try:
        inputs = make_inputs(MANY, 141)
        first, repeated = (
            results_and_gradients(push, flows, inputs, MANY, True)
            for push in (evaluate_together, evaluate_together)
        )
        errors["many"] = error(first, float64_results(flows, inputs, MANY, True))
        return {"many_repeated": error(repeated, first), "blocks": launch.row_blocks(141)[0]}
    finally:
        launch.row_blocks = row_blocks


def check_groups():
    """Returns whether groups give the same results together as one by one, eager and compiled."""
    from test_kernel_groups import SMALL, equal, evaluate_one_by_one, make_groups
    from test_kernel_groups import results_and_gradients as group_results

    groups = make_groups(SMALL)
    expected = group_results(evaluate_one_by_one, groups)
    compiled = torch.compile(kernels.evaluate_many, fullgraph=True, backend="aot_eager")
    return [equal(group_results(push, groups), expected) for push in (kernels.evaluate_many, compiled)]


def measure_errors(tanh_kernel):
    """Returns the errors of the kernels in the interpreter."""
    positive = torch.logspace(-8, 1.3, 2048)
    arguments = torch.cat([positive, -positive])
    values = torch.empty_like(arguments)
    try:
        tanh_kernel[(1,)](arguments, values, torch.tensor([2]), LENGTH=2048)
    except Exception as problem:
        return {"failure": str(problem)[:200]}
    exact = arguments.double().tanh()
    unit = torch.nextafter(exact.abs().float(), torch.tensor(2.0)).double() - exact.abs().float().double()
    result = {"tanh": float(((values.double() - exact).abs() / unit).max()), "errors": {}}
    for name, case in CASES.items():
        flows = make_flows(case)
        for rows, log_det in ((1, True), (16, False), (19, True), (128, True))[: 4 if name == "short" else 3]:
            inputs = make_inputs(case, rows)
            actual = results_and_gradients(
                evaluate_together, flows, inputs, case, log_det, contiguous=rows == 16
            )
            result["errors"][f"{name} {rows}"] = error(actual, float64_results(flows, inputs, case, log_det))

    case = CASES["both"]
    flows, inputs = make_flows(case), make_inputs(case, 3)
    first, repeated = (
        results_and_gradients(push, flows, inputs, case, True)
        for push in (evaluate_together, evaluate_together)
    )
    compiled = torch.compile(
        lambda inputs: evaluate_together(flows, inputs[:, 3:], True),
        fullgraph=True,
        backend="aot_eager",
    )
    third = results_and_gradients(lambda *_: compiled(inputs), flows, inputs, case, True)
    result["repeated"], result["compiled"] = (error(other, first) for other in (repeated, third))

    result.update(many_rows(result["errors"]))
    result["groups"] = check_groups()

    with torch.no_grad():  # the strongest contraction, and a short w
        for flow in flows:
            if flow.chain_shape.planar:
                for k, length in ((0, 3.0), (1, 1e-2)):
                    flow.w[k] *= length
                    flow.u[k] = -20.0 * flow.w[k] / flow.w[k].square().sum() * (1.0 if k == 0 else 1e-3)
    result["edges"] = error(
        results_and_gradients(evaluate_together, flows, inputs, case, True),
        float64_results(flows, inputs, case, True),
    )
    return result


if __name__ == "__main__":
    from flowbnn.kernels.triton_kernels import tanh, tl, triton

    @triton.jit
    def tanh_kernel(arguments, values, counts, LENGTH: tl.constexpr):
        columns = tl.arange(0, LENGTH)
        for i in range(tl.load(counts)):
            positions = i * LENGTH + columns
            tl.store(values + positions, tanh(tl.load(arguments + positions)))

    torch.set_num_threads(1)
    print(json.dumps(measure_errors(tanh_kernel)))
