"""ZigMa: Mamba along one serpentine a layer, conditioned by adaLN-Zero (arXiv 2403.13802).

    n = RMSNorm(x)
    shift, scale, gate = Linear(SiLU(embed(t) + embed(y)))
    x = x + n + gate * Mixer(n * (1 + scale) + shift)
    out = Linear(LayerNorm(RMSNorm(x)))                  after the last block

No MLP, no skip, learned positions; n itself stays in the sum, as in the authors' networks. The
mixer scans in one direction, along the layer's own of eight serpentines (`serpentine8`):

    u, z = Linear(x)
    u = SiLU(conv1d(u))
    step, B, C = linear in u;  step = softplus(Linear(step))
    out = Linear(scan(u, step, -exp(A_log), B, C, D) * SiLU(z))

Under a route each layer walks along its curve with the missing tokens deleted. Half of the curves
go along columns; so `blocks`, which keep neighbours both ways, are the default, and not segments.

B batch, K tokens present, D width, I = expand * D inner width, S state size.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.adaln_shell import AdaLNBackbone
from backbones.scan_shell import (
    ScanMixer,
    full,
    init_convolution,
    init_selective_scan,
    init_uniform,
    scan_dependence,
)
from tread_zoo.backbone import Layout
from tread_zoo.kernels import causal_conv1d, selective_scan
from tread_zoo.layers import add_gated, modulate
from tread_zoo.registry import register_backbone
from tread_zoo.routing.scans import Gaps, check_scan, make_scan


class OneWayMixer(ScanMixer):
    """A selective scan over [B, K, D] along the curve of layer `index`."""

    def __init__(
        self, width: int, expand: int, state: int, taps: int, order: str, index: int, gaps: Gaps
    ) -> None:
        super().__init__()
        inner, rank = expand * width, -(-width // 16)
        self.parts = (rank, state, state)
        self.order, self.index, self.gaps = order, index, gaps
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(inner, taps))
        self.conv_bias = nn.Parameter(torch.empty(inner))
        self.select = nn.Linear(inner, sum(self.parts), bias=False)
        self.step_weight = nn.Parameter(torch.empty(inner, rank))
        self.step_bias = nn.Parameter(torch.empty(inner))
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.fused_rows = {"in_proj.weight": (inner, inner), "select.weight": self.parts}

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        scan = make_scan(layout, self.order, self.index)
        u, z = self.in_proj(scan.permute(x)).chunk(2, dim=-1)
        segments = None if self.gaps == "ignore" else scan.segment_ids()
        gaps = scan.gaps() if self.gaps == "decay" else None
        u = F.silu(causal_conv1d(u, self.conv_weight, self.conv_bias, segment_ids=segments))
        step, b, c = self.select(u).split(self.parts, dim=-1)
        step = F.softplus(full(F.linear(step, self.step_weight)) + full(self.step_bias))
        rates, b, c = -torch.exp(full(self.A_log)), b.unsqueeze(2), c.unsqueeze(2)
        y = selective_scan(u, step, rates, b, c, full(self.D), gaps=gaps)
        return scan.restore(self.out_proj(y * F.silu(z)))

    def initialize(self, num_blocks: int) -> None:
        """Set every weight.

        | parameter | value |
        |---|---|
        | linear layers, `step_weight`, `conv_weight` | uniform within 1 / sqrt(fan in) |
        | `out_proj` | the same, over sqrt(number of blocks) |
        | `step_bias`, `conv_bias` | softplus of it log-uniform in 0.001 … 0.1; 0 |
        | `A_log`, `D` | log 1 … log S for each channel; 1 |
        """
        init_uniform(self.in_proj.weight, self.in_proj.in_features)
        init_uniform(self.select.weight, self.select.in_features)
        init_uniform(self.step_weight, self.parts[0])
        init_uniform(self.out_proj.weight, self.out_proj.in_features * num_blocks)
        init_convolution(self.conv_weight, self.conv_bias)
        init_selective_scan(self.step_bias, self.A_log, self.D)


class ZigMaBlock(nn.Module):
    """Norm and mixer, modulated and gated by the condition: [B, K, D] -> [B, K, D]."""

    def __init__(self, hidden_size: int, mixer: ScanMixer) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.mixer = mixer
        self.modulation = nn.Linear(hidden_size, 3 * hidden_size)
        self.fused_rows = {"modulation.weight": 3 * (hidden_size,)}

    def forward(self, x: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        normed = self.norm(x)
        return add_gated(x + normed, gate, self.mixer(modulate(normed, shift, scale), layout))


class ZigMaHead(nn.Module):
    """Both norms and the map to patches: [B, N, D] -> [B, N, p * p * C_out]; not conditioned."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.norms = nn.Sequential(
            nn.RMSNorm(hidden_size, eps=1e-5),
            nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False),
        )
        self.linear = nn.Linear(hidden_size, patch_size**2 * out_channels)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norms(tokens))
        return out

    def zero(self) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)


class ZigMa(AdaLNBackbone):
    """A stack of `ZigMaBlock`s.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size, depth, expand, state_size: D, the number of blocks, I / D, and S.
        conv_width: taps of the causal convolution ahead of the scan.
        scan_order: of conv and scan, a name in `tread_zoo.routing.ORDERS`.
        gaps: `ignore`: conv and scan run over a route's gaps; `reset`: the conv sees zeros beyond
            one; `decay`: so it does, and the state decays by its length, exp(gap Δ A).
        time_scale, reversed_time: see `AdaLNBackbone`.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown scan_order.
    """

    default_selector: ClassVar[str] = "blocks"

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
        scan_order: str = "serpentine8",
        gaps: Gaps = "reset",
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
        reversed_time: bool = False,
    ) -> None:
        check_scan(scan_order, gaps)
        sizes = (hidden_size, expand, state_size, conv_width, scan_order)
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=scan_dependence(scan_order, gaps),
            hidden_size=hidden_size,
            depth=depth,
            make_block=lambda index: ZigMaBlock(hidden_size, OneWayMixer(*sizes, index, gaps)),
            learned_positions=True,
            learn_sigma=learn_sigma,
            time_scale=time_scale,
            reversed_time=reversed_time,
        )
        self.final = ZigMaHead(hidden_size, patch_size, self.out_channels)  # type: ignore[assignment]
        self.initialize()

    def initialize(self) -> None:
        """Set every weight; called once, last: as the shell does, the mixers as they say."""
        super().initialize()
        for module in self.modules():
            if isinstance(module, ScanMixer):
                module.initialize(self.num_blocks)


for _patch in (1, 2):
    register_backbone(f"zigma_b_{_patch}", patch_size=_patch, hidden_size=768, depth=24)(ZigMa)
# Sizes for comparisons: every architecture has them, of nearly the same number of parameters.
register_backbone("zigma_tiny", learning_rate=1.2e-2, hidden_size=88, depth=12, state_size=4)(ZigMa)
register_backbone("zigma_matched_s", learning_rate=3e-4, hidden_size=384, depth=24)(ZigMa)
register_backbone("zigma_matched_b", hidden_size=768, depth=24)(ZigMa)
