# mypy: ignore-errors
"""Device code of the selective scan in Triton; `triton_form` launches it and has the maths.

A program is one warp. It takes one row of the batch and a block of channels of one group and walks
through time, its states [D, N] in float32 registers. The vectorised load of A decides which lane
has which state: at 16 x 16, four lanes share a channel, four states each, and a lane has two
channels. So a sum over the states of a channel takes two shuffles, a sum over the channels of the
block three, and neither takes a barrier. The loads of STEPS steps are issued together, before
anything is computed; other programs on the multiprocessor fill the time until they arrive.

Time could be a parallel axis instead, with `tl.associative_scan`. That costs about four times the
arithmetic, a tree of shuffles instead of one multiply-add per state, and all steps of a padded
block. Little is left to gain: exponentials, of which a multiprocessor computes 16 per cycle, take
three quarters of the forward pass. In the backward pass, the shuffles of the sums over channels
take as long as all arithmetic. The walk needs enough batch, channels and states to fill the device,
for example 32 x 768 x 16. For much smaller inputs, launching the kernel takes longer than either
the walk or a parallel scan.

Dimensions: D channels of a block, N states, padded to powers of two.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["length"])
def forward(
    u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, keep_ptr, y_ptr, states_ptr, length,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write y [B, L, D], or the states before chunks of STEPS steps [B, chunks, D, N], or both."""
    VECTOR: tl.constexpr = GROUPS * SIZE
    batch, _, d, d_in, vector, n_in, at, at_in = _place(WIDTH, GROUPS, SIZE, BLOCK_D, BLOCK_N)
    rates = tl.load(A_ptr + at, mask=at_in, other=0.0) * LOG2_E
    if D_ptr is not None:
        skip = tl.load(D_ptr + d, mask=d_in, other=0.0)
    h = tl.full([BLOCK_D, BLOCK_N], 0.0, tl.float32)
    num_chunks = tl.cdiv(length, STEPS)
    for chunk in range(num_chunks):
        row = batch * length + chunk * STEPS
        left = length - chunk * STEPS
        d_left, n_left = tl.where(d_in, left, 0), tl.where(n_in, left, 0)
        if states_ptr is not None:
            base = (batch * num_chunks + chunk) * (WIDTH * SIZE)
            tl.store(states_ptr + base + at, h, mask=at_in)
        us = _rows(u_ptr, row, d_left, d, WIDTH, STEPS)
        deltas = _rows(delta_ptr, row, d_left, d, WIDTH, STEPS)
        Bs = _rows(B_ptr, row, n_left, vector, VECTOR, STEPS)
        if keep_ptr is not None:
            keeps = _rows(keep_ptr, row, left, 0, 1, STEPS)
        if y_ptr is not None:
            Cs = _rows(C_ptr, row, n_left, vector, VECTOR, STEPS)
        for i in tl.static_range(STEPS):
            a = tl.exp2(deltas[i][:, None] * rates)
            if keep_ptr is not None:
                a *= keeps[i]
            h = tl.fma(a, h, (deltas[i] * us[i])[:, None] * Bs[i][None, :])
            if y_ptr is not None:
                y = tl.sum(h * Cs[i][None, :], axis=1)
                if D_ptr is not None:
                    y = tl.fma(skip, us[i], y)
                tl.store(y_ptr + (row + i) * WIDTH + d, y, mask=i < d_left)


