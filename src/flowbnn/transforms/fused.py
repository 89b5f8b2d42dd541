r"""The flows of many layers on a GPU, in few launches.

A flow of document 000 on a layer of a few hundred channels is some hundred tiny operations, each of which takes a GPU longer to start
than to do. :func:`push_many` evaluates the :class:`~flowbnn.transforms.PlanarLU` flows of all layers together, with kernels written
in Triton: a flow on at most 32 numbers is one launch, and the stages of longer ones (a run of planar maps, one triangular factor) are
one launch each for all layers. Gradients are written by hand, of first order, and the same from run to run to the last bit.
Products are as good as float32 (three passes of TF32, or plain float32 where they are small), unless the caller allows less.

``torch.compile`` sees one operator, without a graph break, and a CUDA graph captures it.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.transforms.chain import PlanarLU, _forward
from flowbnn.transforms.fused_plan import flat_order, kept_numbers, read, write

__all__ = ["available", "push_many", "push_packed"]

WIDEST = 1024  # numbers that a program holds a row of
_FOUND = find_spec("triton") is not None
_INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # Triton's kernels then run on a processor, for tests


def available(z: Tensor) -> bool:
    """Whether :func:`push_many` has kernels for such a tensor: float32 on a CUDA device, Triton installed, outside ``torch.func``.

    >>> available(torch.zeros(3, 2, dtype=torch.float64))
    False
    """
    if not _FOUND or z.dtype != torch.float32 or not (z.is_cuda or _INTERPRETED):
        return False
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None


def push_many(
    flows: Sequence[PlanarLU], starts: Sequence[Tensor], log_det: bool, coarse: bool = False
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Every flow applied to its own rows: ``flow.push(start, log_det)`` for each pair, all at once where that is possible.

    Args:
        flows: the flows.
        starts: ``[rows, dim]`` for each, with one number of rows; columns of one wide tensor are welcome.
        log_det: whether the log-dets are wanted.
        coarse: the values will be rounded to half precision anyway: the products of some hundred rows and more may be made in one pass
            of TF32, with errors of about a thousandth, instead of three.

    Returns:
        ``[rows, dim]`` for each flow, columns of one wide tensor where the flows went together; and the log-dets ``[rows]`` or None.

    >>> flow = PlanarLU(3, [("planar", 2)], generator=torch.Generator().manual_seed(0))
    >>> (x,), (log_det,) = push_many([flow], [torch.zeros(5, 3)], log_det=True)
    >>> x.shape, log_det.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """
    if len(flows) != len(starts):
        raise FlowBNNError(
            f"there are {len(flows)} flows and {len(starts)} starts; give one start for each flow"
        )
    for flow, start in zip(flows, starts, strict=True):
        if start.dim() != 2 or start.shape[1] != flow.dim or start.shape[0] != starts[0].shape[0]:
            raise FlowBNNError(
                f"a start has the shape {tuple(start.shape)}; give [rows, {flow.dim}], with as many rows as the others have"
            )
    ends: list[Any] = [None] * len(flows)
    totals: list[Any] = [None] * len(flows)
    together = [i for i in range(len(flows)) if _served(flows[i], starts[i], starts[0])]
    if together:
        _together(flows, starts, (log_det, coarse), together, ends, totals)
    for i, (flow, start) in enumerate(zip(flows, starts, strict=True)):
        if ends[i] is None:
            weights = flow._weights()
            ends[i], totals[i] = _forward(flow.plan, log_det, start, weights) if weights else (start, None)
            if log_det and totals[i] is None:
                totals[i] = start.new_zeros(start.shape[0])
    return ends, totals if log_det else None


def _served(flow: PlanarLU, start: Tensor, first: Tensor) -> bool:
    if not available(start) or start.device != first.device or not start.shape[0] or flow.dim > WIDEST:
        return False
    weights = flow._weights()
    return len(weights) > 0 and all(w.dtype == start.dtype and w.device == start.device for w in weights)


def _together(
    flows: Sequence[PlanarLU],
    starts: Sequence[Tensor],
    options: tuple[bool, bool],
    some: list[int],
    ends: list[Any],
    totals: list[Any],
) -> None:
    x, lines = _launch([flows[i] for i in some], [starts[i] for i in some], *options)
    for i, end in zip(some, x.split([flows[i].dim for i in some], -1), strict=True):
        ends[i] = end
    if options[0]:
        for i, line in zip(some, lines.unbind(), strict=True):
            totals[i] = line


def push_packed(flows: Sequence[PlanarLU], wide: Tensor, log_det: bool) -> tuple[Tensor, Tensor | None]:
    """:func:`push_many` on vectors laid end to end in ``[rows, numbers]``, which spares cutting and joining them.

    Returns:
        ``[rows, numbers]``, and the log-dets ``[flows, rows]`` or None.

    >>> flows = [PlanarLU(dim, [("planar", 2)]) for dim in (3, 4)]
    >>> x, log_dets = push_packed(flows, torch.zeros(5, 7), log_det=True)
    >>> x.shape, log_dets.shape
    (torch.Size([5, 7]), torch.Size([2, 5]))
    """
    dims = [flow.dim for flow in flows]
    if wide.dim() != 2 or wide.shape[1] != sum(dims) or not flows:
        raise FlowBNNError(
            f"the starts have the shape {tuple(wide.shape)}; give [rows, {sum(dims)}], a column for each number of the flows"
        )
    if all(_served(flow, wide, wide) for flow in flows):
        x, lines = _launch(flows, [wide], log_det)
        return x, lines if log_det else None
    ends, totals = push_many(flows, wide.split(dims, -1), log_det)
    return torch.cat(ends, -1), None if totals is None else torch.stack(totals)


