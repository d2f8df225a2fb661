"""Linear attention without order or decay, as in SANA (arXiv 2410.10629).

A product of features replaces the softmax, so that one state of fixed size per head sums up all
keys and values (arXiv 2006.16236):

    q, k, v = Linear(x),  φ = ReLU
    o_i = Σ_j (φ(q_i)·φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j) = φ(q_i)ᵀ S / (φ(q_i)ᵀ Σ_j φ(k_j))
    S   = Σ_j φ(k_j) v_jᵀ
    out = Linear(o)

The state S is a sum over the tokens present, so their order and the gaps between them do not
matter. Rotary positions rotate φ(q) and φ(k) in the numerator only, as in RoFormer (arXiv
2104.09864).

B batch, K tokens present, E extra tokens, L = E + K, D width, H heads.
"""

import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import Mixer, check_width
from backbones.mixers.rotary import Rotation, make_rotation
from backbones.mixers.scan import at_least_float32
from tread_zoo.contract.backbone import Layout
from tread_zoo.contract.layers import rotate

# Added to the mean of φ(q)·φ(k) over the L keys, which may be 0. SANA adds 1e-8 to the sum instead
# (1e-15 in diffusers), whatever the number of keys.
EPSILON = 1e-6


class LinearAttention(Mixer):
    """Linear attention over [B, L, D].

    Args:
        hidden_size: D, divisible by H, or by 4 H with `rotary`.
        num_heads: number of heads, H.
        rotary: let attention depend on the tokens' relative positions on the grid.
    """

    def __init__(self, hidden_size: int, num_heads: PositiveInt = 6, rotary: bool = False) -> None:
        super().__init__()
        if rotary:
            check_width(hidden_size, 4 * num_heads, "4 * num_heads, with rotary positions")
        check_width(hidden_size, num_heads, "num_heads")
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.rotary = rotary
        self.depends_on = ("order", "ids") if rotary else ()
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.fused_rows = {"qkv.weight": 3 * (hidden_size,)}
        self.proj = nn.Linear(hidden_size, hidden_size)

    def prepare(self, layout: Layout) -> Rotation | None:
        if not self.rotary:
            return None
        key = ("rotation", self.head_size, None)
        return layout.cached(key, lambda: make_rotation(layout, self.head_size))

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_size))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        q, k = F.relu(q), F.relu(k)
        # Means over the keys, not sums: half precision holds them for any number of keys.
        total = (at_least_float32(q) * at_least_float32(k).mean(-2, keepdim=True)).sum(
            -1, keepdim=True
        ) + EPSILON
        if rotation is not None:
            q, k = (rotate(z, rotation.cos, rotation.sin).to(v.dtype) for z in (q, k))
        state = k.transpose(-2, -1) @ (v / v.shape[-2])
        mixed = ((q @ state) / total).transpose(1, 2)
        return self.proj(mixed.flatten(2).to(v.dtype))
