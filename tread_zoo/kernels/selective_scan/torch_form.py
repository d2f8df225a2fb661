"""The selective scan in plain torch, tile by tile in place.

    h_t = a_t h_{t-1} + x_t B_t,   a_t = exp(Δ_t A),   x_t = Δ_t u_t,   y_t = C_t · h_t + D u_t

and, with g_t the gradient that reaches h_t from y_t and from h_{t+1},

    g_t = C_t ∂y_t + a_{t+1} g_{t+1},        q_t = g_t a_t h_{t-1}   (the gradient of log a_t)
    ∂x_t = B_t · g_t,   ∂B_t = Σ_d x_t g_t,   ∂C_t = Σ_d ∂y_t h_t
    ∂Δ_t = Σ_n A q_t + u_t ∂x_t,   ∂u_t = Δ_t ∂x_t + D ∂y_t,   ∂A = Σ_t Δ_t q_t,   ∂D = Σ_t ∂y_t u_t

A tile is some rows of the batch for some steps, [T, R, G, N, P]: a step is contiguous, the channels
innermost, so every broadcast is along whole vectors and every sum over N or P is a batched matrix
product. Each operation runs once for all steps of a tile, except the recurrence: one `addcmul_`
per step. Autograd keeps only the states between tiles; backward recomputes each tile. exp is
computed as 2^(Δ A / ln 2), which is faster on a CPU.

Dimensions: B batch, L length, D channels, N states, G groups, P = D / G channels of a group,
T steps of a tile, R rows of a tile.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, segment_starts
from tread_zoo.kernels.operators import empty_like, make_operator

CHUNK = 32  # steps of a tile; autograd keeps B·D·N values per tile
STEP_VALUES = 32768  # values per step of a tile on a CPU, so that a few tiles fit in the L3 cache


class _Inputs(NamedTuple):
    """The inputs in the state's dtype, with time first, for G groups of P channels with N states.

    u, delta: [L, B, G, 1, P]. A: [G, N, P]. rates: A / ln 2 [G, N, P], as exp(Δ A) is computed as
    2^(Δ rates). B, C: [L, B, G, N]. D: [G, 1, P] or None. keep: 0 where a segment begins, else 1,
    [L, B, 1, 1, 1]; None if there are no segments.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    rates: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    keep: Tensor | None


class _Tile(NamedTuple):
    """Which values are computed at a time: the `steps` of chunk number `chunk`, for some `rows` of
    the batch."""

    steps: slice
    rows: slice
    chunk: int

    @property
    def at(self) -> tuple[slice, slice]:
        """The index of the tile in a tensor [L, B, ...]."""
        return self.steps, self.rows

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of steps and rows, (T, R)."""
        return self.steps.stop - self.steps.start, self.rows.stop - self.rows.start


def _forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, L, D] and the states between the chunks, [chunks - 1, B, G, N, P], for G groups
    of P channels with N states each."""
    with torch.autocast(u.device.type, enabled=False):
        inputs = _prepare(u, delta, A, B, C, D, segment_ids)
        y = empty_like(u)
        outputs = _time_major(y, inputs.u.shape)
        states = u.new_empty(_states_shape(u, A, B), dtype=inputs.u.dtype)
        tiles = _tiles(inputs)
        scratch = _scratch(inputs, tiles, count=2)
        for tile in tiles:
            a, h = _buffers(inputs, tile, scratch)
            _start(h, states, tile)
            _fill(inputs, tile, a, h)
            part = _contract(inputs.C[tile.at], h[1:])
            if inputs.D is not None:
                part.addcmul_(inputs.u[tile.at], inputs.D)
            outputs[tile.at] = part
            if tile.chunk < len(states):
                states[tile.chunk, tile.rows] = h[-1]
    return y, states


