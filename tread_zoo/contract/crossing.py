"""What a block sees (`Layout`, `Tokens`), and ranges of blocks that see less (`Crossing`).

A crossing changes the tokens before its first block and returns what to do after its last one:

    tokens, exit = crossing.enter(tokens)        before block `start`
    …                                            blocks start … end-1
    tokens = exit(tokens)                        after block end-1

What a crossing remembers between its ends lives in `exit`, so a network can be called again, be
recomputed in the backward pass, or be called inside itself. Crossings nest.

B batch, N = h * w tokens of the grid in raster order, E extra tokens (time, label, context) that
stand before the grid's and are never routed, K tokens present, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Streams = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """The tokens that a block sees: E extra tokens, then K tokens of the grid in raster order.

    Args:
        grid: (h, w) of the full image.
        num_extra: E.
        ids: int64 [B, K] raster positions of the tokens present, ascending; None means all N.
        batch, device: B and the device of the tokens; used if `ids` is None.
        num_context: number of extra tokens that are context tokens or registers (learned tokens).
            They come first, and scans read them first in both directions.
        cache: what blocks compute from the layout and share in one forward pass, e.g. scan orders.
    """

    grid: tuple[int, int]
    num_extra: int
    ids: Tensor | None = None
    batch: int = 1
    device: torch.device | None = None
    num_context: int = 0
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N of the full grid."""
        return self.grid[0] * self.grid[1]

    def cached(self, key: Any, make: Callable[[], T]) -> T:
        """Return the result of `make()`, which is called once per `key` for this layout."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def positions(self) -> Tensor:
        """Return the raster positions of the tokens present, int64 [B, K]."""
        if self.ids is not None:
            return self.ids
        return torch.arange(self.num_tokens, device=self.device).expand(self.batch, -1)

    def rows_cols(self) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns of the tokens present, both int64 [B, K]."""
        positions = self.positions()
        return positions // self.grid[1], positions % self.grid[1]


class Features(NamedTuple):
    """The K tokens of the grid that are present after a block: `tokens` [B, K, D], without extra
    tokens, and their raster positions `ids`, int64 [B, K], or None if all N tokens are present."""

    tokens: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class PerToken:
    """A condition per token, [B, E + N, D]. A backbone's `embed` returns it as the condition or in
    a tuple; its `run_block` and `head` get a plain tensor with the values of the tokens present."""

    values: Tensor


Change = Callable[[Tensor], Tensor]


class Tokens(NamedTuple):
    """All that travels per token between two blocks.

    streams: tensors of tokens that every block updates, [B, E + K, D] each.
    skips: {index of the block it comes from: long skip [B, E + K, D]}, for skips to later blocks.
        Within a crossing that drops tokens, skips from before it are here only if its blocks
        consume them.
    condition: what blocks are conditioned on; a `PerToken` in it has values for the same tokens.
    layout: which tokens are present.
    inner: keys of the `skips` that the blocks of a crossing consume; set before it is entered.
    """

    streams: Streams
    skips: dict[int, Tensor]
    condition: Any
    layout: Layout
    inner: frozenset[int] = frozenset()

    def map(self, change: Change, ids: Tensor | None) -> "Tokens":
        """Return what enters a crossing: streams, per-token conditions and the skips in `inner`,
        with `change` applied to each. Other skips are left out.

        Args:
            change: function from a tensor [B, E + N, D] to a tensor [B, E + K, D].
            ids: int64 [B, K], raster positions of the tokens in the result; None: all.
        """
        return Tokens(
            tuple(map(change, self.streams)),
            {producer: change(self.skips[producer]) for producer in sorted(self.inner)},
            change_condition(self.condition, change),
            replace(self.layout, ids=ids),
        )

    def restore(
        self,
        after: "Tokens",
        put: Callable[[Tensor, Tensor], Tensor],
        absent: Streams | None = None,
    ) -> "Tokens":
        """Return all tokens after a crossing. `self` are all tokens before it; the results of the
        crossing (streams, and long skips that its blocks produced) are put into full tensors.

        Args:
            after: the tokens after the crossing's last block.
            put: function of a full tensor [B, E + N, D] and processed tokens [B, E + K, D] that
                returns the full tensor with these tokens in it.
            absent: full tensors into which the streams are put; None: the streams before the
                crossing.
        """
        meanwhile = {
            producer: put(self.streams[0], skip)
            for producer, skip in after.skips.items()
            if producer not in self.skips
        }
        streams = tuple(map(put, absent or self.streams, after.streams))
        return self._replace(streams=streams, skips={**self.skips, **meanwhile})


