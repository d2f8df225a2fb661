"""The tokens that a block sees: how they leave the streams at a route's start, and rejoin.

B batch, N = h * w tokens in raster order, E extra tokens, K kept tokens, D width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tread_zoo.routing.fusion import Fusion, Streams
from tread_zoo.routing.routes import UNCHANGED, PathDrop, Route
from tread_zoo.routing.routes import row_index as row_index

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The tokens that a block sees: E extra tokens, then K tokens of the grid in raster order.

    Args:
        grid: (h, w) of the full image.
        num_extra: E.
        ids: int64 [B, K] raster positions of the tokens present, ascending; None means all N.
        batch, device: B and the device of the tokens, for `ids` of None.
        num_context: number of extra tokens that are context tokens or registers. They come first,
            and scans read them first in both directions.
        cache: what blocks compute from the layout and share for one forward pass, as scan orders.
    """

    grid: tuple[int, int]
    num_extra: int
    ids: Tensor | None = None
    batch: int = 1
    device: torch.device | None = None
    num_context: int = 0
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` returns, computed once for this layout."""
        if key not in self.cache:
            self.cache[key] = make()
        out: T = self.cache[key]
        return out

    def positions(self) -> Tensor:
        """Return the raster positions of the tokens present, int64 [B, K]."""
        if self.ids is not None:
            return self.ids
        num_tokens = self.grid[0] * self.grid[1]
        return torch.arange(num_tokens, device=self.device).expand(self.batch, -1)

    def rows_cols(self) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns of the tokens present, both int64 [B, K]."""
        positions = self.positions()
        return positions // self.grid[1], positions % self.grid[1]


class Features(NamedTuple):
    """Tokens [B, K, D] after a block, without extra ones, and their raster positions, int64 [B, K],
    or None if all N tokens are present."""

    tokens: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class PerToken:
    """A condition with one row per token, [B, E + N, D], which `embed` returns as the condition or
    in a tuple; `run_block` and `head` receive the rows of their tokens as plain tensors."""

    values: Tensor


class Frame:
    """A range of blocks with work at its ends: a route, a dropped path or a fused range.

    From `enter` to `exit` it holds, at full length, the streams and the skips consumed later.

    Args:
        span: start and end of the range.
        route: its route or dropped path; None: the blocks see all tokens.
        fusion: fuses the streams at the end, if any.
        mask: gives the tokens that replace bypassed ones, if any.
        dense: the layout of all tokens.
        skips: consumer -> producer, of the network.

    Attributes:
        runs: whether the blocks run; False for a dropped path.
        layout: the tokens that the blocks see.
        rows: rows of the flattened streams that the blocks see, from `row_index`; None: all.
        kept: rows that rejoin as processed; None: all.
    """

    def __init__(
        self,
        span: tuple[int, int],
        route: Route | PathDrop | None,
        fusion: Fusion | None,
        mask: nn.Module | None,
        dense: Layout,
        skips: Mapping[int, int],
    ) -> None:
        self.start, self.end = span
        self.fusion, self.mask = fusion, mask
        self.runs = not isinstance(route, PathDrop)
        self.layout, self.kept, self.bypass = dense, None, UNCHANGED
        if isinstance(route, Route):
            self.kept = row_index(route.ids, dense.grid[0] * dense.grid[1], dense.num_extra)
            self.bypass = route.bypass
            if route.bypass.sparsify:
                self.layout = replace(dense, ids=route.ids)
        self.rows = self.kept if self.bypass.sparsify else None
        self.carry_from = self.bypass.carry_from
        self.used_inside = {p for c, p in skips.items() if self.start <= c < self.end}
        self.used_after = {p for c, p in skips.items() if c >= self.end}

    def enter(
        self, streams: Streams, skips: dict[int, Tensor], carried: Streams | None
    ) -> tuple[Streams, dict[int, Tensor]]:
        """Return the streams, and the skips consumed inside, with the tokens that stay.

        `carried` are the streams before block `carry_from`, of all tokens.
        """
        self.streams, self.carried = streams, carried
        self.waiting = {k: skip for k, skip in skips.items() if k in self.used_after}
        skips = {k: skip for k, skip in skips.items() if k in self.used_inside}
        if self.rows is None:
            return streams, skips
        rows = self.rows
        return tuple(gather(s, rows) for s in streams), {
            k: gather(skip, rows) for k, skip in skips.items()
        }

    def exit(self, streams: Streams, skips: dict[int, Tensor]) -> tuple[Streams, dict[int, Tensor]]:
        """Return streams, fused if the range is, and open skips, all at full length.

        In the streams and in skips made within the route, bypassed tokens have their value at the
        start, or what `Bypass` says; skips from before the route are whole again. A mask replaces
        bypassed tokens in all of these.
        """
        made, dense = {k: skip for k, skip in skips.items() if k >= self.start}, self.streams
        if self.kept is not None:
            bypassed = self._bypassed()
            made = {k: self._rejoin(bypassed[0], skip) for k, skip in made.items()}
            absent = bypassed if self.fusion is None else self.fusion.absent(bypassed)
            streams = tuple(map(self._rejoin, absent, streams))
            if self.mask is not None:
                waiting = self.waiting.items()
                self.waiting = {k: self._rejoin(bypassed[0], skip) for k, skip in waiting}
            if bypassed is not dense:
                dense = tuple(map(self._rejoin, bypassed, dense))
        if self.fusion is not None:
            streams = self.fusion(dense, streams if self.runs else self.fusion.absent(streams))
        return streams, {**self.waiting, **made}

    def _bypassed(self) -> Streams:
        """Return the streams that give the bypassed tokens, at full length."""
        if self.mask is not None:
            masks: Streams = self.mask(self.streams)
            return masks
        streams = self.streams if self.carried is None else self.carried
        return tuple(stream.detach() for stream in streams) if self.bypass.detach else streams

    def _rejoin(self, bypassed: Tensor, stream: Tensor) -> Tensor:
        """Return `bypassed` with the kept tokens of `stream`, which has only those or all."""
        assert self.kept is not None
        alone = stream.shape[1] * stream.shape[0] == len(self.kept)
        return scatter(bypassed, self.kept, stream if alone else gather(stream, self.kept))


def gather(stream: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens [B, E + K, D] of a stream [B, E + N, D] in `rows`, from `row_index`."""
    batch, _, width = stream.shape
    return stream.flatten(0, 1).index_select(0, rows).view(batch, -1, width)


def scatter(stream: Tensor, rows: Tensor, kept: Tensor) -> Tensor:
    """Return `stream` [B, E + N, D] with `kept` [B, E + K, D] put into its rows."""
    flat = stream.flatten(0, 1).index_copy(0, rows, kept.flatten(0, 1).to(stream.dtype))
    return flat.view_as(stream)


def rows_of(condition: Any, rows: Tensor | None) -> Any:
    """Return a condition with plain tensors: of each `PerToken`, the given rows or all."""
    if type(condition) is tuple:
        return tuple(rows_of(part, rows) for part in condition)
    if not isinstance(condition, PerToken):
        return condition
    return condition.values if rows is None else gather(condition.values, rows)