def _backward(grad_y: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of u, delta, A, B, C and D (empty where D is None)."""
    u, delta, A, B, C, D, _ = args
    with torch.autocast(u.device.type, enabled=False):
        inputs = _prepare(*args)
        gy = _time_major(grad_y.to(inputs.u.dtype), inputs.u.shape)
        gu, gd, gB, gC = map(empty_like, (u, delta, B, C))
        sums = torch.zeros_like(inputs.A), torch.zeros_like(inputs.A[:, :1])
        grads = (
            *(_time_major(x, inputs.u.shape) for x in (gu, gd)),
            *(x.transpose(0, 1) for x in (gB, gC)),
            *sums,
        )
        tiles = _tiles(inputs)
        scratch = _scratch(inputs, tiles, count=3)
        carry = torch.zeros_like(inputs.B[0].unsqueeze(-1) * inputs.A)
        for tile in reversed(tiles):
            buffers = _buffers(inputs, tile, scratch)
            _start(buffers[1], states, tile)
            _backward_tile(inputs, gy[tile.at], tile, buffers, carry[tile.rows], grads)
    gA, gD = (x.transpose(1, 2) for x in sums)
    gD = u.new_empty(0) if D is None else gD.reshape(D.shape).to(D.dtype)
    return gu, gd, gA.reshape(A.shape).to(A.dtype), gB, gC, gD


def _backward_tile(
    inputs: _Inputs,
    gy: Tensor,
    tile: _Tile,
    buffers: list[Tensor],
    carry: Tensor,
    grads: tuple[Tensor, ...],
) -> None:
    """Recompute a tile, run its recurrence backwards, and write its gradients.

    Args:
        inputs: the inputs of the call.
        gy: gradient of the tile's y.
        tile: the tile.
        buffers: three from `_buffers`; the second begins with the state before the tile.
        carry: a_{t+1} g_{t+1} for the step after the tile; becomes that for the tile's first step.
        grads: gradients of u, delta, B and C, whose values for the tile are written, and of A and
            D, to which the sums over the tile are added.
    """
    a, h, g = buffers
    gu, gd, gB, gC, gA, gD = grads
    u, delta = inputs.u[tile.at], inputs.delta[tile.at]
    x = _fill(inputs, tile, a, h)
    torch.mul(gy, inputs.C[tile.at].unsqueeze(-1), out=g)
    g[-1].add_(carry)
    decays, steps = a.unbind(0), g.unbind(0)
    for t in range(len(steps) - 1, 0, -1):
        steps[t - 1].addcmul_(decays[t], steps[t])
    gx = _contract(inputs.B[tile.at], g)
    gB[tile.at] = _project(x, g)
    gC[tile.at] = _project(gy, h[1:])
    a.mul_(g)
    carry.copy_(a[0])
    q = a.mul_(h[:-1])
    _add_sum(gA, torch.mul(q, delta, out=g))
    gd[tile.at] = q.mul_(inputs.A).sum(-2, keepdim=True).addcmul_(u, gx)
    gx.mul_(delta)
    if inputs.D is not None:
        gx.addcmul_(gy, inputs.D)
        _add_sum(gD, gy * u)
    gu[tile.at] = gx


def _fill(inputs: _Inputs, tile: _Tile, a: Tensor, h: Tensor) -> Tensor:
    """Return x = Δ u of a tile, [T, R, G, 1, P]. Write the decays of its T steps to `a` [T, ...].
    Compute the states after these steps from the one before them, h[0], and write them to h[1:]."""
    delta = inputs.delta[tile.at]
    x = delta * inputs.u[tile.at]
    torch.mul(delta, inputs.rates, out=a)
    a.exp2_()
    if inputs.keep is not None:
        a.mul_(inputs.keep[tile.at])
    torch.mul(x, inputs.B[tile.at].unsqueeze(-1), out=h[1:])
    states = h.unbind(0)
    for t, decay in enumerate(a.unbind(0)):
        if t > 0 or tile.chunk > 0:  # before the first chunk the state is zero
            states[t + 1].addcmul_(decay, states[t])
    return x


def _start(h: Tensor, states: Tensor, tile: _Tile) -> None:
    """Set h[0] to the state before the tile: 0, or taken from `states`, which has the states before
    all chunks but the first."""
    if tile.chunk == 0:
        h[0].zero_()
    else:
        h[0].copy_(states[tile.chunk - 1, tile.rows])


def _contract(vectors: Tensor, states: Tensor) -> Tensor:
    """Return Σ_n vectors [T, R, G, N] states [T, R, G, N, P]: [T, R, G, 1, P]."""
    size, channels = states.shape[-2:]
    sums = torch.bmm(vectors.reshape(-1, 1, size), states.view(-1, size, channels))
    return sums.view(*states.shape[:-2], 1, channels)


def _project(values: Tensor, states: Tensor) -> Tensor:
    """Return Σ_p values [T, R, G, 1, P] states [T, R, G, N, P]: [T, R, G, N]."""
    size, channels = states.shape[-2:]
    flat = states.view(-1, size, channels).transpose(1, 2)
    return torch.bmm(values.reshape(-1, 1, channels), flat).view(states.shape[:-1])


def _add_sum(total: Tensor, values: Tensor) -> None:
    """Add Σ values [T, R, ...] over T and R to `total`; a product with ones is faster than sum."""
    rows = values.flatten(0, 1).flatten(1)
    flat = total.view(1, -1)
    torch.addmm(flat, rows.new_ones(1, len(rows)), rows, out=flat)


def _prepare(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
) -> _Inputs:
    dtype = at_least_float32(u, delta)
    batch, length, width = u.shape
    groups, size = B.shape[2:]
    shape = torch.Size((length, batch, groups, 1, width // groups))
    keep = None
    if segment_ids is not None:
        keep = (~segment_starts(segment_ids)).t()[:, :, None, None, None].to(dtype)
    rates = A.to(dtype).view(groups, -1, size).transpose(1, 2).contiguous()
    return _Inputs(
        u=_time_major(u.to(dtype), shape),
        delta=_time_major(delta.to(dtype), shape),
        A=rates,
        rates=rates / math.log(2),
        B=B.to(dtype).transpose(0, 1),
        C=C.to(dtype).transpose(0, 1),
        D=None if D is None else D.to(dtype).view(groups, 1, -1),
        keep=keep,
    )


def _time_major(values: Tensor, shape: torch.Size) -> Tensor:
    """Return `values` [B, L, D] as a view of `shape`, [L, B, G, 1, P]."""
    length, batch, groups, _, channels = shape
    return values.reshape(batch, length, groups, 1, channels).transpose(0, 1)


def num_chunks(length: int) -> int:
    """Return the number of tiles along time, of at most CHUNK steps."""
    return -(-length // CHUNK)


def _states_shape(u: Tensor, A: Tensor, B: Tensor) -> tuple[int, ...]:
    batch, length, width = u.shape
    groups, size = B.shape[2], A.shape[1]
    return num_chunks(length) - 1, batch, groups, size, width // groups


def _tiles(inputs: _Inputs) -> list[_Tile]:
    """Return the tiles, ordered by block of rows and then by time."""
    length, batch = inputs.u.shape[:2]
    span = -(-length // num_chunks(length))
    num_rows = batch
    if inputs.u.device.type == "cpu":
        num_blocks = -(-batch * inputs.A.numel() // STEP_VALUES)
        num_rows = -(-batch // min(batch, num_blocks))
    return [
        _Tile(slice(t, min(t + span, length)), slice(row, min(row + num_rows, batch)), i)
        for row in range(0, batch, num_rows)
        for i, t in enumerate(range(0, length, span))
    ]


def _scratch(inputs: _Inputs, tiles: list[_Tile], count: int) -> Tensor:
    """Return memory with `count` rows. Each has room for the states of the first tile, which is the
    largest, and for the state before it, [T + 1, R, G, N, P]."""
    span, num_rows = tiles[0].shape
    return inputs.A.new_empty(count, (span + 1) * num_rows * inputs.A.numel())


def _buffers(inputs: _Inputs, tile: _Tile, scratch: Tensor) -> list[Tensor]:
    """Return a view of each row of `scratch` in the tile's shape, [T, R, G, N, P]. The second view
    is for states, [T + 1, R, G, N, P]: the state before the tile comes first."""
    span, num_rows = tile.shape
    shapes = [(span + (i == 1), num_rows, *inputs.A.shape) for i in range(len(scratch))]
    return [x[: math.prod(s)].view(s) for x, s in zip(scratch, shapes, strict=True)]


def kept_like(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return uninitialised outputs of a forward pass: y, and the states between the chunks."""
    dtype = at_least_float32(u, delta)
    return empty_like(u), u.new_empty(_states_shape(u, A, B), dtype=dtype)


def flops(
    u: tuple[int, ...], delta: tuple[int, ...], A: tuple[int, ...], *args: Any
) -> tuple[int, int]:
    """Return the FLOPs, 7 B L D N forward and 20 B L D N backward, without terms that lack N.

    Forward, in the module's symbols: Δ A 1, exp 1, x B 1, a h + x B 2, C · h 2. Backward: h again
    5, C ∂y 1, a g + C ∂y 2, ∂x, ∂B, ∂C 2 each, q 2, ∂A 2, ∂Δ 2.
    """
    return 7 * math.prod(u) * A[1], 20 * math.prod(u) * A[1]


selective_scan_torch = make_operator(
    "selective_scan",
    _forward,
    _backward,
    empty=kept_like,
    flops=flops,
    num_gradients=6,
    num_kept=1,
)
