"""DiT: a transformer conditioned by adaLN-Zero (Peebles and Xie 2022, arXiv 2212.09748).

    c = embed(t) + embed(y)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = Linear(SiLU(c))
    x = x + gate_1 * Attention(LN(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * MLP(LN(x) * (1 + scale_2) + shift_2)

Positions are fixed 2-D sines added once, so a routed token carries its position with it and the
blocks need not be told which tokens they see. B batch, K tokens present, D width, H heads.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.backbone import Backbone, Layout, Streams
from tread_zoo.kernels import attention
from tread_zoo.layers import (
    AdaLNHead,
    LabelEmbedder,
    Mlp,
    TimestepEmbedder,
    check_mlp_ratio,
    check_positive,
    gelu_tanh,
    modulate,
    patchify,
    sincos_2d,
    unpatchify,
)
from tread_zoo.registry import register_backbone


class DiTBlock(nn.Module):
    """Attention and MLP, modulated and gated by the condition: [B, K, D], [B, D] -> [B, K, D]."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), gelu_tanh)
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.fused_rows = {
            "qkv.weight": 3 * (hidden_size,),
            "modulation.weight": 6 * (hidden_size,),
        }

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = torch.addcmul(
            x, gate1.unsqueeze(1), self.attend(modulate(self.norm1(x), shift1, scale1))
        )
        return torch.addcmul(
            x, gate2.unsqueeze(1), self.mlp(modulate(self.norm2(x), shift2, scale2))
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.proj(attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class DiT(Backbone):
    """A stack of `DiTBlock`s.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, divisible by `num_heads` and by 4.
        depth: number of blocks.
        num_heads: H.
        mlp_ratio: width of the MLP over D.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    default_selector: ClassVar[str] = "random"
    why_no_context: ClassVar[str] = "adaLN takes one vector for all tokens"

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int = 2,
        hidden_size: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        learn_sigma: bool = False,
        time_scale: float = 1000.0,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            learn_sigma=learn_sigma,
        )
        check_positive(hidden_size=hidden_size, depth=depth, num_heads=num_heads)
        check_mlp_ratio(mlp_ratio, hidden_size)
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}."
            )
        self.block_knows = ()
        self.patch_embed = nn.Linear(in_channels * patch_size**2, hidden_size)
        self.register_buffer("positions", sincos_2d(hidden_size, self.grid), persistent=False)
        self.time_embed = TimestepEmbedder(
            hidden_size, frequency_size=256, mlp_size=hidden_size, time_scale=time_scale
        )
        self.label_embed = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.blocks = nn.ModuleList(
            DiTBlock(hidden_size, num_heads, mlp_ratio) for _ in range(depth)
        )
        self.final = AdaLNHead(hidden_size, patch_size, self.out_channels)
        self.initialize()

    def initialize(self) -> None:
        """Set every weight; called once, last.

        | layer | weight | bias |
        |---|---|---|
        | linear layers | Xavier uniform | 0 |
        | time MLP, label table | normal, std 0.02 | 0 |
        | modulation of each block and of the head | 0 | 0 |
        | last linear layer | 0 | 0 |
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.time_embed.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if self.label_embed is not None:
            nn.init.normal_(self.label_embed.table.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, DiTBlock):
                nn.init.zeros_(module.modulation.weight)
        self.final.zero()

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Tensor]:
        tokens = self.patch_embed(patchify(x, self.patch_size)) + self.positions
        condition = self.time_embed(t)
        if self.label_embed is not None:
            condition = condition + self.label_embed(y, len(x))
        return (tokens,), F.silu(condition)

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        return (self.blocks[index](streams[0], condition),)

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        return unpatchify(self.final(streams[0], condition), self.patch_size, self.grid)


_SIZES = {
    "s": {"depth": 12, "hidden_size": 384, "num_heads": 6},
    "b": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "l": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "xl": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
}

for _size, _keywords in _SIZES.items():
    for _patch in (2, 4, 8):
        register_backbone(f"dit_{_size}_{_patch}", patch_size=_patch, **_keywords)(DiT)
# Sizes for comparisons: every architecture has them, of nearly the same number of parameters.
register_backbone(
    "dit_tiny", learning_rate=6e-3, patch_size=2, hidden_size=64, depth=12, num_heads=2
)(DiT)
register_backbone("dit_matched_s", patch_size=2, **_SIZES["s"])(DiT)
register_backbone("dit_matched_b", patch_size=2, **_SIZES["b"])(DiT)
