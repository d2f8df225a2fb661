"""Gated linear attention in plain torch, in chunks that are halved down to single steps.

Step i of a chunk takes W_ij v_j from a step j <= i of it, and from the state S before the chunk

    W_ij = Σ_c q_ic k_jc exp(l_{j+1,c} + … + l_ic)
    o_i  = Σ_j W_ij v_j + (q_i exp(l_1 + … + l_i)) S

A product of matrices gives W only if the decay is split in a factor of i and one of j. Split at the
start of the chunk, the factor of j is a power above 0, which overflows. Here a pair is split in the
middle of the smallest block of 2, 4, 8, … steps that has both: i is in its second half, j in its
first, and with the decays a = exp(l)

    W_ij = Σ_c (q_ic since_ic) (k_jc until_jc)
    since_i = a_m … a_i,    until_j = a_{j+1} … a_{m-1}

where m is the first step of the second half. All factors are products of decays, so that whatever
they are, nothing overflows, no difference of large sums is taken, and a decay of 0 parts segments
exactly. The next larger block's are made of these by one product each: since of its second half
takes until now all of its first half's decays, and the reverse.

Backward goes through the blocks from the largest to the smallest and carries ∂ log since and
∂ log until, which need no division by the decays; those of single steps are ∂l.

Dimensions: B batch, L length, H heads, R = B H rows of which some are done at a time, T chunks of
Q steps, N chunks of some rows, chunk-major, K and V widths of keys and values, h half of a block.
"""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

CHUNK = 32  # steps of a chunk at most, a power of 2
BLOCK_VALUES = 2**18  # B·L·H·K values done at a time on a CPU: what a block makes fits in cache


def gated_linear_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention; see `tread_zoo.kernels.gated_linear_attention`."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _forward(q, k, v, log_decay, segment_ids, factor)[0]
    return out


