"""Helpers shared by the implementations: types, segments of equal ids, chunks of steps.

Dimensions: B batch, L length, H heads, F features, T chunks of Q steps.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

CHUNK = 32  # most steps per chunk of the delta rules and linear attention, a power of 2


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """Return the dtype for sums over tensors: float64 if one of them has it, else float32."""
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Return bool [B, L]: whether a step's id differs from the one before it (first step: no)."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))


def reset(log_decay: Tensor, segment_ids: Tensor | None, value: float = -torch.inf) -> Tensor:
    """Return log-decays [B, L, ...] with `value` where a segment begins, to forget the past."""
    if segment_ids is None:
        return log_decay
    starts = segment_starts(segment_ids)
    return log_decay.masked_fill(starts.view(*starts.shape, *[1] * (log_decay.ndim - 2)), value)


def cut(x: Tensor, steps: int) -> Tensor:
    """Return x [B, L, H, F] as T chunks of Q = `steps` steps, [T, B, H, Q, F]: a view, or a copy
    with zeros after the end."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % steps)) if x.shape[1] % steps else x
    return x.unflatten(1, (-1, steps)).permute(1, 0, 3, 2, 4)


def join(chunks: Tensor, length: int) -> Tensor:
    """Return `chunks` [T, B, H, Q, F] as [B, L, H, F], cut to the first L = `length` steps."""
    return chunks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]


def power_of_two(length: int, most: int) -> int:
    """Return the smallest power of 2 that is `length` or more, but at most `most`."""
    steps = 1
    while steps < min(most, length):  # bit_length would need a new compilation for each length
        steps *= 2
    return steps


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I - a)^-1 [..., Q, Q] for a strictly lower triangular [..., Q, Q].

    Entries of `a` on and above its diagonal are ignored and get no gradient.

    It is computed by substitution. The product Π (I + a^(2^j)) is equal only in exact arithmetic:
    for similar keys the powers of a grow like binomials and cancel, with float32 errors above 1.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(-a, eye, upper=False, unitriangular=True)


def row_blocks(x: Tensor, num_values: int) -> list[slice]:
    """Return slices that cut the first axis of x into blocks, to compute one after the other. On a
    CPU a block has about `num_values` values; on other devices there is one block."""
    num_rows = len(x)
    if x.device.type == "cpu":
        num_blocks = -(-x.numel() // num_values)
        num_rows = -(-len(x) // min(len(x), num_blocks))
    return [slice(row, min(row + num_rows, len(x))) for row in range(0, len(x), num_rows)]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that disables autocast, so that sums stay in float32. It does nothing on the
    meta device, which has no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


@register_flop_formula(torch.ops.aten.linalg_solve_triangular)
def _solve_flops(
    a: tuple[int, ...], b: tuple[int, ...], *args: Any, left: bool = True, **kwargs: Any
) -> int:
    """Return the FLOPs of solving a x = b for a triangular a, given the shapes of a and b: on
    average, an entry of x takes a sum over half of a row of a."""
    return math.prod(b) * a[-1]


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) in the dtype of x.

    torch's own takes 10 ns a value on a CPU, because its log1p of float32 is slow there.
    """
    is_slow = x.device.type == "cpu" and x.dtype == torch.float32
    fast = is_slow and not torch.compiler.is_compiling()
    y: Tensor = _Softplus.apply(x) if fast else F.softplus(x)
    return y


class _Softplus(torch.autograd.Function):
    """Softplus as max(x, 0) + log(1 + e^-|x|). The logarithm is -log(1 - s), s = sigmoid(-|x|).

    1 - s is rounded to some u, and log(u) has the error of this rounding. s log(u) / (u - 1) is as
    exact as s (Kahan's method for log1p).
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        s = x.abs().neg_().sigmoid_()
        u = (1 - s).clamp_max_(1 - 2**-24)  # at u = 1 it would be 0 / 0
        return u.log().mul_(s).div_(u.sub_(1)).add_(x.clamp_min(0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].sigmoid()

    jvp = backward  # elementwise, so forward mode multiplies by the same derivative
