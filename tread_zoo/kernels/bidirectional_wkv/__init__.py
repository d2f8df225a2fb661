"""The bidirectional WKV of Vision-RWKV and Diffusion-RWKV.

Dimensions: B batch, L length, C channels.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.bidirectional_wkv.torch_form import bidirectional_wkv_torch
from tread_zoo.kernels.bidirectional_wkv.triton_form import bidirectional_wkv_triton, unsuited
from tread_zoo.kernels.dispatch import Implementation, choose, register
from tread_zoo.kernels.launch import TRITON


def _example(device: torch.device) -> tuple[Tensor | int | None, ...]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 35, 24, generator=generator).to(device) for _ in range(2))
    w, u = torch.linspace(0, 20, 24, device=device), torch.linspace(-1, 1, 24, device=device)
    positions = torch.arange(0, 70, 2, device=device).expand(2, -1).contiguous()
    return k, v, w, u, positions, 70


register(
    "bidirectional_wkv",
    [
        Implementation("triton", bidirectional_wkv_triton, TRITON, unsuited),
        Implementation("torch", bidirectional_wkv_torch),
        Implementation("naive", bidirectional_wkv_naive),
    ],
    _example,
    half=(0, 1),
)


def bidirectional_wkv(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    positions: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """Return, for every channel, a mean of v weighted by key and distance, [B, L, C].

        out_t = [Σ_{i≠t} exp(k_i - (|p_t - p_i| - 1) w/T) v_i + exp(u + k_t) v_t] / [same, v = 1]

    (Vision-RWKV, arXiv 2403.02308, eq. 7, as Diffusion-RWKV, arXiv 2404.04478, uses it.) The sums
    are float32 at least, under autocast too.

    Args:
        k: keys [B, L, C].
        v: values [B, L, C]; the output has their dtype.
        w: decay rates [C]; a negative one grows with the distance.
        u: what the token's own key is raised by [C].
        positions: p, int64 [B, L], ascending in each row, in 0 … T-1; None means 0 … L-1. A part of
            a sequence keeps the positions that its tokens have in the whole.
        length: T, the length of the whole sequence; None means L.

    Raises:
        ValueError: for an empty input, shapes that do not fit together, a length below L, or
            positions that do not ascend or lie outside 0 … T-1 (looked at on the CPU only).
    """
    _check(k, v, w, u, positions, length)
    args = (k, v, w, u, positions, k.shape[1] if length is None else length)
    return choose("bidirectional_wkv", k.device, *args).run(*args)


def _check(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int | None
) -> None:
    if k.ndim != 3 or k.numel() == 0:
        raise ValueError(f"k has shape {tuple(k.shape)}; it must be [B, L, C], none of them 0.")
    channels = (k.shape[2],)
    wanted = {"v": (v, tuple(k.shape)), "w": (w, channels), "u": (u, channels)}
    for name, (value, shape) in wanted.items():
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}.")
    if length is not None and length < k.shape[1]:
        raise ValueError(
            f"length={length} is below the {k.shape[1]} tokens given: it is the length of the "
            "whole sequence."
        )
    if positions is not None:
        _check_positions(positions, tuple(k.shape[:2]), length or k.shape[1])


def _check_positions(positions: Tensor, shape: tuple[int, ...], length: int) -> None:
    if positions.dtype != torch.int64 or tuple(positions.shape) != shape:
        raise ValueError(
            f"positions are {positions.dtype} {tuple(positions.shape)}; they must be int64 {shape}."
        )
    if positions.device.type != "cpu" or torch.compiler.is_compiling():
        return  # to read them would wait for the device, or break the graph
    if bool((positions.diff(dim=1) <= 0).any()):
        raise ValueError("positions must ascend in every row; sort the tokens by them.")
    if bool((positions[:, 0] < 0).any()) or bool((positions[:, -1] >= length).any()):
        raise ValueError(f"positions lie outside 0 … {length - 1}; length is the whole sequence's.")
