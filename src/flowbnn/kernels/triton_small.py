"""Triton kernels of whole chains on at most 32 numbers: one launch, in which a program holds all numbers of its rows."""

from flowbnn.kernels.triton_kernels import (
    constraint,
    constraint_backward,
    num,
    ptr,
    slope,
    tanh,
    tl,
    triton,
)

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def _kind(code, m, length, dim):
    """Returns ``dim, 0`` if map ``m`` is planar, ``0, dim`` if it is an LU map, and ``0, 0`` if there is no such map."""
    size = tl.where((m >= 0) & (m < length), dim, 0)
    planar = ((code >> tl.maximum(m, 0)) & 1) * size
    return planar, size - planar


@triton.jit
def _load(w_ptr, u_ptr, f_ptr, dim, planar, linear, TRANSPOSED: tl.constexpr, WIDTH: tl.constexpr):
    """Loads the parameters of a map. They are loaded during the computation of the map before."""
    columns = tl.arange(0, WIDTH)
    w = tl.load(w_ptr + columns, mask=columns < planar, other=0.0)
    u = tl.load(u_ptr + columns, mask=columns < planar, other=0.0)
    row, column = columns[:, None], columns[None, :]
    if TRANSPOSED:
        row, column = columns[None, :], columns[:, None]
    entry = tl.load(f_ptr + row * dim + column, mask=(row < linear) & (column < linear), other=0.0)
    diag = tl.load(f_ptr + columns * (dim + 1), mask=columns < linear, other=0.0)
    return w, u, entry, diag


@triton.jit
def _planar_map(z, w, u, b, margin):
    r"""Returns the image of a planar map, :math:`a = w^\top z + b` and the log-determinants."""
    u_hat, squeeze, _, _, _, _, _, _, _ = constraint(w, u, margin)
    a = tl.sum(z * w[None, :], 1) + b
    tanh_a = tanh(a)
    log_slope = tl.log(tanh_a * tanh_a + slope(a) * squeeze)
    return z + tanh_a[:, None] * u_hat[None, :], a, log_slope


@triton.jit
def _lu_map(z, entry, diag, scale, bound, columns, PRECISION: tl.constexpr):
    r"""Returns the image of an LU map, the vector :math:`U z` between its factors, and the log-diagonal."""
    upper_mask, lower_mask = columns[:, None] > columns[None, :], columns[:, None] < columns[None, :]
    log, entry = bound * tanh(diag / bound), entry * scale
    middle = z * tl.exp(log)[None, :] + tl.dot(z, tl.where(upper_mask, entry, 0.0), input_precision=PRECISION)
    x = middle + tl.dot(middle, tl.where(lower_mask, entry, 0.0), input_precision=PRECISION)
    return x, middle, log


