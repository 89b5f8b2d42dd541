"""Triton kernels of the LU maps on long vectors, never formed. See :mod:`flowbnn.transforms.fused_kernels`."""
# mypy: disable-error-code="no-untyped-def"

from flowbnn.transforms.fused_kernels import number, pick, slope, tanh, tl, triton

__all__ = ["factors_backward", "triangle"]


@triton.jit
def triangle(
    zs, z_strides, xs, x_strides, factors, totals, dims, fresh, scales, bounds, rows_in_all,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr, UPPER: tl.constexpr, BACKWARD: tl.constexpr, LOG_DET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r"""One triangular factor of every flow: :math:`x = z T^\top`, or :math:`x = z T` on the way back, blocks of zeros left out.

    ``BLOCKS`` products of depth ``DEPTH`` are started together: three passes of TF32 in a row take their time. The triangle is cut out
    of what was loaded, because a mask that changes from number to number would have them loaded one by one.
    """
    flow = tl.program_id(2)
    dim, bound = number(dims, flow, COUNT), number(bounds, flow, COUNT)
    first = tl.program_id(0) * COLUMNS
    if first < dim:
        factors_at = pick(factors, flow, COUNT)
        rows, columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
        here, inside = rows < rows_in_all, columns < dim
        both = here[:, None] & inside[None, :]
        at = rows[:, None].to(tl.int64)
        z_at = pick(zs, flow, COUNT) + at * number(z_strides, flow, COUNT)
        if BLOCKS > 1:  # in a hurry: asked for now, although needed last
            diagonal = tl.load(z_at + columns[None, :], mask=both, other=0.0)
        if UPPER:
            entry = tl.load(factors_at + columns * (dim + 1), mask=inside, other=0.0)
        start, stop = 0, tl.minimum(first + COLUMNS, dim)
        if UPPER != BACKWARD:  # the summed index runs above that of the column
            start, stop = (first // DEPTH) * DEPTH, tl.minimum(dim, dim)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(start, stop, DEPTH * BLOCKS):
            for block in tl.static_range(BLOCKS):
                summed = begin + block * DEPTH + tl.arange(0, DEPTH)
                z = tl.load(z_at + summed[None, :], mask=here[:, None] & (summed < dim)[None, :], other=0.0)
                if BACKWARD:
                    places = summed[:, None] * dim + columns[None, :]
                else:
                    places = columns[None, :] * dim + summed[:, None]
                part = tl.load(factors_at + places, mask=(summed < dim)[:, None] & inside[None, :], other=0.0)
                if UPPER != BACKWARD:
                    part = tl.where(summed[:, None] > columns[None, :], part, 0.0)
                else:
                    part = tl.where(summed[:, None] < columns[None, :], part, 0.0)
                total = tl.dot(z, part, total, input_precision=PRECISION)
        if BLOCKS == 1:
            diagonal = tl.load(z_at + columns[None, :], mask=both, other=0.0)
        if UPPER:
            diagonal = diagonal * tl.exp(bound * tanh(entry / bound))[None, :]
        x_at = pick(xs, flow, COUNT) + at * number(x_strides, flow, COUNT)
        tl.store(x_at + columns[None, :], total * number(scales, flow, COUNT) + diagonal, mask=both)
        if LOG_DET and UPPER and not BACKWARD:  # noqa: SIM102  (decided when the kernel is compiled)
            if first + COLUMNS >= dim:  # who had the least to add up
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
    rows_in_all, rows_each, side, total_stride, part_stride,
    COUNT: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, LOG_DET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r"""Gradients to the factors of every LU map, a square block of one triangle a program: :math:`\bar y^\top z`.

    Programs ``2 i`` and ``2 i + 1`` of the last axis work on the upper and the lower triangle of map ``i``; programs ``p`` of the
    second take ``rows_each`` rows and write at ``p * part_stride`` what these give.
    """
    one, is_upper = tl.program_id(2) // 2, tl.program_id(2) % 2 == 0
    dim, bound = number(dims, one, COUNT), number(bounds, one, COUNT)
    top, left = (tl.program_id(0) // side) * SIDE, (tl.program_id(0) % side) * SIDE
    if (top < dim) & (left < dim) & ((left == top) | ((left > top) == is_upper)):
        across, down = top + tl.arange(0, SIDE), left + tl.arange(0, SIDE)
        in_across, in_down = across < dim, down < dim
        z_at, z_stride = pick(zs, one, COUNT), number(z_strides, one, COUNT)
        g_at, g_stride = pick(gs, one, COUNT), number(g_strides, one, COUNT)
        if is_upper:
            g_at = pick(of_middles, one, COUNT)
        else:
            z_at = pick(middles, one, COUNT)
        g_stride, z_stride = tl.where(is_upper, dim, g_stride), tl.where(is_upper, z_stride, dim)
        begin = tl.program_id(1) * rows_each
        end = tl.minimum(begin + rows_each, rows_in_all)
        found = tl.zeros([SIDE, SIDE], tl.float32)
        for start in range(begin, end, DEPTH):
            rows = start + tl.arange(0, DEPTH)
            here, at = rows < end, rows.to(tl.int64)
            g = tl.load(
                g_at + at[None, :] * g_stride + across[:, None],
                mask=in_across[:, None] & here[None, :],
                other=0.0,
            )
            z = tl.load(
                z_at + at[:, None] * z_stride + down[None, :],
                mask=here[:, None] & in_down[None, :],
                other=0.0,
            )
            found = tl.dot(g, z, found, input_precision=PRECISION)
        places, both = across[:, None] * dim + down[None, :], in_across[:, None] & in_down[None, :]
        keep = down[None, :] < across[:, None]
        into = pick(of_factors, one, COUNT) + tl.program_id(1).to(tl.int64) * part_stride
        if is_upper:
            keep = down[None, :] > across[:, None]
            if left == top:
                of_total = tl.zeros([4 * SIDE], tl.float32)
                if LOG_DET:
                    for start in range(begin, end, 4 * SIDE):
                        rows = start + tl.arange(0, 4 * SIDE)
                        total_at = pick(totals, one, COUNT) + rows * total_stride
                        of_total += tl.load(total_at, mask=rows < end, other=0.0)
                same = down[None, :] == across[:, None]
                entry = tl.load(pick(factors, one, COUNT) + across * (dim + 1), mask=in_across, other=0.0)
                entry = entry / bound
                own = tl.sum(tl.where(same, found, 0.0), 1)
                of_entry = (own * tl.exp(bound * tanh(entry)) + tl.sum(of_total, 0)) * slope(entry)
                tl.store(into + across * (dim + 1), of_entry, mask=in_across)
        tl.store(into + places, found * number(scales, one, COUNT), mask=both & keep)
