"""The contract of a backbone, and the one block loop that routes.

    embed -> blocks 0 … depth-1 -> head

A backbone defines how its input becomes token streams, what one block does, and how the streams
become the output. The loop removes tokens where a route starts and restores them where it ends,
fuses the streams there if the network has a fusion, and gives each block the skip that it consumes,
with the right tokens. Forward draws nothing: noise, times, dropped labels and kept ids are inputs.

B batch, N = h * w tokens in raster order, E extra tokens (time, label, context), K kept tokens,
D width; a context has T embeddings of width S.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tread_zoo.contract.checks import (
    check_dependence,
    check_embedded,
    check_inputs,
    check_new_context,
    check_streams,
)
from tread_zoo.contract.frame import Features as Features
from tread_zoo.contract.frame import Frame, rows_of
from tread_zoo.contract.frame import Layout as Layout
from tread_zoo.contract.frame import PerToken as PerToken
from tread_zoo.contract.layers import sincos_2d
from tread_zoo.routing.fusion import Bypassed, Fusion
from tread_zoo.routing.fusion import Streams as Streams
from tread_zoo.routing.masks import MaskTokens
from tread_zoo.routing.plan import Routing, build_routing
from tread_zoo.routing.routes import PathDrop, Route, check_ranges, check_routes


class Backbone(nn.Module, ABC):
    """Base of every backbone: `backbone(x, t, y, routes=...)`.

    Args:
        input_size: height and width of the input, one integer or two.
        in_channels: C.
        num_classes: labels are 0 … num_classes-1, and num_classes is the null label. 0: the network
            is unconditional.
        patch_size: side of a patch in pixels.
        depends_on: what the result of a block depends on: the `order` of the tokens, the `ids` of
            the layout, the full `grid`. Attention on tokens with added positions depends on
            nothing, `()`, and rotary positions on `order` and `ids`. `tread_zoo.testing` measures
            it.
        learn_sigma: return 2 C output channels, as some published checkpoints do; objectives use
            the first C.

    Class attributes:
        default_selector: the selector of `routing.selector=auto`.
        default_range: start and end of its default route, as in Python slices.
        takes_contexts: whether `embed` calls `prepend_context`, and blocks and head accept the
            extra tokens that it adds.
        per_token_time: whether t may also be [B, N], a time for each token.

    Attributes:
        fused_ranges: block ranges [start, end) at whose end the streams are fused, ascending; set
            by `add_fusions`.
        masked_ranges: block ranges [start, end) at whose end learned tokens replace those that
            bypassed; set by `add_mask_tokens`.
        context_length, context_size: T and S of contexts, set by `add_contexts`; 0 without.
        num_context_tokens: number of context tokens and registers, which come first.

    Subclasses fill `self.blocks`, an `nn.ModuleList`, and may set

    - `self.num_extra_tokens`;
    - `self.skips`, which maps each block that consumes a skip to the earlier block that produces
      it. A skip carries the first stream; several blocks may consume the same one.
    """

    default_selector: ClassVar[str] = "random"
    default_range: ClassVar[tuple[int, int]] = (2, -4)
    takes_contexts: ClassVar[bool] = False
    per_token_time: bool = False

    blocks: nn.ModuleList

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int,
        depends_on: Sequence[str],
        learn_sigma: bool = False,
    ) -> None:
        super().__init__()
        sides = input_size if isinstance(input_size, Sequence) else (input_size, input_size)
        if len(sides) != 2 or min(*sides, in_channels) < 1 or num_classes < 0:  # from the data
            raise ValueError(
                f"input_size={input_size}, in_channels={in_channels}, num_classes={num_classes} "
                "must be a height and a width, one channel or more, and no classes or more."
            )
        height, width = sides
        self.input_size = (height, width)
        if height % patch_size or width % patch_size:
            raise ValueError(
                f"input_size={self.input_size} is not divisible by patch_size={patch_size}; "
                "choose another patch_size, or pad or resize the images."
            )
        self.in_channels, self.num_classes = in_channels, num_classes
        self.context_length, self.context_size = 0, 0
        self.num_context_tokens = 0
        self.context_embed: nn.Linear | None = None
        self.registers: nn.Parameter | None = None
        self.patch_size = patch_size
        self.depends_on = check_dependence(depends_on)
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid = (height // patch_size, width // patch_size)
        self.num_extra_tokens = 0
        self.skips: dict[int, int] = {}
        self.checkpoint_blocks = 0  # n: blocks 0, n, 2n, … are computed again in the backward pass
        self.fused_ranges: tuple[tuple[int, int], ...] = ()
        self.bypassed: Bypassed = "dense"
        self.fusions = nn.ModuleDict()  # by range, as in "2_8", or "2_8_zero"
        self.masked_ranges: tuple[tuple[int, int], ...] = ()
        self.mask_tokens = nn.ModuleDict()
        self.name: str | None = None  # `create_backbone` sets this and the next
        self.config: dict[str, Any] = {}

    # What an architecture defines -----------------------------------------------------------------

    @abstractmethod
    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        """Return the streams, each [B, E + N, D], and what every block is conditioned on."""

    @abstractmethod
    def run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        """Return the streams [B, E + K, D] after `self.blocks[index]`, called as a module, because
        compilation and sharding hook that call. `skip` has the same tokens as the streams."""

    @abstractmethod
    def head(self, streams: Streams, condition: Any) -> Tensor:
        """Return the output [B, C_out, H, W] from streams [B, E + N, D]."""

    def hidden_state(self, streams: Streams) -> Tensor:
        """Return the tokens [B, L, D] that `features` collects; by default the first stream."""
        return streams[0]

    # What all share -------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of blocks, to which the ranges of routes refer."""
        if "blocks" not in self._modules:
            raise TypeError(f"{type(self).__name__} has no self.blocks: fill an nn.ModuleList.")
        return len(self.blocks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N of the grid, without extra tokens."""
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
        """Return the null condition in the shape of `y`: null labels [B], or zeros [B, T, S]."""
        return torch.full_like(y, 0 if self.context_size else self.null_label)

    def add_contexts(self, context_length: int, context_size: int) -> None:
        """Condition on contexts, float [B, T, S], instead of labels.

        Each of the T embeddings becomes an extra token before all others: a linear map plus a
        learned position, drawn from torch's global generator. Times must then be [B].

        Args:
            context_length, context_size: T and S; 0 and 0 change nothing.

        Raises:
            ValueError: only one of them is 0, there are labels, or the backbone takes no contexts.
        """
        check_new_context(self, context_length, context_size)
        if not context_size:
            return
        width, like = self._stream_widths()[0], next(self.parameters())
        self.context_embed = nn.Linear(context_size, width).to(like)
        positions = torch.empty(context_length, width)
        nn.init.normal_(positions, std=0.02)  # gives None where diffusers loads a network
        self.context_positions = nn.Parameter(positions.to(like))
        self.context_length, self.context_size = context_length, context_size
        self._add_tokens(context_length)

    def add_registers(self, num_registers: int) -> None:
        """Add learned tokens [R, D] after those of a context and before all others.

        They hold global information (arXiv 2309.16588; in diffusion 2605.05206). Routes never drop
        them, scans read them first in both directions, and the head discards them. Times must then
        be [B]. R = 0 changes nothing.
        """
        if num_registers:
            width, like = self._stream_widths()[0], next(self.parameters())
            registers = torch.empty(num_registers, width)
            nn.init.normal_(registers, std=0.02)
            self.registers = nn.Parameter(registers.to(like))
            self._add_tokens(num_registers)

    def _add_tokens(self, count: int) -> None:
        self.num_extra_tokens += count
        self.num_context_tokens += count
        self.per_token_time = False

    def prepend_context(self, tokens: Tensor, y: Tensor | None) -> Tensor:
        """Return [B, T + R + L, D]: tokens of the contexts y [B, T, S], if any (None means zeros),
        R registers, if any, then `tokens` [B, L, D]."""
        return self.prepend(tokens, self.embed_context(y, len(tokens)))

    def prepend(self, tokens: Tensor, context: Tensor | None) -> Tensor:
        """Return `tokens` [B, L, D] after the context tokens, if any, and the registers, if any."""
        if self.registers is not None:
            tokens = torch.cat([self.registers.expand(len(tokens), -1, -1), tokens], dim=1)
        return tokens if context is None else torch.cat([context, tokens], dim=1)

    def embed_context(self, y: Tensor | None, batch: int) -> Tensor | None:
        """Return the tokens [B, T, D] of contexts y [B, T, S], zeros for None; None without
        contexts."""
        if self.context_embed is None:
            return None
        weight = self.context_embed.weight
        if y is None:
            y = weight.new_zeros(batch, self.context_length, self.context_size)
        tokens: Tensor = self.context_embed(y.to(weight.dtype)) + self.context_positions
        return tokens

    def build_routing(self, name: str = "tread", **fields: Any) -> Routing:
        """Return a routing for this network, whose `draw` gives the routes of a batch; see
        `tread_zoo.routing.build_routing`."""
        routing = build_routing(
            name, num_blocks=self.num_blocks, default_selector=self.default_selector,
            default_range=self.default_range, **fields,
        )  # fmt: skip
        for plan in routing.plans:
            if hasattr(plan.selector, "check"):
                plan.selector.check(self.grid)
        return routing

    def add_fusions(self, ranges: Sequence[Sequence[int]], bypassed: Bypassed = "dense") -> None:
        """Add a fusion of the streams at the end of each block range [start, end).

        A fusion runs in every call, with or without a route. Initially it changes the output only
        by rounding, unless `bypassed` is zero. Nothing is drawn.

        Args:
            ranges: disjoint and ascending; routes are then possible there only.
            bypassed: see `tread_zoo.routing.fusion`.

        Raises:
            ValueError: the ranges do not fit the depth, or the network already has fusions.
        """
        if not ranges:
            return
        if self.fused_ranges:
            raise ValueError(f"this network has fusions already, at {self.fused_ranges}.")
        self.fused_ranges = check_ranges(ranges, num_blocks=self.num_blocks)
        self.bypassed = bypassed
        widths, like = self._stream_widths(), next(self.parameters())
        for start, end in self.fused_ranges:
            name = f"{start}_{end}" + ("" if bypassed == "dense" else f"_{bypassed}")
            self.fusions[name] = Fusion(widths, bypassed).to(like)

    def add_mask_tokens(self, ranges: Sequence[Sequence[int]]) -> None:
        """Add learned tokens that replace those that bypass the block ranges [start, end).

        They are used only under a route, and start as sines of their positions; nothing is drawn.

        Args:
            ranges: disjoint and ascending; routes are then possible there only.
        """
        self.masked_ranges = check_ranges(ranges, num_blocks=self.num_blocks)
        like = next(self.parameters())
        for start, end in self.masked_ranges:
            tokens = [
                sincos_2d(width + -width % 4, self.grid)[:, :width].to(like)
                for width in self._stream_widths()
            ]
            self.mask_tokens[f"{start}_{end}"] = MaskTokens(tokens)

    @torch.no_grad()
    def _stream_widths(self) -> list[int]:
        like = next(self.parameters())
        one = torch.zeros(1, self.in_channels, *self.input_size, device=like.device)
        streams, _ = self._embed(one.to(like.dtype), torch.zeros_like(one[:, 0, 0, 0]), None)
        return [stream.shape[-1] for stream in streams]

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        *,
        r: Tensor | None = None,
        routes: Sequence[Route | PathDrop] = (),
        features: Sequence[int] | None = None,
        without: Collection[int] = (),
    ) -> Tensor | tuple[Tensor, dict[int, Features]]:
        """Return the raw output [B, C_out, H, W]; for an empty batch it is empty, without gradient.

        Args:
            x: noisy images [B, C, H, W].
            t: noise labels [B] of order 1, from the objective; or [B, N], one per token, if
                `per_token_time`.
            y: labels [B], int64, in 0 … num_classes, or contexts [B, T, S], floats of any
                precision, padded with zeros. None means the null label, or all zeros.
            r: in the shape of t: the output is for the span from r to t, such as a mean velocity;
                None means r = t. `embed` gets the complex t + i (t - r), which `TimestepEmbedder`
                and `time_sinusoids` accept.
            routes: disjoint concrete routes and dropped paths in ascending order. With fusions or
                mask tokens, each must be one of `fused_ranges` or `masked_ranges`; paths can be
                dropped only at `fused_ranges`. A route that keeps all tokens is ignored.
            features: blocks whose tokens are returned too, with gradients, as (output, {block:
                `Features`}); within a route, the kept tokens.
            without: blocks to leave out: streams pass them unchanged.

        Raises:
            ValueError: an input has the wrong shape, a condition is given to an unconditional
                network, or a route, feature or block is out of range.
            TypeError: a method of the subclass returned something that the contract excludes.
        """
        check_inputs(self, x, t, y)
        if r is not None:
            t = torch.complex(t, t - r)
        routes = check_routes(
            routes, num_blocks=self.num_blocks, num_tokens=self.num_tokens, batch=len(x),
            fused_ranges=self.fused_ranges, masked_ranges=self.masked_ranges,
        )  # fmt: skip
        wanted = tuple(features or ())
        for name, indices in (("features", wanted), ("without", without)):
            if not all(0 <= index < self.num_blocks for index in indices):
                raise ValueError(f"{name}={list(indices)}: blocks are 0 … {self.num_blocks - 1}.")
        if len(x):
            streams, condition = self._embed(x, t, y)
            streams, collected = self._run_blocks(streams, condition, routes, wanted, without)
            out = self.head(streams, rows_of(condition, None))
        else:  # kernels take no empty batch
            out, collected = x.new_zeros(0, self.out_channels, *self.input_size), {}
        expected = (len(x), self.out_channels, *self.input_size)
        if out.shape != expected:
            raise TypeError(f"head returned {list(out.shape)}; expected {list(expected)}.")
        return out if features is None else (out, collected)

    @torch.no_grad()
    def importance(self, x: Tensor, t: Tensor, y: Tensor | None, start: int) -> Tensor:
        """Return the importance [B, N] of the tokens before block `start`, float32: their norms in
        the first stream, dense and without gradient, for `routing.selector=norm`.

        Args:
            x, t, y: as of `forward`.
            start: 0 … the number of blocks.
        """
        check_inputs(self, x, t, y)
        if not 0 <= start <= self.num_blocks:
            raise ValueError(f"start={start} is not in 0 … {self.num_blocks}, the depth.")
        streams, condition = self._embed(x, t, y)
        streams, _ = self._run_blocks(streams, condition, stop=start)
        out: Tensor = streams[0][:, self.num_extra_tokens :].float().norm(dim=-1)
        return out

    def tokens_after(self, x: Tensor, t: Tensor, y: Tensor | None, block: int) -> Tensor:
        """Return the tokens [B, N, D] right after a block, all of them kept; later blocks do not
        run.

        Args:
            x, t, y: as of `forward`.
            block: 0 … the number of blocks less one.
        """
        check_inputs(self, x, t, y)
        streams, condition = self._embed(x, t, y)
        _, collected = self._run_blocks(streams, condition, wanted=[block], stop=block + 1)
        return collected[block].tokens

    # The loop -------------------------------------------------------------------------------------

    def _run_blocks(
        self,
        streams: Streams,
        condition: Any,
        routes: Sequence[Route | PathDrop] = (),
        wanted: Sequence[int] = (),
        without: Collection[int] = (),
        stop: int | None = None,
    ) -> tuple[Streams, dict[int, Features]]:
        """Return the streams after blocks 0 … stop-1, and the features of the wanted blocks. Blocks
        in `without` do not run, and no route may cross `stop`."""
        batch, device = len(streams[0]), streams[0].device
        dense = Layout(
            self.grid, self.num_extra_tokens, batch=batch, device=device,
            num_context=self.num_context_tokens,
        )  # fmt: skip
        dense_condition = rows_of(condition, None)
        frames = self._frames(routes, dense)
        last_use = {producer: consumer for consumer, producer in sorted(self.skips.items())}
        skips: dict[int, Tensor] = {}  # by producer, with the tokens that are in play
        collected: dict[int, Features] = {}
        frame, layout, given = None, dense, dense_condition
        carried = dict.fromkeys(frame.carry_from for frame in frames.values())  # by block
        for i in range(self.num_blocks if stop is None else stop):
            if i in carried:
                carried[i] = streams
            if i in frames:  # a route, a fused range or a dropped path starts here
                frame = frames.pop(i)
                streams, skips = frame.enter(streams, skips, carried[frame.carry_from])
                layout, given = frame.layout, rows_of(condition, frame.rows)
            skip = skips[self.skips[i]] if i in self.skips else None
            if i in self.skips and last_use[self.skips[i]] == i:
                del skips[self.skips[i]]
            if (frame is None or frame.runs) and i not in without:
                streams = self._run_block(i, streams, given, layout, skip)
            if i in last_use:
                skips[i] = streams[0]
            if i in wanted:
                tokens = self.hidden_state(streams)[:, self.num_extra_tokens :]
                collected[i] = Features(tokens, layout.ids)
            if frame is not None and i + 1 == frame.end:
                streams, skips = frame.exit(streams, skips)
                frame, layout, given = None, dense, dense_condition
        return streams, collected

    def _frames(self, routes: Sequence[Route | PathDrop], dense: Layout) -> dict[int, Frame]:
        """Return the frames of routes, dropped paths and fused ranges without either, by start."""
        fusions: dict[Any, Any] = dict(zip(self.fused_ranges, self.fusions.values(), strict=True))
        masks = dict(zip(self.masked_ranges, self.mask_tokens.values(), strict=True))
        ways: dict[tuple[int, int], Route | PathDrop | None] = dict.fromkeys(fusions)
        for route in routes:
            if isinstance(route, PathDrop) or route.num_kept < self.num_tokens:
                ways[route.start, route.end] = route
        return {
            span[0]: Frame(span, route, fusions.get(span), masks.get(span), dense, self.skips)
            for span, route in ways.items()
        }

    def _run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        every = self.checkpoint_blocks
        if every and index % every == 0 and torch.is_grad_enabled():
            after = checkpoint(
                self.run_block, index, streams, condition, layout, skip, use_reentrant=False
            )
        else:
            after = self.run_block(index, streams, condition, layout, skip)
        check_streams("run_block", after)
        return after

    def _embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        embedded = self.embed(x, t, y)
        check_embedded(embedded, len(x), self.num_tokens, self.num_extra_tokens)
        return embedded
