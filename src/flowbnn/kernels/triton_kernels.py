r"""Triton kernels of planar and LU maps: one launch works on many chains ("flows" below).

A kernel gets a tuple with one entry for each flow (addresses, sizes, strides) and takes that of the flow its program works on. Sizes
that differ between flows are masked; what is compiled in is the largest, as a power of two. Formulas are those of
:mod:`flowbnn.kernels.reference`; every sum runs in a fixed order, so that two runs agree to the last bit.
"""

from types import SimpleNamespace

# mypy: disable-error-code="no-untyped-def"


try:
    import triton
    import triton.language as tl
except ImportError:  # what imports every file (documentation, doctests) need not have Triton
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=None)


@triton.jit
def pick(many, index, COUNT: tl.constexpr):
    """The address at ``index``."""
    one = many[0]
    for i in tl.static_range(1, COUNT):
        if index == i:
            one = many[i]
    return one


@triton.jit
def number(many, index, COUNT: tl.constexpr):
    """The number at ``index``."""
    one = many[0]
    for i in tl.static_range(1, COUNT):
        one = tl.where(index == i, many[i], one)
    return one


@triton.jit
def tanh(a):
    """To two units in the last place: a polynomial (Cephes) near zero, where a quotient of exponentials loses its digits."""
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
    r""":math:`\tanh'(a)`, exact in the tails."""
    decay = tl.exp(-2.0 * tl.abs(a))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def constraint(w, u, margin):
    r""":math:`\hat u`, :math:`1 + w^\top \hat u`, the shares of :math:`w` in :math:`\hat u` and what the derivative needs."""
    square, product = tl.sum(w * w, 0), tl.sum(w * u, 0)
    decay = tl.exp(-tl.abs(product))
    whole = 1.0 + decay
    # log(1 + decay) with the digits that the sum lost
    log = tl.where(whole == 1.0, decay, tl.log(whole) * (decay / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    soft = tl.maximum(product, 0.0) + log
    squeeze = tl.maximum(soft, margin)
    correction = squeeze - 1.0 - product
    divisor = tl.where(correction < 0.0, tl.maximum(square, 1e-3), square)
    share, step = square / divisor, correction / divisor
    u_hat = u + step * w
    rest = (1.0 - share) * product
    lost = share * (squeeze - 1.0) + rest - tl.sum(w * u_hat, 0)
    restored = lost / tl.maximum(square, 1e-37)
    total = share * squeeze + (1.0 - share) + rest
    free = (correction >= 0.0) | (square >= 1e-3)
    sigmoid = tl.where(product >= 0.0, 1.0, decay) / whole
    passed = tl.where(soft >= margin, sigmoid, 0.0)
    return u_hat + restored * w, total, step, restored, correction, divisor, share, free, passed


@triton.jit
def constraint_backward(of_step, of_total, step, correction, divisor, share, free, passed):
    r"""Gradients to :math:`w^\top u` and :math:`w^\top w`."""
    of_correction = of_step / divisor
    of_share = of_total * correction
    of_divisor = (of_step * step + of_share * share) / divisor
    of_square = of_share / divisor - tl.where(free, of_divisor, 0.0)
    of_product = of_total * (1.0 - share) - of_correction + (of_total * share + of_correction) * passed
    return of_product, of_square


@triton.jit
def planar_forward(
    zs, z_strides, xs, x_strides, ws, us, bs, bends, totals, dims, sizes, fresh, margins, rows_in_all,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    """A run of planar maps of every flow; ``fresh`` tells who begins its log-det."""
    flow = tl.program_id(1)
    w_at, u_at, b_at = pick(ws, flow, COUNT), pick(us, flow, COUNT), pick(bs, flow, COUNT)
    bends_at, dim, margin = pick(bends, flow, COUNT), number(dims, flow, COUNT), number(margins, flow, COUNT)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here, there = rows < rows_in_all, columns < dim
    both = here[:, None] & there[None, :]
    at = rows[:, None].to(tl.int64)
    z_at = pick(zs, flow, COUNT) + at * number(z_strides, flow, COUNT) + columns[None, :]
    z = tl.load(z_at, mask=both, other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    for k in range(number(sizes, flow, COUNT)):
        w = tl.load(w_at + k * dim + columns, mask=there, other=0.0)
        u = tl.load(u_at + k * dim + columns, mask=there, other=0.0)
        u_hat, squeeze, _, _, _, _, _, _, _ = constraint(w, u, margin)
        a = tl.sum(z * w[None, :], 1) + tl.load(b_at + k)
        tl.store(bends_at + k * rows_in_all + rows, a, mask=here)
        bent = tanh(a)
        if LOG_DET:
            total += tl.log(bent * bent + slope(a) * squeeze)
        z += bent[:, None] * u_hat[None, :]
    tl.store(pick(xs, flow, COUNT) + at * number(x_strides, flow, COUNT) + columns[None, :], z, mask=both)
    if LOG_DET:
        total_at = pick(totals, flow, COUNT) + rows
        total += tl.load(total_at, mask=tl.where(here, number(fresh, flow, COUNT), 1) == 0, other=0.0)
        tl.store(total_at, total, mask=here)


@triton.jit
def planar_backward(
    gs, g_strides, of_zs, of_z_strides, ws, us, bends, scalars, totals, dims, sizes, margins, rows_in_all, total_stride,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    r"""Gradient of a run to its input. ``scalars`` ``[3, size, rows]`` gets, for each map and row, those to :math:`a` and to
    :math:`1 + w^\top \hat u`, and the product of :math:`w` with the gradient to the map's output."""
    flow = tl.program_id(1)
    w_at, u_at, bends_at = pick(ws, flow, COUNT), pick(us, flow, COUNT), pick(bends, flow, COUNT)
    dim, size, margin = number(dims, flow, COUNT), number(sizes, flow, COUNT), number(margins, flow, COUNT)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here, there = rows < rows_in_all, columns < dim
    both = here[:, None] & there[None, :]
    at = rows[:, None].to(tl.int64)
    g_at = pick(gs, flow, COUNT) + at * number(g_strides, flow, COUNT) + columns[None, :]
    g = tl.load(g_at, mask=both, other=0.0)
    of_total = tl.zeros([ROWS], tl.float32)
    if LOG_DET:
        of_total = tl.load(pick(totals, flow, COUNT) + rows * total_stride, mask=here, other=0.0)
    scalars_at = pick(scalars, flow, COUNT) + rows
    for i in range(size):
        k = size - 1 - i
        w = tl.load(w_at + k * dim + columns, mask=there, other=0.0)
        u = tl.load(u_at + k * dim + columns, mask=there, other=0.0)
        u_hat, squeeze, _, _, _, _, _, _, _ = constraint(w, u, margin)
        a = tl.load(bends_at + k * rows_in_all + rows, mask=here, other=0.0)
        bent, steep = tanh(a), slope(a)
        of_a = tl.sum(g * u_hat[None, :], 1) * steep
        if LOG_DET:
            ratio = of_total * steep / (bent * bent + steep * squeeze)
            of_a += ratio * bent * (2.0 - 2.0 * squeeze)
            tl.store(scalars_at + (size + k) * rows_in_all, ratio, mask=here)
        tl.store(scalars_at + k * rows_in_all, of_a, mask=here)
        tl.store(scalars_at + (2 * size + k) * rows_in_all, tl.sum(g * w[None, :], 1), mask=here)
        g += of_a[:, None] * w[None, :]
    of_z_at = pick(of_zs, flow, COUNT) + at * number(of_z_strides, flow, COUNT) + columns[None, :]
    tl.store(of_z_at, g, mask=both)


@triton.jit
def _across(bends_at, of_a_at, begin, end, LENGTH: tl.constexpr):
    r""":math:`\sum_n \tanh(a_{jn})` times the gradient to :math:`a_{kn}`."""
    total = tl.zeros([LENGTH], tl.float32)
    for start in range(begin, end, LENGTH):
        rows = start + tl.arange(0, LENGTH)
        bent = tanh(tl.load(bends_at + rows, mask=rows < end, other=0.0))
        total += bent * tl.load(of_a_at + rows, mask=rows < end, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def planar_weights(
    gs, g_strides, zs, z_strides, ws, us, bends, scalars, of_ws, of_us, of_bs, dims, sizes, margins,
    rows_in_all, rows_each, deepest, part_stride,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG_DET: tl.constexpr,
):  # fmt: skip
    """Gradients to ``w``, ``u``, ``b`` of every run, one program for each block of columns of each map and for ``rows_each`` rows.

    They are sums over rows: programs ``p`` of the second axis write at ``p * part_stride`` what their rows give.
    """
    run, k = tl.program_id(2) // deepest, tl.program_id(2) % deepest
    dim, size, margin = number(dims, run, COUNT), number(sizes, run, COUNT), number(margins, run, COUNT)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, rows_in_all)
    if (k < size) & (tl.program_id(0) * COLUMNS < dim):
        w_at, u_at = pick(ws, run, COUNT), pick(us, run, COUNT)
        bends_at, scalars_at = pick(bends, run, COUNT), pick(scalars, run, COUNT)
        g_at, z_at = pick(gs, run, COUNT) + columns[None, :], pick(zs, run, COUNT) + columns[None, :]
        g_stride, z_stride = number(g_strides, run, COUNT), number(z_strides, run, COUNT)
        part = tl.program_id(1).to(tl.int64) * part_stride
        inside = columns < dim
        by_g, by_z = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        of_b, of_step, of_total = (
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS], tl.float32),
        )
        for start in range(begin, end, ROWS):
            rows = start + tl.arange(0, ROWS)
            here, at = rows < end, rows[:, None].to(tl.int64)
            both = here[:, None] & inside[None, :]
            bent = tanh(tl.load(bends_at + k * rows_in_all + rows, mask=here, other=0.0))
            of_a = tl.load(scalars_at + k * rows_in_all + rows, mask=here, other=0.0)
            of_b += of_a
            of_step += bent * tl.load(scalars_at + (2 * size + k) * rows_in_all + rows, mask=here, other=0.0)
            if LOG_DET:
                of_total += tl.load(scalars_at + (size + k) * rows_in_all + rows, mask=here, other=0.0)
            by_g += bent[:, None] * tl.load(g_at + at * g_stride, mask=both, other=0.0)
            by_z += of_a[:, None] * tl.load(z_at + at * z_stride, mask=both, other=0.0)
        of_u_hat, of_w = tl.sum(by_g, 0), tl.sum(by_z, 0)
        every = tl.arange(0, WIDTH)
        for later in range(k + 1, size):
            coefficient = _across(
                bends_at + k * rows_in_all, scalars_at + later * rows_in_all, begin, end, 256
            )
            of_u_hat += coefficient * tl.load(w_at + later * dim + columns, mask=inside, other=0.0)
        for before in range(k):
            coefficient = _across(
                bends_at + before * rows_in_all, scalars_at + k * rows_in_all, begin, end, 256
            )
            w = tl.load(w_at + before * dim + every, mask=every < dim, other=0.0)
            u = tl.load(u_at + before * dim + every, mask=every < dim, other=0.0)
            _, _, step, restored, _, _, _, _, _ = constraint(w, u, margin)
            w = tl.load(w_at + before * dim + columns, mask=inside, other=0.0)
            u = tl.load(u_at + before * dim + columns, mask=inside, other=0.0)
            of_w += coefficient * (u + step * w + restored * w)
        w = tl.load(w_at + k * dim + every, mask=every < dim, other=0.0)
        u = tl.load(u_at + k * dim + every, mask=every < dim, other=0.0)
        _, _, step, _, correction, divisor, share, free, passed = constraint(w, u, margin)
        along, of_square = constraint_backward(
            tl.sum(of_step, 0), tl.sum(of_total, 0), step, correction, divisor, share, free, passed
        )
        w = tl.load(w_at + k * dim + columns, mask=inside, other=0.0)
        u = tl.load(u_at + k * dim + columns, mask=inside, other=0.0)
        of_w += step * of_u_hat + along * u + 2.0 * of_square * w
        tl.store(pick(of_ws, run, COUNT) + part + k * dim + columns, of_w, mask=inside)
        tl.store(pick(of_us, run, COUNT) + part + k * dim + columns, of_u_hat + along * w, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(pick(of_bs, run, COUNT) + part + k, tl.sum(of_b, 0))


@triton.jit
def triangle(
    zs, z_strides, xs, x_strides, factors, totals, dims, fresh, scales, bounds, rows_in_all,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr, UPPER: tl.constexpr, BACKWARD: tl.constexpr, LOG_DET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r"""One triangular factor of every flow: :math:`x = z T^\top`, or :math:`x = z T` in the backward pass, blocks of zeros left out.

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
