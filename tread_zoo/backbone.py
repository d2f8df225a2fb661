"""The contract of a backbone, and the one block loop that routes.

    embed -> blocks 0 … depth-1 -> head

A backbone says how its input becomes token streams, what one block does, and how the streams become
the output. The loop below does the rest: it takes tokens out where a route starts, puts them back
where it ends, fuses the streams there if the network has a fusion, and hands each block the skip
that it asks for, with the right tokens in it. Forward has no randomness of its own: noise, times,
dropped labels and kept ids come from outside.

B batch, N = h * w tokens in raster order, E extra tokens (time, label, context), K kept tokens,
D width; a context has T embeddings of width S.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tread_zoo.layers import as_pair
from tread_zoo.routing.fusion import Fusion, Streams
from tread_zoo.routing.routes import (
    PathDrop,
    Route,
    check_ranges,
    check_routes,
    gather_rows,
    scatter_rows,
)

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
        context_length, context_size: T and S of contexts, float [T, S], which take the place of
            labels; 0 and 0 without. A subclass whose constructor lacks these keywords takes none.

    Class attributes:
        default_selector: the selector that suits it; `routing.selector=auto` takes it.
        default_range: start and end of its default route, as in Python slices.
        why_no_context: for the error of one that takes no contexts.

    Attributes:
        fused_ranges: block ranges [start, end) at whose end the streams are fused, in ascending
            order; `add_fusions` sets them after construction, whatever the subclass.

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
    why_no_context: ClassVar[str] = "its condition is a label"

    blocks: nn.ModuleList

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int,
        learn_sigma: bool = False,
        context_length: int = 0,
        context_size: int = 0,
    ) -> None:
        super().__init__()
        self.input_size = as_pair("input_size", input_size)
        for name, value, least in (
            ("in_channels", in_channels, 1),
            ("num_classes", num_classes, 0),
            ("patch_size", patch_size, 1),
            ("context_length", context_length, 0),
            ("context_size", context_size, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
        if any(side % patch_size for side in self.input_size):
            raise ValueError(
                f"input_size={self.input_size} is not divisible by patch_size={patch_size}; "
                "choose another patch_size, or pad or resize the images."
            )
        if bool(context_length) != bool(context_size):
            raise ValueError(
                f"context_length={context_length} and context_size={context_size} go together: the "
                "number of embeddings of an image, and the width of one."
            )
        if num_classes and context_size:
            raise ValueError(
                f"num_classes={num_classes} and context_size={context_size} exclude each other: "
                "the condition is a label or a context. Set num_classes=0."
            )
        self.in_channels, self.num_classes = in_channels, num_classes
        self.context_length, self.context_size = context_length, context_size
        self.patch_size = patch_size
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid = (self.input_size[0] // patch_size, self.input_size[1] // patch_size)
        self.num_extra_tokens = 0
        self.skips: dict[int, int] = {}
        self.block_knows: tuple[str, ...] | None = None
        self.checkpoint_blocks = 0  # n: blocks 0, n, 2n, … are computed again in the backward pass
        self.fused_ranges: tuple[tuple[int, int], ...] = ()
        self.fusions = nn.ModuleDict()  # by range, as in "2_8"
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

    @property
    def is_conditional(self) -> bool:
        """Whether it takes a condition: labels or contexts."""
        return bool(self.num_classes or self.context_size)

    def null_like(self, y: Tensor) -> Tensor:
        """Return the condition that stands for none, in the shape of `y`: null labels [B], or zeros
        [B, T, S]."""
        return torch.full_like(y, 0 if self.context_size else self.null_label)

    def hidden_matrices(self) -> dict[str, tuple[int, ...]]:
        """Return by parameter name the matrices between hidden layers, which Muon trains.

        The value has the sizes of a matrix's parts along its rows, (rows,) if it is one alone: each
        part is a matrix in its own right, as q, k and v are in `qkv`. A parameter [.., rows,
        columns] counts as its matrices below each other.

        They are the linear layers of the blocks, and what a module in them lists in `fused_rows`,
        {name of its parameter: sizes}. Embeddings, positions, heads and what else is no such
        matrix are left out.
        """
        matrices: dict[str, tuple[int, ...]] = {}
        for path, module in self.blocks.named_modules(prefix="blocks"):
            if isinstance(module, nn.Linear):
                matrices[f"{path}.weight"] = (module.out_features,)
        for path, module in self.blocks.named_modules(prefix="blocks"):
            for name, sizes in getattr(module, "fused_rows", {}).items():
                matrices[f"{path}.{name}"] = sizes
        return matrices

    def add_fusions(self, ranges: Sequence[Sequence[int]]) -> None:
        """Fuse the streams at the end of each block range [start, end), from now on in every call.

        The fusions are part of the network, also where no route runs. As they start, they change
        the output by rounding alone. Nothing is drawn from any generator.

        Args:
            ranges: disjoint, ascending; the network then takes routes there and nowhere else.

        Raises:
            ValueError: ranges that do not fit the depth, or fusions that are there already.
        """
        if not ranges:
            return
        if self.fused_ranges:
            raise ValueError(f"this network has fusions already, at {self.fused_ranges}.")
        self.fused_ranges = check_ranges(ranges, num_blocks=self.num_blocks)
        like = next(self.parameters())
        one = torch.zeros(1, self.in_channels, *self.input_size, device=like.device)
        with torch.no_grad():
            streams, _ = self.embed(one.to(like.dtype), torch.zeros_like(one[:, 0, 0, 0]), None)
        widths = [stream.shape[-1] for stream in streams]
        for start, end in self.fused_ranges:
            fusion = Fusion(widths, device=like.device, dtype=like.dtype)
            self.fusions[f"{start}_{end}"] = fusion

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        *,
        routes: Sequence[Route | PathDrop] = (),
    ) -> Tensor:
        """Return the raw output [B, C_out, H, W]; of an empty batch an empty one, with no gradient.

        Args:
            x: noisy images [B, C, H, W].
            t: noise labels [B] of order 1, as the objective gives them.
            y: labels [B], int64, in 0 … num_classes, or contexts [B, T, S], floats of any
                precision, shorter ones filled up with zeros; None means no label, or all zeros.
            routes: disjoint concrete routes in ascending order, and dropped paths among them. In a
                network with fusions each must be one of `fused_ranges`, the others of which run
                dense; without fusions no path can be dropped.

        Raises:
            ValueError: an input of another type or shape, a label out of range (checked on the CPU
                alone), a condition given to an unconditional network, or a route that does not fit.
        """
        routes = self._check(x, t, y, routes)
        if not len(x):  # kernels take no empty batch
            return x.new_zeros(0, self.out_channels, *self.input_size)
        streams, condition = self.embed(x, t, y)
        streams = self._run_blocks(streams, condition, routes, self.num_blocks)
        return self.head(streams, condition)

    def _run_blocks(
        self, streams: Streams, condition: Any, routes: Sequence[Route | PathDrop], stop: int
    ) -> Streams:
        """Run blocks 0 … stop-1, each on the tokens that are in play; no route may lie across
        `stop`, and a fused range that does is not fused yet."""
        dense = Layout(self.grid, self.num_extra_tokens)
        passages = self._passages(routes)
        consumers = {producer: consumer for consumer, producer in self.skips.items()}
        skips: dict[int, Tensor] = {}  # by producer, with the tokens that are in play
        waiting: _Waiting | None = None
        for index in range(stop):
            if waiting is not None and index == waiting.passage.end:
                streams, skips = waiting.rejoin(streams, skips)
                waiting = None
            if index in passages:
                waiting = _Waiting(passages[index], streams, skips, consumers, dense)
                streams, skips = waiting.leave()
            layout = dense if waiting is None else waiting.layout
            skip = skips.pop(self.skips[index]) if index in self.skips else None
            if layout is not None:  # else the path is dropped, and the streams stay as they are
                streams = self._run_block(index, streams, condition, layout, skip)
            if index in consumers:
                skips[index] = streams[0]
        if waiting is not None and waiting.passage.end <= stop:
            streams, _ = waiting.rejoin(streams, skips)
        return streams

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
            raise ValueError(f"start={start} is not in 0 … {self.num_blocks}, the depth.")
        streams, condition = self.embed(x, t, y)
        streams = self._run_blocks(streams, condition, (), start)
        return streams[0][:, self.num_extra_tokens :].float().norm(dim=-1)

    def _passages(self, routes: Sequence[Route | PathDrop]) -> dict[int, "_Passage"]:
        """Return by start the ranges of the routes, and the fused ones that no route takes."""
        fusions = dict(zip(self.fused_ranges, self.fusions.values(), strict=True))
        passages = {start: _Passage(end, None, fusion) for (start, end), fusion in fusions.items()}
        for route in routes:
            fusion = fusions.get((route.start, route.end))
            passages[route.start] = _Passage(route.end, route, fusion)
        return passages

    def _run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        every = self.checkpoint_blocks
        if every and index % every == 0 and torch.is_grad_enabled():
            return checkpoint(
                self.run_block, index, streams, condition, layout, skip, use_reentrant=False
            )
        return self.run_block(index, streams, condition, layout, skip)

    def _check(
        self, x: Tensor, t: Tensor, y: Tensor | None, routes: Sequence[Route | PathDrop]
    ) -> tuple[Route | PathDrop, ...]:
        self._check_tensors(x, t, y)
        expected = (self.in_channels, *self.input_size)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(f"x has shape {list(x.shape)}; expected [batch, *{list(expected)}].")
        if t.shape != (len(x),):
            raise ValueError(f"t has shape {list(t.shape)}; expected [{len(x)}], one per image.")
        if y is not None:
            self._check_condition(y, len(x))
        return check_routes(
            routes,
            num_blocks=self.num_blocks,
            num_tokens=self.num_tokens,
            batch=len(x),
            fused_ranges=self.fused_ranges,
        )

    def _check_tensors(self, x: Tensor, t: Tensor, y: Tensor | None) -> None:
        """Raise `ValueError` for what is no tensor or of a type that blocks cannot take."""
        for name, value in (("x", x), ("t", t), ("y", y)):
            if not isinstance(value, Tensor) and (name != "y" or value is not None):
                raise ValueError(
                    f"{name} is a {type(value).__name__}; expected a tensor with one entry per "
                    "image in its first dimension."
                )
        own = next(self.parameters()).dtype
        # Half precision and float32 meet under autocast and in sharded networks; float64 never.
        doubles = (x.dtype == torch.float64, own == torch.float64)
        if not x.is_floating_point() or doubles[0] != doubles[1]:
            raise ValueError(f"x is {x.dtype}; this network's weights are {own}: use x.to({own}).")

    def _check_labels(self, y: Tensor, batch: int) -> None:
        """Raise `ValueError` unless y has a label for each image. Values are looked at where that
        is cheap: on the CPU, and not while compiling."""
        if y.shape != (batch,) or y.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"y has shape {list(y.shape)} and dtype {y.dtype}; expected labels, int64 "
                f"[{batch}], one per image."
            )
        if y.device.type != "cpu" or torch.compiler.is_compiling() or not batch:
            return
        low, high = int(y.min()), int(y.max())
        if low < 0 or high > self.num_classes:
            raise ValueError(
                f"y reaches from {low} to {high}; labels are 0 … {self.num_classes - 1}, and "
                f"{self.num_classes} is the null label."
            )

    def _check_condition(self, y: Tensor, batch: int) -> None:
        if not self.is_conditional:
            raise ValueError("y was given, but num_classes=0 makes an unconditional network.")
        if self.context_size:
            expected = [batch, self.context_length, self.context_size]
            if list(y.shape) != expected or not y.is_floating_point():
                raise ValueError(
                    f"y has shape {list(y.shape)} and dtype {y.dtype}; expected contexts, floats "
                    f"{expected}: {self.context_length} embeddings per image."
                )
        else:
            self._check_labels(y, batch)


@dataclass(frozen=True)
class _Passage:
    """A range of blocks that begins or ends with work on the streams: it runs up to `end`, with the
    tokens of a route, with none (a dropped path) or with all (None), and is fused or not."""

    end: int
    route: Route | PathDrop | None
    fusion: nn.Module | None


class _Waiting:
    """What waits at full length while a passage runs: the streams, and the skips made before it.

    `layout` is what its blocks see; None where the path is dropped, and they do not run.
    """

    def __init__(
        self,
        passage: _Passage,
        streams: Streams,
        skips: dict[int, Tensor],
        consumers: dict[int, int],
        dense: Layout,
    ) -> None:
        self.passage, self.streams = passage, streams
        self.rows: Tensor | None = None  # of the tokens that enter; None: they stay as they are
        self.layout: Layout | None = None if isinstance(passage.route, PathDrop) else dense
        self.used_inside = {k: skip for k, skip in skips.items() if consumers[k] < passage.end}
        self.used_after = {k: skip for k, skip in skips.items() if consumers[k] >= passage.end}
        if isinstance(passage.route, Route):
            num_tokens = dense.grid[0] * dense.grid[1]
            self.rows = passage.route.row_index(num_tokens, dense.num_extra)
            self.layout = Layout(dense.grid, dense.num_extra, passage.route.ids)

    def leave(self) -> tuple[Streams, dict[int, Tensor]]:
        """Return the streams, and the skips used on the way, with the tokens that enter."""
        if self.rows is None:
            return self.streams, dict(self.used_inside)
        streams = tuple(gather_rows(stream, self.rows) for stream in self.streams)
        return streams, {k: gather_rows(skip, self.rows) for k, skip in self.used_inside.items()}

    def rejoin(
        self, streams: Streams, made_inside: dict[int, Tensor]
    ) -> tuple[Streams, dict[int, Tensor]]:
        """Return streams and open skips at full length, the streams fused if the passage is.

        A bypassed token is as it was when the route started, in the streams and in a skip that was
        made on the way; a skip that was made before the route is whole again.
        """
        if self.rows is not None:
            rows = self.rows
            made_inside = {
                k: scatter_rows(self.streams[0], rows, skip) for k, skip in made_inside.items()
            }
            streams = tuple(
                scatter_rows(before, rows, after)
                for before, after in zip(self.streams, streams, strict=True)
            )
        if self.passage.fusion is not None:
            streams = self.passage.fusion(self.streams, streams)
        return streams, {**self.used_after, **made_inside}
