"""U-ViT: a transformer with long skips and every condition as a token (arXiv 2209.12152).

    [x = Linear(cat(x, skip))]        in the second half: block depth - i takes block i's output
    x = x + Attention(LN(x))
    x = x + MLP(LN(x))

A label token and a time token precede the image's. All tokens have learned positions, which are
added once, before the first block. A 3x3 convolution smooths the image after its patches are
joined. A context replaces the label, as in the paper's text-to-image network: its tokens come
before the time token.

B batch, L = E + K tokens present (E extra), D width, H heads.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import check_width
from backbones.shells import Shell, draw_linears
from tread_zoo.contract.backbone import Layout, Streams
from tread_zoo.contract.layers import (
    LabelEmbedder,
    Mlp,
    TimestepEmbedder,
    join_skip,
    patchify,
    self_attention,
    time_sinusoids,
    unpatchify,
)


class UViTBlock(nn.Module):
    """Joins x with a long skip, if there is one, then adds the outputs of attention and of an MLP:
    [B, L, D] -> [B, L, D]."""

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
        x = join_skip(x, skip, self.skip_proj)
        x = x + self_attention(self.norm1(x), self.qkv, self.proj, self.num_heads)
        return x + self.mlp(self.norm2(x))


class UViT(Shell):
    """U-ViT (arXiv 2209.12152): attention blocks, with long skips from first to second half.

    Args:
        depth: an even number. There are depth + 1 blocks: depth / 2 that give long skips, one in
            the middle, and depth / 2 that take them.
        num_heads: number of attention heads.
        mlp_ratio: inner width of the MLP divided by hidden_size.
        time_mlp: put a two-layer MLP between the sinusoids of t and the time token; the published
            ImageNet networks have none.
        final_conv: end with the 3x3 convolution; the published H/2 has none.
        init_std: standard deviation of initial weights. The published 0.02 suits a width of 512 or
            more; see docs/log.md for narrow networks.
        options: options of `Shell`; hidden_size must be even and divisible by num_heads.
    """

    default_range = (3, -3)  # contains both blocks of a skip, or neither

    def __init__(
        self,
        *,
        hidden_size: PositiveInt = 512,
        depth: PositiveInt = 12,
        num_heads: PositiveInt = 8,
        mlp_ratio: PositiveFloat = 4.0,
        time_mlp: bool = False,
        final_conv: bool = True,
        init_std: PositiveFloat = 0.02,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size=hidden_size, **options)
        width = hidden_size
        if depth % 2:
            raise ValueError(f"depth={depth} must be even: skips join the halves.")
        check_width(width, 2, "as half the sinusoids are cosines")
        check_width(width, num_heads, "num_heads")
        self.init_std, self.num_extra_tokens = init_std, 2 if self.num_classes else 1
        self.skips = {depth - i: i for i in range(depth // 2)}
        self.positions = nn.Parameter(torch.empty(self.num_extra_tokens + self.num_tokens, width))
        embedder: dict[str, Any] = {"frequency_size": width, "mlp_size": 4 * width}
        embedder["time_scale"] = self.time_scale
        self.time_embed = TimestepEmbedder(width, **embedder) if time_mlp else None
        self.label_embed = LabelEmbedder(self.num_classes, width) if self.num_classes else None
        self.blocks = nn.ModuleList(
            UViTBlock(width, num_heads, mlp_ratio, has_skip=index in self.skips)
            for index in range(depth + 1)
        )
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.linear = nn.Linear(width, self.patch_size**2 * self.out_channels)
        channels = self.out_channels
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if final_conv else None

    def initialize(self) -> None:
        """Set every weight but the norms', which start at 1 and 0; called once, last.

        | layer | weight | bias |
        |---|---|---|
        | linear layers | normal, std `init_std`, cut at -2 and 2 | 0 |
        | positions, label table | the same | |
        | 3x3 convolution | the identity | 0 |

        The authors initialise the convolution at random. With one channel it is a single kernel,
        and a run's quality depended on its start: docs/comparison/fashion_mnist has the numbers.
        """
        draw_linears(self, partial(nn.init.trunc_normal_, std=self.init_std))
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
