"""Triton kernels of whole chains on at most 32 numbers: one launch, in which a program holds all numbers of its rows."""

from flowbnn.kernels.triton_kernels import (
    constraint,
    constraint_backward,
    number,
    pick,
    slope,
    tanh,
    tl,
    triton,
)

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def _kind(code, m, length, dim):
    """``dim, 0`` where map ``m`` is planar, ``0, dim`` where it is an LU map, ``0, 0`` where there is none."""
    there = tl.where((m >= 0) & (m < length), dim, 0)
    planar = ((code >> tl.maximum(m, 0)) & 1) * there
    return planar, there - planar


@triton.jit
def _fetched(w_at, u_at, factors_at, dim, planar, linear, TRANSPOSED: tl.constexpr, WIDTH: tl.constexpr):
    """What a map needs; asked for while the one before it is worked out."""
    columns = tl.arange(0, WIDTH)
    w = tl.load(w_at + columns, mask=columns < planar, other=0.0)
    u = tl.load(u_at + columns, mask=columns < planar, other=0.0)
    row, column = columns[:, None], columns[None, :]
    if TRANSPOSED:
        row, column = columns[None, :], columns[:, None]
    entry = tl.load(factors_at + row * dim + column, mask=(row < linear) & (column < linear), other=0.0)
    diagonal = tl.load(factors_at + columns * (dim + 1), mask=columns < linear, other=0.0)
    return w, u, entry, diagonal


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
    length = number(lengths, flow, COUNT)
    planar, linear = _kind(code, 0, length, dim)
    next_w, next_u, next_entry, next_diagonal = _fetched(
        w_at, u_at, factors_at, dim, planar, linear, True, WIDTH
    )
    next_b = tl.load(b_at, mask=planar > 0, other=0.0)
    for m in range(length):
        w, u, b, entry, diagonal, is_planar = next_w, next_u, next_b, next_entry, next_diagonal, planar > 0
        w_at += planar
        u_at += planar
        b_at += tl.where(is_planar, 1, 0)
        factors_at += linear * dim
        planar, linear = _kind(code, m + 1, length, dim)
        next_w, next_u, next_entry, next_diagonal = _fetched(
            w_at, u_at, factors_at, dim, planar, linear, True, WIDTH
        )
        next_b = tl.load(b_at, mask=planar > 0, other=0.0)
        given_at = kept_at + at * dim + columns[None, :]
        second = rows_in_all * dim
        if KEEP:
            tl.store(given_at, z, mask=both)
        if is_planar:
            u_hat, squeeze, _, _, _, _, _, _, _ = constraint(w, u, margin)
            a = tl.sum(z * w[None, :], 1) + b
            if KEEP:
                tl.store(kept_at + second + rows, a, mask=here)
            bent = tanh(a)
            if LOG_DET:
                total += tl.log(bent * bent + slope(a) * squeeze)
            z += bent[:, None] * u_hat[None, :]
        else:
            above, below = columns[:, None] > columns[None, :], columns[:, None] < columns[None, :]
            log, entry = bound * tanh(diagonal / bound), entry * scale
            z = z * tl.exp(log)[None, :] + tl.dot(z, tl.where(above, entry, 0.0), input_precision=PRECISION)
            if KEEP:
                tl.store(given_at + second, z, mask=both)
            z += tl.dot(z, tl.where(below, entry, 0.0), input_precision=PRECISION)
            if LOG_DET:
                total += tl.sum(log, 0)
        kept_at += 2 * second
    tl.store(pick(xs, flow, COUNT) + at * number(x_strides, flow, COUNT) + columns[None, :], z, mask=both)
    if LOG_DET:
        tl.store(pick(totals, flow, COUNT) + rows, total, mask=here)


