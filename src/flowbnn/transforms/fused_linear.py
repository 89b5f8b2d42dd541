"""Triton kernels of the LU maps on long vectors, never formed. See :mod:`flowbnn.transforms.fused_kernels`."""
# mypy: disable-error-code="no-untyped-def"

from flowbnn.transforms.fused_kernels import number, pick, slope, tanh, tl, triton

__all__ = ["factors_backward", "triangle"]


@triton.jit
def triangle(
    zs, z_strides, xs, x_strides, factors, totals, dims, fresh, scales, bounds, rows_in_all,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    UPPER: tl.constexpr, BACKWARD: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    r"""One triangular factor of every flow: :math:`x = z T^\top`, or :math:`x = z T` on the way back, blocks of zeros left out."""
    flow = tl.program_id(2)
    dim, bound = number(dims, flow, COUNT), number(bounds, flow, COUNT)
    first = tl.program_id(0) * COLUMNS
    if first < dim:
        factors_at = pick(factors, flow, COUNT)
        rows, columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
        here, inside = rows < rows_in_all, columns < dim
        at = rows[:, None].to(tl.int64)
        z_at = pick(zs, flow, COUNT) + at * number(z_strides, flow, COUNT)
        start, stop = 0, tl.minimum(first + COLUMNS, dim)
        if UPPER != BACKWARD:  # the summed index runs above that of the column
            start, stop = (first // DEPTH) * DEPTH, tl.minimum(dim, dim)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(start, stop, DEPTH):
            summed = begin + tl.arange(0, DEPTH)
            z = tl.load(z_at + summed[None, :], mask=here[:, None] & (summed < dim)[None, :], other=0.0)
            if UPPER != BACKWARD:
                keep = (summed[:, None] > columns[None, :]) & (summed < dim)[:, None]
            else:
                keep = (summed[:, None] < columns[None, :]) & inside[None, :]
            if BACKWARD:
                places = summed[:, None] * dim + columns[None, :]
            else:
                places = columns[None, :] * dim + summed[:, None]
            part = tl.load(factors_at + places, mask=keep & inside[None, :], other=0.0)
            total = tl.dot(z, part, total, input_precision="tf32x3")
        both = here[:, None] & inside[None, :]
        diagonal = tl.load(z_at + columns[None, :], mask=both, other=0.0)
        if UPPER:
            entry = tl.load(factors_at + columns * (dim + 1), mask=inside, other=0.0)
            diagonal = diagonal * tl.exp(bound * tanh(entry / bound))[None, :]
        x_at = pick(xs, flow, COUNT) + at * number(x_strides, flow, COUNT)
        tl.store(x_at + columns[None, :], total * number(scales, flow, COUNT) + diagonal, mask=both)
        if LOG_DET and UPPER and not BACKWARD:  # noqa: SIM102  (decided when the kernel is compiled)
            if first == 0:
                every = tl.arange(0, WIDTH)
                logs = bound * tanh(
                    tl.load(factors_at + every * (dim + 1), mask=every < dim, other=0.0) / bound
                )
                total_at = pick(totals, flow, COUNT) + rows
                before = tl.load(total_at, mask=tl.where(here, number(fresh, flow, COUNT), 1) == 0, other=0.0)
                tl.store(total_at, before + tl.sum(logs, 0), mask=here)


@triton.jit
def factors_backward(
    zs, z_strides, middles, of_middles, gs, g_strides, factors, of_factors, totals, dims, scales, bounds,
    rows_in_all, total_stride,
    COUNT: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    r"""Gradients to the factors of every LU map, a square block a program: :math:`\bar y^\top z` in each triangle."""
    one = tl.program_id(2)
    dim, bound, scale = number(dims, one, COUNT), number(bounds, one, COUNT), number(scales, one, COUNT)
    top, left = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    if (top < dim) & (left < dim):
        across, down = top + tl.arange(0, SIDE), left + tl.arange(0, SIDE)
        in_across, in_down = across < dim, down < dim
        upper, lower = tl.zeros([SIDE, SIDE], tl.float32), tl.zeros([SIDE, SIDE], tl.float32)
        of_total = tl.zeros([DEPTH], tl.float32)
        z_at, middle_at = pick(zs, one, COUNT), pick(middles, one, COUNT)
        g_at, of_middle_at = pick(gs, one, COUNT), pick(of_middles, one, COUNT)
        z_stride, g_stride = number(z_strides, one, COUNT), number(g_strides, one, COUNT)
        for start in range(0, rows_in_all, DEPTH):
            rows = start + tl.arange(0, DEPTH)
            here, at = rows < rows_in_all, rows.to(tl.int64)
            left_mask, right_mask = in_across[:, None] & here[None, :], here[:, None] & in_down[None, :]
            if left >= top:
                g = tl.load(of_middle_at + at[None, :] * dim + across[:, None], mask=left_mask, other=0.0)
                z = tl.load(z_at + at[:, None] * z_stride + down[None, :], mask=right_mask, other=0.0)
                upper = tl.dot(g, z, upper, input_precision="tf32x3")
            if left <= top:
                g = tl.load(g_at + at[None, :] * g_stride + across[:, None], mask=left_mask, other=0.0)
                z = tl.load(middle_at + at[:, None] * dim + down[None, :], mask=right_mask, other=0.0)
                lower = tl.dot(g, z, lower, input_precision="tf32x3")
            if LOG_DET:
                of_total += tl.load(pick(totals, one, COUNT) + rows * total_stride, mask=here, other=0.0)
        found = tl.where(down[None, :] > across[:, None], upper, lower) * scale
        places, both = across[:, None] * dim + down[None, :], in_across[:, None] & in_down[None, :]
        if left == top:
            same = down[None, :] == across[:, None]
            entry = tl.load(pick(factors, one, COUNT) + places, mask=both & same, other=0.0) / bound
            of_log = upper * tl.exp(bound * tanh(entry)) + tl.sum(of_total, 0)
            found = tl.where(same, of_log * slope(entry), found)
        tl.store(pick(of_factors, one, COUNT) + places, found, mask=both)