Exit = Callable[[Tokens], Tokens]


@dataclass(frozen=True)
class Crossing:
    """How blocks start … end-1 run in a call of the network, usually on fewer tokens.

    Subclasses are frozen dataclasses that override `enter`, which draws no random numbers;
    `runs = False` skips the blocks.
    """

    start: int
    end: int

    runs: ClassVar[bool] = True  # False: the blocks do not run

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        """Return the tokens that block `start` sees, and the function to apply to the tokens after
        block `end - 1`."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Self:
        """Return the same crossing with its tensors on `device`."""
        moved = {name: v.to(device, non_blocking=True) for name, v in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]


def check_crossings(crossings: Sequence[Crossing], num_blocks: int) -> list[Crossing]:
    """Return `crossings` in the order in which they are entered: by start, then longest first;
    equal ranges keep their order.

    Raises:
        ValueError: a range exceeds the blocks, or two overlap without one containing the other.
    """
    ordered = sorted(crossings, key=lambda each: (each.start, -each.end))
    open_ends: list[int] = []
    for each in ordered:
        where = f"{type(each).__name__} [{each.start}, {each.end})"
        if not 0 <= each.start < each.end <= num_blocks:
            raise ValueError(f"{where} is no range of the {num_blocks} blocks.")
        while open_ends and open_ends[-1] <= each.start:
            open_ends.pop()
        if open_ends and each.end > open_ends[-1]:
            raise ValueError(
                f"{where} starts before another crossing ends ({open_ends[-1]}) and ends after it: "
                "crossings must be disjoint, or one within the other."
            )
        open_ends.append(each.end)
    return ordered


def change_condition(condition: Any, change: Change) -> Any:
    """Return a condition with `change` applied to each `PerToken` in it."""
    if type(condition) is tuple:
        return tuple(change_condition(part, change) for part in condition)
    return PerToken(change(condition.values)) if isinstance(condition, PerToken) else condition


def plain_condition(condition: Any) -> Any:
    """Return a condition with plain tensors in place of `PerToken`, as blocks get it."""
    if type(condition) is tuple:
        return tuple(plain_condition(part) for part in condition)
    return condition.values if isinstance(condition, PerToken) else condition


def row_index(ids: Tensor, num_tokens: int, num_extra: int) -> Tensor:
    """Return the rows that E extra and K kept tokens of each image have in a stream flattened to
    [B * (E + N), D]: int64 [B * (E + K)]. `ids` [B, K] are the raster positions of the kept tokens.
    """
    batch, device = ids.shape[0], ids.device
    extra = torch.arange(num_extra, device=device).expand(batch, num_extra)
    within = torch.cat([extra, ids + num_extra], dim=1)
    first = torch.arange(batch, device=device)[:, None] * (num_extra + num_tokens)
    return (within + first).flatten()


def gather(stream: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens [B, E + K, D] at `rows` of a stream [B, E + N, D]; for rows see
    `row_index`."""
    batch, _, width = stream.shape
    return stream.flatten(0, 1).index_select(0, rows).view(batch, -1, width)


def scatter(stream: Tensor, rows: Tensor, kept: Tensor) -> Tensor:
    """Return a copy of `stream` [B, E + N, D] with `kept` [B, E + K, D] written at `rows`; for rows
    see `row_index`."""
    flat = stream.flatten(0, 1).index_copy(0, rows, kept.flatten(0, 1).to(stream.dtype))
    return flat.view_as(stream)