@triton.jit
def _left(kept_at, rows, rows_in_all, dim, planar, linear, WIDTH: tl.constexpr):
    """What :func:`small_forward` left of a map: what it was given, its bends, its middle."""
    columns, at = tl.arange(0, WIDTH), rows[:, None].to(tl.int64)
    given_at, second = kept_at + at * dim + columns[None, :], rows_in_all * dim
    here = rows < rows_in_all
    z = tl.load(given_at, mask=here[:, None] & (columns < planar + linear)[None, :], other=0.0)
    a = tl.load(kept_at + second + rows, mask=rows < tl.where(planar > 0, rows_in_all, 0), other=0.0)
    middle = tl.load(given_at + second, mask=here[:, None] & (columns < linear)[None, :], other=0.0)
    return z, a, middle


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
    length, count = number(lengths, flow, COUNT), number(planars, flow, COUNT)
    of_w_at, of_u_at = (
        pick(of_ws, flow, COUNT) + part + count * dim,
        pick(of_us, flow, COUNT) + part + count * dim,
    )
    of_b_at = pick(of_bs, flow, COUNT) + part + count
    of_factors_at = pick(of_factors, flow, COUNT) + part + (length - count) * dim * dim
    planar, linear = _kind(code, length - 1, length, dim)
    w_at = pick(ws, flow, COUNT) + count * dim - planar
    u_at = pick(us, flow, COUNT) + count * dim - planar
    factors_at = pick(factors, flow, COUNT) + (length - count) * dim * dim - linear * dim
    kept_at = pick(kept, flow, COUNT) + 2 * (length - 1) * rows_in_all * dim
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here, there = rows < rows_in_all, columns < dim
    both, at = here[:, None] & there[None, :], rows[:, None].to(tl.int64)
    g_at = pick(gs, flow, COUNT) + at * number(g_strides, flow, COUNT) + columns[None, :]
    g = tl.load(g_at, mask=both, other=0.0)
    of_total = tl.zeros([ROWS], tl.float32)
    if LOG_DET:
        of_total = tl.load(pick(totals, flow, COUNT) + rows * total_stride, mask=here, other=0.0)
    of_log_det = tl.sum(of_total, 0)
    next_w, next_u, next_entry, next_diagonal = _fetched(
        w_at, u_at, factors_at, dim, planar, linear, False, WIDTH
    )
    next_z, next_a, next_middle = _left(kept_at, rows, rows_in_all, dim, planar, linear, WIDTH)
    for i in range(length):
        w, u, entry, diagonal, is_planar = next_w, next_u, next_entry, next_diagonal, planar > 0
        z, a, middle = next_z, next_a, next_middle
        planar, linear = _kind(code, length - 2 - i, length, dim)
        w_at -= planar
        u_at -= planar
        factors_at -= linear * dim
        kept_at -= 2 * rows_in_all * dim
        next_w, next_u, next_entry, next_diagonal = _fetched(
            w_at, u_at, factors_at, dim, planar, linear, False, WIDTH
        )
        next_z, next_a, next_middle = _left(kept_at, rows, rows_in_all, dim, planar, linear, WIDTH)
        if is_planar:
            of_w_at -= dim
            of_u_at -= dim
            of_b_at -= 1
            u_hat, squeeze, step, _, correction, divisor, share, free, passed = constraint(w, u, margin)
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
            of_factors_at -= dim * dim
            row, column = columns[:, None], columns[None, :]
            inside, above, below = (row < dim) & (column < dim), column > row, column < row
            entry, diagonal = entry * scale, diagonal / bound
            size = tl.exp(bound * tanh(diagonal))
            lower = tl.dot(tl.trans(g), middle, input_precision=PRECISION)
            g += tl.dot(g, tl.where(below, entry, 0.0), input_precision=PRECISION)
            upper = tl.dot(tl.trans(g), z, input_precision=PRECISION)
            of_size = tl.sum(g * z, 0)
            g = g * size[None, :] + tl.dot(g, tl.where(above, entry, 0.0), input_precision=PRECISION)
            of_diagonal = (of_size * size + of_log_det) * slope(diagonal)
            found = tl.where(above, upper, lower) * scale
            tl.store(of_factors_at + row * dim + column, found, mask=inside & (row != column))
            tl.store(of_factors_at + columns * (dim + 1), of_diagonal, mask=there)
    tl.store(
        pick(of_zs, flow, COUNT) + at * number(of_z_strides, flow, COUNT) + columns[None, :], g, mask=both
    )
