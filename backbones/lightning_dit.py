"""LightningDiT: DiT with RMSNorm, SwiGLU, rotary positions and qk-norm (arXiv 2501.01423).

`lightning_shell` has the shell, this file the attention. Queries and keys are normalised by head,
then turned by angles of the row and the column of their token (RoPE), so that attention sees where
tokens lie relative to each other. The angles come from the places of the tokens on the full grid,
whichever of them a route kept, never from their index in the sequence; fixed sines, which tokens
carry with them, are added once as in DiT.

Options, each off by default:

- `value_residual`: from the second block on, values are v + m (v_1 - v), with the values v_1 of the
  first block, which travel as a stream of their own, and a learned m (value residual learning,
  arXiv 2410.17897; on diffusion transformers 2512.12386).
- `shared_modulation`: one modulation layer for all blocks, and an offset to it for each
  (adaLN-single of PixArt-α, arXiv 2310.00426).
- `num_class_tokens`: E tokens of the label's embedding and learned positions join the sequence
  after a third of the blocks (JiT, arXiv 2511.13720); they have no place on the grid, and no angle.

B batch, K tokens present, E class tokens, L = E + K, D width, H heads.
"""

from dataclasses import replace
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.lightning_shell import LightningBackbone, LightningBlock, Mixer
from tread_zoo.backbone import Layout, PerToken, Streams
from tread_zoo.kernels import attention
from tread_zoo.layers import rotary_2d, rotate
from tread_zoo.registry import register_backbone


class RotaryAttention(Mixer):
    """Attention of tokens [B, L, D] to each other, by their contents and their relative positions.

    Args:
        hidden_size: D.
        num_heads: H; D / H is divisible by 4.
        qk_norm: RMSNorm of queries and keys, by head.
        value_residual: keep the values of the first block in the streams, and use them.
        is_first: whether this is the mixer that sets them.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        qk_norm: bool = True,
        value_residual: bool = False,
        is_first: bool = False,
    ) -> None:
        super().__init__()
        if hidden_size % (4 * num_heads):
            raise ValueError(
                f"hidden_size={hidden_size} must be divisible by 4 * num_heads = {4 * num_heads}: "
                "rotary positions turn pairs of channels by row and by column."
            )
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.value_size = hidden_size if value_residual else 0
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.fused_rows = {"qkv.weight": 3 * (hidden_size,)}
        self.q_norm = nn.RMSNorm(self.head_size, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_size, eps=1e-6) if qk_norm else None
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.is_first = is_first
        self.value_mix = nn.Parameter(torch.empty(1)) if value_residual and not is_first else None

    def forward(
        self, x: Tensor, layout: Layout, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        q, k, value = self.qkv(x).chunk(3, dim=-1)
        rotation = find_rotation(layout, self.head_size)
        q = rotate(self._heads(q, self.q_norm), *rotation)
        k = rotate(self._heads(k, self.k_norm), *rotation)
        v = value
        if self.value_mix is not None:
            assert first_value is not None, "the shell has a stream for it"
            v = value + self.value_mix.to(value.dtype) * (first_value.to(value.dtype) - value)
        mixed = attention(q.to(v.dtype), k.to(v.dtype), self._heads(v))
        out = self.proj(mixed.transpose(1, 2).flatten(2))
        return out, value if self.value_size and self.is_first else None

    def initialize(self) -> None:
        """Start with the mean of both values."""
        if self.value_mix is not None:
            nn.init.constant_(self.value_mix, 0.5)

    def _heads(self, x: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Return [B, H, L, Dh] of [B, L, D], normalised by head."""
        x = x.view(*x.shape[:2], self.num_heads, self.head_size).transpose(1, 2)
        # Under autocast x is in half precision and the weight is not: the fused form wants one.
        return x if norm is None else norm(x.to(norm.weight.dtype))


def find_rotation(layout: Layout, head_size: int) -> tuple[Tensor, Tensor]:
    """Return what turns the tokens present, extra ones by nothing; made once for a layout."""
    key = ("rotary_2d", head_size)
    if key not in layout.cache:
        rows, cols = layout.rows_cols()
        if layout.ids is None:  # all images alike
            rows, cols = rows[:1], cols[:1]
        layout.cache[key] = rotary_2d(rows, cols, head_size, layout.num_extra)
    rotation: tuple[Tensor, Tensor] = layout.cache[key]
    return rotation


