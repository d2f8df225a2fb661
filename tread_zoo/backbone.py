"""The contract of a backbone, and the one block loop that routes.

    embed -> blocks 0 … depth-1 -> head

A backbone says how its input becomes token streams, what one block does, and how the streams become
the output. The loop below does the rest: it takes tokens out where a route starts, puts them back
where it ends, and hands each block the skip that it asks for, with the right tokens in it. Forward
has no randomness of its own: noise, times, dropped labels and kept ids come from outside.

B batch, N = h * w tokens in raster order, E extra tokens (time, label), K kept tokens, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tread_zoo.layers import as_pair
from tread_zoo.routing.routes import Route, check_routes, gather_rows, scatter_rows

Streams = tuple[Tensor, ...]

BLOCK_KNOWS = ("order", "ids", "grid")


@dataclass(frozen=True)
class Layout:
    """Which tokens a block sees: E extra tokens, then grid tokens in raster order.

    Args:
        grid: (h, w) of the full image.
        num_extra: E.
        ids: int64 [B, K] raster positions of the tokens present, ascending; None means all N.
        derived: what an architecture made of the layout and wants again in later blocks: tables of
            neighbours, scan orders; lives as long as the layout, which is one forward pass.
    """

    grid: tuple[int, int]
    num_extra: int
    ids: Tensor | None = None
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def segment_ids(self) -> Tensor | None:
        """Return int64 [B, E + K], one higher after every gap in the raster order; None if dense.

        The extra tokens count as the neighbours of raster position 0.
        """
        if self.ids is None:
            return None
        before = torch.cat([torch.full_like(self.ids[:, :1], -1), self.ids[:, :-1]], dim=1)
        segments = (self.ids - before != 1).cumsum(dim=1)
        return torch.cat([segments.new_zeros(len(segments), self.num_extra), segments], dim=1)


class Backbone(nn.Module, ABC):
    """Base of every backbone: `backbone(x, t, y, routes=...)`.

    Args:
        input_size: height and width of the input, one integer or two.
        in_channels: C.
        num_classes: labels are 0 … num_classes-1, and num_classes is the null label of guidance;
            0 makes an unconditional network.
        patch_size: side of a patch in pixels.
        learn_sigma: give 2 C output channels, as some published checkpoints have; objectives use
            the first C.

    Class attributes:
        default_selector: the selector that suits it; `routing.selector=auto` takes it.
        default_range: start and end of its default route, as in Python slices.

    Subclasses fill `self.blocks` (an `nn.ModuleList`), and may set

    - `self.num_extra_tokens`;
    - `self.skips`, which maps a block that consumes a skip to the earlier block that produced it. A
      skip carries the first stream;
    - `self.block_knows`, what changes the result of some block if it alone changes, which
      `tread_zoo.testing` then holds it to: the `order` of the tokens in the sequence, the `ids` of
      the layout, the full `grid`. Attention on tokens that carry their positions with them knows
      nothing, `()`; a scan that runs over gaps the `order`; rotary positions `order` and `ids`; a
      decay over distances divided by the full length all three. None leaves it unsaid.
    """

    default_selector: ClassVar[str] = "random"
    default_range: ClassVar[tuple[int, int]] = (2, -4)

    blocks: nn.ModuleList

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int,
        learn_sigma: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = as_pair("input_size", input_size)
        for name, value, least in (
            ("in_channels", in_channels, 1),
            ("num_classes", num_classes, 0),
            ("patch_size", patch_size, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
        if any(side % patch_size for side in self.input_size):
            raise ValueError(
                f"input_size={self.input_size} is not divisible by patch_size={patch_size}; "
                "choose another patch_size, or pad or resize the images."
            )
        self.in_channels, self.num_classes = in_channels, num_classes
        self.patch_size = patch_size
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid = (self.input_size[0] // patch_size, self.input_size[1] // patch_size)
        self.num_extra_tokens = 0
        self.skips: dict[int, int] = {}
        self.block_knows: tuple[str, ...] | None = None
        self.checkpoint_blocks = False
        self.name: str | None = None  # the registry sets this and the next
        self.config: dict[str, Any] = {}

    # What an architecture defines -----------------------------------------------------------------

    @abstractmethod
    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        """Return the streams, each [B, E + N, D], and what every block is conditioned on."""

    @abstractmethod
    def run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        """Run block `index` on streams [B, E + K, D]; `skip` has the same tokens as they have."""

    @abstractmethod
    def head(self, streams: Streams, condition: Any) -> Tensor:
        """Return the output [B, C_out, H, W] from streams [B, E + N, D]."""

    # What all share -------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of blocks that a route can count."""
        return len(self.blocks)

    @property
    def num_tokens(self) -> int:
        """N, without extra tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def null_label(self) -> int:
        """The label that stands for no label."""
        return self.num_classes

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor | None = None, *, routes: Sequence[Route] = ()
    ) -> Tensor:
        """Return the raw output [B, C_out, H, W].

        Args:
            x: noisy images [B, C, H, W].
            t: noise labels [B] of order 1, as the objective gives them.
            y: labels [B], int64, in 0 … num_classes; None means no label.
            routes: disjoint concrete routes in ascending order.

        Raises:
            ValueError: an input of another shape, labels given to an unconditional network, or a
                route that does not fit.
        """
        routes = self._check(x, t, y, routes)
        streams, condition = self.embed(x, t, y)
        dense = Layout(self.grid, self.num_extra_tokens)
        starts = {route.start: route for route in routes}
        consumers = {producer: consumer for consumer, producer in self.skips.items()}
        skips: dict[int, Tensor] = {}  # by producer, with the tokens that are in play
        waiting: _Waiting | None = None
        for index in range(self.num_blocks):
            if waiting is not None and index == waiting.route.end:
                streams, skips = waiting.rejoin(streams, skips)
                waiting = None
            if index in starts:
                waiting = _Waiting(starts[index], streams, skips, consumers, dense)
                streams, skips = waiting.leave()
            layout = dense if waiting is None else waiting.layout
            skip = skips.pop(self.skips[index]) if index in self.skips else None
            streams = self._run_block(index, streams, condition, layout, skip)
            if index in consumers:
                skips[index] = streams[0]
        if waiting is not None:
            streams, _ = waiting.rejoin(streams, skips)
        return self.head(streams, condition)

    @torch.no_grad()
    def importance(self, x: Tensor, t: Tensor, y: Tensor | None, start: int) -> Tensor:
        """Return the importance [B, N] of the tokens before block `start`, float32, not negative.

        It is the norm of each token of the first stream after blocks 0 … start-1 have run on all
        tokens, without gradient: what `routing.selector=norm` draws kept tokens by.

        Args:
            x, t, y: as of `forward`.
            start: 0 … the number of blocks.

        Raises:
            ValueError: an input of another shape, or a start outside the depth.
        """
        self._check(x, t, y, ())
        if not 0 <= start <= self.num_blocks:
            raise ValueError(
                f"start={start} is not in 0 … {self.num_blocks}, the number of blocks."
            )
        streams, condition = self.embed(x, t, y)
        dense = Layout(self.grid, self.num_extra_tokens)
        skips: dict[int, Tensor] = {}
        for index in range(start):
            skip = skips.pop(self.skips[index]) if index in self.skips else None
            streams = self.run_block(index, streams, condition, dense, skip)
            if index in self.skips.values():
                skips[index] = streams[0]
        return streams[0][:, self.num_extra_tokens :].float().norm(dim=-1)

    def _run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(
                self.run_block, index, streams, condition, layout, skip, use_reentrant=False
            )
        return self.run_block(index, streams, condition, layout, skip)

    def _check(
        self, x: Tensor, t: Tensor, y: Tensor | None, routes: Sequence[Route]
    ) -> tuple[Route, ...]:
        expected = (self.in_channels, *self.input_size)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(f"x has shape {list(x.shape)}; expected [batch, *{list(expected)}].")
        if t.shape != (len(x),):
            raise ValueError(f"t has shape {list(t.shape)}; expected [{len(x)}], one per image.")
        if y is not None and not self.num_classes:
            raise ValueError("y was given, but num_classes=0 makes an unconditional network.")
        if y is not None and y.shape != (len(x),):
            raise ValueError(f"y has shape {list(y.shape)}; expected [{len(x)}], one per image.")
        return check_routes(
            routes, num_blocks=self.num_blocks, num_tokens=self.num_tokens, batch=len(x)
        )


class _Waiting:
    """What waits at full length while a route runs: the streams, and the skips made before it."""

    def __init__(
        self,
        route: Route,
        streams: Streams,
        skips: dict[int, Tensor],
        consumers: dict[int, int],
        dense: Layout,
    ) -> None:
        self.route, self.streams = route, streams
        num_tokens = dense.grid[0] * dense.grid[1]
        self.rows = route.row_index(num_tokens, dense.num_extra)
        self.layout = Layout(dense.grid, dense.num_extra, route.ids)
        self.used_inside = {k: skip for k, skip in skips.items() if consumers[k] < route.end}
        self.used_after = {k: skip for k, skip in skips.items() if consumers[k] >= route.end}

    def leave(self) -> tuple[Streams, dict[int, Tensor]]:
        """Return the streams, and the skips that the route consumes, with the kept tokens only."""
        streams = tuple(gather_rows(stream, self.rows) for stream in self.streams)
        return streams, {k: gather_rows(skip, self.rows) for k, skip in self.used_inside.items()}

    def rejoin(
        self, streams: Streams, made_inside: dict[int, Tensor]
    ) -> tuple[Streams, dict[int, Tensor]]:
        """Return streams and open skips at full length.

        A bypassed token is as it was when the route started, in the streams and in a skip that was
        made on the way; a skip that was made before the route is whole again.
        """
        full = tuple(
            scatter_rows(before, self.rows, after)
            for before, after in zip(self.streams, streams, strict=True)
        )
        aligned = {
            k: scatter_rows(self.streams[0], self.rows, skip) for k, skip in made_inside.items()
        }
        return full, {**self.used_after, **aligned}
