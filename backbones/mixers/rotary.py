"""Self-attention by content and relative positions, as in LightningDiT (arXiv 2501.01423).

Queries and keys are normalised per head, then rotated by angles from their token's row and column
(RoPE), so that attention depends on relative positions. The angles come from positions on the full
grid, whichever tokens a route keeps, so gaps have no effect.

With a window W, a token attends to the tokens present in its window of W x W positions (as in Swin,
arXiv 2103.14030, without its shift); extra tokens see all and are seen by all. Windows are a mask
over all pairs and save no FLOPs.

B batch, K tokens present, E extra tokens, L = E + K, D width, H heads.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import Mixer, check_width
from tread_zoo.contract.backbone import Layout
from tread_zoo.contract.layers import rotary_2d, rotate
from tread_zoo.kernels import attention


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of the L tokens present, and which of these tokens attend to each other.

    Args:
        cos, sin: cosines and signed sines of the angles, [B, 1, L, Dh] for heads of size Dh; see
            `rotary_2d`. If no route left tokens out, all fields have 1 in place of B.
        mask: [B, 1, L, L], True for pairs that attend to each other; None: all pairs do.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None


def make_rotation(layout: Layout, head_size: int, window: int | None = None) -> Rotation:
    """Return the `Rotation` of the tokens that are present in `layout`, for heads of size
    Dh = `head_size`. It has a mask if attention is limited to windows of `window` tokens a side."""
    rows, cols = layout.rows_cols()
    if layout.ids is None:  # equal for all images
        rows, cols = rows[:1], cols[:1]
    mask = None
    if window is not None and window < max(layout.grid):
        windows = rows // window * layout.grid[1] + cols // window
        mask = windows[:, :, None] == windows[:, None]
        mask = F.pad(mask, (layout.num_extra, 0, layout.num_extra, 0), value=True).unsqueeze(1)
    return Rotation(*rotary_2d(rows, cols, head_size, layout.num_extra), mask)


class RotaryAttention(Mixer):
    """Self-attention of tokens [B, L, D] by their contents and relative positions.

    Args:
        hidden_size: D.
        num_heads: number of heads, H; D / H is divisible by 4.
        qk_norm: apply RMSNorm to queries and keys, per head.
        window: W, the side of a window in tokens; None: all tokens attend to all.
    """

    depends_on = ("order", "ids")

    def __init__(
        self,
        hidden_size: int,
        num_heads: PositiveInt = 6,
        qk_norm: bool = True,
        window: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        check_width(hidden_size, 4 * num_heads, "4 * num_heads: rows and columns rotate pairs")
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.window = window
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.fused_rows = {"qkv.weight": 3 * (hidden_size,)}
        self.q_norm = nn.RMSNorm(self.head_size, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_size, eps=1e-6) if qk_norm else None
        self.proj = nn.Linear(hidden_size, hidden_size)

    def prepare(self, layout: Layout) -> Rotation:
        key = ("rotation", self.head_size, self.window)
        return layout.cached(key, lambda: make_rotation(layout, self.head_size, self.window))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = rotate(self._heads(q, self.q_norm), rotation.cos, rotation.sin)
        k = rotate(self._heads(k, self.k_norm), rotation.cos, rotation.sin)
        mixed = attention(q.to(v.dtype), k.to(v.dtype), self._heads(v), rotation.mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """Return x [B, L, D] split into H heads of size Dh, [B, H, L, Dh], each normalised by
        `norm` if it is given."""
        x = x.view(*x.shape[:2], self.num_heads, self.head_size).transpose(1, 2)
        # Under autocast x is in half precision, unlike the weight; the fused kernel wants one type.
        return x if norm is None else norm(x.to(norm.weight.dtype))
