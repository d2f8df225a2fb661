"""The shell of DiT (arXiv 2212.09748): all of a backbone conditioned by adaLN-Zero, but the blocks.

    c = embed(t) + embed(y)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = Linear(SiLU(c))
    x = x + gate_1 * Mix(LN(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * MLP(LN(x) * (1 + scale_2) + shift_2)

A new row of this kind brings its mixer and its sizes:

    class MyBlock(AdaLNBlock):
        def mix(self, x, layout): …                 # [B, K, D] -> [B, K, D]

    class MyNet(AdaLNBackbone):
        def __init__(self, *, …):
            super().__init__(…, depends_on=…, make_block=lambda index: MyBlock(hidden_size))
            self.initialize()

t may be [B, N], a time for each token; the condition is then one for each token, too.

A context [B, T, S] is T tokens ahead of the patches, which a mixer sees as `layout.num_extra`.
Their mean is added to c, as SD3 (arXiv 2403.03206) modulates by a pooled text beside its tokens:
what the text says as a whole then reaches each token at once, also where a scan forgets.

B batch, K tokens present, N tokens of the full grid, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.backbone import Backbone, Layout, PerToken, Streams
from tread_zoo.layers import (
    AdaLNHead,
    LabelEmbedder,
    Mlp,
    TimestepEmbedder,
    add_gated,
    gelu_tanh,
    modulate,
    patchify,
    per_token,
    sincos_2d,
    unpatchify,
)


class AdaLNBlock(nn.Module, ABC):
    """A mixer and an MLP, modulated and gated by the condition: [B, K, D] -> [B, K, D].

    Args:
        hidden_size: D.
        mlp_ratio: width of the MLP over D.
        layers: of the mixer, by name; others may be set after construction. Weights are drawn in
            the order in which layers are set, these ahead of the MLP's.
    """

    def __init__(self, hidden_size: int, mlp_ratio: float, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), gelu_tanh)
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.fused_rows: dict[str, tuple[int, ...]] = {"modulation.weight": 6 * (hidden_size,)}

    @abstractmethod
    def mix(self, x: Tensor, layout: Layout) -> Tensor:
        """Return the mixed tokens [B, K, D]; `layout` says which these are."""

    def forward(self, x: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = add_gated(x, gate1, self.mix(modulate(self.norm1(x), shift1, scale1), layout))
        return add_gated(x, gate2, self.mlp(modulate(self.norm2(x), shift2, scale2)))


class AdaLNBackbone(Backbone):
    """A stack of blocks, each with a layer `modulation` of its own.

    Args:
        input_size, in_channels, num_classes, patch_size, depends_on, learn_sigma: see `Backbone`.
        hidden_size: D; divisible by 4 for fixed positions.
        depth: number of blocks.
        make_block: (index of the block) -> the block.
        learned_positions: instead of fixed 2-D sines.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.
        reversed_time: embed 1 - t, the time of networks that have data at 1.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    takes_contexts: ClassVar[bool] = True
    per_token_time: bool = True

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int,
        depends_on: Sequence[str],
        hidden_size: int,
        depth: int,
        make_block: Callable[[int], nn.Module],
        learned_positions: bool = False,
        learn_sigma: bool = False,
        time_scale: float = 1000.0,
        reversed_time: bool = False,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=depends_on,
            learn_sigma=learn_sigma,
        )
        self.reversed_time = reversed_time
        self.patch_embed = nn.Linear(in_channels * patch_size**2, hidden_size)
        self.positions: Tensor | nn.Parameter
        if learned_positions:
            self.positions = nn.Parameter(torch.empty(self.num_tokens, hidden_size))
        else:
            self.register_buffer("positions", sincos_2d(hidden_size, self.grid), persistent=False)
        self.time_embed = TimestepEmbedder(
            hidden_size, frequency_size=256, mlp_size=hidden_size, time_scale=time_scale
        )
        self.label_embed = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.blocks = nn.ModuleList(make_block(index) for index in range(depth))
        self.final = AdaLNHead(hidden_size, patch_size, self.out_channels)

    def initialize(self) -> None:
        """Set every weight; a subclass calls it once, last.

        | layer | weight | bias |
        |---|---|---|
        | linear layers | Xavier uniform | 0 |
        | time MLP, label table, learned positions | normal, std 0.02 | 0 |
        | modulation of each block and of the head | 0 | 0 |
        | last linear layer | 0 | 0 |
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.time_embed.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if isinstance(self.positions, nn.Parameter):
            nn.init.normal_(self.positions, std=0.02)
        if self.label_embed is not None:
            nn.init.normal_(self.label_embed.table.weight, std=0.02)
        for block in self.blocks:
            nn.init.zeros_(block.get_parameter("modulation.weight"))
        self.final.zero()

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        tokens = self.patch_embed(patchify(x, self.patch_size)) + self.positions
        tokens = self.prepend_context(tokens, y)
        condition = self.time_embed(1 - t if self.reversed_time else t)
        if self.context_size:
            condition = condition + tokens[:, : self.context_length].mean(dim=1)
        if self.label_embed is not None:
            label = self.label_embed(y, len(x))
            condition = condition + (label if t.ndim == 1 else per_token(label))
        condition = F.silu(condition)
        return (tokens,), condition if t.ndim == 1 else PerToken(condition)

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        return (self.blocks[index](streams[0], condition, layout),)

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        tokens = self.final(streams[0][:, self.num_extra_tokens :], condition)
        return unpatchify(tokens, self.patch_size, self.grid)
