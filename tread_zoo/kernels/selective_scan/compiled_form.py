"""The selective scan in C for a CPU: the recurrence of `torch_form`, in one pass over the inputs.

Autograd keeps the inputs and, as in the torch form, the state before each chunk of at most CHUNK
steps but the first. From these the backward pass recomputes the states of all steps. The softplus
of the step sizes is part of the pass. Rows of the batch and blocks of channels are independent of
each other, so the number of threads changes no bit. Each has its own part of the gradients of A, B,
C, D and the bias; the parts are summed afterwards.

Dimensions: B batch, L length, D channels, N states, G groups, P = D / G channels of a group.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import segment_starts
from tread_zoo.kernels.compiled import CompiledSource
from tread_zoo.kernels.operators import make_operator
from tread_zoo.kernels.selective_scan.torch_form import flops, kept_like, num_chunks

CHANNELS = 128  # per block, as in scan.c
SCAN_C = CompiledSource(Path(__file__).with_name("scan.c"))


def _forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    step_bias: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, L, D] and the states between the chunks, [chunks - 1, B, G, N, P], for G groups
    of P channels with N states each."""
    _, states = kept_like(u, delta, A, B)
    inputs = _prepare(u, delta, A, B, C, D, step_bias, segment_ids)
    y = torch.empty_like(inputs[0])
    _scan(inputs, states, y, *[None] * 8)
    return y.to(u.dtype), states


def _backward(grad_y: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of u, delta, A, B, C, D and step_bias; that of a None is empty."""
    u, delta, A, B, C, D, step_bias, _ = args
    inputs = _prepare(*args)
    gu, gdelta = (torch.empty_like(inputs[0]) for _ in range(2))
    gA, gD, gbias = (gu.new_empty(len(u), *x.shape) for x in (inputs[2], gu[0, 0], gu[0, 0]))
    gB, gC = (gu.new_empty(_num_blocks(inputs), *B.shape) for _ in range(2))
    _scan(inputs, states, None, grad_y.float().contiguous(), gu, gdelta, gA, gB, gC, gD, gbias)
    gA, gB, gC, gD, gbias = (x.sum(0) for x in (gA, gB, gC, gD, gbias))
    gA = gA.transpose(1, 2).reshape(A.shape)
    pairs = ((gu, u), (gdelta, delta), (gA, A), (gB, B), (gC, C), (gD, D), (gbias, step_bias))
    return tuple(u.new_empty(0) if x is None else g.to(x.dtype) for g, x in pairs)


def _prepare(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    step_bias: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Any, ...]:
    """Return the inputs as the C function `scan` takes them. A becomes A / ln 2 [G, N, P], and
    `segment_ids` become 0 where a segment begins, else 1."""
    rates = (A.float() / math.log(2)).view(B.shape[2], -1, A.shape[1]).transpose(1, 2)
    keep = None if segment_ids is None else (~segment_starts(segment_ids)).float()
    given = (u, delta, rates, B, C, D, step_bias, keep)
    return tuple(None if x is None else x.float().contiguous() for x in given)


def _scan(inputs: tuple[Any, ...], states: Tensor, *results: Tensor | None) -> None:
    (batch, length, _), (groups, size, channels) = inputs[0].shape, inputs[2].shape
    sizes = batch, length, groups, size, channels, -(-length // num_chunks(length))
    jobs = batch * groups * _num_blocks(inputs)
    SCAN_C.share("scan", *inputs, states, *results, *sizes, jobs=jobs)


def _num_blocks(inputs: tuple[Any, ...]) -> int:
    """Return how many blocks of at most CHANNELS channels a group has."""
    return -(-inputs[2].shape[2] // CHANNELS)


selective_scan_compiled = make_operator(
    "selective_scan_compiled",
    _forward,
    _backward,
    empty=kept_like,
    flops=flops,
    num_gradients=7,
    num_kept=1,
)
