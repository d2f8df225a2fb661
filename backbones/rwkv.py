"""RWKV: a decaying mean, both ways, in place of attention (Diffusion-RWKV, arXiv 2404.04478).

    x = LN(patches + positions);  c = embed(t) + embed(y)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = Linear(SiLU(c))
    [x = Linear(cat(x, x of block depth-1-i))]             in the second half: long skips
    x = x + gate_1 * SpatialMix(LN(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * ChannelMix(LN(x) * (1 + scale_2) + shift_2)

B batch, K tokens present, D width.
"""

from typing import Any

from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.q_shift import GridWalk
from backbones.mixers.wkv import ChannelMix, SpatialMix
from backbones.shells import AdaLNBackbone
from tread_zoo.contract.backbone import Layout, Streams
from tread_zoo.contract.layers import add_gated, join_skip, modulate


class RWKVBlock(nn.Module):
    """Joins x with a long skip, if there is one, then mixes its tokens and its channels. The
    condition modulates and gates both mixes."""

    def __init__(
        self, hidden_size: int, spatial: SpatialMix, channel: ChannelMix, *, has_skip: bool
    ) -> None:
        super().__init__()
        self.skip_proj = nn.Linear(2 * hidden_size, hidden_size) if has_skip else None
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.spatial = spatial
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.channel = channel
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.fused_rows = {"modulation.weight": 6 * (hidden_size,)}

    def prepare(self, layout: Layout) -> GridWalk:
        return self.spatial.prepare(layout)

    def forward(self, x: Tensor, condition: Tensor, walk: GridWalk, skip: Tensor | None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = join_skip(x, skip, self.skip_proj)
        mixed = self.spatial(modulate(self.norm1(x), shift1, scale1), walk)
        x = add_gated(x, gate1, mixed)
        mixed = self.channel(modulate(self.norm2(x), shift2, scale2), walk)
        return add_gated(x, gate2, mixed)


class RWKV(AdaLNBackbone):
    """Diffusion-RWKV (arXiv 2404.04478), with long skips from block i to block depth - 1 - i.

    The default route, blocks 3 … depth - 4, contains both blocks of a skip or neither.

    Args:
        depth: number of blocks, odd: the middle one has no skip.
        options: options of `AdaLNBackbone`.
    """

    mixer, mlp = SpatialMix, ChannelMix
    default_range = (3, -3)
    learned_positions = True

    def __init__(self, *, depth: PositiveInt = 13, **options: Any) -> None:
        if depth % 2 == 0:
            raise ValueError(f"depth={depth} must be odd: skips join the halves around a middle.")
        super().__init__(depth=depth, **options)
        self.skips = {depth - 1 - i: i for i in range(depth // 2)}
        self.norm_in = nn.LayerNorm(self.hidden_size, eps=1e-5)
        self.norm = nn.LayerNorm(self.hidden_size, eps=1e-5)

    def make_block(self, index: int, depth: int) -> RWKVBlock:
        mixes = self.make_part(SpatialMix, index), self.make_part(ChannelMix, index)
        return RWKVBlock(self.hidden_size, *mixes, has_skip=index > depth // 2)

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        (tokens,), condition = super().embed(x, t, y)
        return (self.norm_in(tokens),), condition

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        block: Any = self.blocks[index]
        return (block(streams[0], condition, block.prepare(layout), skip),)

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        return super().head((self.norm(streams[0]),), condition)