@triton.jit
def small_forward(
    zs, z_strides, xs, x_strides, ws, us, bs, factors, saved, log_dets, dims, codes, lengths, scales, margins, bounds, num_rows,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Applies all maps of every flow. Bit ``m`` of its code is 1 if map ``m`` is planar.

    ``saved`` ``[maps, 2, rows, dim]`` receives the input of each map, and the middle of an LU map or the activations of a planar map.
    """
    flow = tl.program_id(1)
    w_ptr, u_ptr, b_ptr = ptr(ws, flow, COUNT), ptr(us, flow, COUNT), ptr(bs, flow, COUNT)
    f_ptr, saved_ptr = ptr(factors, flow, COUNT), ptr(saved, flow, COUNT)
    dim, code, scale = num(dims, flow, COUNT), num(codes, flow, COUNT), num(scales, flow, COUNT)
    margin, bound = num(margins, flow, COUNT), num(bounds, flow, COUNT)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row_mask, col_mask = rows < num_rows, columns < dim
    mask, offsets = row_mask[:, None] & col_mask[None, :], rows[:, None].to(tl.int64)
    z_ptr = ptr(zs, flow, COUNT) + offsets * num(z_strides, flow, COUNT) + columns[None, :]
    z = tl.load(z_ptr, mask=mask, other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    length = num(lengths, flow, COUNT)
    planar, linear = _kind(code, 0, length, dim)
    next_w, next_u, next_entry, next_diag = _load(w_ptr, u_ptr, f_ptr, dim, planar, linear, True, WIDTH)
    next_b = tl.load(b_ptr, mask=planar > 0, other=0.0)
    for m in range(length):
        w, u, b, entry, diag, is_planar = next_w, next_u, next_b, next_entry, next_diag, planar > 0
        w_ptr += planar
        u_ptr += planar
        b_ptr += tl.where(is_planar, 1, 0)
        f_ptr += linear * dim
        planar, linear = _kind(code, m + 1, length, dim)
        next_w, next_u, next_entry, next_diag = _load(w_ptr, u_ptr, f_ptr, dim, planar, linear, True, WIDTH)
        next_b = tl.load(b_ptr, mask=planar > 0, other=0.0)
        input_ptr = saved_ptr + offsets * dim + columns[None, :]
        second = num_rows * dim
        if SAVE:
            tl.store(input_ptr, z, mask=mask)
        if is_planar:
            z, a, log_slope = _planar_map(z, w, u, b, margin)
            if SAVE:
                tl.store(saved_ptr + second + rows, a, mask=row_mask)
            if LOG_DET:
                total += log_slope
        else:
            z, middle, log = _lu_map(z, entry, diag, scale, bound, columns, PRECISION)
            if SAVE:
                tl.store(input_ptr + second, middle, mask=mask)
            if LOG_DET:
                total += tl.sum(log, 0)
        saved_ptr += 2 * second
    tl.store(ptr(xs, flow, COUNT) + offsets * num(x_strides, flow, COUNT) + columns[None, :], z, mask=mask)
    if LOG_DET:
        tl.store(ptr(log_dets, flow, COUNT) + rows, total, mask=row_mask)


@triton.jit
def _load_saved(saved_ptr, rows, num_rows, dim, planar, linear, WIDTH: tl.constexpr):
    """Loads what :func:`small_forward` saved of a map: its input, its activations and its middle."""
    columns, offsets = tl.arange(0, WIDTH), rows[:, None].to(tl.int64)
    input_ptr, second = saved_ptr + offsets * dim + columns[None, :], num_rows * dim
    row_mask = rows < num_rows
    z = tl.load(input_ptr, mask=row_mask[:, None] & (columns < planar + linear)[None, :], other=0.0)
    a = tl.load(saved_ptr + second + rows, mask=rows < tl.where(planar > 0, num_rows, 0), other=0.0)
    middle = tl.load(input_ptr + second, mask=row_mask[:, None] & (columns < linear)[None, :], other=0.0)
    return z, a, middle


@triton.jit
def _planar_backward(grad, z, a, w, u, margin, grad_total, LOG_DET: tl.constexpr):
    """Returns the gradients of a planar map to its input, ``w``, ``u`` and ``b``."""
    u_hat, squeeze, step, _, correction, divisor, square_ratio, unclamped, soft_slope = constraint(
        w, u, margin
    )
    tanh_a, slope_a = tanh(a), slope(a)
    grad_a = tl.sum(grad * u_hat[None, :], 1) * slope_a
    grad_squeeze = 0.0
    if LOG_DET:
        ratio = grad_total * slope_a / (tanh_a * tanh_a + slope_a * squeeze)
        grad_a += ratio * tanh_a * (2.0 - 2.0 * squeeze)
        grad_squeeze = tl.sum(ratio, 0)
    grad_u_hat = tl.sum(tanh_a[:, None] * grad, 0)
    grad_w = tl.sum(grad_a[:, None] * z, 0)
    grad_dot, grad_square = constraint_backward(
        tl.sum(grad_u_hat * w, 0),
        grad_squeeze,
        step,
        correction,
        divisor,
        square_ratio,
        unclamped,
        soft_slope,
    )
    grad_w = grad_w + step * grad_u_hat + grad_dot * u + 2.0 * grad_square * w
    return grad + grad_a[:, None] * w[None, :], grad_w, grad_u_hat + grad_dot * w, tl.sum(grad_a, 0)


@triton.jit
def _lu_backward(
    grad, z, middle, entry, diag, scale, bound, grad_log_det, columns, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns the gradients of an LU map to its input, to the entries off the diagonal and to the diagonal."""
    upper_mask, lower_mask = columns[None, :] > columns[:, None], columns[None, :] < columns[:, None]
    entry, diag = entry * scale, diag / bound
    size = tl.exp(bound * tanh(diag))
    lower = tl.dot(tl.trans(grad), middle, input_precision=PRECISION)
    grad += tl.dot(grad, tl.where(lower_mask, entry, 0.0), input_precision=PRECISION)
    upper = tl.dot(tl.trans(grad), z, input_precision=PRECISION)
    grad_size = tl.sum(grad * z, 0)
    grad = grad * size[None, :] + tl.dot(grad, tl.where(upper_mask, entry, 0.0), input_precision=PRECISION)
    grad_diag = (grad_size * size + grad_log_det) * slope(diag)
    return grad, tl.where(upper_mask, upper, lower) * scale, grad_diag


@triton.jit
def _store_factors(f_ptr, entry, diag, dim, columns):
    """Stores a matrix from its entries off the diagonal and its diagonal."""
    row, column = columns[:, None], columns[None, :]
    off_diagonal = (row < dim) & (column < dim) & (row != column)
    tl.store(f_ptr + row * dim + column, entry, mask=off_diagonal)
    tl.store(f_ptr + columns * (dim + 1), diag, mask=columns < dim)


@triton.jit
def small_backward(
    grad_outs, grad_out_strides, grad_zs, grad_z_strides, ws, us, factors, saved, log_dets, grad_ws, grad_us, grad_bs, grad_factors,
    dims, codes, lengths, planars, scales, margins, bounds, num_rows, total_stride, block_stride,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients to the inputs, and those to all parameters from a block of rows.

    Block ``p`` writes the gradients to the parameters at ``p * block_stride``.
    """
    flow, block_offset = tl.program_id(1), tl.program_id(0).to(tl.int64) * block_stride
    dim, code, scale = num(dims, flow, COUNT), num(codes, flow, COUNT), num(scales, flow, COUNT)
    margin, bound = num(margins, flow, COUNT), num(bounds, flow, COUNT)
    length, count = num(lengths, flow, COUNT), num(planars, flow, COUNT)
    grad_w_ptr = ptr(grad_ws, flow, COUNT) + block_offset + count * dim
    grad_u_ptr = ptr(grad_us, flow, COUNT) + block_offset + count * dim
    grad_b_ptr = ptr(grad_bs, flow, COUNT) + block_offset + count
    grad_f_ptr = ptr(grad_factors, flow, COUNT) + block_offset + (length - count) * dim * dim
    planar, linear = _kind(code, length - 1, length, dim)
    w_ptr = ptr(ws, flow, COUNT) + count * dim - planar
    u_ptr = ptr(us, flow, COUNT) + count * dim - planar
    f_ptr = ptr(factors, flow, COUNT) + (length - count) * dim * dim - linear * dim
    saved_ptr = ptr(saved, flow, COUNT) + 2 * (length - 1) * num_rows * dim
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row_mask, col_mask = rows < num_rows, columns < dim
    mask, offsets = row_mask[:, None] & col_mask[None, :], rows[:, None].to(tl.int64)
    grad_ptr = ptr(grad_outs, flow, COUNT) + offsets * num(grad_out_strides, flow, COUNT) + columns[None, :]
    grad = tl.load(grad_ptr, mask=mask, other=0.0)
    grad_total = tl.zeros([ROWS], tl.float32)
    if LOG_DET:
        grad_total = tl.load(ptr(log_dets, flow, COUNT) + rows * total_stride, mask=row_mask, other=0.0)
    grad_log_det = tl.sum(grad_total, 0)
    next_w, next_u, next_entry, next_diag = _load(w_ptr, u_ptr, f_ptr, dim, planar, linear, False, WIDTH)
    next_z, next_a, next_middle = _load_saved(saved_ptr, rows, num_rows, dim, planar, linear, WIDTH)
    for i in range(length):
        w, u, entry, diag, is_planar = next_w, next_u, next_entry, next_diag, planar > 0
        z, a, middle = next_z, next_a, next_middle
        planar, linear = _kind(code, length - 2 - i, length, dim)
        w_ptr -= planar
        u_ptr -= planar
        f_ptr -= linear * dim
        saved_ptr -= 2 * num_rows * dim
        next_w, next_u, next_entry, next_diag = _load(w_ptr, u_ptr, f_ptr, dim, planar, linear, False, WIDTH)
        next_z, next_a, next_middle = _load_saved(saved_ptr, rows, num_rows, dim, planar, linear, WIDTH)
        if is_planar:
            grad_w_ptr -= dim
            grad_u_ptr -= dim
            grad_b_ptr -= 1
            grad, grad_w, grad_u, grad_b = _planar_backward(grad, z, a, w, u, margin, grad_total, LOG_DET)
            tl.store(grad_w_ptr + columns, grad_w, mask=col_mask)
            tl.store(grad_u_ptr + columns, grad_u, mask=col_mask)
            tl.store(grad_b_ptr, grad_b)
        else:
            grad_f_ptr -= dim * dim
            grad, grad_entry, grad_diag = _lu_backward(
                grad, z, middle, entry, diag, scale, bound, grad_log_det, columns, PRECISION
            )
            _store_factors(grad_f_ptr, grad_entry, grad_diag, dim, columns)
    grad_z_ptr = ptr(grad_zs, flow, COUNT) + offsets * num(grad_z_strides, flow, COUNT) + columns[None, :]
    tl.store(grad_z_ptr, grad, mask=mask)
