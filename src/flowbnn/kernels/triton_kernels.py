"""Triton kernels of planar and LU maps. One launch works on many chains, which are called flows below.

A kernel receives tuples with one entry for each flow (pointers, sizes, strides), and a program picks the entry of its flow. Sizes
that differ between flows are masked; the largest one, as a power of two, is compiled in. The formulas are those of
:mod:`flowbnn.kernels.reference`. Every sum has a fixed order, so that two runs agree to the last bit. Names that begin with ``grad_``
are gradients, names that end with ``_ptr`` are pointers.
"""

from types import SimpleNamespace

# mypy: disable-error-code="no-untyped-def"


try:
    import triton
    import triton.language as tl
except ImportError:  # documentation and doctests import every file without Triton
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=None)


@triton.jit
def ptr(values, index, COUNT: tl.constexpr):
    """Returns the pointer at ``index``."""
    chosen = values[0]
    for i in tl.static_range(1, COUNT):
        if index == i:
            chosen = values[i]
    return chosen


@triton.jit
def num(values, index, COUNT: tl.constexpr):
    """Returns the number at ``index``."""
    chosen = values[0]
    for i in tl.static_range(1, COUNT):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def tanh(a):
    """Returns tanh with an error of two units in the last place: a polynomial (Cephes) near zero, where quotients of exponentials
    cancel.
    """
    size, square = tl.abs(a), a * a
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * a + a
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < 0.625, near, tl.where(a < 0.0, -far, far))


@triton.jit
def slope(a):
    r"""Returns :math:`\tanh'(a)`, exact in the tails."""
    decay = tl.exp(-2.0 * tl.abs(a))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def constraint(w, u, margin):
    r"""Returns :math:`\hat u`, :math:`1 + w^\top \hat u`, the coefficients of :math:`w` in :math:`\hat u`, and what the derivative
    needs.
    """
    square, product = tl.sum(w * w, 0), tl.sum(w * u, 0)
    decay = tl.exp(-tl.abs(product))
    one_plus_decay = 1.0 + decay
    # log(1 + decay), corrected for the rounding of the sum
    rounded = tl.where(one_plus_decay == 1.0, 1.0, one_plus_decay - 1.0)
    log = tl.where(one_plus_decay == 1.0, decay, tl.log(one_plus_decay) * (decay / rounded))
    soft = tl.maximum(product, 0.0) + log
    squeeze = tl.maximum(soft, margin)
    correction = squeeze - 1.0 - product
    divisor = tl.where(correction < 0.0, tl.maximum(square, 1e-3), square)
    square_ratio, step = square / divisor, correction / divisor
    u_hat = u + step * w
    remainder = (1.0 - square_ratio) * product
    deficit = square_ratio * (squeeze - 1.0) + remainder - tl.sum(w * u_hat, 0)
    restoration = deficit / tl.maximum(square, 1e-37)
    total = square_ratio * squeeze + (1.0 - square_ratio) + remainder
    unclamped = (correction >= 0.0) | (square >= 1e-3)
    sigmoid = tl.where(product >= 0.0, 1.0, decay) / one_plus_decay
    soft_slope = tl.where(soft >= margin, sigmoid, 0.0)
    return (
        u_hat + restoration * w,
        total,
        step,
        restoration,
        correction,
        divisor,
        square_ratio,
        unclamped,
        soft_slope,
    )


@triton.jit
def constraint_backward(
    grad_step, grad_total, step, correction, divisor, square_ratio, unclamped, soft_slope
):
    r"""Returns the gradients to :math:`w^\top u` and :math:`w^\top w`."""
    grad_correction = grad_step / divisor
    grad_square_ratio = grad_total * correction
    grad_divisor = (grad_step * step + grad_square_ratio * square_ratio) / divisor
    grad_square = grad_square_ratio / divisor - tl.where(unclamped, grad_divisor, 0.0)
    grad_product = (
        grad_total * (1.0 - square_ratio)
        - grad_correction
        + (grad_total * square_ratio + grad_correction) * soft_slope
    )
    return grad_product, grad_square


