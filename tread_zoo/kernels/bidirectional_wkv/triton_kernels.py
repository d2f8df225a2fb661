# mypy: ignore-errors
"""Device code of the bidirectional WKV in Triton; `triton_form` launches it and has the maths.

A program is one warp. It has one chunk of CHUNK steps of one row of the batch, and one channel a
thread: loads and stores are whole lines, no thread needs another's values, and a state is a handful
of registers. The loads of a chunk are issued together, before anything is computed.

Chunks are independent but for what comes in from the others. There are two kernels each forward and
backward: one writes every chunk's state at its last step, going forth, and at its first, going
back; the other merges those of the chunks on either side of its own and walks through its chunk
both ways. So time is cut into L / CHUNK programs; batch and channels alone would leave most of a
large GPU idle.

Dimensions: B batch, L length, C channels, n chunks. States at the edges of chunks are float32
[B, n, 2, S, C]: forth, then back; S = 3, m N D, forward, and S = 5, m A Z A' Z', backward.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)  # the log-weight of nothing; not -inf, whose differences are NaN
LENGTHS = ["length", "num_chunks"]  # another number of tokens must not compile anew


@triton.jit(do_not_specialize=LENGTHS)
def summarise(
    k_ptr,
    v_ptr,
    w_ptr,
    places_ptr,
    edges_ptr,
    length,
    total,
    channels,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the states at the edges of each chunk, of what is in it."""
    row, start, c, c_in = _here(num_chunks, channels, CHUNK, BLOCK)
    rate = tl.div_rn(_load(w_ptr + c, c_in, 0.0), total)
    at = (row * length + start) * channels + c
    left = tl.where(c_in, length - start, 0)  # steps of each channel from `start` on
    keys = _rows(k_ptr + at, left, channels, CHUNK, NOTHING)
    values = _rows(v_ptr + at, left, channels, CHUNK, 0.0)
    edge_ptr = edges_ptr + (row * num_chunks + start // CHUNK) * 6 * channels + c
    for way in tl.static_range(2):
        away = _to_edge(places_ptr, row, start, length, way, CHUNK)
        m, n, d = rate * 0 + NOTHING, rate * 0, rate * 0
        for i in tl.static_range(CHUNK):
            m = tl.maximum(m, keys[i] - rate * away[i])
        for i in tl.static_range(CHUNK):
            weight = tl.exp((keys[i] - m) - rate * away[i])
            n += weight * values[i]
            d += weight
        tl.store(edge_ptr + 3 * way * channels, m, mask=c_in)
        tl.store(edge_ptr + (3 * way + 1) * channels, n, mask=c_in)
        tl.store(edge_ptr + (3 * way + 2) * channels, d, mask=c_in)


@triton.jit(do_not_specialize=LENGTHS)
def average(
    k_ptr,
    v_ptr,
    w_ptr,
    u_ptr,
    places_ptr,
    edges_ptr,
    out_ptr,
    lse_ptr,
    length,
    total,
    channels,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the output and log D, both [B, L, C]."""
    row, start, c, c_in = _here(num_chunks, channels, CHUNK, BLOCK)
    rate = tl.div_rn(_load(w_ptr + c, c_in, 0.0), total)
    bonus = _load(u_ptr + c, c_in, 0.0)
    gaps = _gaps(places_ptr, row, start, length, CHUNK)
    at = (row * length + start) * channels + c
    left = tl.where(c_in, length - start, 0)  # steps of each channel from `start` on
    keys = _rows(k_ptr + at, left, channels, CHUNK, NOTHING)
    values = _rows(v_ptr + at, left, channels, CHUNK, 0.0)
    edge_ptr = edges_ptr + row * num_chunks * 6 * channels + c

    m, n, d = rate * 0 + NOTHING, rate * 0, rate * 0
    for chunk in range(num_chunks - 1, start // CHUNK, -1):
        fall = rate * _distance(places_ptr, row, chunk * CHUNK, (chunk + 1) * CHUNK, length)
        edge = _load_3(edge_ptr + (6 * chunk + 3) * channels, c_in, channels)
        m, n, d = _merge(m, n, d, fall, *edge)
    later = ()
    for i in tl.static_range(CHUNK - 1, -1, -1):
        gap = gaps[i + 1]
        later += ((m, n, d, rate * (gap - 1)),)
        m, n, d = _merge(m, n, d, rate * gap, keys[i], values[i], 1.0)

    m, n, d = rate * 0 + NOTHING, rate * 0, rate * 0
    for chunk in range(start // CHUNK):
        last = (chunk + 1) * CHUNK - 1
        fall = rate * _distance(places_ptr, row, last - CHUNK, last, length)
        edge = _load_3(edge_ptr + 6 * chunk * channels, c_in, channels)
        m, n, d = _merge(m, n, d, fall, *edge)
    for i in tl.static_range(CHUNK):
        gap = gaps[i]
        near = rate * (gap - 1)
        later_m, later_n, later_d, later_near = later[CHUNK - 1 - i]
        r = tl.maximum(tl.maximum(m - near, later_m - later_near), keys[i] + bonus)
        before, after = tl.exp((m - r) - near), tl.exp((later_m - r) - later_near)
        own = tl.exp((keys[i] - r) + bonus)
        top = before * n + after * later_n + own * values[i]
        bottom = before * d + after * later_d + own
        tl.store(out_ptr + at + i * channels, top / bottom, mask=i < left)
        tl.store(lse_ptr + at + i * channels, r + tl.log(bottom), mask=i < left)
        m, n, d = _merge(m, n, d, rate * gap, keys[i], values[i], 1.0)


@triton.jit(do_not_specialize=LENGTHS)
def summarise_grads(
    grad_ptr,
    out_ptr,
    lse_ptr,
    w_ptr,
    places_ptr,
    edges_ptr,
    length,
    total,
    channels,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the backward states at the edges of each chunk, of what is in it."""
    row, start, c, c_in = _here(num_chunks, channels, CHUNK, BLOCK)
    rate = tl.div_rn(_load(w_ptr + c, c_in, 0.0), total)
    at = (row * length + start) * channels + c
    left = tl.where(c_in, length - start, 0)  # steps of each channel from `start` on
    sums = _rows(lse_ptr + at, left, channels, CHUNK, -NOTHING)
    grads = _rows(grad_ptr + at, left, channels, CHUNK, 0.0)
    means = _rows(out_ptr + at, left, channels, CHUNK, 0.0)
    edge_ptr = edges_ptr + (row * num_chunks + start // CHUNK) * 10 * channels + c
    for way in tl.static_range(2):
        away = _to_edge(places_ptr, row, start, length, way, CHUNK)
        m, a, z, far_a, far_z = rate * 0 + NOTHING, rate * 0, rate * 0, rate * 0, rate * 0
        for i in tl.static_range(CHUNK):
            m = tl.maximum(m, -sums[i] - rate * away[i])
        for i in tl.static_range(CHUNK):
            share = tl.exp((-sums[i] - m) - rate * away[i]) * grads[i]
            a += share
            z += share * means[i]
            far_a += away[i] * share
            far_z += away[i] * share * means[i]
        to = edge_ptr + 5 * way * channels
        tl.store(to, m, mask=c_in)
        tl.store(to + channels, a, mask=c_in)
        tl.store(to + 2 * channels, z, mask=c_in)
        tl.store(to + 3 * channels, far_a, mask=c_in)
        tl.store(to + 4 * channels, far_z, mask=c_in)


@triton.jit(do_not_specialize=LENGTHS)
def differentiate(
    grad_ptr,
    out_ptr,
    lse_ptr,
    k_ptr,
    v_ptr,
    w_ptr,
    u_ptr,
    places_ptr,
    edges_ptr,
    gk_ptr,
    gv_ptr,
    gs_ptr,
    gu_ptr,
    length,
    total,
    channels,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ∂k and ∂v [B, L, C], and the chunks' parts of ∂s and ∂u [B, n, C]."""
    row, start, c, c_in = _here(num_chunks, channels, CHUNK, BLOCK)
    rate = tl.div_rn(_load(w_ptr + c, c_in, 0.0), total)
    bonus = _load(u_ptr + c, c_in, 0.0)
    gaps = _gaps(places_ptr, row, start, length, CHUNK)
    at = (row * length + start) * channels + c
    left = tl.where(c_in, length - start, 0)  # steps of each channel from `start` on
    sums = _rows(lse_ptr + at, left, channels, CHUNK, -NOTHING)
    grads = _rows(grad_ptr + at, left, channels, CHUNK, 0.0)
    means = _rows(out_ptr + at, left, channels, CHUNK, 0.0)
    keys = _rows(k_ptr + at, left, channels, CHUNK, NOTHING)
    values = _rows(v_ptr + at, left, channels, CHUNK, 0.0)
    edge_ptr = edges_ptr + row * num_chunks * 10 * channels + c
    gs, gu = rate * 0, rate * 0

    m, a, z, far_a, far_z = rate * 0 + NOTHING, rate * 0, rate * 0, rate * 0, rate * 0
    for chunk in range(start // CHUNK):
        last = (chunk + 1) * CHUNK - 1
        gap = _distance(places_ptr, row, last - CHUNK, last, length)
        edge = _load_5(edge_ptr + 10 * chunk * channels, c_in, channels)
        m, a, z, far_a, far_z = _merge_grads(m, a, z, far_a, far_z, gap, rate, *edge)
    parts = ()
    for i in tl.static_range(CHUNK):
        gap = gaps[i]
        weight = tl.exp((keys[i] + m) - rate * (gap - 1))
        part = weight * (values[i] * a - z)
        gs += weight * (values[i] * far_a - far_z) + (gap - 1) * part
        parts += ((weight * a, part),)
        m, a, z, far_a, far_z = _merge_grads(
            m, a, z, far_a, far_z, gap, rate, -sums[i], grads[i], grads[i] * means[i], 0.0, 0.0
        )

    m, a, z, far_a, far_z = rate * 0 + NOTHING, rate * 0, rate * 0, rate * 0, rate * 0
    for chunk in range(num_chunks - 1, start // CHUNK, -1):
        gap = _distance(places_ptr, row, chunk * CHUNK, (chunk + 1) * CHUNK, length)
        edge = _load_5(edge_ptr + (10 * chunk + 5) * channels, c_in, channels)
        m, a, z, far_a, far_z = _merge_grads(m, a, z, far_a, far_z, gap, rate, *edge)
    for i in tl.static_range(CHUNK - 1, -1, -1):
        gap, inside = gaps[i + 1], i < left
        to = at + i * channels
        key, value = _load(k_ptr + to, inside, NOTHING), _load(v_ptr + to, inside, 0.0)
        grad, mean = _load(grad_ptr + to, inside, 0.0), _load(out_ptr + to, inside, 0.0)
        sum_ = _load(lse_ptr + to, inside, -NOTHING)
        weight = tl.exp((key + m) - rate * (gap - 1))
        part = weight * (value * a - z)
        gs += weight * (value * far_a - far_z) + (gap - 1) * part
        own = tl.exp((key - sum_) + bonus) * grad
        own_part = own * (value - mean)
        gu += own_part
        earlier_v, earlier_k = parts[i]
        tl.store(gv_ptr + to, earlier_v + weight * a + own, mask=inside)
        tl.store(gk_ptr + to, earlier_k + part + own_part, mask=inside)
        m, a, z, far_a, far_z = _merge_grads(
            m, a, z, far_a, far_z, gap, rate, -sum_, grad, grad * mean, 0.0, 0.0
        )
    to = (row * num_chunks + start // CHUNK) * channels + c
    tl.store(gs_ptr + to, -gs, mask=c_in)
    tl.store(gu_ptr + to, gu, mask=c_in)


@triton.jit
def _merge(m, n, d, fall, m_new, n_new, d_new):
    """Return two states as one, the first decayed by `fall`."""
    top = tl.maximum(m - fall, m_new)
    old, new = tl.exp((m - top) - fall), tl.exp(m_new - top)
    return top, old * n + new * n_new, old * d + new * d_new


@triton.jit
def _merge_grads(
    m, a, z, far_a, far_z, gap, rate, m_new, a_new, z_new, far_a_new, far_z_new
):  # fmt: skip
    """Return two backward states as one, the first from `gap` further away."""
    fall = gap * rate
    top = tl.maximum(m - fall, m_new)
    old, new = tl.exp((m - top) - fall), tl.exp(m_new - top)
    far_a, far_z = far_a + gap * a, far_z + gap * z
    return (
        top,
        old * a + new * a_new,
        old * z + new * z_new,
        old * far_a + new * far_a_new,
        old * far_z + new * far_z_new,
    )


@triton.jit
def _here(num_chunks, channels, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the program's row of the batch, its first step, its channels, and which there are."""
    row = tl.program_id(0) // num_chunks
    start = (tl.program_id(0) % num_chunks) * CHUNK
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), start, c, c < channels


@triton.jit
def _load(at, inside, other):
    """Return float32; the load itself could give `other` in the dtype of the memory only."""
    return tl.where(inside, tl.load(at, mask=inside, other=0.0).to(tl.float32), other)


@triton.jit
def _load_3(at, c_in, channels):
    m = _load(at, c_in, NOTHING)
    return m, _load(at + channels, c_in, 0.0), _load(at + 2 * channels, c_in, 0.0)


@triton.jit
def _load_5(at, c_in, channels):
    m, a, z = _load_3(at, c_in, channels)
    return m, a, z, _load(at + 3 * channels, c_in, 0.0), _load(at + 4 * channels, c_in, 0.0)


@triton.jit
def _rows(at, left, channels, CHUNK: tl.constexpr, other):
    """Return CHUNK steps, float32 [BLOCK] each; `other` where nothing is left."""
    rows = ()
    for i in tl.static_range(CHUNK):
        rows += (_load(at + i * channels, i < left, other),)
    return rows


@triton.jit
def _gaps(places_ptr, row, start, length, CHUNK: tl.constexpr):
    """Return CHUNK + 1 distances: from the step before `start`, and from each of the chunk on."""
    gaps = ()
    for i in tl.static_range(CHUNK + 1):
        gaps += (_distance(places_ptr, row, start + i - 1, start + i, length),)
    return gaps


@triton.jit
def _to_edge(places_ptr, row, start, length, way, CHUNK: tl.constexpr):
    """Return each step's distance to the last one of the chunk, going forth, or to its first."""
    away = ()
    for i in tl.static_range(CHUNK):
        if way == 0:
            away += (_distance(places_ptr, row, start + i, start + CHUNK - 1, length),)
        else:
            away += (_distance(places_ptr, row, start, start + i, length),)
    return away


@triton.jit
def _distance(places_ptr, row, here, there, length):
    """Return p_there - p_here as float32; past the ends, a step is where the nearest one is."""
    if places_ptr is None:
        return (there - here) * 1.0  # a step may be a number under the interpreter
    else:
        here = tl.minimum(tl.maximum(here, 0), length - 1)
        there = tl.minimum(tl.maximum(there, 0), length - 1)
        places_ptr += row * length
        return (tl.load(places_ptr + there) - tl.load(places_ptr + here)).to(tl.float32)
