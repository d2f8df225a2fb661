"""Mamba: a bidirectional selective state space in place of attention, after DiS (arXiv 2402.05608).

    [delta_i = Linear(cat(delta_i, delta_{depth-i}))]        in the second half: long skips
    residual = residual + delta
    delta    = Mixer(RMSNorm(residual))

`scan_shell` has the shell: time and label as tokens, long skips, two streams, the head. The mixer
scans the sequence both ways, in raster order or along another curve; the directions share their
projections in and out and own everything between:

    u, z  = Linear(x)
    u_dir = SiLU(conv1d(u, taken in that direction))
    step, B, C = linear in u_dir;  step = softplus(step + bias)
    y     = sum over directions of scan(u_dir, step, -exp(A_log), B, C, D)
    out   = Linear(y * SiLU(z))

B batch, L = E + K tokens present, D width, I = expand * D inner width, S state size.
"""

import math

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
    init_selective_scan,
    init_uniform,
)
from tread_zoo.backbone import Layout
from tread_zoo.kernels import selective_scan
from tread_zoo.layers import convolve_both_ways, scan_both_ways
from tread_zoo.registry import register_backbone
from tread_zoo.routing.scans import Gaps, make_scan


class BidirectionalMixer(ScanMixer):
    """Selective scans over [B, L, D] in both directions, summed.

    The directions' own parameters are stacked along their first axis, forward first, so that one
    call of each kernel serves both.
    """

    def __init__(
        self,
        hidden_size: int,
        expand: int,
        state_size: int,
        conv_width: int,
        scan_order: str = "raster",
        index: int = 0,
        gaps: Gaps = "ignore",
    ) -> None:
        super().__init__()
        inner = expand * hidden_size
        self.inner, self.state_size = inner, state_size
        self.step_rank = math.ceil(hidden_size / 16)
        self.scan_order, self.index, self.gaps = scan_order, index, gaps
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * inner, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(2 * inner))
        self.select = nn.Parameter(torch.empty(2, self.step_rank + 2 * state_size, inner))
        self.step_weight = nn.Parameter(torch.empty(2, inner, self.step_rank))
        self.step_bias = nn.Parameter(torch.empty(2 * inner))
        self.A_log = nn.Parameter(torch.empty(2 * inner, state_size))
        self.D = nn.Parameter(torch.empty(2 * inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.fused_rows = {
            "in_proj.weight": (inner, inner),
            "select": 2 * (self.step_rank, state_size, state_size),
        }

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        scan = make_scan(layout, self.scan_order, self.index)
        u, z = self.in_proj(scan.permute(x)).chunk(2, dim=-1)
        segments = None if self.gaps == "ignore" else scan.segment_ids_both_ways()
        u = both_ways(u, scan, dim=-1)
        u = F.silu(convolve_both_ways(u, self.conv_weight, self.conv_bias, segments))
        steps, inputs, outputs = [], [], []
        for direction, part in enumerate(u.split(self.inner, dim=-1)):
            selected = F.linear(part, self.select[direction])
            step, b, c = selected.split([self.step_rank, self.state_size, self.state_size], dim=-1)
            steps.append(F.linear(step, self.step_weight[direction]))
            inputs.append(b)
            outputs.append(c)
        scanned = (
            u,
            F.softplus(full(torch.cat(steps, dim=-1)) + full(self.step_bias)),
            -torch.exp(full(self.A_log)),
            torch.stack(inputs, dim=2),
            torch.stack(outputs, dim=2),
            full(self.D),
        )
        y = scan_both_ways(
            selective_scan, scanned, scan.gaps_both_ways() if self.gaps == "decay" else None
        )
        forward, backward = y.chunk(2, dim=-1)
        return scan.restore(self.out_proj((forward + scan.flip(backward)) * F.silu(z)))

    def initialize(self, num_blocks: int) -> None:
        """Set every weight.

        | parameter | value |
        |---|---|
        | `in_proj`, `select`, `step_weight` | uniform within 1 / sqrt(fan in) |
        | `out_proj` | the same, over sqrt(number of blocks) |
        | `conv_weight`, `conv_bias` | uniform within 1 / sqrt(conv_width); 0 |
        | `step_bias` | softplus of it log-uniform in 0.001 … 0.1 |
        | `A_log` | log 1 … log S for each channel |
        | `D` | 1 |
        """
        init_uniform(self.out_proj.weight, self.inner * num_blocks)
        init_convolution(self.conv_weight, self.conv_bias)
        init_uniform(self.select, self.inner)
        init_uniform(self.step_weight, self.step_rank)
        init_selective_scan(self.step_bias, self.A_log, self.D)


class Mamba(ScanBackbone):
    """Selective scans in the shell of DiS: depth + 1 blocks.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, even.
        depth: even.
        expand: inner width over D.
        state_size: S.
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
        depth: PositiveInt = 24,
        expand: PositiveInt = 2,
        state_size: PositiveInt = 16,
        conv_width: PositiveInt = 4,
        scan_order: str = "raster",
        gaps: Gaps = "ignore",
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
    ) -> None:
        sizes = (hidden_size, expand, state_size, conv_width)
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
            make_mixer=lambda index: BidirectionalMixer(*sizes, scan_order, index, gaps),
        )


_SIZES = {
    "s": {"depth": 24, "hidden_size": 368},
    "b": {"depth": 24, "hidden_size": 768},
    "m": {"depth": 48, "hidden_size": 768},
    "l": {"depth": 48, "hidden_size": 1024},
    "h": {"depth": 48, "hidden_size": 1536},
}

for _size, _keywords in _SIZES.items():
    _rate = 3e-4 if _size == "s" else None
    register_backbone(f"mamba_{_size}_2", learning_rate=_rate, patch_size=2, **_keywords)(Mamba)
# Sizes for comparisons: every architecture has them, of nearly the same number of parameters.
register_backbone(
    "mamba_tiny", learning_rate=1.2e-2, patch_size=2, hidden_size=88, depth=12, state_size=4
)(Mamba)
register_backbone("mamba_matched_s", learning_rate=3e-4, patch_size=2, hidden_size=392, depth=24)(
    Mamba
)
register_backbone("mamba_matched_b", patch_size=2, hidden_size=800, depth=24)(Mamba)