@torch.library.custom_op("tread_zoo::gated_linear_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [B, L, H, V], W [T, R, Q, Q] and the states between chunks [T - 1, R, K, V]."""
    with torch.autocast(q.device.type, enabled=False):
        cut = _cut(q, k, v, log_decay, segment_ids, scale)
        out, (weights, states) = torch.empty_like(cut[2]), _empty_saved(q, v, cut[0].dtype)
        for rows in _blocks(q):
            queries, keys, values, decays = (x[:, rows].flatten(0, 1) for x in cut)
            found = _attend(queries, keys, values, decays, len(states) + 1)
            for result, whole in zip(found, (out, weights, states), strict=True):
                whole[:, rows] = result.view(whole[:, rows].shape)
    return _join(out, v), weights, states


@torch.library.custom_op("tread_zoo::gated_linear_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    weights: Tensor,
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and log_decay."""
    with torch.autocast(q.device.type, enabled=False):
        cut = _cut(q, k, v, log_decay, segment_ids, scale)
        saved = (*cut, weights, states, _chunked(grad.to(cut[0].dtype)))
        grads = [torch.empty_like(x) for x in cut]
        for rows in _blocks(q):
            found = _gradients(*(x[:, rows].flatten(0, 1) for x in saved), len(weights))
            for result, whole in zip(found, grads, strict=True):
                whole[:, rows] = result.view(whole[:, rows].shape)
        gq, gk, gv, gl = grads
    return _join(gq.mul_(scale), q), _join(gk, k), _join(gv, v), _join(gl, log_decay)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, num_chunks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [N, Q, V], W [N, Q, Q] and the states between chunks of some rows [N, Q, F]."""
    levels, since, until = _decays(log_decay)
    weights = q.new_zeros(*q.shape[:2], q.shape[1])
    weights.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    for h, since_mid, until_mid in levels:
        left, right = _halves(k, h)[0] * until_mid, _halves(q, h)[1] * since_mid
        block = torch.bmm(right.flatten(0, 1), left.flatten(0, 1).mT)
        _corners(weights, h).copy_(block.unflatten(0, right.shape[:2]))
    out = torch.bmm(weights, v)
    num_rows = len(q) // num_chunks
    ahead, behind = slice(num_rows, None), slice(-num_rows)
    states = torch.bmm((k[behind] * until[behind]).mT, v[behind])
    left_over, parts = since[:, -1].unsqueeze(-1).split(num_rows), states.split(num_rows)
    for i in range(1, len(parts)):
        parts[i].addcmul_(left_over[i], parts[i - 1])
    out[ahead].baddbmm_(q[ahead] * since[ahead], states)
    return out, weights, states


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    weights: Tensor,
    states: Tensor,
    grad: Tensor,
    num_chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and log_decay for that of o, of some rows [N, Q, F]."""
    levels, since, until = _decays(log_decay)
    gw, gv = torch.bmm(grad, v.mT), torch.bmm(weights.mT, grad)
    own = gw.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    gq, gk = own * k, own * q
    gsince, guntil = torch.zeros_like(q), torch.zeros_like(q)  # of the logarithms

    num_rows = len(q) // num_chunks
    ahead, behind = slice(num_rows, None), slice(-num_rows)
    left, right = k[behind] * until[behind], q[ahead] * since[ahead]
    gstates = torch.bmm(right.mT, grad[ahead])
    left_over, parts = since[:, -1].unsqueeze(-1).split(num_rows), gstates.split(num_rows)
    for i in reversed(range(1, len(parts))):
        parts[i - 1].addcmul_(left_over[i], parts[i])
    gv[behind].baddbmm_(left, gstates)
    gleft, gright = torch.bmm(v[behind], gstates.mT), torch.bmm(grad[ahead], states.mT)
    gk[behind].addcmul_(gleft, until[behind])
    gq[ahead].addcmul_(gright, since[ahead])
    guntil[behind].addcmul_(gleft, left)
    gsince[ahead].addcmul_(gright, right)
    passed = (states[behind] * gstates[ahead]).sum(-1)
    gsince[ahead][behind][:, -1].addcmul_(passed, since[ahead][behind][:, -1])

    for h, since_mid, until_mid in reversed(levels):
        (gsince_left, gsince_right), guntil_left = _halves(gsince, h), _halves(guntil, h)[0]
        gsince_left[..., -1, :] += gsince_right.sum(-2)
        gsince_right[..., -1, :] += guntil_left.sum(-2)
        left, right = _halves(k, h)[0] * until_mid, _halves(q, h)[1] * since_mid
        block = _corners(gw, h)
        gleft, gright = _product(block.mT, right), _product(block, left)
        _halves(gk, h)[0].addcmul_(gleft, until_mid)
        _halves(gq, h)[1].addcmul_(gright, since_mid)
        guntil_left.addcmul_(gleft, left)
        gsince_right.addcmul_(gright, right)
    return gq, gk, gv, gsince


def _decays(log_decay: Tensor) -> tuple[list[tuple[int, Tensor, Tensor]], Tensor, Tensor]:
    """Return what is left since the middle of a block, and until it, for halves of 1, 2, 4, … steps
    as (h, since [N, Q / 2h, h, K], until); then since the chunk's start and until its end."""
    since, until, levels = log_decay.exp(), torch.ones_like(log_decay), []
    h = 1
    while h < log_decay.shape[1]:
        (since_left, since_right), until_left = _halves(since, h), _halves(until, h)[0]
        levels.append((h, since_right.clone(), until_left.clone()))
        until_left *= since_right[..., -1:, :]
        since_right *= since_left[..., -1:, :]
        h *= 2
    return levels, since, until


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Return views [N, Q / 2h, h, F] of [N, Q, F]: first and second halves of blocks of 2h."""
    left, right = x.unflatten(1, (-1, 2, h)).unbind(2)
    return left, right


def _corners(weights: Tensor, h: int) -> Tensor:
    """Return a view [N, Q / 2h, h, h] of W: from first halves of blocks of 2h to second halves."""
    blocks = weights.unflatten(2, (-1, 2 * h)).unflatten(1, (-1, 2 * h))
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)[..., h:, :h]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return [N, M, h, h] times [N, M, h, F]; torch's product is slow where they are tiny."""
    if a.shape[-1] <= 2:
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _cut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scaled q, k, v and log-decays as [T, R, Q, F] in the state's dtype."""
    dtypes = (q.dtype, k.dtype, v.dtype, log_decay.dtype, torch.float32)
    dtype = reduce(torch.promote_types, dtypes)
    if segment_ids is not None:
        starts = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
        log_decay = log_decay.masked_fill(starts[..., None, None], -torch.inf)
    queries = _chunked(q.to(dtype)) * scale
    return queries, _chunked(k.to(dtype)), _chunked(v.to(dtype)), _chunked(log_decay.to(dtype))


def _chunked(x: Tensor) -> Tensor:
    """[B, L, H, F] -> [T, R, Q, F], contiguous, with zeros after the end."""
    num_chunks, span = _spans(x.shape[1])
    x = F.pad(x, (0, 0, 0, 0, 0, num_chunks * span - x.shape[1]))
    return x.unflatten(1, (-1, span)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def _join(x: Tensor, like: Tensor) -> Tensor:
    """[T, R, Q, F] -> [B, L, H, F], contiguous, in the dtype of `like`, which has that shape."""
    x = x.unflatten(1, (like.shape[0], like.shape[2])).permute(1, 0, 3, 2, 4)
    joined = torch.empty_like(like, memory_format=torch.contiguous_format)
    return joined.copy_(x.flatten(1, 2)[:, : like.shape[1]])


def _spans(length: int) -> tuple[int, int]:
    """Return T and Q, a power of 2."""
    span = min(CHUNK, 1 << (length - 1).bit_length())
    return -(-length // span), span


def _blocks(q: Tensor) -> list[slice]:
    """Return the rows that are done at a time."""
    batch, length, heads, width = q.shape
    num_rows = step = batch * heads
    if q.device.type == "cpu":
        step = max(1, BLOCK_VALUES // (length * width))
    return [slice(row, row + step) for row in range(0, num_rows, step)]


def _empty_saved(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return memory for W and for the states between the chunks."""
    batch, length, heads, width = q.shape
    num_chunks, span = _spans(length)
    weights = q.new_empty(num_chunks, batch * heads, span, span, dtype=dtype)
    return weights, q.new_empty(num_chunks - 1, batch * heads, width, v.shape[3], dtype=dtype)


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype, log_decay.dtype, torch.float32))
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, *_empty_saved(q, v, dtype)


@_backward.register_fake
def _(
    grad: Tensor, weights: Tensor, states: Tensor, *inputs: Any, **rest: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _products(q: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the FLOPs of all blocks of W, of W v, and of a product with the states."""
    (batch, length, heads, width), size = q, v[3]
    num_chunks, span = _spans(length)
    num = batch * heads * num_chunks
    between = 2 * (num - batch * heads) * span * width * size
    return num * span * (span - 1) * width, 2 * num * span * span * size, between


@register_flop_formula(torch.ops.tread_zoo.gated_linear_attention)
def _forward_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *args: Any, **kwargs: Any
) -> int:
    """The matrix products: the blocks of W, W v, into the states and out of them."""
    blocks, weighted, between = _products(q, v)
    return blocks + weighted + 2 * between


@register_flop_formula(torch.ops.tread_zoo.gated_linear_attention_backward)
def _backward_flops(
    grad: tuple[int, ...],
    weights: tuple[int, ...],
    states: tuple[int, ...],
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    *args: Any,
    **kwargs: Any,
) -> int:
    """Two products for the gradients of each of those."""
    return 2 * _forward_flops(q, k, v)
