"""One forward pass of another project's network, with blocks called on some of the tokens.

While the network runs, its lists of blocks are lists of `Call`s, which hold the `RoutedPass` of
this pass. A `Crossing` is a range of blocks that see fewer tokens; here crossings are disjoint, and
choose among image tokens only. Gradient checkpointing keeps the `Call`s, so a recomputation uses
the crossings of its own pass, whatever ran since.

B batch, N image tokens, K image tokens present, T other tokens of the same sequence, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tread_zoo.contract.crossing import Crossing, Exit, Layout, Tokens
from tread_zoo.routing.others.arguments import (
    OTHER,
    Adapter,
    First,
    image_of,
    sequence,
    take,
    with_image,
)
from tread_zoo.routing.others.check import Verdict, cycle, examine, most_similar


class Call:
    """Stands in for a block in a list, and passes its calls to `RoutedPass.run`. `index` is the
    block's number, counted over all routed lists. It is None in a list that is not routed; the
    first call there shows the number of image tokens."""

    def __init__(self, routed: "RoutedPass", index: int | None, block: nn.Module) -> None:
        self.routed, self.index, self.block = routed, index, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.routed.run(self.index, self.block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


@dataclass(frozen=True)
class Visit:
    """One call of a block within a crossing, a range of blocks that see fewer tokens.

    Args:
        index: the block's number, counted over all lists.
        named: the block's arguments by name; `key` is the name of the argument with the tokens.
        sequence: the tokens present, [B, K + T, D]: K of the image and T others.
        tokens: the image tokens among them, [B, K, D], as a `Tokens`.
        exit: the function to apply after the crossing's last block; None unless this block is the
            crossing's first.
    """

    index: int
    block: nn.Module
    named: dict[str, Any]
    key: str
    crossing: Crossing
    sequence: Tensor
    tokens: Tokens
    exit: Exit | None

    @property
    def ids(self) -> Tensor | None:
        """The positions of the image tokens present, int64 [B, K]; None: all."""
        return self.tokens.layout.ids


@dataclass
class Passage:
    """What a forward pass remembers about a crossing (a range of blocks that see fewer tokens), for
    the range's later blocks and for recomputation in the backward pass.

    Args:
        start: the image tokens before the first block, without autograd graph.
        layout: which tokens the blocks see.
        exit: the function that turns the tokens after the last block into all tokens; None after
            the pass, so that memory can be freed.
    """

    start: Tokens
    layout: Layout
    exit: Exit | None


class RoutedPass:
    """The state of one forward pass of a routed network. After `close`, it keeps no autograd graph.

    Args:
        routes: the network's handle, a `Routes`.
        arguments: the arguments of the network's forward, by name.
        draws: (`Step`, number of the pass within the step), on which random choices depend.
    """

    def __init__(self, routes: Any, arguments: Mapping[str, Any], draws: Any) -> None:
        self.routes, self.arguments, self.draws = routes, arguments, draws
        self.open, self.num_tokens = True, 0
        self.crossings: list[Crossing] | None = None
        self.replaced: list[tuple[dict[str, Any], str, Any]] = []  # attributes, name, value before
        self.called: set[int] = set()
        self.passages: dict[int, Passage] = {}  # by the crossing's first block
        self.made: Any = WeakIdKeyDictionary()  # a block's output -> its crossing
        self.length: tuple[int, int] | None = None  # list of the last block, its num_tokens

    def close(self) -> None:
        """End the pass and free memory. The positions at which images begin are kept, because
        recomputations in the backward pass may need them."""
        offsets = self.routes.family.offsets
        self.arguments = {} if offsets is None else {"offsets": offsets(self.arguments)}
        self.open, self.replaced = False, []
        for passage in self.passages.values():
            passage.exit = None

    def check_calls(self, before: int | None = None) -> None:
        """Raise `RuntimeError` if a routed block was not called. Only blocks with an index below
        `before` are checked; None: all."""
        end = self.routes.num_blocks if before is None else before
        ranges = [range(c.start, min(c.end, end)) for c in self.crossings or ()]
        if self.crossings is None or any(not self.called.issuperset(each) for each in ranges):
            raise RuntimeError(
                f"{self.routes.title} left out routed blocks, or ran them without going through "
                f"its lists ({', '.join(self.routes.lists)}), as a loop over children() does: "
                "route others with start and end, or name other lists with blocks=…."
            )

    def run(self, index: int | None, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the output of a block that is called with `args` and `kwargs`. A `Crossing` that
        starts at the block is entered before the block runs, and one that ends there is left
        afterwards. For `index` see `Call`."""
        named = self.routes.named(block, args, kwargs)
        key = self.routes.tokens or next(iter(named))
        if self.crossings is None:
            self.crossings = self._draw(index, named[key])
        at = -1 if index is None else index
        crossing = next((c for c in self.crossings if c.start <= at < c.end), None)
        named = self._whole(named, crossing)
        if crossing is None:
            return block(**named)
        if self.open:
            self._check_call(at, named[key], crossing)
        visit = self._enter(at, block, named, key, crossing)
        if not visit.crossing.runs:
            return self._leave(visit, self._unchanged(visit), None)
        verdict = None if visit.ids is None else self._verdict(visit, visit.ids)
        out = block(**self._arguments(visit, verdict.form if verdict else "broadcast"))
        return self._leave(visit, out, verdict)

    # Before a block -------------------------------------------------------------------------------

    def _draw(self, index: int | None, x: Any) -> list[Crossing]:
        if not isinstance(x, Tensor) or x.ndim != 3:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{self.routes.title}: the tokens of its blocks are {shape} and not [batch, "
                "tokens, width]: name the argument with enable_routing(tokens=…)."
            )
        extra = 0 if index is None else self.routes.extra(self.arguments, x)
        self.num_tokens = x.shape[1] - extra
        return self.routes.draw(self.draws, x, self.num_tokens, self.arguments)

    def _check_call(self, index: int, x: Tensor, crossing: Crossing) -> None:
        """Raise `RuntimeError` where routing block `index` in `crossing` would silently give wrong
        results: an earlier routed block was not called, the block runs without gradients, or the
        network has changed the length of the sequence x since the block before."""
        self.check_calls(before=index)
        self.called.add(index)
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "a routed block runs without gradients while its network has them: reentrant "
                "gradient checkpointing cannot be routed, set use_reentrant=False."
            )
        number = self.routes.list_of(index)
        last_list, length = self.length or (number, x.shape[1])
        if crossing.start < index and last_list == number and length != x.shape[1]:
            raise RuntimeError(
                f"{self.routes.title} changes its sequence from {length} to {x.shape[1]} tokens "
                f"between blocks {index - 1} and {index}, so no route may hold both: route other "
                "blocks, or each alone, as method=random_ltd."
            )

    def _first(self, others: int) -> First:
        """Return the position at which the image begins in a sequence with `others` non-image
        tokens, as an int or, if images begin at different positions, int64 [B]."""
        offsets, family = self.arguments.get("offsets"), self.routes.family
        if offsets is None and family.offsets is not None:
            offsets = family.offsets(self.arguments)
        if offsets is not None and others:
            return offsets
        return 0 if family.image_first else others

    def _image(self, x: Tensor, count: int) -> Tensor:
        """Return the `count` image tokens of a sequence x [B, L, D]."""
        return image_of(x, count, self._first(x.shape[1] - count))

    def _with_image(self, x: Tensor, image: Tensor, count: int) -> Tensor:
        """Return a sequence x [B, L, D] with `image` [B, M, D] in place of its `count` image
        tokens."""
        return with_image(x, image, count, self._first(x.shape[1] - count))

    def _count(self, layout: Layout) -> int:
        return self.num_tokens if layout.ids is None else layout.ids.shape[1]

    def _enter(
        self, index: int, block: nn.Module, named: dict[str, Any], key: str, crossing: Crossing
    ) -> Visit:
        """Return the `Visit`, the record of this call of a block. If `crossing`, a range of blocks
        that see fewer tokens, starts at the block, `crossing.enter` is called first. For the
        other arguments see `Visit`."""
        x: Tensor = named[key]
        layout = Layout((1, self.num_tokens), 0, None, len(x), x.device)
        if index > crossing.start:
            layout = self.passages[crossing.start].layout
        if x.shape[1] < self._count(layout):
            raise RuntimeError(f"{self.routes.title} drops tokens before block {index} itself.")
        image = self._image(x, self._count(layout))
        start = Tokens((image,), {}, None, layout)
        if index > crossing.start:
            return Visit(index, block, named, key, crossing, x, start, None)
        tokens, exit = crossing.enter(start)
        if self.open:
            leaf = image.detach().requires_grad_(image.requires_grad)
            start = start._replace(streams=(leaf,))
            self.passages[index] = Passage(start, tokens.layout, exit)
        if tokens.streams[0] is not image:
            x = self._with_image(x, tokens.streams[0], self.num_tokens)
        return Visit(index, block, named, key, crossing, x, tokens, exit)

    def _exit(self, crossing: Crossing) -> Exit:
        """Return the function to apply after the last block of a `Crossing`. After the pass, this
        function is no longer kept; the crossing is then entered again, without gradients."""
        passage = self.passages[crossing.start]
        if passage.exit is not None:
            return passage.exit
        with torch.no_grad():
            return crossing.enter(passage.start)[1]

    def _whole(self, named: dict[str, Any], inside: Crossing | None) -> dict[str, Any]:
        """Return the arguments `named` of a block, with all tokens in long skips. An output that a
        block made within an earlier crossing lacks the tokens that were dropped there; they are put
        back. `inside` is the crossing that this block is in, or None."""
        for name, value in named.items() if len(self.made) else ():
            crossing = self.made.get(value) if isinstance(value, Tensor) else None
            if crossing is not None and crossing is not inside:
                layout = self.passages[crossing.start].layout
                image = self._image(value, self._count(layout))
                after = self._exit(crossing)(Tokens((image,), {}, None, layout))
                value = self._with_image(value, after.streams[0], self._count(layout))
                named = {**named, name: value}
        return named

    def _arguments(self, visit: Visit, form: str, turn: Tensor | None = None) -> dict[str, Any]:
        """Return the visited block's arguments by name, restricted to the tokens present. If `turn`
        [B, K] is given, it reorders the K image tokens. For `form` see `Adapter`."""
        new, ids = visit.sequence, visit.ids
        if ids is None:
            return {**visit.named, visit.key: new}
        text = OTHER + self.routes.family.text
        adapter = Adapter(self.num_tokens, self._sizes(visit), len(ids), form, self.made, text)
        if turn is not None:
            others = new.shape[1] - ids.shape[1]
            new = take(new, sequence(turn, ids.shape[1], others, self._first(others)), 1)
            ids = ids.gather(1, turn)
        return {**adapter(visit.named, visit.key, ids), visit.key: new}

    def _sizes(self, visit: Visit) -> dict[int, tuple[int, First]]:
        """Return the `sizes` of an `Adapter`: {size of a dimension over tokens: (number of other
        tokens, position of the first image token)}."""
        others = visit.sequence.shape[1] - self._count(visit.tokens.layout)
        text = visit.named.get("encoder_hidden_states")
        beside = text.shape[1] if isinstance(text, Tensor) and text.ndim == 3 else 0
        return {
            self.num_tokens + beside: (beside, 0 if self.routes.family.image_first else beside),
            self.num_tokens + others: (others, self._first(others)),
            self.num_tokens: (0, 0),
        }

    def _verdict(self, visit: Visit, ids: Tensor) -> Verdict:
        """Return the `Verdict` on whether blocks of the visited block's class may be routed. If
        there is none yet for this number of image tokens, the class is tested first: a window, for
        example, does not show while it holds all tokens. As long as a block does not change its
        tokens, the test shows nothing and is repeated. `ids` [B, K] are the image tokens
        present."""
        name = self.routes.kind(visit.index, visit.block)
        known: Verdict | None = self.routes.verdicts.get(name)
        tested = (name, self.num_tokens) in self.routes.tested
        if known is not None and ((known.error is not None and tested) or not self.open):
            return known
        kept, shared = ids.shape[1], self.routes.family.shared
        if kept < 2:
            raise ValueError("a route keeps one token, with which nothing can be proven: keep two.")
        turn = cycle(kept, len(ids), ids.device, shared)
        others = visit.sequence.shape[1] - kept
        reorder = sequence(turn, kept, others, self._first(others))

        def call(form: str, is_reordered: bool) -> dict[str, Any]:
            return self._arguments(visit, form, turn if is_reordered else None)

        forms = ("shared",) if shared else ("broadcast", "plain")
        verdict = examine(visit.block, call, visit.key, reorder, forms)
        self.routes.verdicts[name] = verdict
        self.routes.tested.add((name, self.num_tokens))
        return verdict

    # After a block --------------------------------------------------------------------------------

    def _leave(self, visit: Visit, out: Any, verdict: Verdict | None) -> Any:
        """Return the output `out` of a visited block, with all tokens if its crossing ends here.
        `verdict` is None if the block ran on all tokens, or not at all."""
        at = None
        if not isinstance(out, Tensor):
            at = verdict.output if verdict else self._outputs(visit).index(visit.key)
        y = out if at is None else out[at]
        ends = visit.crossing.end == visit.index + 1
        if ends:
            count = self._count(visit.tokens.layout)
            after = visit.tokens._replace(streams=(self._image(y, count),))
            exit = visit.exit or self._exit(visit.crossing)
            y = self._with_image(y, exit(after).streams[0], count)
        if self.open:
            self.length = (self.routes.list_of(visit.index), y.shape[1])
            if visit.ids is not None and not ends:
                self.made[y] = visit.crossing
        return y if at is None else (*out[:at], y, *out[at + 1 :])

    def _unchanged(self, visit: Visit) -> Any:
        """Return what a block that does not run would return if it changed nothing: its inputs, in
        the form of its output."""
        values = {**visit.named, visit.key: visit.sequence}
        outs = [None if name is None else values[name] for name in self._outputs(visit)]
        return outs[0] if self.routes.single[type(visit.block)] else tuple(outs)

    def _outputs(self, visit: Visit) -> list[str | None]:
        """Return, for each output of the visited block, the name of the argument whose new value it
        is, or None."""
        kind = type(visit.block)
        if kind not in self.routes.outputs:
            with torch.no_grad():
                out = visit.block(**visit.named)
            self.routes.single[kind] = isinstance(out, Tensor)
            self.routes.outputs[kind] = most_similar(out, visit.named)
        return self.routes.outputs[kind]
