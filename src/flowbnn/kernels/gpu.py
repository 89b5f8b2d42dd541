"""Custom operator for the Triton kernels: many chains of planar and LU maps in one call.

``torch.compile`` traces it without a graph break, autograd knows its derivative, and a CUDA graph can capture it.
:mod:`flowbnn.kernels.launch` launches the kernels.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.kernels import launch, reference
from flowbnn.kernels.reference import ChainShape
from flowbnn.kernels.tasks import GroupTask, by_chain, flat_order, weight_names


class OperatorLists(NamedTuple):
    """Description of the chains of a call by lists of numbers, because operators of torch accept only these.

    Args:
        counts: Number of chains of each group.
        dims: Length of the vectors of each chain.
        runs: Runs of each chain, ended by zero: positive for planar maps and negative for LU maps.
        limits: Margin and bound of each chain.
        log_dets: True for groups that need log-determinants.
        allow_tf32: True for groups that allow products in TF32.
    """

    counts: Sequence[int]
    dims: Sequence[int]
    runs: Sequence[int]
    limits: Sequence[float]
    log_dets: Sequence[bool]
    allow_tf32: Sequence[bool]


_LISTS = "int[] counts, int[] dims, int[] runs, float[] limits, bool[] log_dets, bool[] allow_tf32"


def encode_shapes(shapes: Sequence[ChainShape]) -> tuple[list[int], list[int], list[float]]:
    """Returns chain shapes as ``dims``, ``runs`` and ``limits``."""
    dims = [shape.dim for shape in shapes]
    runs = [n for shape in shapes for n in (*(size if planar else -size for planar, size in shape.runs), 0)]
    return dims, runs, [limit for shape in shapes for limit in (shape.margin, shape.bound)]


@lru_cache(maxsize=256)
def decode_shapes(
    dims: tuple[int, ...], runs: tuple[int, ...], limits: tuple[float, ...]
) -> tuple[ChainShape, ...]:
    """Returns the chain shapes that :func:`encode_shapes` encoded.

    >>> decode_shapes((5,), (2, -3, 0), (0.001, 4.0))
    (ChainShape(dim=5, runs=((True, 2), (False, 3)), planar=2, linear=3, margin=0.001, bound=4.0),)
    """
    shapes: list[ChainShape] = []
    sizes: list[int] = []
    for size in runs:
        if size:
            sizes.append(size)
            continue
        shapes.append(
            ChainShape(
                dims[len(shapes)],
                tuple((n > 0, abs(n)) for n in sizes),
                sum(n for n in sizes if n > 0),
                -sum(n for n in sizes if n < 0),
                *limits[2 * len(shapes) : 2 * len(shapes) + 2],
            )
        )
        sizes = []
    return tuple(shapes)


def _make_tasks(
    lists: OperatorLists, vectors: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[GroupTask]:
    """Returns one task for each group."""
    shapes = decode_shapes(tuple(lists.dims), tuple(lists.runs), tuple(lists.limits))
    first_shape = first_weight = 0
    tasks = []
    for index, count in enumerate(lists.counts):
        group_shapes = shapes[first_shape : first_shape + count]
        number = sum(len(weight_names(shape)) for shape in group_shapes)
        weight_slice = slice(first_weight, first_weight + number)
        flags = lists.log_dets[index], lists.allow_tf32[index]
        tasks.append(GroupTask(group_shapes, vectors[index], weights[weight_slice], weight_slice, *flags))
        first_shape, first_weight = first_shape + count, weight_slice.stop
    return tasks


def evaluate_groups(groups: Sequence[Any]) -> list[tuple[Tensor, Tensor | None]]:
    """Applies the chains of all groups.

    Args:
        groups: Sequence of :class:`flowbnn.kernels.Group`.

    Returns:
        For each group the values ``[rows, numbers]``, and the log-determinants ``[chains, rows]`` or None.
    """
    chains = [chain for group in groups for chain in group.chains]
    vectors = [z if z.stride(1) == 1 else z.contiguous() for z in (group.vectors for group in groups)]
    weights = [weight.contiguous() for chain in chains for weight in chain.weights]
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*vectors, *weights))
    outputs = torch.ops.flowbnn.evaluate_chains(
        vectors, weights, save, [len(group.chains) for group in groups], *encode_shapes([chain.shape for chain in chains]),
        [group.log_det for group in groups], [group.allow_tf32 for group in groups],
    )  # fmt: skip
    xs, log_dets, _ = _split_outputs(outputs)
    triples = zip(xs, log_dets, groups, strict=True)
    return [(x, log_det if group.log_det else None) for x, log_det, group in triples]


def _split_outputs(outputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Splits the outputs of the operator into values, log-determinants and saved tensors of all groups."""
    number = len(outputs) // 3
    return outputs[:number], outputs[number : 2 * number], outputs[2 * number :]


