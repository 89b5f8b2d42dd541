"""Triton kernels for flows on short vectors: the whole flow in one launch. See :mod:`flowbnn.transforms.fused_kernels`."""
# mypy: disable-error-code="no-untyped-def"

from flowbnn.transforms.fused_kernels import (
    constraint,
    constraint_backward,
    number,
    pick,
    slope,
    tanh,
    tl,
    triton,
)

__all__ = ["small_backward", "small_forward"]


@triton.jit
def _entries(factors_at, dim, bound, TRANSPOSED: tl.constexpr, WIDTH: tl.constexpr):
    """The stored square, the same over the bound, and row and column of every entry."""
    first, second = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    if TRANSPOSED:
        row, column = second, first
    else:
        row, column = first, second
    entry = tl.load(factors_at + row * dim + column, mask=(row < dim) & (column < dim), other=0.0)
    return entry, entry / bound, row, column


@triton.jit
def small_forward(
    zs, z_strides, xs, x_strides, ws, us, bs, factors, kept, totals, dims, codes, lengths, scales, margins, bounds, rows_in_all,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All maps of every flow; bit ``m`` of its code tells that map ``m`` is planar. ``kept`` ``[maps, 2, rows, dim]`` gets what each
    map was given, and the middle of an LU map or the bends of a planar one."""
    flow = tl.program_id(1)
    w_at, u_at, b_at = pick(ws, flow, COUNT), pick(us, flow, COUNT), pick(bs, flow, COUNT)
    factors_at, kept_at = pick(factors, flow, COUNT), pick(kept, flow, COUNT)
    dim, code, scale = number(dims, flow, COUNT), number(codes, flow, COUNT), number(scales, flow, COUNT)
    margin, bound = number(margins, flow, COUNT), number(bounds, flow, COUNT)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here, there = rows < rows_in_all, columns < dim
    both, at = here[:, None] & there[None, :], rows[:, None].to(tl.int64)
    z_at = pick(zs, flow, COUNT) + at * number(z_strides, flow, COUNT) + columns[None, :]
    z = tl.load(z_at, mask=both, other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    for m in range(number(lengths, flow, COUNT)):
        given_at = kept_at + at * dim + columns[None, :]
        second = rows_in_all * dim
        if KEEP:
            tl.store(given_at, z, mask=both)
        if ((code >> m) & 1) == 1:
            w = tl.load(w_at + columns, mask=there, other=0.0)
            u = tl.load(u_at + columns, mask=there, other=0.0)
            u_hat, squeeze, _, _, _, _, _, _, _ = constraint(w, u, margin)
            a = tl.sum(z * w[None, :], 1) + tl.load(b_at)
            if KEEP:
                tl.store(kept_at + second + rows, a, mask=here)
            bent = tanh(a)
            if LOG_DET:
                total += tl.log(bent * bent + slope(a) * squeeze)
            z += bent[:, None] * u_hat[None, :]
            w_at += dim
            u_at += dim
            b_at += 1
        else:
            entry, small, row, column = _entries(factors_at, dim, bound, True, WIDTH)
            log = tl.where(row == column, bound * tanh(small), 0.0)
            strict = entry * scale
            z = tl.dot(
                z,
                tl.where(column > row, strict, tl.where(row == column, tl.exp(log), 0.0)),
                input_precision=PRECISION,
            )
            if KEEP:
                tl.store(given_at + second, z, mask=both)
            z = tl.dot(
                z,
                tl.where(column < row, strict, tl.where(row == column, 1.0, 0.0)),
                input_precision=PRECISION,
            )
            if LOG_DET:
                total += tl.sum(tl.sum(log, 1), 0)
            factors_at += dim * dim
        kept_at += 2 * second
    tl.store(pick(xs, flow, COUNT) + at * number(x_strides, flow, COUNT) + columns[None, :], z, mask=both)
    if LOG_DET:
        tl.store(pick(totals, flow, COUNT) + rows, total, mask=here)


@triton.jit
def small_backward(
    gs, g_strides, of_zs, of_z_strides, ws, us, factors, kept, totals, of_ws, of_us, of_bs, of_factors,
    dims, codes, lengths, planars, scales, margins, bounds, rows_in_all, total_stride, part_stride,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients to the starts, and to all parameters from this block of rows: block ``p`` writes them at ``p * part_stride``."""
    flow, part = tl.program_id(1), tl.program_id(0).to(tl.int64) * part_stride
    dim, code, scale = number(dims, flow, COUNT), number(codes, flow, COUNT), number(scales, flow, COUNT)
    margin, bound = number(margins, flow, COUNT), number(bounds, flow, COUNT)
    length, planar = number(lengths, flow, COUNT), number(planars, flow, COUNT)
    linear = length - planar
    w_at, u_at = pick(ws, flow, COUNT) + planar * dim, pick(us, flow, COUNT) + planar * dim
    of_w_at, of_u_at = (
        pick(of_ws, flow, COUNT) + part + planar * dim,
        pick(of_us, flow, COUNT) + part + planar * dim,
    )
    of_b_at = pick(of_bs, flow, COUNT) + part + planar
    factors_at = pick(factors, flow, COUNT) + linear * dim * dim
    of_factors_at = pick(of_factors, flow, COUNT) + part + linear * dim * dim
    second = rows_in_all * dim
    kept_at = pick(kept, flow, COUNT) + 2 * length * second
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here, there = rows < rows_in_all, columns < dim
    both, at = here[:, None] & there[None, :], rows[:, None].to(tl.int64)
    g_at = pick(gs, flow, COUNT) + at * number(g_strides, flow, COUNT) + columns[None, :]
    g = tl.load(g_at, mask=both, other=0.0)
    of_total = tl.zeros([ROWS], tl.float32)
    if LOG_DET:
        of_total = tl.load(pick(totals, flow, COUNT) + rows * total_stride, mask=here, other=0.0)
    of_log_det = tl.sum(of_total, 0)
    for i in range(length):
        kept_at -= 2 * second
        given_at = kept_at + at * dim + columns[None, :]
        z = tl.load(given_at, mask=both, other=0.0)
        if ((code >> (length - 1 - i)) & 1) == 1:
            w_at -= dim
            u_at -= dim
            of_w_at -= dim
            of_u_at -= dim
            of_b_at -= 1
            w = tl.load(w_at + columns, mask=there, other=0.0)
            u = tl.load(u_at + columns, mask=there, other=0.0)
            u_hat, squeeze, step, _, correction, divisor, share, free, passed = constraint(w, u, margin)
            a = tl.load(kept_at + second + rows, mask=here, other=0.0)
            bent, steep = tanh(a), slope(a)
            of_a = tl.sum(g * u_hat[None, :], 1) * steep
            of_squeeze = 0.0
            if LOG_DET:
                ratio = of_total * steep / (bent * bent + steep * squeeze)
                of_a += ratio * bent * (2.0 - 2.0 * squeeze)
                of_squeeze = tl.sum(ratio, 0)
            of_u_hat = tl.sum(bent[:, None] * g, 0)
            of_w = tl.sum(of_a[:, None] * z, 0)
            along, of_square = constraint_backward(
                tl.sum(of_u_hat * w, 0), of_squeeze, step, correction, divisor, share, free, passed
            )
            tl.store(of_w_at + columns, of_w + step * of_u_hat + along * u + 2.0 * of_square * w, mask=there)
            tl.store(of_u_at + columns, of_u_hat + along * w, mask=there)
            tl.store(of_b_at, tl.sum(of_a, 0))
            g += of_a[:, None] * w[None, :]
        else:
            factors_at -= dim * dim
            of_factors_at -= dim * dim
            middle = tl.load(given_at + second, mask=both, other=0.0)
            entry, small, row, column = _entries(factors_at, dim, bound, False, WIDTH)
            size, strict, same = tl.exp(bound * tanh(small)), entry * scale, row == column
            lower = tl.dot(tl.trans(g), middle, input_precision=PRECISION)
            g = tl.dot(g, tl.where(column < row, strict, tl.where(same, 1.0, 0.0)), input_precision=PRECISION)
            upper = tl.dot(tl.trans(g), z, input_precision=PRECISION)
            g = tl.dot(
                g, tl.where(column > row, strict, tl.where(same, size, 0.0)), input_precision=PRECISION
            )
            of_diagonal = (upper * size + of_log_det) * slope(small)
            found = tl.where(same, of_diagonal, tl.where(column > row, upper, lower) * scale)
            tl.store(of_factors_at + row * dim + column, found, mask=(row < dim) & (column < dim))
    tl.store(
        pick(of_zs, flow, COUNT) + at * number(of_z_strides, flow, COUNT) + columns[None, :], g, mask=both
    )
