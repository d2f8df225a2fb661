"""U-ViT: a transformer with long skips and every condition as a token (arXiv 2209.12152).

    [x = Linear(cat(x, skip))]        in the second half: block depth - i takes block i's output
    x = x + Attention(LN(x))
    x = x + MLP(LN(x))

Label and time are tokens ahead of the image's, in this order, and have learned positions as these
do. Positions are added once, so a routed token carries its own, and blocks do not depend on which
tokens they see. The image is joined from its patches and then smoothed by a 3x3 convolution,
which runs after every route has ended, on the whole grid.

In place of a label it takes a context, as the text-to-image network of the paper does: its tokens
stand ahead of the time's.

B batch, L = E + K tokens present (E extra), D width, H heads.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from tread_zoo.contract.backbone import Backbone, Layout, Streams
from tread_zoo.contract.layers import (
    LabelEmbedder,
    Mlp,
    TimestepEmbedder,
    patchify,
    self_attention,
    time_sinusoids,
    unpatchify,
)


class UViTBlock(nn.Module):
    """[skip joined] then attention and MLP: [B, L, D], [B, L, D] or None -> [B, L, D]."""

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_ratio: float, *, has_skip: bool
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.skip_proj = nn.Linear(2 * hidden_size, hidden_size) if has_skip else None
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), F.gelu)
        self.fused_rows = {"qkv.weight": 3 * (hidden_size,)}

    def forward(self, x: Tensor, skip: Tensor | None) -> Tensor:
        if self.skip_proj is not None:
            assert skip is not None, "the block loop hands a skip to each block in `skips`"
            # Under autocast the projection is half precision; the residual stream stays as it was.
            x = self.skip_proj(torch.cat([x, skip], dim=-1)).to(x.dtype)
        x = x + self_attention(self.norm1(x), self.qkv, self.proj, self.num_heads)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class UViT(Backbone):
    """`depth // 2` blocks, a middle one, and `depth // 2` blocks that take the first ones' skips.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, even and divisible by `num_heads`.
        depth: even; the stack has depth + 1 blocks.
        num_heads: H.
        mlp_ratio: width of the MLP over D.
        time_mlp: put a two-layer MLP between the sinusoids of t and the time token; the published
            ImageNet networks have none.
        final_conv: end with the 3x3 convolution; the published H/2 does without.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.
        num_registers: learned tokens ahead of the others, see `Backbone.add_registers`.
        init_std: deviation of the weights at the start. The published 0.02 suits a width of 512 and
            more; in a narrow network it lets little through, the skips' layers least of all.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    takes_contexts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 512,
        depth: PositiveInt = 12,
        num_heads: PositiveInt = 8,
        mlp_ratio: PositiveFloat = 4.0,
        time_mlp: bool = False,
        final_conv: bool = True,
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
        init_std: PositiveFloat = 0.02,
        num_registers: NonNegativeInt = 0,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=(),
            learn_sigma=learn_sigma,
        )
        if depth % 2:
            raise ValueError(f"depth={depth} must be even: skips join the halves.")
        if hidden_size % 2 or hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be even (half the time token is cosines) and "
                f"divisible by num_heads={num_heads}."
            )
        self.hidden_size, self.time_scale = hidden_size, time_scale
        self.init_std = init_std
        self.num_extra_tokens = 2 if num_classes else 1
        self.skips = {depth - i: i for i in range(depth // 2)}
        self.patch_embed = nn.Linear(in_channels * patch_size**2, hidden_size)
        self.positions = nn.Parameter(
            torch.empty(self.num_extra_tokens + self.num_tokens, hidden_size)
        )
        self.time_embed = (
            TimestepEmbedder(
                hidden_size,
                frequency_size=hidden_size,
                mlp_size=4 * hidden_size,
                time_scale=time_scale,
            )
            if time_mlp
            else None
        )
        self.label_embed = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.blocks = nn.ModuleList(
            UViTBlock(hidden_size, num_heads, mlp_ratio, has_skip=index in self.skips)
            for index in range(depth + 1)
        )
        self.norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.linear = nn.Linear(hidden_size, patch_size**2 * self.out_channels)
        self.conv = (
            nn.Conv2d(self.out_channels, self.out_channels, 3, padding=1) if final_conv else None
        )
        self.initialize()
        self.add_registers(num_registers)

    def initialize(self) -> None:
        """Set every weight; called once, last.

        | layer | weight | bias |
        |---|---|---|
        | linear layers | normal, std `init_std`, cut at -2 and 2 | 0 |
        | positions, label table | the same | |
        | norms | 1 | 0 |
        | 3x3 convolution | the identity | 0 |

        Nothing else starts at zero: the untrained output is small, not 0. The convolution is where
        this departs from the authors, who draw it at random. What it takes away at the start, in
        fine detail above all, the network must learn to give back, and with one channel it is a
        single kernel: how well a run went hung on that one draw. docs/comparison/fashion_mnist has
        the numbers.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=self.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        if self.conv is not None:
            nn.init.dirac_(self.conv.weight)
            assert self.conv.bias is not None
            nn.init.zeros_(self.conv.bias)
        nn.init.trunc_normal_(self.positions, std=self.init_std)
        if self.label_embed is not None:
            nn.init.trunc_normal_(self.label_embed.table.weight, std=self.init_std)

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, None]:
        if self.time_embed is not None:
            time = self.time_embed(t)
        else:
            sinusoids = time_sinusoids(t, self.hidden_size, self.time_scale)
            time = sinusoids.to(self.positions.dtype)
        extra = [time.unsqueeze(1)]
        if self.label_embed is not None:
            extra = [self.label_embed(y, len(x)).unsqueeze(1), *extra]
        tokens = self.patch_embed(patchify(x, self.patch_size))
        tokens = torch.cat([*extra, tokens], dim=1) + self.positions
        return (self.prepend_context(tokens, y),), None

    def run_block(
        self, index: int, streams: Streams, condition: None, layout: Layout, skip: Tensor | None
    ) -> Streams:
        return (self.blocks[index](streams[0], skip),)

    def head(self, streams: Streams, condition: None) -> Tensor:
        tokens = self.linear(self.norm(streams[0][:, self.num_extra_tokens :]))
        image = unpatchify(tokens, self.patch_size, self.grid)
        return image if self.conv is None else self.conv(image)