@torch.library.custom_op(
    "flowbnn::evaluate_chains",
    mutates_args=(),
    schema=f"(Tensor[] vectors, Tensor[] weights, bool save, {_LISTS}) -> Tensor[]",
)
def _evaluate(
    vectors: Sequence[Tensor], weights: Sequence[Tensor], save: bool, *numbers: Any
) -> list[Tensor]:
    """Applies the chains of all groups. Returns values, log-determinants and saved tensors of all groups."""
    tasks = _make_tasks(OperatorLists(*numbers), vectors, weights)
    outputs = [task.outputs(save) for task in tasks]  # allocated on the stream that uses them afterwards
    _run_on_streams(tasks, lambda index: launch.forward(tasks[index], save, *outputs[index]))
    return [tensor for third in zip(*outputs, strict=True) for tensor in third]


@_evaluate.register_fake
def _(vectors: Any, weights: Any, save: bool, *numbers: Any) -> Any:
    outputs = [task.outputs(save) for task in _make_tasks(OperatorLists(*numbers), vectors, weights)]
    return [tensor for third in zip(*outputs, strict=True) for tensor in third]


@torch.library.custom_op(
    "flowbnn::evaluate_chains_backward",
    mutates_args=(),
    schema=f"(Tensor[] vectors, Tensor[] weights, Tensor[] saved, Tensor[] grad_x, Tensor[] grad_log_dets, {_LISTS}) -> Tensor[]",
)
def _evaluate_backward(
    vectors: Sequence[Tensor],
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    grad_x: Sequence[Tensor],
    grad_log_dets: Sequence[Tensor],
    *numbers: Any,
) -> list[Tensor]:
    """Returns the gradients to the vectors of all groups, and then to their parameters."""
    tasks = _make_tasks(OperatorLists(*numbers), vectors, weights)
    outputs = _gradients(tasks, grad_x)

    def work(index: int) -> None:
        log_det_grads = grad_log_dets[index] if len(grad_log_dets[index]) else None
        memory = outputs[index], outputs[len(tasks) + index]
        launch.backward(tasks[index], saved[index], grad_x[index], log_det_grads, *memory)

    _run_on_streams(tasks, work)
    return outputs


def _gradients(tasks: Sequence[GroupTask], grad_x: Sequence[Tensor]) -> list[Tensor]:
    """Returns memory for the gradients to the vectors of every group, and then to its parameters."""
    grad_vectors = [torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in grad_x]
    numbers = [sum(weight.numel() for weight in task.all_weights) for task in tasks]
    return grad_vectors + [g.new_empty(number) for g, number in zip(grad_x, numbers, strict=True)]