class ModulationOffset(nn.Module):
    """A block's own addition to the modulation that all share: [.., 6 D] -> [.., 6 D]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, shared: Tensor) -> Tensor:
        return shared + self.weight


class LightningDiT(LightningBackbone):
    """A stack of `LightningBlock`s with `RotaryAttention`.

    A route's gaps are nothing to it: a kept token attends to the kept ones from its own place.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, divisible by 4 H.
        depth: number of blocks.
        num_heads: H.
        mlp_ratio: of `SwiGLU`.
        qk_norm: RMSNorm of queries and keys.
        value_residual, shared_modulation, num_class_tokens: see the module.
        time_scale, reversed_time: see `AdaLNBackbone`.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 384,
        depth: PositiveInt = 12,
        num_heads: PositiveInt = 6,
        mlp_ratio: PositiveFloat = 4.0,
        qk_norm: bool = True,
        value_residual: bool = False,
        shared_modulation: bool = False,
        num_class_tokens: NonNegativeInt = 0,
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
        reversed_time: bool = False,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=("order", "ids"),
            hidden_size=hidden_size,
            depth=depth,
            make_mixer=lambda index: RotaryAttention(
                hidden_size, num_heads, qk_norm, value_residual, is_first=index == 0
            ),
            mlp_ratio=mlp_ratio,
            learn_sigma=learn_sigma,
            time_scale=time_scale,
        )
        self.reversed_time = reversed_time
        self.modulation: nn.Linear | None = None
        if shared_modulation:
            self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
            for block in self.blocks:
                assert isinstance(block, LightningBlock)
                block.modulation, block.fused_rows = ModulationOffset(6 * hidden_size), {}
        self.num_class_tokens, self.joins_at = num_class_tokens, depth // 3
        self.num_extra_tokens = num_class_tokens
        self.per_token_time = not num_class_tokens  # these have no time of their own
        self.class_positions: nn.Parameter | None = None
        if num_class_tokens:
            self.class_positions = nn.Parameter(torch.empty(num_class_tokens, hidden_size))
        self.initialize()

    def initialize(self) -> None:
        """Set every weight; called once, last. Beside what the shell sets:

        | parameter | value |
        |---|---|
        | `value_mix` | 0.5 |
        | the shared modulation and its offsets | 0 |
        | positions of class tokens | normal, std 0.02 |
        """
        super().initialize()
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
        if self.class_positions is not None:
            nn.init.normal_(self.class_positions, std=0.02)

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        streams, condition = super().embed(x, t, y)
        if self.class_positions is not None:
            tokens = self.class_positions.expand(len(x), -1, -1)
            if self.label_embed is not None:
                tokens = tokens + self.label_embed(y, len(x)).unsqueeze(1)
            values = [tokens.new_zeros(*tokens.shape[:2], s.shape[2]) for s in streams[1:]]
            pairs = zip((tokens, *values), streams, strict=True)
            streams = tuple(torch.cat(pair, dim=1) for pair in pairs)
        if self.modulation is None:
            return streams, condition
        if isinstance(condition, PerToken):
            return streams, (condition, PerToken(self.modulation(condition.values)))
        return streams, (condition, self.modulation(condition))

    def run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        given = condition if self.modulation is None else condition[1]
        absent = self.num_class_tokens  # ahead of a context's, which are there from the start
        if not absent or index >= self.joins_at:
            return super().run_block(index, streams, given, layout, skip)
        others = replace(layout, num_extra=layout.num_extra - absent)
        layout = layout.cache.setdefault("no class tokens", others)
        after = super().run_block(index, tuple(s[:, absent:] for s in streams), given, layout, skip)
        pairs = zip(streams, after, strict=True)
        return tuple(torch.cat([before[:, :absent], s], dim=1) for before, s in pairs)

    def head(self, streams: Streams, condition: Any) -> Tensor:
        return super().head(streams, condition if self.modulation is None else condition[0])


_SIZES = {
    "b": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "l": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "xl": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
}

for _size, _keywords in _SIZES.items():
    for _patch in (1, 2):
        register_backbone(f"lightning_dit_{_size}_{_patch}", patch_size=_patch, **_keywords)(
            LightningDiT
        )
# Sizes for comparisons: every architecture has them, of nearly the same number of parameters.
register_backbone(
    "lightning_dit_tiny", learning_rate=1.2e-2, patch_size=2, hidden_size=64, depth=12, num_heads=2
)(LightningDiT)
register_backbone(
    "lightning_dit_matched_s",
    learning_rate=3e-4,
    patch_size=2,
    hidden_size=384,
    depth=12,
    num_heads=6,
)(LightningDiT)
register_backbone("lightning_dit_matched_b", patch_size=2, **_SIZES["b"])(LightningDiT)
