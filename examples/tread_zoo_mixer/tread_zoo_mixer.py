"""A gated MLP-mixer: tokens are mixed by a learned matrix over positions, [N, N].

    value, gate = Linear(LN(x) * (1 + scale) + shift)
    x = x + Linear(Mix[ids, ids] value * SiLU(gate));   x = x + MLP(LN(x))

A route leaves tokens out, so a block takes the rows and columns of the positions it is told of.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo import register_backbone
from tread_zoo.backbone import Backbone, Layout, Streams
from tread_zoo.layers import (
    AdaLNHead,
    LabelEmbedder,
    Mlp,
    TimestepEmbedder,
    modulate,
    patchify,
    unpatchify,
)


class MixerBlock(nn.Module):
    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.modulation = nn.Linear(width, 2 * width)
        self.value_gate = nn.Linear(width, 2 * width)
        self.mix = nn.Parameter(torch.randn(num_tokens, num_tokens) / num_tokens)
        self.out = nn.Linear(width, width)
        self.mlp = Mlp(width, 4 * width, F.gelu)
        self.fused_rows = {"modulation.weight": 2 * (width,), "value_gate.weight": 2 * (width,)}

    def forward(self, x: Tensor, condition: Tensor, ids: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        value, gate = self.value_gate(modulate(self.norm1(x), shift, scale)).chunk(2, dim=-1)
        mix = self.mix[ids.unsqueeze(2), ids.unsqueeze(1)]  # [B, K, K]
        x = x + self.out(mix @ value * F.silu(gate))
        return x + self.mlp(self.norm2(x))


@register_backbone("mixer_tiny", patch_size=2, hidden_size=96, depth=8)
class Mixer(Backbone):
    default_selector = "blocks"

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int = 2,
        hidden_size: int = 96,
        depth: int = 8,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
        )
        self.block_knows = ("order", "ids", "grid")
        width = hidden_size
        self.patch_embed = nn.Linear(in_channels * patch_size**2, width)
        self.time_embed = TimestepEmbedder(
            width, frequency_size=256, mlp_size=width, time_scale=1000.0
        )
        self.label_embed = LabelEmbedder(num_classes, width) if num_classes else None
        self.blocks = nn.ModuleList(MixerBlock(width, self.num_tokens) for _ in range(depth))
        self.final = AdaLNHead(width, patch_size, self.out_channels)
        self.final.zero()

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Tensor]:
        condition = self.time_embed(t)
        if self.label_embed is not None:
            condition = condition + self.label_embed(y, len(x))
        return (self.patch_embed(patchify(x, self.patch_size)),), F.silu(condition)

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        ids = layout.ids
        if ids is None:
            ids = torch.arange(self.num_tokens, device=condition.device).expand(len(condition), -1)
        return (self.blocks[index](streams[0], condition, ids),)

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        return unpatchify(self.final(streams[0], condition), self.patch_size, self.grid)
