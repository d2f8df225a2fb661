"""LightningDiT: DiT with RMSNorm, SwiGLU, rotary positions and qk-norm (arXiv 2501.01423).

`shells` has the shell and `mixers.rotary` the attention. Fixed sines are added once, as in DiT.

B batch, K tokens present, E class tokens, L = E + K, D width.
"""

from dataclasses import replace
from typing import Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn

from backbones.mixers.rotary import RotaryAttention
from backbones.shells import LightningBackbone
from tread_zoo.contract.backbone import Layout, Streams


class LightningDiT(LightningBackbone):
    """A stack of `LightningBlock`s with `RotaryAttention`; it also takes the options of both.

    Args:
        num_class_tokens: E, the number of tokens (label embedding plus learned positions) that join
            the sequence after a third of the blocks (JiT, arXiv 2511.13720), off the grid.
    """

    mixer = RotaryAttention

    def __init__(self, *, num_class_tokens: NonNegativeInt = 0, **options: Any) -> None:
        super().__init__(**options)
        self.num_class_tokens, self.joins_at = num_class_tokens, self.num_blocks // 3
        self.class_positions: nn.Parameter | None = None
        if num_class_tokens:
            self.num_extra_tokens, self.per_token_time = num_class_tokens, False
            self.class_positions = nn.Parameter(torch.empty(num_class_tokens, self.hidden_size))

    def initialize(self) -> None:
        """Set the weights as the shell does, and class positions with std 0.02."""
        super().initialize()
        if self.class_positions is not None:
            nn.init.normal_(self.class_positions, std=0.02)

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        streams, condition = super().embed(x, t, y)
        if self.class_positions is None:
            return streams, condition
        tokens = self.class_positions.expand(len(x), -1, -1)
        if self.label_embed is not None:
            tokens = tokens + self.label_embed(y, len(x)).unsqueeze(1)
        values = [tokens.new_zeros(*tokens.shape[:2], s.shape[2]) for s in streams[1:]]
        pairs = zip((tokens, *values), streams, strict=True)
        return tuple(torch.cat(pair, dim=1) for pair in pairs), condition

    def run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        absent = self.num_class_tokens  # before context tokens, which are there from the start
        if not absent or index >= self.joins_at:
            return super().run_block(index, streams, condition, layout, skip)
        others = replace(layout, num_extra=layout.num_extra - absent)
        others = layout.cache.setdefault("no class tokens", others)
        present = tuple(s[:, absent:] for s in streams)
        after = super().run_block(index, present, condition, others, skip)
        pairs = zip(streams, after, strict=True)
        return tuple(torch.cat([before[:, :absent], s], dim=1) for before, s in pairs)
