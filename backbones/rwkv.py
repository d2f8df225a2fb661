"""RWKV: a decaying mean, both ways, in place of attention (Diffusion-RWKV, arXiv 2404.04478).

    x = LN(patches + positions);  c = embed(t) + embed(y)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = Linear(SiLU(c))
    [x = Linear(cat(x, x of block depth-1-i))]             in the second half: long skips
    x = x + gate_1 * SpatialMix(LN(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * ChannelMix(LN(x) * (1 + scale_2) + shift_2)

Both mixes begin with the q-shift of Vision-RWKV (arXiv 2403.02308): a quarter of the channels comes
from the left neighbour on the grid, the others from the right, upper and lower one, zero outside.
Each projection then takes its own blend of the token and of what was shifted in, by channel,
blend = x * own + shifted * (1 - own):

    SpatialMix: r, k, v = Linear(blend_r), Linear(blend_k), Linear(blend_v)
                Linear(sigmoid(r) * WKV(k, v, w, u))
    ChannelMix: sigmoid(Linear(blend_r)) * Linear(relu(Linear(blend_k))^2)

The grid matters twice, so a route's tokens keep their places in it: the shift brings in zeros for a
neighbour that the route left out, and the WKV decays by distances along the full scan order, over
the full length, whichever tokens are present (`gaps="decay"`; the other ways are for comparison).

B batch, K tokens present, N = h * w tokens of the full grid, D width.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.adaln_shell import AdaLNBackbone
from backbones.q_shift import shift_and_blend
from tread_zoo.backbone import Layout, Streams
from tread_zoo.kernels import bidirectional_wkv
from tread_zoo.layers import add_gated, modulate
from tread_zoo.registry import register_backbone
from tread_zoo.routing.scans import Gaps, Scan, check_scan, make_scan

SLOWEST, FASTEST = 0.3, 30.0  # initial decay over the whole image, of the first and last channel


class SpatialMix(nn.Module):
    """Mix tokens: [B, K, D] -> [B, K, D]. `own` holds the blends of r, k and v, [3, D]."""

    def __init__(
        self, hidden_size: int, scan_order: str = "raster", index: int = 0, gaps: str = "decay"
    ) -> None:
        super().__init__()
        self.scan_order, self.index, self.gaps = scan_order, index, gaps
        self.own = nn.Parameter(torch.empty(3, hidden_size))
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.decay = nn.Parameter(torch.empty(hidden_size))
        self.bonus = nn.Parameter(torch.empty(hidden_size))
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        blends = shift_and_blend(x, layout, self.own, over_gaps=self.gaps == "ignore")
        layers = (self.receptance, self.key, self.value)
        r, k, v = (layer(blend) for layer, blend in zip(layers, blends, strict=True))
        scan = make_scan(layout, self.scan_order, self.index)
        mean = self._mean(scan.permute(k), scan.permute(v), scan, layout)
        out: Tensor = self.output(torch.sigmoid(r) * scan.restore(mean))
        return out

    def _mean(self, k: Tensor, v: Tensor, scan: Scan, layout: Layout) -> Tensor:
        """Return the WKV of a walk [B, L, D]. A context is at both ends of it, mirrored, so that it
        is as near to the last token as to the first."""
        places = scan.places if self.gaps == "decay" else None
        length, num_context = layout.grid[0] * layout.grid[1], layout.num_context
        if num_context:
            k, v = (torch.cat([x, x[:, :num_context].flip(1)], dim=1) for x in (k, v))
            if places is not None:
                ahead = torch.arange(num_context, device=k.device).expand(len(k), -1)
                behind = ahead + num_context + length
                places = torch.cat([ahead, places + num_context, behind], dim=1)
            length += 2 * num_context
        mean = bidirectional_wkv(k, v, self.decay, self.bonus, positions=places, length=length)
        return mean[:, : mean.shape[1] - num_context]


class ChannelMix(nn.Module):
    """Mix channels: [B, K, D] -> [B, K, D]. `own` holds the blends of r and k, [2, D]."""

    def __init__(self, hidden_size: int, mlp_ratio: float, gaps: str = "decay") -> None:
        super().__init__()
        inner = int(hidden_size * mlp_ratio)
        self.gaps = gaps
        self.own = nn.Parameter(torch.empty(2, hidden_size))
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, inner, bias=False)
        self.value = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        r, k = shift_and_blend(x, layout, self.own, over_gaps=self.gaps == "ignore")
        keys = F.relu(self.key(k)).square()
        out: Tensor = torch.sigmoid(self.receptance(r)) * self.value(keys)
        return out


class RWKVBlock(nn.Module):
    """[skip joined] then both mixes, modulated and gated by the condition."""

    def __init__(
        self,
        hidden_size: int,
        mlp_ratio: float,
        *,
        has_skip: bool,
        scan_order: str,
        index: int,
        gaps: str,
    ) -> None:
        super().__init__()
        self.skip_proj = nn.Linear(2 * hidden_size, hidden_size) if has_skip else None
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.spatial = SpatialMix(hidden_size, scan_order, index, gaps)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.channel = ChannelMix(hidden_size, mlp_ratio, gaps)
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.fused_rows = {"modulation.weight": 6 * (hidden_size,)}

    def forward(self, x: Tensor, condition: Tensor, layout: Layout, skip: Tensor | None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        if self.skip_proj is not None:
            assert skip is not None, "the block loop hands a skip to each block in `skips`"
            # Under autocast the projection is half precision; the residual stream stays as it was.
            x = self.skip_proj(torch.cat([x, skip], dim=-1)).to(x.dtype)
        mixed = self.spatial(modulate(self.norm1(x), shift1, scale1), layout)
        x = add_gated(x, gate1, mixed)
        mixed = self.channel(modulate(self.norm2(x), shift2, scale2), layout)
        return add_gated(x, gate2, mixed)


class RWKV(AdaLNBackbone):
    """A stack of `RWKVBlock`s; block i of the first half hands a skip to block depth-1-i.

    A route [s, depth-s) cuts no skip: its ends lie both inside or both outside.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, divisible by 4.
        depth: number of blocks, odd: the middle one has no skip.
        mlp_ratio: inner width of the channel mix over D.
        scan_order: of the WKV, a name in `tread_zoo.routing.ORDERS`; the shift follows the grid.
        gaps: what a route's gaps are to it. `decay`: the WKV decays by the distances of the full
            order, and the shift brings in zeros for what is not there. `reset`: the WKV counts
            distances among the tokens present. `ignore`: so it does, and the shift brings in the
            nearest token present in its direction.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.

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
        depth: PositiveInt = 13,
        mlp_ratio: PositiveFloat = 4.0,
        scan_order: str = "raster",
        gaps: Gaps = "decay",
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
    ) -> None:
        if hidden_size % 4:
            raise ValueError(
                f"hidden_size={hidden_size} must be divisible by 4: a quarter of the channels "
                "comes from each neighbour."
            )
        if depth % 2 == 0:
            raise ValueError(f"depth={depth} must be odd: skips join the halves around a middle.")
        check_scan(scan_order, gaps)
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=("order", "ids", "grid"),
            hidden_size=hidden_size,
            depth=depth,
            make_block=lambda index: RWKVBlock(
                hidden_size,
                mlp_ratio,
                has_skip=index > depth // 2,
                scan_order=scan_order,
                index=index,
                gaps=gaps,
            ),
            learned_positions=True,
            learn_sigma=learn_sigma,
            time_scale=time_scale,
        )
        self.skips = {depth - 1 - i: i for i in range(depth // 2)}
        self.norm_in = nn.LayerNorm(hidden_size, eps=1e-5)
        self.norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.initialize()

    def initialize(self) -> None:
        """Set every weight; called once, last. Beside what the shell sets:

        | parameter | value |
        |---|---|
        | `own` | 0.5: half the token, half what is shifted in |
        | `decay` | log-spaced over the channels, 0.3 … 30 |
        | `bonus` | 0: the token weighs as its neighbour does |
        | norms | weight 1, bias 0 |
        """
        super().initialize()
        for module in self.modules():
            if isinstance(module, SpatialMix | ChannelMix):
                nn.init.constant_(module.own, 0.5)
            if isinstance(module, SpatialMix):
                nn.init.zeros_(module.bonus)
                with torch.no_grad():
                    spaced = torch.linspace(math.log(SLOWEST), math.log(FASTEST), len(module.decay))
                    module.decay.copy_(spaced.exp())

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        (tokens,), condition = super().embed(x, t, y)
        return (self.norm_in(tokens),), condition

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        return (self.blocks[index](streams[0], condition, layout, skip),)

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        return super().head((self.norm(streams[0]),), condition)


_SIZES = {
    "s": {"depth": 13, "hidden_size": 384},
    "b": {"depth": 25, "hidden_size": 384},
    "m": {"depth": 25, "hidden_size": 512},
    "l": {"depth": 37, "hidden_size": 768},
    "h": {"depth": 37, "hidden_size": 1024},
}

for _size, _keywords in _SIZES.items():
    _rate = 3e-4 if _size == "s" else None
    register_backbone(f"rwkv_{_size}_2", learning_rate=_rate, patch_size=2, **_keywords)(RWKV)
# Sizes for comparisons: every architecture has them, of nearly the same number of parameters.
register_backbone("rwkv_tiny", learning_rate=1.2e-2, patch_size=2, hidden_size=60, depth=13)(RWKV)
register_backbone("rwkv_matched_s", learning_rate=3e-4, patch_size=2, hidden_size=352, depth=13)(
    RWKV
)
register_backbone("rwkv_matched_b", patch_size=2, **_SIZES["m"])(RWKV)
