"""LightningDiT: DiT with RMSNorm, SwiGLU, rotary positions and qk-norm (arXiv 2501.01423).

`shells` has the shell, `mixers.rotary` the attention, this file what else is an option of it. Fixed
sines, which tokens carry with them, are added once as in DiT.

B batch, K tokens present, E class tokens, L = E + K, D width, H heads.
"""

from dataclasses import replace
from typing import Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn

from backbones.mixers.rotary import RotaryAttention
from backbones.shells import LightningBackbone, LightningBlock
from tread_zoo.contract.backbone import Layout, PerToken, Streams


class ModulationOffset(nn.Module):
    """A block's own addition to the modulation that all share: [.., 6 D] -> [.., 6 D]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, shared: Tensor) -> Tensor:
        return shared + self.weight


class LightningDiT(LightningBackbone):
    """A stack of `LightningBlock`s with `RotaryAttention`; see their options, too.

    Args:
        shared_modulation: one modulation layer for all blocks, and an offset to it for each
            (adaLN-single of PixArt-α, arXiv 2310.00426).
        num_class_tokens: E tokens of the label's embedding and learned positions join the sequence
            after a third of the blocks (JiT, arXiv 2511.13720); they have no place on the grid, and
            no angle.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    mixer = RotaryAttention

    def __init__(
        self,
        *,
        shared_modulation: bool = False,
        num_class_tokens: NonNegativeInt = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        hidden_size = self.hidden_size
        self.modulation: nn.Linear | None = None
        if shared_modulation:
            self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
            for block in self.blocks:
                assert isinstance(block, LightningBlock)
                block.modulation, block.fused_rows = ModulationOffset(6 * hidden_size), {}
        self.num_class_tokens, self.joins_at = num_class_tokens, self.num_blocks // 3
        self.num_extra_tokens = num_class_tokens
        self.per_token_time = not num_class_tokens  # these have no time of their own
        self.class_positions: nn.Parameter | None = None
        if num_class_tokens:
            self.class_positions = nn.Parameter(torch.empty(num_class_tokens, hidden_size))

    def initialize(self) -> None:
        """Set every weight. Beside what the shell sets:

        | parameter | value |
        |---|---|
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
        given, *context = condition if isinstance(condition, tuple) else (condition,)
        return streams, (given, self.modulation(given), *context)

    def run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        given = condition if self.modulation is None else condition[1:]
        absent = self.num_class_tokens  # ahead of a context's, which are there from the start
        if not absent or index >= self.joins_at:
            return super().run_block(index, streams, given, layout, skip)
        others = replace(layout, num_extra=layout.num_extra - absent)
        layout = layout.cache.setdefault("no class tokens", others)
        after = super().run_block(index, tuple(s[:, absent:] for s in streams), given, layout, skip)
        pairs = zip(streams, after, strict=True)
        return tuple(torch.cat([before[:, :absent], s], dim=1) for before, s in pairs)