@triton.jit
def planar_forward(
    zs, z_strides, xs, x_strides, ws, us, bs, activations, log_dets, dims, sizes, is_first, margins, num_rows,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    """Applies a run of planar maps of every flow. ``is_first`` is 1 for flows whose log-determinant begins here."""
    flow = tl.program_id(1)
    w_ptr, u_ptr, b_ptr = ptr(ws, flow, COUNT), ptr(us, flow, COUNT), ptr(bs, flow, COUNT)
    a_ptr, dim, margin = (
        ptr(activations, flow, COUNT),
        num(dims, flow, COUNT),
        num(margins, flow, COUNT),
    )
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row_mask, col_mask = rows < num_rows, columns < dim
    mask = row_mask[:, None] & col_mask[None, :]
    offsets = rows[:, None].to(tl.int64)
    z_ptr = ptr(zs, flow, COUNT) + offsets * num(z_strides, flow, COUNT) + columns[None, :]
    z = tl.load(z_ptr, mask=mask, other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    for k in range(num(sizes, flow, COUNT)):
        w = tl.load(w_ptr + k * dim + columns, mask=col_mask, other=0.0)
        u = tl.load(u_ptr + k * dim + columns, mask=col_mask, other=0.0)
        u_hat, squeeze, _, _, _, _, _, _, _ = constraint(w, u, margin)
        a = tl.sum(z * w[None, :], 1) + tl.load(b_ptr + k)
        tl.store(a_ptr + k * num_rows + rows, a, mask=row_mask)
        tanh_a = tanh(a)
        if LOG_DET:
            total += tl.log(tanh_a * tanh_a + slope(a) * squeeze)
        z += tanh_a[:, None] * u_hat[None, :]
    tl.store(ptr(xs, flow, COUNT) + offsets * num(x_strides, flow, COUNT) + columns[None, :], z, mask=mask)
    if LOG_DET:
        total_ptr = ptr(log_dets, flow, COUNT) + rows
        total += tl.load(total_ptr, mask=tl.where(row_mask, num(is_first, flow, COUNT), 1) == 0, other=0.0)
        tl.store(total_ptr, total, mask=row_mask)


@triton.jit
def planar_backward(
    grad_outs, grad_out_strides, grad_zs, grad_z_strides, ws, us, activations, scalars, log_dets, dims, sizes, margins,
    num_rows, total_stride,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    r"""Computes the gradient of a run of planar maps to its input.

    ``scalars`` ``[3, size, rows]`` receives three numbers for each map and row: the gradient to :math:`a`, the gradient to
    :math:`1 + w^\top \hat u`, and the product of :math:`w` with the gradient to the output of the map.
    """
    flow = tl.program_id(1)
    w_ptr, u_ptr, a_ptr = (
        ptr(ws, flow, COUNT),
        ptr(us, flow, COUNT),
        ptr(activations, flow, COUNT),
    )
    dim, size, margin = (
        num(dims, flow, COUNT),
        num(sizes, flow, COUNT),
        num(margins, flow, COUNT),
    )
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row_mask, col_mask = rows < num_rows, columns < dim
    mask = row_mask[:, None] & col_mask[None, :]
    offsets = rows[:, None].to(tl.int64)
    grad_ptr = ptr(grad_outs, flow, COUNT) + offsets * num(grad_out_strides, flow, COUNT) + columns[None, :]
    grad = tl.load(grad_ptr, mask=mask, other=0.0)
    grad_total = tl.zeros([ROWS], tl.float32)
    if LOG_DET:
        grad_total = tl.load(ptr(log_dets, flow, COUNT) + rows * total_stride, mask=row_mask, other=0.0)
    scalars_ptr = ptr(scalars, flow, COUNT) + rows
    for i in range(size):
        k = size - 1 - i
        w = tl.load(w_ptr + k * dim + columns, mask=col_mask, other=0.0)
        u = tl.load(u_ptr + k * dim + columns, mask=col_mask, other=0.0)
        u_hat, squeeze, _, _, _, _, _, _, _ = constraint(w, u, margin)
        a = tl.load(a_ptr + k * num_rows + rows, mask=row_mask, other=0.0)
        tanh_a, slope_a = tanh(a), slope(a)
        grad_a = tl.sum(grad * u_hat[None, :], 1) * slope_a
        if LOG_DET:
            ratio = grad_total * slope_a / (tanh_a * tanh_a + slope_a * squeeze)
            grad_a += ratio * tanh_a * (2.0 - 2.0 * squeeze)
            tl.store(scalars_ptr + (size + k) * num_rows, ratio, mask=row_mask)
        tl.store(scalars_ptr + k * num_rows, grad_a, mask=row_mask)
        tl.store(scalars_ptr + (2 * size + k) * num_rows, tl.sum(grad * w[None, :], 1), mask=row_mask)
        grad += grad_a[:, None] * w[None, :]
    grad_z_ptr = ptr(grad_zs, flow, COUNT) + offsets * num(grad_z_strides, flow, COUNT) + columns[None, :]
    tl.store(grad_z_ptr, grad, mask=mask)


@triton.jit
def _sum_tanh_grad(a_ptr, grad_a_ptr, begin, end, LENGTH: tl.constexpr):
    r"""Returns the sum over rows of :math:`\tanh(a_{jn})` times the gradient to :math:`a_{kn}`."""
    total = tl.zeros([LENGTH], tl.float32)
    for start in range(begin, end, LENGTH):
        rows = start + tl.arange(0, LENGTH)
        tanh_a = tanh(tl.load(a_ptr + rows, mask=rows < end, other=0.0))
        total += tanh_a * tl.load(grad_a_ptr + rows, mask=rows < end, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _sum_over_rows(
    grad_ptr, z_ptr, a_ptr, scalars_ptr, grad_stride, z_stride, in_range, begin, end, k, size, num_rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    r"""Returns sums over rows for planar map ``k``: gradients to :math:`\hat u`, ``w``, ``b``, the step and
    :math:`1 + w^\top \hat u`.
    """
    sum_grad, sum_z = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    grad_b, grad_step = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    grad_total = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        row_mask, offsets = rows < end, rows[:, None].to(tl.int64)
        mask = row_mask[:, None] & in_range[None, :]
        tanh_a = tanh(tl.load(a_ptr + k * num_rows + rows, mask=row_mask, other=0.0))
        grad_a = tl.load(scalars_ptr + k * num_rows + rows, mask=row_mask, other=0.0)
        grad_b += grad_a
        grad_step += tanh_a * tl.load(
            scalars_ptr + (2 * size + k) * num_rows + rows, mask=row_mask, other=0.0
        )
        if LOG_DET:
            grad_total += tl.load(scalars_ptr + (size + k) * num_rows + rows, mask=row_mask, other=0.0)
        sum_grad += tanh_a[:, None] * tl.load(grad_ptr + offsets * grad_stride, mask=mask, other=0.0)
        sum_z += grad_a[:, None] * tl.load(z_ptr + offsets * z_stride, mask=mask, other=0.0)
    return (
        tl.sum(sum_grad, 0),
        tl.sum(sum_z, 0),
        tl.sum(grad_b, 0),
        tl.sum(grad_step, 0),
        tl.sum(grad_total, 0),
    )


@triton.jit
def planar_weights(
    grad_outs, grad_out_strides, zs, z_strides, ws, us, activations, scalars, grad_ws, grad_us, grad_bs, dims, sizes, margins,
    num_rows, rows_per_block, max_size, block_stride,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    """Computes the gradients to ``w``, ``u`` and ``b`` of every run, with one program for each block of columns of each map.

    Sums over rows are split into blocks of ``rows_per_block``. Program ``p`` of the second axis writes its sums at ``p *
    block_stride``.
    """
    run, k = tl.program_id(2) // max_size, tl.program_id(2) % max_size
    dim, size, margin = num(dims, run, COUNT), num(sizes, run, COUNT), num(margins, run, COUNT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * rows_per_block
    end = tl.minimum(begin + rows_per_block, num_rows)
    if (k < size) & (tl.program_id(0) * COLUMNS < dim):
        w_ptr, u_ptr = ptr(ws, run, COUNT), ptr(us, run, COUNT)
        a_ptr, scalars_ptr = ptr(activations, run, COUNT), ptr(scalars, run, COUNT)
        grad_ptr, z_ptr = (
            ptr(grad_outs, run, COUNT) + columns[None, :],
            ptr(zs, run, COUNT) + columns[None, :],
        )
        grad_stride, z_stride = num(grad_out_strides, run, COUNT), num(z_strides, run, COUNT)
        block_offset = tl.program_id(1).to(tl.int64) * block_stride
        in_range = columns < dim
        grad_u_hat, grad_w, grad_b, grad_step, grad_total = _sum_over_rows(
            grad_ptr, z_ptr, a_ptr, scalars_ptr, grad_stride, z_stride, in_range, begin, end, k, size, num_rows,
            ROWS, COLUMNS, LOG_DET,
        )  # fmt: skip
        all_columns = tl.arange(0, WIDTH)
        for later in range(k + 1, size):
            total = _sum_tanh_grad(a_ptr + k * num_rows, scalars_ptr + later * num_rows, begin, end, 256)
            grad_u_hat += total * tl.load(w_ptr + later * dim + columns, mask=in_range, other=0.0)
        for previous in range(k):
            total = _sum_tanh_grad(a_ptr + previous * num_rows, scalars_ptr + k * num_rows, begin, end, 256)
            w = tl.load(w_ptr + previous * dim + all_columns, mask=all_columns < dim, other=0.0)
            u = tl.load(u_ptr + previous * dim + all_columns, mask=all_columns < dim, other=0.0)
            _, _, step, restoration, _, _, _, _, _ = constraint(w, u, margin)
            w = tl.load(w_ptr + previous * dim + columns, mask=in_range, other=0.0)
            u = tl.load(u_ptr + previous * dim + columns, mask=in_range, other=0.0)
            grad_w += total * (u + step * w + restoration * w)
        w = tl.load(w_ptr + k * dim + all_columns, mask=all_columns < dim, other=0.0)
        u = tl.load(u_ptr + k * dim + all_columns, mask=all_columns < dim, other=0.0)
        _, _, step, _, correction, divisor, square_ratio, unclamped, soft_slope = constraint(w, u, margin)
        grad_dot, grad_square = constraint_backward(
            grad_step, grad_total, step, correction, divisor, square_ratio, unclamped, soft_slope
        )
        w = tl.load(w_ptr + k * dim + columns, mask=in_range, other=0.0)
        u = tl.load(u_ptr + k * dim + columns, mask=in_range, other=0.0)
        grad_w += step * grad_u_hat + grad_dot * u + 2.0 * grad_square * w
        position = block_offset + k * dim + columns
        tl.store(ptr(grad_ws, run, COUNT) + position, grad_w, mask=in_range)
        tl.store(ptr(grad_us, run, COUNT) + position, grad_u_hat + grad_dot * w, mask=in_range)
        if tl.program_id(0) == 0:
            tl.store(ptr(grad_bs, run, COUNT) + block_offset + k, grad_b)


@triton.jit
def _load_triangle(f_ptr, depth, columns, dim, in_range, UPPER: tl.constexpr, BACKWARD: tl.constexpr):
    """Returns a tile of a strict triangle ``[depth, columns]``.

    The triangle is cut out after the load, because a mask that changes from number to number would load them one by one.
    """
    if BACKWARD:
        positions = depth[:, None] * dim + columns[None, :]
    else:
        positions = columns[None, :] * dim + depth[:, None]
    tile = tl.load(f_ptr + positions, mask=(depth < dim)[:, None] & in_range[None, :], other=0.0)
    if UPPER != BACKWARD:
        tile = tl.where(depth[:, None] > columns[None, :], tile, 0.0)
    else:
        tile = tl.where(depth[:, None] < columns[None, :], tile, 0.0)
    return tile


@triton.jit
def triangle(
    zs, z_strides, xs, x_strides, factors, log_dets, dims, is_first, scales, bounds, num_rows,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr, UPPER: tl.constexpr, BACKWARD: tl.constexpr, LOG_DET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r"""Applies one triangular factor of every flow: :math:`x = z T^\top`, or :math:`x = z T` in the backward pass, without blocks of
    zeros.

    ``BLOCKS`` products of depth ``DEPTH`` are started together, because three passes of TF32 have a long latency.
    """
    flow = tl.program_id(2)
    dim, bound = num(dims, flow, COUNT), num(bounds, flow, COUNT)
    first = tl.program_id(0) * COLUMNS
    if first < dim:
        f_ptr = ptr(factors, flow, COUNT)
        rows, columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
        row_mask, in_range = rows < num_rows, columns < dim
        mask = row_mask[:, None] & in_range[None, :]
        offsets = rows[:, None].to(tl.int64)
        z_ptr = ptr(zs, flow, COUNT) + offsets * num(z_strides, flow, COUNT)
        if BLOCKS > 1:  # loaded early, although needed last, to hide the latency
            diagonal = tl.load(z_ptr + columns[None, :], mask=mask, other=0.0)
        if UPPER:
            entry = tl.load(f_ptr + columns * (dim + 1), mask=in_range, other=0.0)
        start, stop = 0, tl.minimum(first + COLUMNS, dim)
        if UPPER != BACKWARD:  # the sum runs over indices above that of the column
            start, stop = (first // DEPTH) * DEPTH, tl.minimum(dim, dim)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(start, stop, DEPTH * BLOCKS):
            for block in tl.static_range(BLOCKS):
                depth = begin + block * DEPTH + tl.arange(0, DEPTH)
                z = tl.load(
                    z_ptr + depth[None, :], mask=row_mask[:, None] & (depth < dim)[None, :], other=0.0
                )
                tile = _load_triangle(f_ptr, depth, columns, dim, in_range, UPPER, BACKWARD)
                total = tl.dot(z, tile, total, input_precision=PRECISION)
        if BLOCKS == 1:
            diagonal = tl.load(z_ptr + columns[None, :], mask=mask, other=0.0)
        if UPPER:
            diagonal = diagonal * tl.exp(bound * tanh(entry / bound))[None, :]
        x_ptr = ptr(xs, flow, COUNT) + offsets * num(x_strides, flow, COUNT)
        tl.store(x_ptr + columns[None, :], total * num(scales, flow, COUNT) + diagonal, mask=mask)
        if LOG_DET and UPPER and not BACKWARD:  # noqa: SIM102  (decided when the kernel is compiled)
            if first + COLUMNS >= dim:  # the program with the shortest sum
                all_columns = tl.arange(0, WIDTH)
                logs = bound * tanh(
                    tl.load(f_ptr + all_columns * (dim + 1), mask=all_columns < dim, other=0.0) / bound
                )
                total_ptr = ptr(log_dets, flow, COUNT) + rows
                previous = tl.load(
                    total_ptr, mask=tl.where(row_mask, num(is_first, flow, COUNT), 1) == 0, other=0.0
                )
                tl.store(total_ptr, previous + tl.sum(logs, 0), mask=row_mask)


@triton.jit
def _outer_product(
    grad_ptr, z_ptr, grad_stride, z_stride, out_index, in_index, out_mask, in_mask, begin, end,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r"""Returns a square block of :math:`\bar y^\top z`, summed over the rows from ``begin`` to ``end``."""
    result = tl.zeros([SIDE, SIDE], tl.float32)
    for start in range(begin, end, DEPTH):
        rows = start + tl.arange(0, DEPTH)
        row_mask, offsets = rows < end, rows.to(tl.int64)
        grad_ptrs = grad_ptr + offsets[None, :] * grad_stride + out_index[:, None]
        grad = tl.load(grad_ptrs, mask=out_mask[:, None] & row_mask[None, :], other=0.0)
        z_ptrs = z_ptr + offsets[:, None] * z_stride + in_index[None, :]
        z = tl.load(z_ptrs, mask=row_mask[:, None] & in_mask[None, :], other=0.0)
        result = tl.dot(grad, z, result, input_precision=PRECISION)
    return result


@triton.jit
def factors_backward(
    zs, z_strides, middles, grad_middles, grad_outs, grad_out_strides, factors, grad_factors, log_dets, dims, scales, bounds,
    num_rows, rows_per_block, side, total_stride, block_stride,
    COUNT: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, LOG_DET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r"""Computes the gradients to the factors of every LU map, :math:`\bar y^\top z`, one square block of one triangle for each
    program.

    Programs ``2 i`` and ``2 i + 1`` of the last axis work on the upper and the lower triangle of map ``i``. Program ``p`` of the
    second axis sums over ``rows_per_block`` rows and writes its sums at ``p * block_stride``.
    """
    map_index, is_upper = tl.program_id(2) // 2, tl.program_id(2) % 2 == 0
    dim, bound = num(dims, map_index, COUNT), num(bounds, map_index, COUNT)
    top, left = (tl.program_id(0) // side) * SIDE, (tl.program_id(0) % side) * SIDE
    if (top < dim) & (left < dim) & ((left == top) | ((left > top) == is_upper)):
        out_index, in_index = top + tl.arange(0, SIDE), left + tl.arange(0, SIDE)
        out_mask, in_mask = out_index < dim, in_index < dim
        z_ptr, z_stride = ptr(zs, map_index, COUNT), num(z_strides, map_index, COUNT)
        grad_ptr, grad_stride = (
            ptr(grad_outs, map_index, COUNT),
            num(grad_out_strides, map_index, COUNT),
        )
        if is_upper:
            grad_ptr = ptr(grad_middles, map_index, COUNT)
        else:
            z_ptr = ptr(middles, map_index, COUNT)
        grad_stride, z_stride = tl.where(is_upper, dim, grad_stride), tl.where(is_upper, z_stride, dim)
        begin = tl.program_id(1) * rows_per_block
        end = tl.minimum(begin + rows_per_block, num_rows)
        result = _outer_product(
            grad_ptr, z_ptr, grad_stride, z_stride, out_index, in_index, out_mask, in_mask, begin, end, SIDE, DEPTH, PRECISION
        )  # fmt: skip
        positions, mask = out_index[:, None] * dim + in_index[None, :], out_mask[:, None] & in_mask[None, :]
        triangle_mask = in_index[None, :] < out_index[:, None]
        target_ptr = ptr(grad_factors, map_index, COUNT) + tl.program_id(1).to(tl.int64) * block_stride
        if is_upper:
            triangle_mask = in_index[None, :] > out_index[:, None]
            if left == top:
                grad_total = tl.zeros([4 * SIDE], tl.float32)
                if LOG_DET:
                    for start in range(begin, end, 4 * SIDE):
                        rows = start + tl.arange(0, 4 * SIDE)
                        total_ptr = ptr(log_dets, map_index, COUNT) + rows * total_stride
                        grad_total += tl.load(total_ptr, mask=rows < end, other=0.0)
                is_diagonal = in_index[None, :] == out_index[:, None]
                entry = tl.load(
                    ptr(factors, map_index, COUNT) + out_index * (dim + 1), mask=out_mask, other=0.0
                )
                entry = entry / bound
                grad_diag = tl.sum(tl.where(is_diagonal, result, 0.0), 1)
                grad_entry = (grad_diag * tl.exp(bound * tanh(entry)) + tl.sum(grad_total, 0)) * slope(entry)
                tl.store(target_ptr + out_index * (dim + 1), grad_entry, mask=out_mask)
        tl.store(target_ptr + positions, result * num(scales, map_index, COUNT), mask=mask & triangle_mask)
