"""Attention of tokens to each other, by their contents alone: DiT's (arXiv 2212.09748).

Positions are added once, ahead of the blocks, so a routed token carries its position with it, and
blocks do not depend on which tokens they see.

B batch, K tokens present, D width, H heads.
"""

from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import Mixer
from tread_zoo.contract.backbone import Layout
from tread_zoo.contract.layers import self_attention


class Attention(Mixer):
    """Attention over [B, K, D].

    Args:
        hidden_size: D, divisible by H.
        num_heads: H.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    def __init__(self, hidden_size: int, num_heads: PositiveInt = 6) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}."
            )
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.fused_rows = {"qkv.weight": 3 * (hidden_size,)}

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self_attention(x, self.qkv, self.proj, self.num_heads)
