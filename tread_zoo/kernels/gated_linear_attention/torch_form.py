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

Dimensions: B batch, L length, H heads, T chunks of Q steps, N = T B H chunk-major, K and V widths
of keys and values, h half of a block.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    dtypes = (q.dtype, k.dtype, v.dtype, log_decay.dtype, torch.float32)
    dtype = reduce(torch.promote_types, dtypes)
    if segment_ids is not None:
        starts = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
        log_decay = log_decay.masked_fill(starts[..., None, None], -torch.inf)
    queries = q.to(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return _attend(queries, k.to(dtype), v.to(dtype), log_decay.to(dtype)).to(v.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Return the unscaled attention [B, L, H, V], on a CPU some rows of the batch, or heads, at a
    time."""
    batch, length, heads, _ = q.shape
    in_blocks = q.device.type == "cpu" and not torch.compiler.is_compiling()
    num_blocks = -(-q.numel() // BLOCK_VALUES) if in_blocks else 1
    dim = 0 if batch > 1 else 2
    if num_blocks > 1 and q.shape[dim] > 1:
        parts = (x.chunk(num_blocks, dim) for x in (q, k, v, log_decay))
        return torch.cat([_attend(*block) for block in zip(*parts, strict=True)], dim)
    span = min(CHUNK, 1 << (length - 1).bit_length())
    num_chunks = -(-length // span)

    def cut(x: Tensor) -> Tensor:
        """[B, L, H, F] -> [N, Q, F], contiguous, with zeros after the end."""
        x = F.pad(x, (0, 0, 0, 0, 0, num_chunks * span - length))
        return x.unflatten(1, (-1, span)).permute(1, 0, 3, 2, 4).flatten(0, 2).contiguous()

    out = _Attention.apply(cut(q), cut(k), cut(v), cut(log_decay), batch * heads)[0]
    out = out.unflatten(0, (num_chunks, batch, heads)).permute(1, 0, 3, 2, 4)
    return out.flatten(1, 2)[:, :length]


class _Attention(torch.autograd.Function):
    """Return the outputs [N, Q, V], W [N, Q, Q] and the states between chunks [N - B H, K, V]."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _full_precision(q.device):
            levels, since, until = _decays(log_decay)
            weights = q.new_zeros(*q.shape[:2], q.shape[1])
            weights.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
            for h, since_mid, until_mid in levels:
                left, right = _halves(k, h)[0] * until_mid, _halves(q, h)[1] * since_mid
                block = torch.bmm(right.flatten(0, 1), left.flatten(0, 1).mT)
                _corners(weights, h).copy_(block.unflatten(0, right.shape[:2]))
            out = torch.bmm(weights, v)
            ahead, behind = slice(num_rows, None), slice(-num_rows)
            states = torch.bmm((k[behind] * until[behind]).mT, v[behind])
            left_over = since[:, -1].unsqueeze(-1).split(num_rows)
            parts = states.split(num_rows)
            for i in range(1, len(parts)):
                parts[i].addcmul_(left_over[i], parts[i - 1])
            out[ahead].baddbmm_(q[ahead] * since[ahead], states)
            return out, weights, states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.num_rows = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, weights, states = ctx.saved_tensors
        with _full_precision(q.device):
            grad = grad.contiguous()  # bmm would copy its matrices one by one
            levels, since, until = _decays(log_decay)
            gw, gv = torch.bmm(grad, v.mT), torch.bmm(weights.mT, grad)
            own = gw.diagonal(dim1=1, dim2=2).unsqueeze(-1)
            gq, gk = own * k, own * q
            gsince, guntil = torch.zeros_like(q), torch.zeros_like(q)  # of the logarithms

            ahead, behind = slice(ctx.num_rows, None), slice(-ctx.num_rows)
            left, right = k[behind] * until[behind], q[ahead] * since[ahead]
            gstates = torch.bmm(right.mT, grad[ahead])
            left_over = since[:, -1].unsqueeze(-1).split(ctx.num_rows)
            parts = gstates.split(ctx.num_rows)
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
            return gq, gk, gv, gsince, None


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()  # the meta device has no autocast to switch off


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
