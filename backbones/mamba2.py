"""Mamba-2: a bidirectional state-space dual (arXiv 2405.21060) in the shell of DiS (2402.05608).

    [delta_i = Linear(cat(delta_i, delta_{depth-i}))]        in the second half: long skips
    residual = residual + delta
    delta    = Mixer(RMSNorm(residual))

`scan_shell` has the shell: time and label as tokens, long skips, two streams, the head. The mixer
scans the sequence both ways, in raster order or along another curve; the directions share their
projections in and out and own everything between:

    z, u, step  = Linear(x)                                  u holds the inputs, B and C
    inputs, B, C = SiLU(conv1d(u, taken in that direction))
    step = softplus(step + bias)
    y    = sum over directions of ssd(inputs, step, -exp(A_log), B, C, D)
    out  = Linear(RMSNorm(y * SiLU(z)))

What sets it apart from `mamba` is that step, rate and D are one number for a head of P channels, so
that the scan is made of matrix products and the states can be many; that all it selects by comes
out of the first projection, not out of the convolved inputs; and the norm ahead of the last one.

B batch, L = E + K tokens present, D width, I = expand * D inner width, P head size, S state size.
"""

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.scan_shell import (
    ScanBackbone,
    ScanMixer,
    both_ways,
    full,
    init_convolution,
    init_step_bias,
    init_uniform,
)
from tread_zoo.backbone import Layout
from tread_zoo.kernels import ssd
from tread_zoo.layers import convolve_both_ways, scan_both_ways
from tread_zoo.registry import register_backbone
from tread_zoo.routing.scans import Gaps, make_scan


class BidirectionalSSD(ScanMixer):
    """State-space duals over [B, L, D] in both directions, summed.

    The directions' own parameters are stacked along their first axis, forward first, so that one
    call of each kernel serves both: they are groups of it, each with its B and C.
    """

    def __init__(
        self,
        hidden_size: int,
        expand: int,
        state_size: int,
        head_size: int,
        conv_width: int,
        scan_order: str = "raster",
        index: int = 0,
        gaps: Gaps = "ignore",
    ) -> None:
        super().__init__()
        inner = expand * hidden_size
        num_heads, mixed = inner // head_size, inner + 2 * state_size
        self.head_size = head_size
        self.parts = [inner, mixed, num_heads]
        self.mixed_parts = [inner, state_size, state_size]
        self.scan_order, self.index, self.gaps = scan_order, index, gaps
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * mixed, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(2 * mixed))
        self.step_bias = nn.Parameter(torch.empty(2 * num_heads))
        self.A_log = nn.Parameter(torch.empty(2 * num_heads))
        self.D = nn.Parameter(torch.empty(2 * num_heads))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.fused_rows = {"in_proj.weight": (inner, *self.mixed_parts, num_heads)}

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        scan = make_scan(layout, self.scan_order, self.index)
        z, u, step = self.in_proj(scan.permute(x)).split(self.parts, dim=-1)
        segments = None if self.gaps == "ignore" else scan.segment_ids_both_ways()
        u = both_ways(u, scan, dim=-1)
        u = F.silu(convolve_both_ways(u, self.conv_weight, self.conv_bias, segments))
        inputs, b, c = u.unflatten(-1, (2, -1)).split(self.mixed_parts, dim=-1)  # [B, L, 2, ...]
        steps = both_ways(step, scan, dim=-1)
        scanned = (
            inputs.reshape(*inputs.shape[:2], -1, self.head_size),
            F.softplus(full(steps) + full(self.step_bias)),
            -torch.exp(full(self.A_log)),
            b,
            c,
            full(self.D),
        )
        y = scan_both_ways(ssd, scanned, scan.gaps_both_ways() if self.gaps == "decay" else None)
        forward, backward = y.flatten(2).chunk(2, dim=-1)
        y = (forward + scan.flip(backward)) * F.silu(z)
        norm = self.norm
        y = F.rms_norm(full(y), norm.normalized_shape, full(norm.weight), norm.eps)
        # Weights may be stored in half precision; under autocast both are float32 here.
        return scan.restore(self.out_proj(y.to(self.out_proj.weight.dtype)))

    def initialize(self, num_blocks: int) -> None:
        """Set every weight.

        | parameter | value |
        |---|---|
        | `in_proj` | uniform within 1 / sqrt(fan in) |
        | `out_proj` | the same, over sqrt(number of blocks) |
        | `conv_weight`, `conv_bias` | uniform within 1 / sqrt(conv_width); 0 |
        | `step_bias` | softplus of it log-uniform in 0.001 … 0.1 |
        | `A_log` | exp of it uniform in 1 … 16 |
        | `D`, `norm` | 1 |
        """
        init_uniform(self.out_proj.weight, self.out_proj.in_features * num_blocks)
        init_convolution(self.conv_weight, self.conv_bias)
        init_step_bias(self.step_bias)
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
        nn.init.ones_(self.D)


class Mamba2(ScanBackbone):
    """State-space duals in the shell of DiS: depth + 1 blocks.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, even.
        depth: even.
        expand: inner width over D.
        state_size: S.
        head_size: P, a divisor of the inner width.
        conv_width: taps of the causal convolution ahead of the scan.
        scan_order: of conv and scan, a name in `tread_zoo.routing.ORDERS`.
        gaps: what a route's gaps are to it. `ignore`: both run over a gap as if its sides were
            neighbours. `reset`: the convolution sees zeros beyond it. `decay`: so it does, and the
            state decays by the length of the gap, exp(gap Δ A).
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown scan_order.
    """

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 384,
        depth: PositiveInt = 28,
        expand: PositiveInt = 2,
        state_size: PositiveInt = 64,
        head_size: PositiveInt = 64,
        conv_width: PositiveInt = 4,
        scan_order: str = "raster",
        gaps: Gaps = "ignore",
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
    ) -> None:
        if expand * hidden_size % head_size:
            raise ValueError(
                f"head_size={head_size} must divide the inner width, expand * hidden_size = "
                f"{expand * hidden_size}."
            )
        sizes = (hidden_size, expand, state_size, head_size, conv_width)
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            learn_sigma=learn_sigma,
            hidden_size=hidden_size,
            depth=depth,
            scan_order=scan_order,
            gaps=gaps,
            time_scale=time_scale,
            make_mixer=lambda index: BidirectionalSSD(*sizes, scan_order, index, gaps),
        )


# Sizes for comparisons; nobody has published diffusion networks of this kind.
register_backbone(
    "mamba2_tiny",
    learning_rate=6e-3,
    patch_size=2,
    hidden_size=120,
    depth=12,
    expand=1,
    state_size=16,
    head_size=40,
)(Mamba2)
register_backbone("mamba2_matched_s", learning_rate=3e-4, patch_size=2, hidden_size=384, depth=28)(
    Mamba2
)
register_backbone("mamba2_matched_b", patch_size=2, hidden_size=768, depth=28)(Mamba2)
