"""What scanning mixers share: base class, initial values, precision, scans in both directions.

A walk is the sequence of the tokens present, in the order in which a direction scans them.

B batch, L = E + K tokens present, D width, W taps, S state size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mixers.base import Mixer
from tread_zoo.contract.backbone import Layout
from tread_zoo.kernels import causal_conv1d
from tread_zoo.routing.orders import ScanOrder
from tread_zoo.routing.scans import Gaps, Scan, make_scan


class ScanMixer(Mixer):
    """Base of mixers that walk over the tokens along a curve: `forward(x, scan: Scan)`.

    Args:
        scan_order: raster, serpentine, hilbert or serpentine8; see `tread_zoo.routing.orders`.
        gaps: what happens where a route left tokens out. `ignore`: the tokens on both sides of the
            gap count as neighbours. `reset`: convolutions and shifts see zeros beyond the gap.
            `decay`: as `reset`, and the state also decays with the length of the gap, at the rates
            of the token after it.
        index: index of the block, for orders that differ between blocks.
    """

    default_selector: ClassVar[str] = "rows"

    def __init__(
        self, *, scan_order: ScanOrder = "raster", gaps: Gaps = "ignore", index: int = 0
    ) -> None:
        super().__init__()
        self.scan_order, self.gaps, self.index = scan_order, gaps, index
        self.depends_on = ("order",) if gaps == "ignore" else ("order", "ids")
        if scan_order != "raster":
            self.depends_on = ("order", "ids", "grid")

    def prepare(self, layout: Layout) -> Any:
        return make_scan(layout, self.scan_order, self.index)


# Initial values -----------------------------------------------------------------------------------


def init_uniform(weight: Tensor, fan_in: int) -> None:
    """Draw a weight uniformly within ±1 / sqrt(fan_in)."""
    nn.init.uniform_(weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


@torch.no_grad()
def init_step_bias(bias: Tensor) -> None:
    """Draw a bias whose softplus, the step, is log-uniform in 0.001 … 0.1."""
    step = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus


def mark_no_weight_decay(*parameters: nn.Parameter) -> None:
    """Exempt parameters from weight decay: set their `_no_weight_decay`, as fla and mamba do."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]


# Types --------------------------------------------------------------------------------------------


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if it is float64. Steps and rates need this precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return x + bias in float32 at least."""
    return at_least_float32(x) + at_least_float32(bias)


def rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return `norm(x)`, computed in float32 at least."""
    weight = at_least_float32(norm.weight)
    return F.rms_norm(at_least_float32(x), norm.normalized_shape, weight, norm.eps)


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """Cast x to the dtype in which the weights of `linear` are stored, and return `linear(x)`."""
    return linear(x.to(linear.weight.dtype))


# Both directions ----------------------------------------------------------------------------------


def both_ways(x: Tensor, scan: Scan, dim: int = 0) -> Tensor:
    """Return x [B, L, ..], given in the order of the forward walk, joined along `dim` with its copy
    in the order of the backward walk."""
    return torch.cat([x, scan.flip(x)], dim)


def sum_ways(x: Tensor, scan: Scan) -> Tensor:
    """Return the sum of each token's two values, [B, L, ..] in the order of the forward walk and in
    float32 at least. x [2 B, L, ..] has the forward walks' values, then the backward walks'."""
    forward, backward = at_least_float32(x).chunk(2)
    return forward + scan.flip(backward)


def decay_over_gaps(log_decay: Tensor, scan: Scan) -> Tensor:
    """Return `log_decay` [2 B, L, ..], those of the forward walk and then those of the backward
    walk, each multiplied by the steps along the full curve from the previous token present."""
    gaps = scan.gaps()
    if gaps is None:
        return log_decay
    lengths = torch.cat(gaps)
    return log_decay * lengths.view(*lengths.shape, *[1] * (log_decay.ndim - 2))


def convolve_ways(
    x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Sequence[Tensor] | None
) -> Tensor:
    """Return the SiLU of a causal convolution of each walk. The walks lie side by side in the
    channels of input and output, [B, L, ways * D] for a number `ways` of walks.

    Args:
        x: tokens in the order of each walk.
        weight: W taps for each channel, [ways * D, W].
        bias: [ways * D] or None.
        segment_ids: ascending integers [B, L] per walk; no tap reaches into another segment. None:
            each walk is one segment.
    """
    if segment_ids is None:
        return causal_conv1d(x, weight, bias, silu=True)
    n = len(segment_ids)
    biases = n * (None,) if bias is None else bias.chunk(n)
    parts = zip(x.chunk(n, -1), weight.chunk(n), biases, segment_ids, strict=True)
    walks = [
        causal_conv1d(way, taps, shift, segment_ids=ids, silu=True)
        for way, taps, shift, ids in parts
    ]
    return torch.cat(walks, dim=-1)


def scan_ways(
    scan: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    gaps: Sequence[Tensor] | None,
) -> Tensor:
    """Return the output of a state-space scan of each walk. The walks lie side by side in the
    channels, heads and groups of inputs and output.

    Args:
        scan: `selective_scan` or `ssd`.
        inputs: the tensors u, delta, A, B, C, D, and perhaps a step bias, that `scan` takes.
        gaps: for each walk, every token's distance from the previous token [B, L]. None: distances
            do not count, so that one call scans all walks.
    """
    if gaps is None:
        return scan(*inputs)
    dims = (2, 2, 0, 2, 2, 0, 0)[: len(inputs)]
    parts = [x.chunk(len(gaps), dim) for x, dim in zip(inputs, dims, strict=True)]
    walks = zip(zip(*parts, strict=True), gaps, strict=True)
    return torch.cat([scan(*way, gaps=apart) for way, apart in walks], dim=2)


class ShortConvolution(nn.Module):
    """Causal depthwise convolutions of the forward and the backward walk, without bias, then SiLU,
    as in flash-linear-attention.

    Args:
        channels: D; the taps are [2 D, W], the forward direction's first.
        width: W, the number of taps.
    """

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * channels, width))

    def forward(self, x: Tensor, scan: Scan, gaps: Gaps) -> Tensor:
        """Return x [B, L, D], in the order of the forward walk, convolved along both walks:
        [2 B, L, D], forward first. Unless `gaps` is "ignore", no tap reaches over a gap."""
        segment_ids = None if gaps == "ignore" else scan.segment_ids()
        both = convolve_ways(both_ways(x, scan, dim=-1), self.weight, None, segment_ids)
        return torch.cat(both.chunk(2, dim=-1))

    def initialize(self, num_blocks: int) -> None:
        init_uniform(self.weight, self.weight.shape[1])


def make_convolution(channels: int, short_conv: bool, gaps: Gaps) -> ShortConvolution | None:
    """Return a mixer's convolution over `channels` channels, or None if `short_conv` is False.

    Raises:
        ValueError: the mixer's `gaps` is "reset", which only convolutions can do, and `short_conv`
            is False.
    """
    if gaps == "reset" and not short_conv:
        raise ValueError("gaps=reset is for convolutions: set short_conv=true, or other gaps.")
    return ShortConvolution(channels) if short_conv else None
