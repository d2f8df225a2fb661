"""What mixers that scan have in common: their walk, their steps and rates, both directions.

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
from tread_zoo.routing.scans import Gaps, Scan, check_scan, make_scan


class ScanMixer(Mixer):
    """Walks over the tokens in one order and back: `forward(x, scan)`.

    Args:
        scan_order: a name in `tread_zoo.routing.ORDERS`.
        gaps: what a route's gaps are to it. `ignore`: it runs over a gap as if its sides were
            neighbours. `reset`: convolutions and shifts see zeros beyond it. `decay`: so they do,
            and the state decays by the length of the gap, at the rates of the token that ends it.
        index: of the block, for orders that differ between blocks.

    Raises:
        ValueError: an unknown order, or gaps that it has not.
    """

    default_selector: ClassVar[str] = "rows"

    def __init__(
        self, *, scan_order: str = "raster", gaps: Gaps = "ignore", index: int = 0
    ) -> None:
        super().__init__()
        check_scan(scan_order, gaps)
        self.scan_order, self.gaps, self.index = scan_order, gaps, index
        self.depends_on = ("order",) if gaps == "ignore" else ("order", "ids")
        if scan_order != "raster":
            self.depends_on = ("order", "ids", "grid")

    def prepare(self, layout: Layout) -> Any:
        return make_scan(layout, self.scan_order, self.index)


def init_uniform(weight: Tensor, fan_in: int) -> None:
    """Fill a weight uniformly within 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)


def init_convolution(weight: Tensor, bias: Tensor) -> None:
    """Set the taps [D, W] uniformly within 1 / sqrt(W), and the bias to 0."""
    init_uniform(weight, weight.shape[1])
    nn.init.zeros_(bias)


@torch.no_grad()
def init_step_bias(bias: Tensor) -> None:
    """Draw a bias whose softplus, the step, is log-uniform in 0.001 … 0.1."""
    step = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus


def init_selective_scan(step_bias: Tensor, A_log: Tensor, D: Tensor) -> None:
    """Draw steps as `init_step_bias`, and set the rates of each channel to 1 … S and D to 1."""
    init_step_bias(step_bias)
    with torch.no_grad():
        A_log.copy_(torch.arange(1, A_log.shape[1] + 1).float().log())
    nn.init.ones_(D)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) in the dtype of x.

    torch's own takes 10 ns a value on a CPU, because its log1p of float32 is slow there.
    """
    is_slow = x.device.type == "cpu" and x.dtype == torch.float32
    fast = is_slow and not torch.compiler.is_compiling()
    y: Tensor = _Softplus.apply(x) if fast else F.softplus(x)
    return y


class _Softplus(torch.autograd.Function):
    """By way of float64, rounded once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        y = x.double().exp_().log1p_().float()
        return torch.where(x > 30, x, y)  # e^x overflows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].sigmoid()


def both_ways(x: Tensor, scan: Scan, dim: int = 0) -> Tensor:
    """Return a walk [B, L, ..], and below it the same walk backwards: [2 B, L, ..]; or beside it,
    along another `dim`."""
    return torch.cat([x, scan.flip(x)], dim)


def sum_ways(x: Tensor, scan: Scan) -> Tensor:
    """Return what two walks [2 B, L, ..] found, added up token by token, in float32 at least."""
    forward, backward = at_least_float32(x).chunk(2)
    return forward + scan.flip(backward)


def decay_over_gaps(log_decay: Tensor, scan: Scan) -> Tensor:
    """Return the log-decays [2 B, L, ..] of two walks times the lengths of the gaps they cross."""
    gaps = scan.gaps_both_ways()
    if gaps is None:
        return log_decay
    lengths = torch.cat(gaps)
    return log_decay * lengths.view(*lengths.shape, *[1] * (log_decay.ndim - 2))


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or float64 where it is: steps and rates do not bear half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolve_ways(
    x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Sequence[Tensor] | None
) -> Tensor:
    """Return causal convolutions of walks side by side, [B, L, ways * D] of the same.

    Args:
        x: tokens in the order of each walk.
        weight, bias: taps [ways * D, W], and [ways * D] or None.
        segment_ids: of each walk, ascending integers [B, L]; no tap reaches into another segment.
    """
    if segment_ids is None:
        return causal_conv1d(x, weight, bias)
    n = len(segment_ids)
    biases = n * (None,) if bias is None else bias.chunk(n)
    parts = zip(x.chunk(n, -1), weight.chunk(n), biases, segment_ids, strict=True)
    walks = [causal_conv1d(way, taps, shift, segment_ids=ids) for way, taps, shift, ids in parts]
    return torch.cat(walks, dim=-1)


class ShortConvolution(nn.Module):
    """SiLU of depthwise causal convolutions, one of a walk and one of the walk backwards.

    It is the one that flash-linear-attention's layers have ahead of their states, without bias.

    Args:
        channels: D; taps [2 D, W], the forward direction's first.
        width: W.
    """

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * channels, width))

    def forward(self, x: Tensor, scan: Scan, gaps: Gaps) -> Tensor:
        """Return both directions of a walk [B, L, D] below each other: [2 B, L, D]."""
        segment_ids = None if gaps == "ignore" else scan.segment_ids_both_ways()
        both = convolve_ways(both_ways(x, scan, dim=-1), self.weight, None, segment_ids)
        return torch.cat(F.silu(both).chunk(2, dim=-1))

    def initialize(self, num_blocks: int) -> None:
        """Set the taps uniformly within 1 / sqrt(W)."""
        init_uniform(self.weight, self.weight.shape[1])


def make_convolution(channels: int, short_conv: bool, gaps: Gaps) -> ShortConvolution | None:
    """Return the convolution of a mixer whose option it is, or None.

    Raises:
        ValueError: without one `reset` means nothing.
    """
    if gaps == "reset" and not short_conv:
        raise ValueError("gaps=reset is of convolutions: set short_conv=true, or another gaps.")
    return ShortConvolution(channels) if short_conv else None


def scan_ways(
    scan: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    gaps: Sequence[Tensor] | None,
) -> Tensor:
    """Return a state-space scan of walks side by side in channels, heads and groups.

    Without gaps it is one call; each walk has gaps of its own.

    Args:
        scan: `selective_scan` or `ssd`.
        inputs: u, delta, A, B, C, D as it takes them.
        gaps: of each walk, [B, L].
    """
    if gaps is None:
        return scan(*inputs)
    parts = [x.chunk(len(gaps), dim) for x, dim in zip(inputs, (2, 2, 0, 2, 2, 0), strict=True)]
    walks = zip(zip(*parts, strict=True), gaps, strict=True)
    return torch.cat([scan(*way, gaps=apart) for way, apart in walks], dim=2)
