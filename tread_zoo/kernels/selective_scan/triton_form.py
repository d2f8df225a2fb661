"""The selective scan in Triton: the states stay in registers, forward and backward.

    h_t = a_t h_{t-1} + x_t B_t,   a_t = exp(Δ_t A),   x_t = Δ_t u_t,   y_t = C_t · h_t + D u_t

and, with g_t the gradient that reaches h_t from y_t and from h_{t+1},

    g_t = C_t ∂y_t + a_{t+1} g_{t+1},        q_t = g_t a_t h_{t-1}   (the gradient of log a_t)
    ∂x_t = B_t · g_t,   ∂B_t = Σ_d x_t g_t,   ∂C_t = Σ_d ∂y_t h_t
    ∂Δ_t = Σ_n A q_t + u_t ∂x_t,   ∂u_t = Δ_t ∂x_t + D ∂y_t,   ∂A = Σ_t Δ_t q_t,   ∂D = Σ_t ∂y_t u_t

Autograd keeps the inputs alone. Backward first runs the recurrence again and stores the state
before each chunk of BACKWARD_STEPS steps: B L D N / BACKWARD_STEPS float32 values, freed at the end
of the backward pass. Then it goes from the last chunk to the first: from the stored state it
recomputes the states of the chunk in registers, and walks through them backwards.

∂B and ∂C are sums over channels and therefore over programs; ∂A and ∂D are sums over the batch.
Every program writes its partial sum, and these are added afterwards: no atomics, the same bits in
every run.

Dimensions: B batch, L length, D channels, N states, G groups.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import segment_starts
from tread_zoo.kernels.launch import launch
from tread_zoo.kernels.operators import empty_like, make_operator
from tread_zoo.kernels.selective_scan.torch_form import flops

KERNELS = "tread_zoo.kernels.selective_scan.triton_kernels"
MAX_STATES = 64
FORWARD_STEPS = 8  # steps whose loads are in flight together
BACKWARD_STEPS = 4  # steps whose states and decays fill half of a thread's registers
PROGRAM_STATES = 256  # per program, 8 per thread. Fewer cost more shuffles, more would spill
MIN_PROGRAMS = 1024  # two per quarter of a large GPU's multiprocessors; below, blocks are halved
# With 168 registers per thread, 12 programs fit on a multiprocessor. NVIDIA only.
BACKWARD_OPTIONS = {"maxnreg": 168} if torch.version.hip is None else {}


class _Blocks(NamedTuple):
    """How the work is divided: a program computes one block of channels of one row of the batch.

    channels: number of channels of a block. states: number of states of a channel, rounded up to a
    power of two. parts: number of blocks of a group of channels that share B and C. programs:
    number of programs.
    """

    channels: int
    states: int
    parts: int
    programs: int


def _forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
) -> Tensor:
    """Return y [B, L, D]."""
    y = empty_like(u)
    _scan(_prepare(u, delta, A, B, C, D, segment_ids), _blocks(u, A, B), y=y)
    return y


def _backward(grad_y: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of u, delta, A, B, C and D (empty where D is None)."""
    u, delta, A, B, C, D, _ = args
    (batch, length, width), size = u.shape, A.shape[1]
    inputs, blocks = _prepare(*args), _blocks(u, A, B)
    num_chunks = -(-length // BACKWARD_STEPS)
    states = u.new_empty(batch, num_chunks, width, size, dtype=torch.float32)
    _scan(inputs, blocks, states=states)
    gu, gdelta = empty_like(u), empty_like(delta)
    gA = states.new_empty(batch, width, size)
    gB, gC = states.new_empty(2, blocks.parts, *B.shape)
    gD = states.new_empty(batch, 0 if D is None else width)
    launch(
        KERNELS,
        "backward",
        u.device,
        (blocks.programs,),
        *(grad_y.contiguous(), *inputs, states, gu, gdelta, gA, gB, gC, gD),
        *(length, batch * length),
        **_sizes(u, B, blocks, BACKWARD_STEPS),
        **BACKWARD_OPTIONS,
    )
    sums = [part.sum(0).to(x.dtype) for part, x in ((gA, A), (gB, B), (gC, C))]
    return gu, gdelta, sums[0], sums[1], sums[2], gD.sum(0).to(u.dtype if D is None else D.dtype)


def _prepare(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Any, ...]:
    """Return the inputs as the kernels take them: contiguous, with A and D in float32.
    `segment_ids` become float32 [B, L]: 0 where a segment begins, else 1."""
    keep = None if segment_ids is None else (~segment_starts(segment_ids)).float()
    given = (u, delta, A.float(), B, C, None if D is None else D.float(), keep)
    return tuple(None if x is None else x.contiguous() for x in given)


def _scan(
    inputs: tuple[Any, ...], blocks: _Blocks, y: Tensor | None = None, states: Tensor | None = None
) -> None:
    """Write y to `y`, or the state before each chunk of BACKWARD_STEPS steps to `states`."""
    u, steps = inputs[0], FORWARD_STEPS if states is None else BACKWARD_STEPS
    args, sizes = (*inputs, y, states, u.shape[1]), _sizes(u, inputs[3], blocks, steps)
    launch(KERNELS, "forward", u.device, (blocks.programs,), *args, **sizes)


def _blocks(u: Tensor, A: Tensor, B: Tensor) -> _Blocks:
    problem = len(u), u.shape[2], B.shape[2], A.shape[1]
    blocks = _split(*problem, PROGRAM_STATES)
    return blocks if blocks.programs >= MIN_PROGRAMS else _split(*problem, PROGRAM_STATES // 2)


def _split(batch: int, width: int, groups: int, size: int, wanted: int) -> _Blocks:
    """Return `_Blocks` with `wanted` states per program, or all states of a group if the group has
    fewer.

    batch: rows of the batch. width: channels of all `groups`. size: states of a channel.
    """
    states = _power_of_two(size)
    channels = min(wanted // states, _power_of_two(width // groups))
    parts = -(-width // groups // channels)
    return _Blocks(channels, states, parts, batch * groups * parts)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _sizes(u: Tensor, B: Tensor, blocks: _Blocks, steps: int) -> dict[str, Any]:
    """Return the constants that a kernel is compiled with, and its launch options. Batch and length
    are not among them. `steps` is the number of steps whose inputs are loaded together."""
    groups, size = B.shape[2:]
    return {
        "WIDTH": u.shape[2],
        "GROUPS": groups,
        "SIZE": size,
        "BLOCK_D": blocks.channels,
        "BLOCK_N": blocks.states,
        "STEPS": steps,
        "num_warps": 1,
        "enable_fp_fusion": True,
    }


# FLOPs as in the torch form: the states are recomputed twice here, but counted once.
selective_scan_triton = make_operator(
    "selective_scan_triton",
    _forward,
    _backward,
    empty=lambda u, *rest: empty_like(u),
    flops=flops,
    num_gradients=6,
)
