"""Self-attention by content alone, as in DiT (arXiv 2212.09748), and cross-attention.

Positions are added to the tokens once, before the first block, so a block need not know where the
tokens that it sees are on the grid. The shells of DiT and LightningDiT can add `CrossAttention` to
a context after any mixer.

B batch, K tokens present, T tokens of a context, D width, H heads.
"""

from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import Mixer, check_width
from tread_zoo.contract.backbone import Layout
from tread_zoo.contract.layers import self_attention
from tread_zoo.kernels import attention


class Attention(Mixer):
    """Multi-head self-attention over tokens [B, K, D].

    Args:
        hidden_size: D, divisible by H.
        num_heads: number of heads, H.
    """

    def __init__(self, hidden_size: int, num_heads: PositiveInt = 6) -> None:
        super().__init__()
        check_width(hidden_size, num_heads, "num_heads")
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.fused_rows = {"qkv.weight": 3 * (hidden_size,)}

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self_attention(x, self.qkv, self.proj, self.num_heads)


class CrossAttention(nn.Module):
    """Attention of tokens [B, K, D] to a context [B, T, D]; the initial weights make the output 0.

    Args:
        hidden_size: D.
        num_heads: a divisor of D; None: the largest that gives each head 64 channels or more,
            or 1.
    """

    def __init__(self, hidden_size: int, num_heads: int | None = None) -> None:
        super().__init__()
        counts = range(max(1, hidden_size // 64), 0, -1)
        self.num_heads = num_heads or next(n for n in counts if hidden_size % n == 0)
        self.norm = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.q = nn.Linear(hidden_size, hidden_size)
        self.kv = nn.Linear(hidden_size, 2 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.fused_rows = {"kv.weight": 2 * (hidden_size,)}
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q(self.norm(x)), *self.kv(context).chunk(2, dim=-1))
        )
        return self.out(attention(q, k, v).transpose(1, 2).flatten(2))
