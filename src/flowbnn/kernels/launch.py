"""Launches of the Triton kernels for the chains of a call. :mod:`flowbnn.kernels.gpu` calls them.

A chain on at most 32 numbers takes one launch. Larger chains are evaluated stage by stage; a stage is a run of planar maps or one
triangular factor. All chains whose next stage is of one kind share a launch. Gradients to the parameters of all stages come at the
end, in one launch for the planar maps and one for the LU maps. They are sums over rows. Many rows are split into blocks with their
own programs, and one more launch adds up the sums of the blocks in a fixed order.

For the backward pass, small chains save the input of each map and the middle of each LU map. Large chains save the values between the
stages and the activations of the planar maps. The backward pass needs as much memory again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.kernels.tasks import (
    Arguments,
    GroupTask,
    Stage,
    by_chain,
    chunks,
    flat_order,
    next_power_of_two,
    schedule,
    stages_of,
)

SMALL_ROWS = 16  # rows of a program on 16 numbers; more exceed its registers


def row_blocks(rows: int, single_block_rows: int = 512, block_rows: int = 256) -> tuple[int, int]:
    """Returns the number of blocks of rows for sums, and the number of rows of each.

    There are enough blocks for a whole GPU, and always the same for one number of rows.

    Args:
        rows: Number of rows.
        single_block_rows: Largest number of rows whose sum is short enough for one block.
        block_rows: Approximate smallest number of rows of each block of a longer sum.

    >>> row_blocks(512), row_blocks(513), row_blocks(32768)
    ((1, 512), (3, 192), (64, 512))
    """
    if rows <= single_block_rows:
        return 1, rows
    max_blocks = 64  # with their columns these occupy a whole GPU
    rows_per_block = -(-rows // min(max_blocks, -(-rows // block_rows)))
    rows_per_block = -(-rows_per_block // 64) * 64
    return -(-rows // rows_per_block), rows_per_block


def forward(task: GroupTask, save: bool, x: Tensor, log_dets: Tensor, saved: Tensor) -> None:
    """Applies the chains of a task.

    Args:
        task: The task.
        save: If True, saves what :func:`backward` needs.
        x: Memory for the values ``[rows, numbers]``.
        log_dets: Memory for the log-determinants ``[chains, rows]``.
        saved: Memory for what is saved.
    """
    # Imported at the first launch, because importing Triton is slow.
    from flowbnn.kernels import triton_kernels, triton_small

    count = len(task.shapes)
    outputs = x.split(task.dims, -1)
    log_det_rows = log_dets.unbind() if task.log_det else [x] * count
    chunks_saved = task.saved_chunks(saved) if save else [x] * count
    for chains in chunks(task.small):
        triton_small.small_forward[(-(-task.rows // SMALL_ROWS), len(chains))](
            **_matrices("z", _select(task.columns, chains)), **_matrices("x", _select(outputs, chains)),
            **_small_arguments(task, chains), bs=task.chain_weights(chains, "b"),
            saved=_select(chunks_saved, chains), log_dets=_select(log_det_rows, chains), num_rows=task.rows,
            LOG_DET=task.log_det, SAVE=save,
        )  # fmt: skip
    values = {i: task.values(i, chunks_saved[i]) if save else task.scratch_values(i) for i in task.large}
    stage_values = {i: [task.columns[i], *values[i][0], outputs[i]] for i in task.large}
    for kind, pairs in schedule(tuple(task.shapes[i] for i in task.large)):
        chains = [task.large[i] for i, _ in pairs]
        steps = [(i, s) for i, (_, s) in zip(chains, pairs, strict=True)]
        stages = [stages_of(task.shapes[i])[s] for i, s in steps]
        common = {
            **_matrices("z", [stage_values[i][s] for i, s in steps]),
            **_matrices("x", [stage_values[i][s + 1] for i, s in steps]),
            "log_dets": _select(log_det_rows, chains),
            "is_first": tuple(int(s == 0) for _, s in steps),
            "LOG_DET": task.log_det,
        }
        if kind == "planar":
            tile, shared = _planar_arguments(task, chains, stages, values)
            biases = tuple(task.weights[i]["b"][s.first :] for i, s in zip(chains, stages, strict=True))
            grid = (-(-task.rows // tile["ROWS"]), len(chains))
            triton_kernels.planar_forward[grid](**common, **shared, bs=biases, **tile)
        else:
            _launch_triangle(task, chains, stages, common, kind == "upper", False)


def backward(
    task: GroupTask,
    saved: Tensor,
    grad_x: Tensor,
    grad_log_dets: Tensor | None,
    grad_vectors: Tensor,
    grad_weights: Tensor,
) -> None:
    """Computes the gradients of a task.

    Args:
        task: The task.
        saved: Tensors that :func:`forward` saved.
        grad_x: Gradients to the values.
        grad_log_dets: Gradients to the log-determinants, or None.
        grad_vectors: Memory for the gradients to the vectors ``[rows, numbers]``.
        grad_weights: Memory for the gradients to all parameters, concatenated in the order of :func:`flat_order`.
    """
    from flowbnn.kernels import triton_small

    grad_x = grad_x if grad_x.stride(1) == 1 else grad_x.contiguous()
    grad_outs, grad_zs = grad_x.split(task.dims, -1), grad_vectors.split(task.dims, -1)
    log_det = grad_log_dets is not None
    log_det_rows = [grad_x] * len(task.shapes) if grad_log_dets is None else grad_log_dets.unbind()
    stride = 0 if grad_log_dets is None else grad_log_dets.stride(1)
    chunks_saved = task.saved_chunks(saved)
    # Sums over the rows of each block, and then over the blocks.
    small_blocks, (num_blocks, rows_per_block) = -(-task.rows // SMALL_ROWS), row_blocks(task.rows)
    length = sum(weight.numel() for i in task.small for weight in task.weights[i].values())
    block_sums = [
        flat[None] if number == 1 else flat.new_empty(number, len(flat))
        for flat, number in ((grad_weights[:length], small_blocks), (grad_weights[length:], num_blocks))
    ]
    views = _gradient_views(task, block_sums[0][0], block_sums[1][0])
    if task.small:
        for chains in chunks(task.small):
            triton_small.small_backward[(small_blocks, len(chains))](
                **_matrices("grad_out", _select(grad_outs, chains)), **_matrices("grad_z", _select(grad_zs, chains)),
                **_small_arguments(task, chains), saved=_select(chunks_saved, chains), log_dets=_select(log_det_rows, chains),
                **{f"grad_{name}s": tuple(views[i].get(name, grad_x) for i in chains) for name in "wub"},
                grad_factors=tuple(views[i].get("f", grad_x) for i in chains),
                planars=tuple(task.shapes[i].planar for i in chains),
                num_rows=task.rows, total_stride=stride, block_stride=length,
                LOG_DET=log_det,
            )  # fmt: skip
        if small_blocks > 1:
            torch.sum(block_sums[0], 0, out=grad_weights[:length])
    if task.large:
        ends = {i: (grad_zs[i], grad_outs[i]) for i in task.large}
        log_arguments = {"LOG_DET": log_det, "total_stride": stride}
        stages = _LargeBackward(task, chunks_saved, ends, views, log_det_rows, log_arguments)
        stages.run()
        stages.weight_gradients(RowBlocks(num_blocks, rows_per_block, len(grad_weights) - length))
        if num_blocks > 1:
            torch.sum(block_sums[1], 0, out=grad_weights[length:])


class RowBlocks(NamedTuple):
    """Blocks of rows over which sums are made separately.

    Args:
        number: Number of blocks.
        rows: Number of rows of each block.
        stride: Distance of the sums of two blocks in memory.
    """

    number: int
    rows: int
    stride: int


class _LargeBackward:
    """Backward pass of the large chains of a task, stage by stage from the last.

    The gradients between the stages are kept for the gradients to the parameters.

    Args:
        task: The task.
        saved: Memory that :func:`forward` filled, for each chain.
        ends: Gradients to the input and to the output, for each large chain.
        views: Memory for the gradients to the parameters, for each chain.
        log_det_rows: Gradients to the log-determinants, for each chain.
        log_arguments: Arguments of all kernels that concern the log-determinants.
    """

    def __init__(
        self,
        task: GroupTask,
        saved: Sequence[Tensor],
        ends: dict[int, tuple[Tensor, Tensor]],
        views: Sequence[dict[str, Tensor]],
        log_det_rows: Sequence[Tensor],
        log_arguments: Arguments,
    ) -> None:
        self.task, self.views = task, views
        self.log_det_rows, self.log_arguments = log_det_rows, log_arguments
        self.values = {i: task.values(i, saved[i]) for i in task.large}
        self.stage_inputs = {i: [task.columns[i], *self.values[i][0]] for i in task.large}
        self.grads: dict[int, list[Tensor]] = {}
        for i in task.large:
            between = saved[i].new_empty((len(self.stage_inputs[i]) - 1, task.rows, task.dims[i]))
            self.grads[i] = [ends[i][0], *between.unbind(), ends[i][1]]
        self.scalars: dict[tuple[int, int], Tensor] = {}

    def run(self) -> None:
        """Computes the gradients to the inputs of all stages."""
        from flowbnn.kernels import triton_kernels

        task = self.task
        for kind, pairs in reversed(schedule(tuple(task.shapes[i] for i in task.large))):
            chains = [task.large[i] for i, _ in pairs]
            steps = [(i, s) for i, (_, s) in zip(chains, pairs, strict=True)]
            stages = [stages_of(task.shapes[i])[s] for i, s in steps]
            grad_outs, grad_zs = (
                [self.grads[i][s + 1] for i, s in steps],
                [self.grads[i][s] for i, s in steps],
            )
            if kind != "planar":
                common = {
                    **_matrices("z", grad_outs), **_matrices("x", grad_zs),
                    "log_dets": tuple(grad_outs), "is_first": (0,) * len(grad_outs), "LOG_DET": False,
                }  # fmt: skip
                _launch_triangle(task, chains, stages, common, kind == "upper", True)
                continue
            for step, stage in zip(steps, stages, strict=True):
                self.scalars[step] = grad_outs[0].new_empty((3, stage.size, task.rows))
            tile, shared = _planar_arguments(task, chains, stages, self.values)
            triton_kernels.planar_backward[(-(-task.rows // tile["ROWS"]), len(chains))](
                **_matrices("grad_out", grad_outs), **_matrices("grad_z", grad_zs), **shared, **self.log_arguments,
                log_dets=_select(self.log_det_rows, chains), scalars=tuple(self.scalars[step] for step in steps), **tile,
            )  # fmt: skip

    def weight_gradients(self, blocks: RowBlocks) -> None:
        """Computes the gradients to the parameters of all stages."""
        task = self.task
        triples = [(i, s, stage) for i in task.large for s, stage in enumerate(stages_of(task.shapes[i]))]
        for selection in chunks([triple for triple in triples if triple[2].kind == "planar"]):
            self._planar_gradients(selection, blocks)
        for selection in chunks([triple for triple in triples if triple[2].kind == "upper"]):
            self._factor_gradients(selection, blocks)

    def _planar_gradients(self, selection: Sequence[tuple[int, int, Stage]], blocks: RowBlocks) -> None:
        """Computes the gradients to ``w``, ``u`` and ``b`` of planar stages, given as (chain, index, stage)."""
        from flowbnn.kernels import triton_kernels

        task = self.task
        chains, stages = [i for i, _, _ in selection], [stage for _, _, stage in selection]
        _, shared = _planar_arguments(task, chains, stages, self.values)
        widest, max_size = max(task.dims[i] for i in chains), max(stage.size for stage in stages)
        triton_kernels.planar_weights[(-(-widest // 64), blocks.number, max_size * len(selection))](
            **_matrices("grad_out", [self.grads[i][s + 1] for i, s, _ in selection]),
            **_matrices("z", [self.stage_inputs[i][s] for i, s, _ in selection]),
            **shared, rows_per_block=blocks.rows, block_stride=blocks.stride,
            scalars=tuple(self.scalars[i, s] for i, s, _ in selection), LOG_DET=self.log_arguments["LOG_DET"],
            **{f"grad_{name}s": tuple(self.views[i][name][stage.first :] for i, _, stage in selection) for name in "wub"},
            max_size=max_size, ROWS=32 if blocks.number == 1 else 64, COLUMNS=64, num_warps=4,
        )  # fmt: skip

    def _factor_gradients(self, selection: Sequence[tuple[int, int, Stage]], blocks: RowBlocks) -> None:
        """Computes the gradients to the factors of LU maps, given by their upper stages as (chain, index, stage)."""
        from flowbnn.kernels import triton_kernels

        task = self.task
        chains = [i for i, _, _ in selection]
        tile = {"SIDE": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 3}
        side = -(-max(task.dims[i] for i in chains) // tile["SIDE"])
        triton_kernels.factors_backward[(side * side, blocks.number, 2 * len(selection))](
            **_matrices("z", [self.stage_inputs[i][s] for i, s, _ in selection]),
            **_matrices("grad_out", [self.grads[i][s + 2] for i, s, _ in selection]),
            middles=tuple(self.stage_inputs[i][s + 1] for i, s, _ in selection),
            grad_middles=tuple(self.grads[i][s + 1] for i, s, _ in selection),
            factors=tuple(task.weights[i]["f"][stage.first] for i, _, stage in selection),
            grad_factors=tuple(self.views[i]["f"][stage.first] for i, _, stage in selection),
            log_dets=_select(self.log_det_rows, chains), **task.chain_numbers(chains, "dims", "scales", "bounds"),
            **self.log_arguments, rows_per_block=blocks.rows, block_stride=blocks.stride, num_rows=task.rows, side=side,
            COUNT=len(selection), PRECISION=task.precision, **tile,
        )  # fmt: skip


def _launch_triangle(
    task: GroupTask,
    chains: Sequence[int],
    stages: Sequence[Stage],
    common: Arguments,
    upper: bool,
    backward: bool,
) -> None:
    """Launches one triangular factor of some chains."""
    from flowbnn.kernels import triton_kernels

    widest = max(task.dims[i] for i in chains)
    # Many small tiles for few rows, which finish sooner; large tiles for many rows, which read less.
    many_rows = row_blocks(task.rows)[0] > 1
    sizes = (
        {"ROWS": 64, "COLUMNS": 64, "BLOCKS": 1} if many_rows else {"ROWS": 16, "COLUMNS": 32, "BLOCKS": 2}
    )
    tile = {**sizes, "DEPTH": 32, "num_warps": 4, "num_stages": 3}
    triton_kernels.triangle[(-(-widest // tile["COLUMNS"]), -(-task.rows // tile["ROWS"]), len(chains))](
        **common, factors=tuple(task.weights[i]["f"][s.first] for i, s in zip(chains, stages, strict=True)),
        **task.chain_numbers(chains, "dims", "scales", "bounds"), num_rows=task.rows, COUNT=len(chains),
        WIDTH=task.width(chains), UPPER=upper, BACKWARD=backward, PRECISION=task.precision, **tile,
    )  # fmt: skip


def _planar_arguments(
    task: GroupTask, chains: Sequence[int], stages: Sequence[Stage], values: Any
) -> tuple[Arguments, Arguments]:
    """Returns the tile of a program, and the arguments that all three kernels of planar runs share."""
    pairs, width = list(zip(chains, stages, strict=True)), task.width(chains)
    rows = min(max(1, 2048 // width), next_power_of_two(task.rows, 1, 16))
    rows = max(rows, min(8192 // width, next_power_of_two(task.rows // 512, 1, 64)))
    return {"ROWS": rows, "num_warps": 8 if rows * width > 4096 else 4}, {
        "ws": tuple(task.weights[i]["w"][s.first :] for i, s in pairs),
        "us": tuple(task.weights[i]["u"][s.first :] for i, s in pairs),
        "activations": tuple(values[i][1][s.first :] for i, s in pairs),
        "sizes": tuple(stage.size for stage in stages),
        **task.chain_numbers(chains, "dims", "margins"),
        "num_rows": task.rows,
        "COUNT": len(chains),
        "WIDTH": width,
    }


def _small_arguments(task: GroupTask, chains: Sequence[int]) -> Arguments:
    """Returns the arguments that both kernels of small chains share."""
    bits = [[int(planar) for planar, n in task.shapes[i].runs for _ in range(n)] for i in chains]
    width = task.width(chains)
    return {
        **task.chain_numbers(chains, "dims", "scales", "margins", "bounds"),
        "ws": task.chain_weights(chains, "w"),
        "us": task.chain_weights(chains, "u"),
        "factors": task.chain_weights(chains, "f"),
        "codes": tuple(sum(bit << m for m, bit in enumerate(chain_bits)) for chain_bits in bits),
        "lengths": tuple(len(chain_bits) for chain_bits in bits),
        "COUNT": len(chains),
        "WIDTH": width,
        "ROWS": SMALL_ROWS,
        "num_warps": width // 4,
        # Plain float32 products of wider rows exceed the registers.
        "PRECISION": "ieee" if width == 16 else "tf32x3",
    }


def _select(items: Sequence[Tensor], chains: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns the items of some chains."""
    return tuple(items[i] for i in chains)


def _matrices(name: str, tensors: Sequence[Tensor]) -> Arguments:
    """Returns the arguments of matrices and their row strides."""
    return {f"{name}s": tuple(tensors), f"{name}_strides": tuple(tensor.stride(0) for tensor in tensors)}


def _gradient_views(task: GroupTask, small: Tensor, large: Tensor) -> list[dict[str, Tensor]]:
    """Returns for each chain the views of its parameters in the flat tensors of small and large chains."""
    weights, begin = task.all_weights, 0
    views: dict[int, Tensor] = {}
    for place in flat_order(task.shapes):
        flat, offset = (small, 0) if begin < len(small) else (large, len(small))
        end = begin + weights[place].numel()
        views[place] = flat[begin - offset : end - offset].view(weights[place].shape)
        begin = end
    return by_chain(task.shapes, [views[place] for place in range(len(weights))])