@triton.jit(do_not_specialize=["length", "num_rows"])
def backward(
    gy_ptr, u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, keep_ptr, states_ptr,
    gu_ptr, gdelta_ptr, gA_ptr, gB_ptr, gC_ptr, gD_ptr, length, num_rows,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write ∂u and ∂Δ [B, L, D], and partial sums of the other gradients, to be added over the
    first axis.

    gA: [B, D, N]. gD: [B, D]. gB, gC: [blocks of a group, B, L, G, N]. num_rows is B L.
    """
    VECTOR: tl.constexpr = GROUPS * SIZE
    batch, part, d, d_in, vector, n_in, at, at_in = _place(WIDTH, GROUPS, SIZE, BLOCK_D, BLOCK_N)
    rates = tl.load(A_ptr + at, mask=at_in, other=0.0) * LOG2_E
    if D_ptr is not None:
        skip = tl.load(D_ptr + d, mask=d_in, other=0.0)
        gskip = tl.full([BLOCK_D], 0.0, tl.float32)
    carry = tl.full([BLOCK_D, BLOCK_N], 0.0, tl.float32)  # a_{t+1} g_{t+1}
    gA = tl.full([BLOCK_D, BLOCK_N], 0.0, tl.float32)
    num_chunks = tl.cdiv(length, STEPS)
    for done in range(num_chunks):
        chunk = num_chunks - 1 - done
        row = batch * length + chunk * STEPS
        left = length - chunk * STEPS
        d_left, n_left = tl.where(d_in, left, 0), tl.where(n_in, left, 0)
        base = (batch * num_chunks + chunk) * (WIDTH * SIZE)
        h = tl.load(states_ptr + base + at, mask=at_in, other=0.0)
        us = _rows(u_ptr, row, d_left, d, WIDTH, STEPS)
        deltas = _rows(delta_ptr, row, d_left, d, WIDTH, STEPS)
        gys = _rows(gy_ptr, row, d_left, d, WIDTH, STEPS)
        Bs = _rows(B_ptr, row, n_left, vector, VECTOR, STEPS)
        Cs = _rows(C_ptr, row, n_left, vector, VECTOR, STEPS)
        if keep_ptr is not None:
            keeps = _rows(keep_ptr, row, left, 0, 1, STEPS)
        sums = (part * num_rows + row) * VECTOR + vector
        decays = ()
        before = ()
        for i in tl.static_range(STEPS):
            a = tl.exp2(deltas[i][:, None] * rates)
            if keep_ptr is not None:
                a *= keeps[i]
            decays += (a,)
            before += (h,)
            h = tl.fma(a, h, (deltas[i] * us[i])[:, None] * Bs[i][None, :])
        for i in tl.static_range(STEPS - 1, -1, -1):
            inside = i < n_left
            _store_sum(gC_ptr + sums + i * VECTOR, gys[i][:, None] * h, inside, BLOCK_D, BLOCK_N)
            g = tl.fma(Cs[i][None, :], gys[i][:, None], carry)
            x = deltas[i] * us[i]
            _store_sum(gB_ptr + sums + i * VECTOR, x[:, None] * g, inside, BLOCK_D, BLOCK_N)
            gx = tl.sum(Bs[i][None, :] * g, axis=1)
            carry = decays[i] * g
            h = before[i]
            q = carry * h
            gA = tl.fma(deltas[i][:, None], q, gA)
            gdelta = tl.fma(us[i], gx, tl.sum(rates * q, axis=1) * LN_2)
            gu = deltas[i] * gx
            if D_ptr is not None:
                gu = tl.fma(skip, gys[i], gu)
                gskip = tl.fma(us[i], gys[i], gskip)
            here = (row + i) * WIDTH + d
            tl.store(gu_ptr + here, gu, mask=i < d_left)
            tl.store(gdelta_ptr + here, gdelta, mask=i < d_left)
    tl.store(gA_ptr + batch * (WIDTH * SIZE) + at, gA, mask=at_in)
    if D_ptr is not None:
        tl.store(gD_ptr + batch * WIDTH + d, gskip, mask=d_in)


@triton.jit
def _place(
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the offsets in memory that this program works on.

    In order: the row of the batch and the block's number in its group, int64; the channels [D]; the
    offsets [N] of a group's vector in [G, N]; the offsets [D, N] of the block in a matrix [D, N].
    Each of the last three is followed by a mask of those that exist.
    """
    GROUP: tl.constexpr = WIDTH // GROUPS
    BLOCKS: tl.constexpr = (GROUP + BLOCK_D - 1) // BLOCK_D
    batch = tl.program_id(0) // (GROUPS * BLOCKS)
    group = tl.program_id(0) // BLOCKS % GROUPS
    part = tl.program_id(0) % BLOCKS
    p = part * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    d = group * GROUP + p
    d_in, n_in = p < GROUP, n < SIZE
    at, at_in = d[:, None] * SIZE + n[None, :], d_in[:, None] & n_in[None, :]
    return batch.to(tl.int64), part.to(tl.int64), d, d_in, group * SIZE + n, n_in, at, at_in


@triton.jit
def _rows(ptr, row, left, column, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Return the columns `column` of STEPS rows, from `row` on, of a matrix with WIDTH columns: a
    tuple of float32 vectors. Rows after the first `left` are zeros."""
    rows = ()
    for i in tl.static_range(STEPS):
        value = tl.load(ptr + (row + i) * WIDTH + column, mask=i < left, other=0.0)
        rows += (value.to(tl.float32),)
    return rows


@triton.jit
def _store_sum(ptr, values, inside, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store Σ_d values [D, N] at ptr [N].

    The sum is stored as the first row of a tile like `values`. A vector would first be converted to
    another layout, through shared memory and a barrier.
    """
    first = (tl.arange(0, BLOCK_D) == 0)[:, None]
    total = tl.broadcast_to(tl.sum(values, axis=0)[None, :], [BLOCK_D, BLOCK_N])
    places = tl.broadcast_to(ptr[None, :], [BLOCK_D, BLOCK_N])
    tl.store(places, total, mask=first & inside[None, :])
