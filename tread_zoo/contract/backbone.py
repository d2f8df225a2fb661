"""The contract of a backbone, and the one block loop that routes.

    embed -> blocks 0 … depth-1 -> head

A backbone defines how its input becomes token streams, what one block does, and how the streams
become the output. A route is a `Crossing`, a range of blocks that see fewer tokens. Before each
block, the loop enters the crossings that start there; then it runs the block, with its long skip
if it has one; afterwards, it leaves the crossings that end there. Forward has no randomness: noise,
times, dropped labels and the ids of kept tokens are inputs.

B batch, N = h * w tokens in raster order, E extra tokens (time, label, context), K tokens present,
D width; a context has T embeddings of width S.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
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
from tread_zoo.contract.crossing import Crossing, Exit, Tokens, check_crossings, plain_condition
from tread_zoo.contract.crossing import Features as Features
from tread_zoo.contract.crossing import Layout as Layout
from tread_zoo.contract.crossing import PerToken as PerToken
from tread_zoo.contract.crossing import Streams as Streams


class Backbone(nn.Module, ABC):
    """Base of every backbone: `backbone(x, t, y, routes=...)`.

    Args:
        input_size: height and width of the input, one integer or two.
        in_channels: C.
        num_classes: labels are 0 … num_classes-1, and num_classes is the null label. 0: the network
            is unconditional.
        patch_size: side of a patch in pixels.
        depends_on: what a block's result depends on besides the values of its tokens: their
            `order`, their raster positions (`ids`), the size of the full `grid`. It is `()` for
            attention with added positions, `order` and `ids` with rotary positions.
            `tread_zoo.testing` measures it.
        learn_sigma: return 2 C output channels, as some published checkpoints do; objectives use
            the first C.

    Class attributes:
        default_selector: the selector that `routing.selector=auto` means.
        default_range: start and end of the default route, as in Python slices.
        takes_contexts: whether `embed` calls `prepend_context`, and blocks and head accept the
            extra tokens that it adds.
        per_token_time: whether t may also be [B, N], a time for each token.

    Attributes:
        routing: a module with the weights of a routing method, or None; set by
            `tread_zoo.factory.add_routing`. Its `cross(crossings)` returns the `Crossing`s that a
            call runs.
        context_length, context_size: number T and width S of the embeddings of a context, set by
            `add_contexts`; else 0.
        num_context_tokens: number of context tokens and registers, the first extra tokens.

    Subclasses fill `self.blocks`, an `nn.ModuleList`, and may set

    - `self.num_extra_tokens`, E;
    - `self.skips`, {consumer: producer} of long skips, as indices of blocks. The consumer gets the
      first stream (tensor of tokens) as it was after the producer; a producer may have several
      consumers.
    """

    default_selector: ClassVar[str] = "random"
    default_range: ClassVar[tuple[int, int]] = (2, -4)
    takes_contexts: ClassVar[bool] = False
    per_token_time: bool = False

    blocks: nn.ModuleList
    routing: Any

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
        if len(sides) != 2 or min(*sides, in_channels) < 1 or num_classes < 0:  # from data
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
        self.checkpoint_blocks = 0  # n > 0: backward recomputes blocks 0, n, 2n, …
        self.register_module("routing", None)  # here, so that its weights come before the blocks'
        self.routing_config: dict[str, Any] = {}  # settings of the method that owns `routing`
        self.name: str | None = None  # `create_backbone` sets name and config
        self.config: dict[str, Any] = {}

    # What an architecture defines -----------------------------------------------------------------

    @abstractmethod
    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        """Return the streams, tensors of tokens [B, E + N, D] that the blocks update, and the
        condition that every block gets. For x, t and y see `forward`."""

    @abstractmethod
    def run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        """Return the streams, tensors of tokens [B, E + K, D], after `self.blocks[index]`. The
        block must be called as a module, because compilation and sharding hook that call.

        `condition` is from `embed`, with plain tensors in place of `PerToken`, `layout` says which
        tokens are present, and `skip` is a long skip [B, E + K, D] of the same tokens, or None.
        """

    @abstractmethod
    def head(self, streams: Streams, condition: Any) -> Tensor:
        """Return the output [B, C_out, H, W] from `streams`, the tensors of tokens [B, E + N, D]
        after all blocks, and the condition from `embed`, with plain tensors in place of `PerToken`.
        """

    def hidden_state(self, streams: Streams) -> Tensor:
        """Return what `forward` collects as a block's features, [B, E + K, D], from `streams`, the
        tensors of tokens after the block; by default the first of them."""
        return streams[0]

    # What all backbones share ---------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of blocks. Routes and features count the blocks from 0."""
        if "blocks" not in self._modules:
            raise TypeError(f"{type(self).__name__} has no self.blocks: fill an nn.ModuleList.")
        return len(self.blocks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N of the grid, without extra tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def null_label(self) -> int:
        """The label that means "no label"."""
        return self.num_classes

    @property
    def is_conditional(self) -> bool:
        """Whether the network takes a condition: labels or contexts."""
        return bool(self.num_classes or self.context_size)

    def null_like(self, y: Tensor) -> Tensor:
        """Return the null condition in the shape of `y`: null labels [B], or contexts of zeros
        [B, T, S]."""
        return torch.full_like(y, 0 if self.context_size else self.null_label)

    def add_contexts(self, context_length: int, context_size: int) -> None:
        """Condition on contexts, float [B, T, S], instead of labels.

        A linear map and a learned position turn each of the T embeddings into an extra token before
        all others. Both are initialised from torch's global generator. Times must then be [B].

        Args:
            context_length, context_size: T and S, number and width of the embeddings; 0 and 0
                change nothing.

        Raises:
            ValueError: only one of them is 0, the network has labels, or it takes no contexts.
        """
        check_new_context(self, context_length, context_size)
        if not context_size:
            return
        width, like = self.widths[0], next(self.parameters())
        self.context_embed = nn.Linear(context_size, width).to(like)
        positions = torch.empty(context_length, width)
        nn.init.normal_(positions, std=0.02)  # returns None while diffusers loads a network
        self.context_positions = nn.Parameter(positions.to(like))
        self.context_length, self.context_size = context_length, context_size
        self._add_tokens(context_length)

    def add_registers(self, num_registers: int) -> None:
        """Add R = `num_registers` learned tokens after context tokens and before all others.

        Registers hold global information (arXiv 2309.16588; in diffusion 2605.05206). Routes never
        drop them, scans read them first in both directions, and the head discards them. Times must
        then be [B]. R = 0 changes nothing.
        """
        if num_registers:
            width, like = self.widths[0], next(self.parameters())
            registers = torch.empty(num_registers, width)
            nn.init.normal_(registers, std=0.02)
            self.registers = nn.Parameter(registers.to(like))
            self._add_tokens(num_registers)

    def _add_tokens(self, count: int) -> None:
        self.num_extra_tokens += count
        self.num_context_tokens += count
        self.per_token_time = False

    def prepend_context(self, tokens: Tensor, y: Tensor | None) -> Tensor:
        """Return T context tokens (if any), R registers (if any), then `tokens` [B, L, D], as one
        sequence [B, T + R + L, D]. Contexts `y` are T embeddings of width S per image, [B, T, S];
        None means zeros."""
        return self.prepend(tokens, self.embed_context(y, len(tokens)))

    def prepend(self, tokens: Tensor, context: Tensor | None) -> Tensor:
        """Return the context tokens `context` [B, T, D] (None: without them), registers (if any),
        then `tokens` [B, L, D], as one sequence."""
        if self.registers is not None:
            tokens = torch.cat([self.registers.expand(len(tokens), -1, -1), tokens], dim=1)
        return tokens if context is None else torch.cat([context, tokens], dim=1)

    def embed_context(self, y: Tensor | None, batch: int) -> Tensor | None:
        """Return the context tokens [B, T, D] of contexts `y`, T embeddings of width S per image,
        [B, T, S]. If `y` is None, they are those of `batch` contexts of zeros. Return None for a
        network without contexts."""
        if self.context_embed is None:
            return None
        weight = self.context_embed.weight
        if y is None:
            y = weight.new_zeros(batch, self.context_length, self.context_size)
        return self.context_embed(y.to(weight.dtype)) + self.context_positions

    @cached_property
    @torch.no_grad()
    def widths(self) -> tuple[int, ...]:
        """The width D of each stream, a tensor of tokens that goes from block to block."""
        like = next(self.parameters())
        one = torch.zeros(1, self.in_channels, *self.input_size, device=like.device)
        streams, _ = self._embed(one.to(like.dtype), torch.zeros_like(one[:, 0, 0, 0]), None)
        return tuple(stream.shape[-1] for stream in streams)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        *,
        r: Tensor | None = None,
        routes: Sequence[Crossing] = (),
        features: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, dict[int, Features]]:
        """Return the raw output [B, C_out, H, W], from which an objective forms its estimate. The
        output of an empty batch has no gradient.

        Args:
            x: noisy images [B, C, H, W].
            t: noise labels [B] of order 1, from the objective; or [B, N], one per token, if
                `per_token_time`.
            y: labels [B], int64, in 0 … num_classes; or contexts [B, T, S], T embeddings of width S
                in any float precision, padded with zeros. None: the null label, or all zeros.
            r: start of a time span [r, t], shaped like t, for outputs such as a mean velocity. None
                means r = t. `embed` gets the complex t + i (t - r), which `TimestepEmbedder` and
                `time_sinusoids` accept.
            routes: crossings (ranges of blocks that see fewer tokens) of a routing method, such as
                `tread_zoo.routing.Select`; disjoint or nested.
            features: indices of blocks. If given, the result is (output, {block: `Features`}), the
                tokens after each of these blocks, with gradients. Within a route, only the kept
                tokens are there.

        Raises:
            ValueError: an input has the wrong shape, y is given to an unconditional network, or
                `routes` or `features` name a block that does not exist.
            TypeError: a method of the subclass returned something that the contract excludes.
        """
        check_inputs(self, x, t, y)
        if r is not None:
            t = torch.complex(t, t - r)
        crossings = self._crossings(routes)
        wanted = tuple(features or ())
        if not all(0 <= index < self.num_blocks for index in wanted):
            raise ValueError(f"features={list(wanted)}: blocks are 0 … {self.num_blocks - 1}.")
        if len(x):
            streams, condition = self._embed(x, t, y)
            streams, collected = self._run_blocks(streams, condition, crossings, wanted)
            out = self.head(streams, plain_condition(condition))
        else:  # kernels accept no empty batch
            out, collected = x.new_zeros(0, self.out_channels, *self.input_size), {}
        expected = (len(x), self.out_channels, *self.input_size)
        if out.shape != expected:
            raise TypeError(f"head returned {list(out.shape)}; expected {list(expected)}.")
        return out if features is None else (out, collected)

    def tokens_after(self, x: Tensor, t: Tensor, y: Tensor | None, block: int) -> Tensor:
        """Return the tokens [B, N, D] after a block, in a call without routes; later blocks do not
        run. Tokens that bypass the block, in a crossing that the module `routing` adds, are there,
        too.

        Args:
            x, t, y: see `forward`.
            block: index of the block, 0 … num_blocks - 1.
        """
        check_inputs(self, x, t, y)
        streams, condition = self._embed(x, t, y)
        crossings = self._crossings(())
        streams, _ = self._run_blocks(streams, condition, crossings, (), block + 1)
        return self.hidden_state(streams)[:, self.num_extra_tokens :]

    # The loop -------------------------------------------------------------------------------------

    def _crossings(self, routes: Sequence[Crossing]) -> list[Crossing]:
        """Return the crossings that a call runs, in the order in which they are entered: `routes`,
        or what the module `routing`, if there is one, makes of them."""
        whole = routes if self.routing is None else self.routing.cross(routes)
        return check_crossings(whole, self.num_blocks)

    def _run_blocks(
        self,
        streams: Streams,
        condition: Any,
        crossings: list[Crossing],
        wanted: Sequence[int],
        stop: int | None = None,
    ) -> tuple[Streams, dict[int, Features]]:
        """Return the streams after blocks 0 … stop-1 (None: after all blocks), and
        {block: `Features`} for the blocks `wanted`. `streams` and `condition` are from `embed`;
        `crossings` are in the order of entry."""
        layout = Layout(
            self.grid, self.num_extra_tokens, batch=len(streams[0]), device=streams[0].device,
            num_context=self.num_context_tokens,
        )  # fmt: skip
        tokens, waiting = Tokens(streams, {}, condition, layout), list(crossings)
        last_use = {producer: consumer for consumer, producer in sorted(self.skips.items())}
        inside: list[tuple[Crossing, Exit]] = []
        collected: dict[int, Features] = {}
        for i in range(self.num_blocks if stop is None else stop):
            while waiting and waiting[0].start == i:
                crossing = waiting.pop(0)
                inner = {p for c, p in self.skips.items() if i <= c < crossing.end}
                inner &= tokens.skips.keys()
                tokens, exit = crossing.enter(tokens._replace(inner=frozenset(inner)))
                inside.append((crossing, exit))
            if all(crossing.runs for crossing, _ in inside):
                skip = tokens.skips[self.skips[i]] if i in self.skips else None
                tokens = tokens._replace(streams=self._run_block(i, tokens, skip))
            made = {i: tokens.streams[0]} if i in last_use else {}
            tokens = tokens._replace(skips=_still_used({**tokens.skips, **made}, last_use, i))
            if i in wanted:
                hidden = self.hidden_state(tokens.streams)[:, self.num_extra_tokens :]
                collected[i] = Features(hidden, tokens.layout.ids)
            while inside and inside[-1][0].end == i + 1:
                tokens = inside.pop()[1](tokens)
                tokens = tokens._replace(skips=_still_used(tokens.skips, last_use, i))
        while inside:  # `stop` lies within these crossings
            tokens = inside.pop()[1](tokens)
        return tokens.streams, collected

    def _run_block(self, index: int, tokens: Tokens, skip: Tensor | None) -> Streams:
        every, condition = self.checkpoint_blocks, plain_condition(tokens.condition)
        given = (index, tokens.streams, condition, tokens.layout, skip)
        if every and index % every == 0 and torch.is_grad_enabled():
            after = checkpoint(self.run_block, *given, use_reentrant=False)
        else:
            after = self.run_block(*given)
        check_streams("run_block", after)
        return after

    def _embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        embedded = self.embed(x, t, y)
        check_embedded(embedded, len(x), self.num_tokens, self.num_extra_tokens)
        return embedded


def _still_used(
    skips: dict[int, Tensor], last_use: dict[int, int], block: int
) -> dict[int, Tensor]:
    """Return those long skips, {producer: tokens}, that some block after `block` consumes;
    `last_use` is {producer: last consumer}."""
    return {producer: skip for producer, skip in skips.items() if last_use[producer] > block}
