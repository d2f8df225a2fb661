# mypy: ignore-errors
"""Device code of the bidirectional WKV in Triton; `triton_form` launches it and has the maths.

A program is one warp. It computes one chunk, CHUNK steps of one row of the batch, with one channel
per thread: loads and stores are whole cache lines, no thread needs another's values, and a state is
a handful of registers. The loads of GROUP or CHUNK steps are issued together, before anything is
computed.

Chunks depend on each other only through two states per chunk. The forth state sums up the chunk as
seen from its last step, the back state as seen from its first step. Forward and backward have two
kernels each. The first kernel writes both states of every chunk. The second one merges the forth
states of the chunks before its own and the back states of those after it, and walks through its
chunk both ways. So time is cut into L / CHUNK programs; batch and channels alone would leave most
of a large GPU idle.

Dimensions: B batch, L length, C channels, n chunks. The states of chunks are float32
[B, n, 2, S, C]: forth, then back. In the forward pass they are (m, N, D), S = 3; in the backward
pass (m, A, Z, A', Z'), S = 5.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)  # log-weight of an empty sum; not -inf, whose differences are NaN
LENGTHS = ["length", "num_chunks"]  # another number of tokens must not need a new compilation


@triton.jit(do_not_specialize=LENGTHS)
def summarise(
    k_ptr, v_ptr, w_ptr, places_ptr, edges_ptr, length, total, channels, num_chunks,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write two states (m, N, D) of each chunk, as seen from its last step (forth) and from its
    first step (back). N and D are sums of e^(k - m) v and e^(k - m), decayed by the distance to
    that step; m is the largest exponent."""
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
    k_ptr, v_ptr, w_ptr, u_ptr, places_ptr, edges_ptr, out_ptr, lse_ptr,
    length, total, channels, num_chunks,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the output and ℓ, the logarithm of its denominator, both [B, L, C]."""
    GROUPS: tl.constexpr = CHUNK // GROUP
    row, start, c, c_in = _here(num_chunks, channels, CHUNK, BLOCK)
    rate = tl.div_rn(_load(w_ptr + c, c_in, 0.0), total)
    bonus = _load(u_ptr + c, c_in, 0.0)
    row_at = row * length * channels + c
    edge_ptr = edges_ptr + row * num_chunks * 6 * channels + c

    m, n, d = rate * 0 + NOTHING, rate * 0, rate * 0
    for chunk in range(num_chunks - 1, start // CHUNK, -1):
        fall = rate * _distance(places_ptr, row, chunk * CHUNK, (chunk + 1) * CHUNK, length)
        edge = _load_3(edge_ptr + (6 * chunk + 3) * channels, c_in, channels)
        m, n, d = _merge(m, n, d, fall, *edge)
    later_m = tl.zeros([GROUPS, BLOCK], tl.float32)
    later_n, later_d = later_m, later_m
    for done in range(GROUPS):
        group = GROUPS - 1 - done
        later_m, later_n = _put(later_m, group, m), _put(later_n, group, n)
        later_d = _put(later_d, group, d)
        first = start + group * GROUP
        left = tl.where(c_in, length - first, 0)  # steps of each channel from `first` on
        keys = _rows(k_ptr + row_at + first * channels, left, channels, GROUP, NOTHING)
        values = _rows(v_ptr + row_at + first * channels, left, channels, GROUP, 0.0)
        for i in tl.static_range(GROUP - 1, -1, -1):
            fall = rate * _distance(places_ptr, row, first + i, first + i + 1, length)
            m, n, d = _merge(m, n, d, fall, keys[i], values[i], 1.0)

    m, n, d = rate * 0 + NOTHING, rate * 0, rate * 0
    for chunk in range(start // CHUNK):
        last = (chunk + 1) * CHUNK - 1
        fall = rate * _distance(places_ptr, row, last - CHUNK, last, length)
        edge = _load_3(edge_ptr + 6 * chunk * channels, c_in, channels)
        m, n, d = _merge(m, n, d, fall, *edge)
    for group in range(GROUPS):
        first = start + group * GROUP
        at, left = row_at + first * channels, tl.where(c_in, length - first, 0)
        gaps = _gaps(places_ptr, row, first, length, GROUP)
        keys = _rows(k_ptr + at, left, channels, GROUP, NOTHING)
        values = _rows(v_ptr + at, left, channels, GROUP, 0.0)
        m_after, n_after = _take(later_m, group), _take(later_n, group)
        d_after = _take(later_d, group)
        later = ()
        for i in tl.static_range(GROUP - 1, -1, -1):
            gap = gaps[i + 1]
            later += ((m_after, n_after, d_after, rate * (gap - 1)),)
            m_after, n_after, d_after = _merge(
                m_after, n_after, d_after, rate * gap, keys[i], values[i], 1.0
            )
        for i in tl.static_range(GROUP):
            near = rate * (gaps[i] - 1)
            m_next, n_next, d_next, near_next = later[GROUP - 1 - i]
            r = tl.maximum(tl.maximum(m - near, m_next - near_next), keys[i] + bonus)
            before, after = tl.exp((m - r) - near), tl.exp((m_next - r) - near_next)
            own = tl.exp((keys[i] - r) + bonus)
            top = before * n + after * n_next + own * values[i]
            bottom = before * d + after * d_next + own
            tl.store(out_ptr + at + i * channels, top / bottom, mask=i < left)
            tl.store(lse_ptr + at + i * channels, r + tl.log(bottom), mask=i < left)
            m, n, d = _merge(m, n, d, rate * gaps[i], keys[i], values[i], 1.0)


@triton.jit(do_not_specialize=LENGTHS)
def summarise_grads(
    grad_ptr, out_ptr, lse_ptr, w_ptr, places_ptr, edges_ptr, length, total, channels, num_chunks,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write, for each chunk, the backward state (m, A, Z, A', Z') that sums up its steps as seen
    from the last one (forth), and the same as seen from the first one (back)."""
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
    grad_ptr, out_ptr, lse_ptr, k_ptr, v_ptr, w_ptr, u_ptr, places_ptr, edges_ptr,
    gk_ptr, gv_ptr, gs_ptr, gu_ptr, length, total, channels, num_chunks,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ∂k and ∂v [B, L, C], and what each of the n chunks adds to ∂u and to ∂s, the gradient
    of the decay per step, [B, n, C] each."""
    GROUPS: tl.constexpr = CHUNK // GROUP
    row, start, c, c_in = _here(num_chunks, channels, CHUNK, BLOCK)
    rate = tl.div_rn(_load(w_ptr + c, c_in, 0.0), total)
    bonus = _load(u_ptr + c, c_in, 0.0)
    row_at = row * length * channels + c
    edge_ptr = edges_ptr + row * num_chunks * 10 * channels + c
    gs, gu = rate * 0, rate * 0

    later_m, later_a, later_z, later_far_a, later_far_z = _grads_after_groups(
        grad_ptr, out_ptr, lse_ptr, places_ptr, edge_ptr, row, row_at, start, rate, c_in,
        length, channels, num_chunks, CHUNK, GROUP, BLOCK,
    )  # fmt: skip
    m, a, z, far_a, far_z = rate * 0 + NOTHING, rate * 0, rate * 0, rate * 0, rate * 0
    for chunk in range(start // CHUNK):
        last = (chunk + 1) * CHUNK - 1
        gap = _distance(places_ptr, row, last - CHUNK, last, length)
        edge = _load_5(edge_ptr + 10 * chunk * channels, c_in, channels)
        m, a, z, far_a, far_z = _merge_grads(m, a, z, far_a, far_z, gap, rate, *edge)
    for group in range(GROUPS):
        first = start + group * GROUP
        at, left = row_at + first * channels, tl.where(c_in, length - first, 0)
        gaps = _gaps(places_ptr, row, first, length, GROUP)
        sums = _rows(lse_ptr + at, left, channels, GROUP, -NOTHING)
        grads = _rows(grad_ptr + at, left, channels, GROUP, 0.0)
        means = _rows(out_ptr + at, left, channels, GROUP, 0.0)
        keys = _rows(k_ptr + at, left, channels, GROUP, NOTHING)
        values = _rows(v_ptr + at, left, channels, GROUP, 0.0)
        m_after, a_after = _take(later_m, group), _take(later_a, group)
        z_after = _take(later_z, group)
        far_a_after, far_z_after = _take(later_far_a, group), _take(later_far_z, group)
        parts = ()
        for i in tl.static_range(GROUP - 1, -1, -1):
            gap = gaps[i + 1]
            weight = tl.exp((keys[i] + m_after) - rate * (gap - 1))
            part = weight * (values[i] * a_after - z_after)
            gs += weight * (values[i] * far_a_after - far_z_after) + (gap - 1) * part
            parts += ((weight * a_after, part),)
            m_after, a_after, z_after, far_a_after, far_z_after = _merge_grads(
                m_after, a_after, z_after, far_a_after, far_z_after,
                gap, rate, -sums[i], grads[i], grads[i] * means[i], 0.0, 0.0,
            )  # fmt: skip
        for i in tl.static_range(GROUP):
            gap = gaps[i]
            weight = tl.exp((keys[i] + m) - rate * (gap - 1))
            part = weight * (values[i] * a - z)
            gs += weight * (values[i] * far_a - far_z) + (gap - 1) * part
            own = tl.exp((keys[i] - sums[i]) + bonus) * grads[i]
            own_part = own * (values[i] - means[i])
            gu += own_part
            later_v, later_k = parts[GROUP - 1 - i]
            tl.store(gv_ptr + at + i * channels, later_v + weight * a + own, mask=i < left)
            tl.store(gk_ptr + at + i * channels, later_k + part + own_part, mask=i < left)
            m, a, z, far_a, far_z = _merge_grads(
                m, a, z, far_a, far_z, gap, rate, -sums[i], grads[i], grads[i] * means[i], 0.0, 0.0
            )
    to = (row * num_chunks + start // CHUNK) * channels + c
    tl.store(gs_ptr + to, -gs, mask=c_in)
    tl.store(gu_ptr + to, gu, mask=c_in)


@triton.jit
def _grads_after_groups(
    grad_ptr, out_ptr, lse_ptr, places_ptr, edge_ptr, row, row_at, start, rate, c_in,
    length, channels, num_chunks,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return, for each of the GROUPS groups of GROUP steps in the chunk, the backward state
    (m, A, Z, A', Z') of all steps after the group: five tensors [GROUPS, BLOCK]."""
    GROUPS: tl.constexpr = CHUNK // GROUP
    m, a, z, far_a, far_z = rate * 0 + NOTHING, rate * 0, rate * 0, rate * 0, rate * 0
    for chunk in range(num_chunks - 1, start // CHUNK, -1):
        gap = _distance(places_ptr, row, chunk * CHUNK, (chunk + 1) * CHUNK, length)
        edge = _load_5(edge_ptr + (10 * chunk + 5) * channels, c_in, channels)
        m, a, z, far_a, far_z = _merge_grads(m, a, z, far_a, far_z, gap, rate, *edge)
    later_m = tl.zeros([GROUPS, BLOCK], tl.float32)
    later_a, later_z, later_far_a, later_far_z = later_m, later_m, later_m, later_m
    for done in range(GROUPS):
        group = GROUPS - 1 - done
        later_m, later_a = _put(later_m, group, m), _put(later_a, group, a)
        later_z = _put(later_z, group, z)
        later_far_a, later_far_z = _put(later_far_a, group, far_a), _put(later_far_z, group, far_z)
        first = start + group * GROUP
        at = row_at + first * channels
        left = tl.where(c_in, length - first, 0)  # steps of each channel from `first` on
        sums = _rows(lse_ptr + at, left, channels, GROUP, -NOTHING)
        grads = _rows(grad_ptr + at, left, channels, GROUP, 0.0)
        means = _rows(out_ptr + at, left, channels, GROUP, 0.0)
        for i in tl.static_range(GROUP - 1, -1, -1):
            gap = _distance(places_ptr, row, first + i, first + i + 1, length)
            m, a, z, far_a, far_z = _merge_grads(
                m, a, z, far_a, far_z, gap, rate, -sums[i], grads[i], grads[i] * means[i], 0.0, 0.0
            )
    return later_m, later_a, later_z, later_far_a, later_far_z


@triton.jit
def _put(states, group, state):
    """Return `states` [GROUPS, BLOCK] with that of `group` replaced by `state` [BLOCK]."""
    return tl.where(tl.arange(0, states.shape[0])[:, None] == group, state[None, :], states)


@triton.jit
def _take(states, group):
    """Return the state [BLOCK] of `group` among `states` [GROUPS, BLOCK]."""
    here = tl.arange(0, states.shape[0])[:, None] == group
    return tl.sum(tl.where(here, states, 0.0), axis=0)


@triton.jit
def _merge(m, n, d, fall, m_new, n_new, d_new):
    """Decay the state (m, n, d) by exp(-fall), add (m_new, n_new, d_new), and return the sum."""
    top = tl.maximum(m - fall, m_new)
    old, new = tl.exp((m - top) - fall), tl.exp(m_new - top)
    return top, old * n + new * n_new, old * d + new * d_new


@triton.jit
def _merge_grads(
    m, a, z, far_a, far_z, gap, rate, m_new, a_new, z_new, far_a_new, far_z_new
):  # fmt: skip
    """Move the first backward state away by `gap` positions, each a decay by exp(-rate), add the
    second one (`…_new`), and return the sum. far_a and far_z are A' and Z'."""
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
    """Return the program's row of the batch (int64), its first step, its channels [BLOCK], and a
    mask [BLOCK] of the channels that exist."""
    row = tl.program_id(0) // num_chunks
    start = (tl.program_id(0) % num_chunks) * CHUNK
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), start, c, c < channels


