"""Masked training: after a range of blocks, learned tokens replace the tokens that bypassed it.

MaskDiT (arXiv 2306.09305): between encoder and decoder

    rejoined[i] = the processed token  if i was kept,  m_i  otherwise        m [N, D], learned

MaskDiT adds one learned vector to fixed positions; here their sum m_i is learned, which suits any
architecture. Tokens are replaced in all streams, and in all long skips that are used after the
range. The loss is `tread_zoo.routing.token_loss.split_loss`. MicroDiT (arXiv 2407.15811) drops
tokens and has a loss on the kept tokens only.

B batch, E extra tokens, N tokens of the grid, D width of a stream, a tensor of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from tread_zoo.contract.crossing import Crossing, Exit, Streams, Tokens, gather, row_index, scatter
from tread_zoo.contract.layers import sincos_2d
from tread_zoo.registry import register
from tread_zoo.routing.method import Bypass, Crossings, Stack, Step
from tread_zoo.routing.select import Select, bypassed_tokens, check_trained
from tread_zoo.routing.token_loss import split_loss
from tread_zoo.seeding import ImageGenerator


@register("routing", "microdit")
@dataclass(frozen=True, kw_only=True)
class MicroDiT(Bypass):
    """Some tokens bypass a range of blocks and are not in the loss (MicroDiT, arXiv 2407.15811).

    In the paper, all patches run through a few mixing blocks, and many are then dropped for good:
    set `start` to the number of mixing blocks, and `end` to the depth.
    """

    reconstruction_weight: ClassVar[float] = 0.0  # for the loss of the bypassed tokens

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        return self.bypass(stack, images, self.rate_at(step))

    def check(self, stack: Stack) -> None:
        super().check(stack)
        if self.chooses_by_state(stack):
            raise ValueError(
                "routing.selector chooses tokens inside the network, and this loss must know which "
                "tokens bypass: use another selector, such as random."
            )

    def loss(
        self, objective: Any, predict: Any, x: Tensor, draw: Any, crossings: Crossings, patch: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        num_tokens = x.shape[2] * x.shape[3] // patch**2
        return split_loss(
            objective, predict, x, draw, patch_size=patch, weight=self.reconstruction_weight,
            bypassed=bypassed_tokens(crossings, len(x), num_tokens, x.device),
        )  # fmt: skip


@register("routing", "maskdit")
@dataclass(frozen=True, kw_only=True)
class MaskDiT(MicroDiT):
    """Learned tokens replace the bypassed tokens, which get a reconstruction loss (MaskDiT).

    arXiv 2306.09305. One learned token per grid position replaces the paper's mask token plus fixed
    positions. By default the middle blocks act as the encoder; in the paper, all blocks but the
    last eight do.

    Args:
        reconstruction_weight: weight of the loss that reconstructs the noisy bypassed patches.
    """

    reconstruction_weight: NonNegativeFloat = 0.1  # type: ignore[misc]

    def build(self, stack: Stack) -> nn.Module:
        return MaskTokens(self.span(stack), stack.widths, stack.grid)

    @property
    def idle_weights(self) -> bool:
        return True  # a dense step does not use the mask tokens


class MaskTokens(nn.Module):
    """Learned tokens, one per stream and grid position, that replace the tokens that bypassed a
    range of blocks. Their initial values are the sine-cosine encoding of their positions.

    Args:
        span: start and end of the range.
        widths: D of each stream, a tensor of tokens that goes from block to block.
        grid: (h, w).
    """

    def __init__(self, span: tuple[int, int], widths: Sequence[int], grid: tuple[int, int]) -> None:
        super().__init__()
        self.span = span
        self.tokens = nn.ParameterList(
            nn.Parameter(sincos_2d(width + -width % 4, grid)[:, :width].clone()) for width in widths
        )

    def cross(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        """Return `crossings` with a `Mask` in place of each `Select`, so that the learned tokens
        replace the bypassed ones after the range."""
        return [
            Mask(*self.span, each.ids, self) if isinstance(each, Select) else each
            for each in check_trained(crossings, self.span, (Select,))
        ]

    def forward(self, streams: Streams) -> Streams:
        """Return the learned tokens in the shape and type of `streams`, tensors of tokens
        [B, E + N, D], with zeros for the E extra tokens."""
        return tuple(
            F.pad(mask.to(stream.dtype), (0, 0, stream.shape[1] - len(mask), 0)).expand_as(stream)
            for mask, stream in zip(self.tokens, streams, strict=True)
        )


@dataclass(frozen=True)
class Mask(Crossing):
    """Blocks run on the tokens `ids` [B, K] and the extra tokens. After the blocks, the
    learned tokens of `mask` replace the grid's other tokens, in all streams (tensors of tokens) and
    long skips."""

    ids: Tensor
    mask: MaskTokens

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        kept, exit = Select(self.start, self.end, self.ids).enter(tokens)
        layout = tokens.layout
        if kept is tokens:
            return kept, exit
        rows = row_index(self.ids, layout.num_tokens, layout.num_extra)
        masks = self.mask(tokens.streams)

        def put(full: Tensor, part: Tensor) -> Tensor:
            return scatter(full, rows, part)

        def masked(after: Tokens) -> Tokens:
            whole = tokens._replace(streams=masks).restore(after, put)
            skips = {k: put(masks[0], gather(skip, rows)) for k, skip in tokens.skips.items()}
            return whole._replace(skips={**whole.skips, **skips})

        return kept, masked