@_evaluate_backward.register_fake
def _(vectors: Any, weights: Any, saved: Any, grad_x: Any, grad_log_dets: Any, *numbers: Any) -> Any:
    return _gradients(_make_tasks(OperatorLists(*numbers), vectors, weights), grad_x)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Saves what the derivative of the operator needs."""
    vectors, weights, _, *ctx.numbers = inputs
    ctx.sizes = len(vectors), len(weights)
    ctx.set_materialize_grads(False)
    saved = _split_outputs(output)[2]
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*vectors, *weights, *saved)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    """Returns the gradients of the operator to its arguments."""
    tensors, (first, second) = list(ctx.saved_tensors), ctx.sizes
    vectors, weights, saved = tensors[:first], tensors[first : first + second], tensors[first + second :]
    tasks, no_gradients = (
        _make_tasks(OperatorLists(*ctx.numbers), vectors, weights),
        (None,) * (1 + len(ctx.numbers)),
    )
    if torch.is_grad_enabled():  # the gradients will be differentiated again
        gradients = reference.gradients(
            partial(_reference, tasks, first), (*vectors, *weights), grads[: 2 * first]
        )
        return gradients[:first], gradients[first:], *no_gradients
    grad_x, grad_log_dets, _ = (list(third) for third in _split_outputs(grads))
    for index, task in enumerate(tasks):
        zeros = task.vectors.new_zeros
        if grad_x[index] is None:
            grad_x[index] = zeros((task.rows, sum(task.dims)))
        if grad_log_dets[index] is None or not task.log_det:
            grad_log_dets[index] = zeros(0)
    outputs = torch.ops.flowbnn.evaluate_chains_backward(
        vectors, weights, saved, grad_x, grad_log_dets, *ctx.numbers
    )
    grad_weights: list[Any] = [None] * len(weights)
    for task, flat in zip(tasks, outputs[len(tasks) :], strict=True):
        order = flat_order(task.shapes)
        chunks = flat.split([task.all_weights[place].numel() for place in order])
        for place, chunk in zip(order, chunks, strict=True):
            grad_weights[task.weight_slice.start + place] = chunk.view(task.all_weights[place].shape)
    return list(outputs[: len(tasks)]), grad_weights, *no_gradients


def _reference(tasks: Sequence[GroupTask], first: int, *tensors: Tensor) -> list[Any]:
    """Returns the values and log-determinants of every task by torch's operations, which have all derivatives."""
    xs: list[Any] = []
    log_dets: list[Any] = []
    for task, vectors in zip(tasks, tensors[:first], strict=True):
        weights = by_chain(task.shapes, tensors[first:][task.weight_slice])
        columns = zip(task.shapes, weights, vectors.split(task.dims, -1), strict=True)
        outputs = [
            reference.forward(shape, list(group_shapes.values()), z, task.log_det)
            for shape, group_shapes, z in columns
        ]
        xs.append(torch.cat([x for x, _ in outputs], -1))
        log_dets.append(
            torch.stack([line for _, line in outputs if line is not None]) if task.log_det else None
        )
    return xs + log_dets


_evaluate.register_autograd(_backward, setup_context=_setup_context)


@cache
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Returns the side streams of a device, as many as were ever needed at once."""
    return []


def _run_on_streams(tasks: Sequence[GroupTask], work: Callable[[int], None]) -> None:
    """Runs every task. The largest runs on the current stream, which finally waits for the others.

    Args:
        tasks: The tasks.
        work: Function that launches the task of an index.
    """
    first, sizes = tasks[0].vectors, [task.rows * sum(task.dims) for task in tasks]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    others = [index for index in range(len(sizes)) if index != largest]
    if not first.is_cuda:
        for index in (*others, largest):
            work(index)
        return
    with torch.cuda.device(first.device):
        main_stream, streams = torch.cuda.current_stream(first.device), _side_streams(first.device)
        streams += [torch.cuda.Stream(first.device) for _ in range(len(streams), len(sizes) * bool(others))]
        try:
            for index in others:  # they run at the same time as the largest
                streams[index].wait_stream(main_stream)
                with torch.cuda.stream(streams[index]):
                    work(index)
            work(largest)
        finally:  # also after an error, because memory that other streams still write to must not be reused
            for index in others:
                main_stream.wait_stream(streams[index])
