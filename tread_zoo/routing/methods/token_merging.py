"""Token merging (ToMe, arXiv 2210.09461; for diffusion 2303.17604): similar tokens run as one.

Some tokens are targets. Each other token has a nearest target by cosine similarity, and the most
similar ones merge into theirs. A group runs as the mean of its tokens, at its target's position,
and each of its tokens x_i gets the update that the blocks f give to the mean:

    x_i + f(mean of the group of i) - mean of the group of i

B batch, N tokens, M targets, K tokens after merging, E extra tokens, D width.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tread_zoo.contract.crossing import Crossing, Exit, Tokens
from tread_zoo.fields import Auto
from tread_zoo.registry import register
from tread_zoo.routing.method import Crossings, Method, Stack, Step, make_selector
from tread_zoo.seeding import ImageGenerator

TARGETS = 0.25  # fraction of the tokens that others may join: one per 2x2 square


@register("routing", "token_merging")
@dataclass(frozen=True, kw_only=True)
class TokenMerging(Method):
    """Similar tokens run as their mean, and each gets the mean's update (token merging, ToMe).

    arXiv 2210.09461, 2303.17604. It has no weights, so it can also sample networks trained without
    it: sampler.routing=token_merging sampler.selection_rate=0.5. The papers merge tokens only for
    attention; here whole blocks run on merged tokens.

    Args:
        start, end: blocks start … end-1 run on merged tokens. Negative values count from the end,
            as in Python slices; auto is the backbone's default.
        rate: fraction of tokens that merge into another token, at most 0.75: one token of each 2x2
            square is a target, which others join.
    """

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    rate: Annotated[float, Field(ge=0, le=1 - TARGETS)] = 0.5

    drawn = False
    for_any = True

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        return self.sample(stack, images, self.rate)

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        num_kept, num_targets = stack.num_kept(rate), stack.num_kept(1 - TARGETS)
        if num_kept == stack.num_tokens:
            return ()
        if num_kept < num_targets:
            raise ValueError(
                f"token_merging merges at most {1 - TARGETS} of the tokens, not {rate:g}."
            )
        targets = make_selector("structured")(len(images.keys), stack.grid, num_targets, images)
        return (Merge(*stack.span(self.start, self.end), targets, num_kept),)


@dataclass(frozen=True)
class Merge(Crossing):
    """Blocks run on K groups of similar tokens, each as the mean of its tokens.

    Args:
        targets: int64 [B, M], raster positions of the M tokens that others may join, ascending.
        num_kept: K, at least M.
    """

    targets: Tensor
    num_kept: int

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        if tokens.layout.ids is not None:
            raise ValueError("tokens are merged where some are missing: this cannot be nested.")
        extra = tokens.layout.num_extra
        group, ids = self._groups(tokens.streams[0][:, extra:].detach())
        batch, device = len(group), group.device
        first = torch.arange(extra, device=device).expand(batch, -1)
        rows = torch.cat([first, group + extra], dim=1)[..., None]  # [B, E + N, 1]
        sizes = torch.zeros(batch, extra + self.num_kept, 1, device=device)
        sizes = sizes.scatter_add(1, rows, torch.ones(rows.shape, device=device))
        share = 1 / sizes.gather(1, rows)

        def mean(stream: Tensor) -> Tensor:
            zeros = stream.new_zeros(batch, extra + self.num_kept, stream.shape[2])
            return zeros.scatter_add(1, rows.expand_as(stream), stream * share.to(stream.dtype))

        def put(full: Tensor, after: Tensor) -> Tensor:
            update = after - mean(full)
            return full + update.gather(1, rows.expand_as(full)).to(full.dtype)

        return tokens.map(mean, ids), lambda after: tokens.restore(after, put)

    def _groups(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's group, int64 [B, N] in 0 … K-1, and each group's raster position,
        int64 [B, K]. Tokens that are similar in `state` [B, N, D] get the same group."""
        num_tokens, width = state.shape[1:]
        unit = F.normalize(state.float(), dim=-1)
        goals = unit.gather(1, self.targets[..., None].expand(-1, -1, width))
        likeness, nearest = (unit @ goals.mT).max(dim=2)
        likeness = likeness.scatter(1, self.targets, -torch.inf)
        merged = likeness.topk(num_tokens - self.num_kept, dim=1).indices
        stays = torch.ones_like(nearest).scatter(1, merged, 0)
        place = stays.cumsum(dim=1) - 1  # index among the tokens that stay
        joined = place.gather(1, self.targets.gather(1, nearest))
        ids = stays.argsort(dim=1, descending=True, stable=True)[:, : self.num_kept]
        return torch.where(stays.bool(), place, joined), ids