@triton.jit
def _load(at, inside, other):
    """Return the values at `at` as float32, and `other` where `inside` is false. tl.load's own
    `other` would have the dtype of the memory."""
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
    """Return CHUNK steps from `at` on, float32 [BLOCK] each. Only the first `left` steps exist; the
    others have the value `other`."""
    rows = ()
    for i in tl.static_range(CHUNK):
        rows += (_load(at + i * channels, i < left, other),)
    return rows


@triton.jit
def _gaps(places_ptr, row, start, length, CHUNK: tl.constexpr):
    """Return the CHUNK + 1 distances between neighbours among the steps `start` - 1 … `start` +
    CHUNK."""
    gaps = ()
    for i in tl.static_range(CHUNK + 1):
        gaps += (_distance(places_ptr, row, start + i - 1, start + i, length),)
    return gaps


@triton.jit
def _to_edge(places_ptr, row, start, length, way, CHUNK: tl.constexpr):
    """Return each step's distance to the chunk's last step (`way` 0) or to its first (`way` 1)."""
    away = ()
    for i in tl.static_range(CHUNK):
        if way == 0:
            away += (_distance(places_ptr, row, start + i, start + CHUNK - 1, length),)
        else:
            away += (_distance(places_ptr, row, start, start + i, length),)
    return away


@triton.jit
def _distance(places_ptr, row, here, there, length):
    """Return the position of step `there` minus that of step `here`, as float32. In `places_ptr`,
    if given, a step outside of the sequence has the position of the nearest step."""
    if places_ptr is None:
        return (there - here) * 1.0  # a step may be a number under the interpreter
    else:
        here = tl.minimum(tl.maximum(here, 0), length - 1)
        there = tl.minimum(tl.maximum(there, 0), length - 1)
        places_ptr += row * length
        return (tl.load(places_ptr + there) - tl.load(places_ptr + here)).to(tl.float32)