def _launch(
    flows: Sequence[PlanarLU], starts: Sequence[Tensor], log_det: bool, coarse: bool = False
) -> tuple[Tensor, Tensor]:
    """One start for each flow, or one for all of them."""
    given = [start if start.stride(1) == 1 else start.contiguous() for start in starts]
    weights = [weight.contiguous() for flow in flows for weight in flow._weights()]
    dims, (runs, limits) = [flow.dim for flow in flows], write([flow.plan for flow in flows])
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*given, *weights))
    x, lines, _ = torch.ops.flowbnn.push_flows(given, weights, dims, runs, limits, log_det, keep, coarse)
    return x, lines


def _cut(starts: Sequence[Tensor], dims: Sequence[int]) -> Sequence[Tensor]:
    return starts if len(starts) == len(dims) else starts[0].split(list(dims), -1)


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@torch.library.custom_op(
    "flowbnn::push_flows",
    mutates_args=(),
    schema="(Tensor[] starts, Tensor[] weights, int[] dims, int[] runs, float[] limits, bool log_det, bool keep,"
    " bool coarse) -> (Tensor, Tensor, Tensor)",
)
def _push(
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    dims: Sequence[int],
    runs: Sequence[int],
    limits: Sequence[float],
    log_det: bool,
    keep: bool,
    coarse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from flowbnn.transforms.fused_launch import forward  # Triton is loaded when it is first used

    x = starts[0].new_empty((starts[0].shape[0], sum(dims)))
    totals = x.new_empty((len(dims), x.shape[0]) if log_det else 0)
    with _on(x):
        kept = forward(
            read(tuple(runs), tuple(limits)), log_det, keep, coarse, _cut(starts, dims), weights, x, totals
        )
    return x, totals, kept


@_push.register_fake
def _(
    starts: Any, weights: Any, dims: Any, runs: Any, limits: Any, log_det: bool, keep: bool, coarse: bool
) -> Any:
    rows = starts[0].shape[0]
    kept = rows * sum(kept_numbers(read(tuple(runs), tuple(limits)), dims)) if keep else 0
    empty = starts[0].new_empty
    return empty((rows, sum(dims))), empty((len(dims), rows) if log_det else 0), empty(kept)


@torch.library.custom_op(
    "flowbnn::push_flows_backward",
    mutates_args=(),
    schema="(Tensor[] starts, Tensor[] weights, Tensor kept, Tensor of_x, Tensor? of_totals, int[] dims, int[] runs, float[] limits,"
    " bool coarse) -> (Tensor, Tensor)",
)
def _push_backward(
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    kept: Tensor,
    of_x: Tensor,
    of_totals: Tensor | None,
    dims: Sequence[int],
    runs: Sequence[int],
    limits: Sequence[float],
    coarse: bool,
) -> tuple[Tensor, Tensor]:
    from flowbnn.transforms.fused_launch import backward

    with _on(of_x):
        return backward(
            read(tuple(runs), tuple(limits)), coarse, _cut(starts, dims), weights, kept, of_x, of_totals
        )


@_push_backward.register_fake
def _(
    starts: Any,
    weights: Any,
    kept: Any,
    of_x: Any,
    of_totals: Any,
    dims: Any,
    runs: Any,
    limits: Any,
    coarse: bool,
) -> Any:
    return of_x.new_empty(of_x.shape), of_x.new_empty(sum(weight.numel() for weight in weights))


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    starts, weights, ctx.dims, ctx.runs, ctx.limits, _, _, ctx.coarse = inputs
    ctx.count = len(starts)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*starts, *weights, output[2])


def _back(ctx: Any, of_x: Tensor | None, of_totals: Tensor | None, of_kept: Tensor | None) -> Any:
    *tensors, kept = ctx.saved_tensors
    starts, weights = tensors[: ctx.count], tensors[ctx.count :]
    dims = list(ctx.dims)
    if of_x is None:
        of_x = starts[0].new_zeros((starts[0].shape[0], sum(dims)))
    of_starts, flat = torch.ops.flowbnn.push_flows_backward(
        starts, weights, kept, of_x, of_totals, dims, ctx.runs, ctx.limits, ctx.coarse
    )
    order = flat_order(read(tuple(ctx.runs), tuple(ctx.limits)), dims)
    found = dict(zip(order, flat.split([weights[place].numel() for place in order]), strict=True))
    of_weights = [found[place].view(weight.shape) for place, weight in enumerate(weights)]
    whole = [of_starts] if ctx.count == 1 else list(of_starts.split(dims, -1))
    return whole, of_weights, None, None, None, None, None, None


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise FlowBNNError(
        "the fused flows have first derivatives only; for a gradient of a gradient call each flow by itself"
    )


_push.register_autograd(_back, setup_context=_set_up)
_push_backward.register_autograd(_refuse)
