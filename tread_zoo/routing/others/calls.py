"""One forward pass of another project's network, with blocks called on some of the tokens.

While the network runs, its lists of blocks are lists of `Call`s, which hold the `Frame` of this
pass. Gradient checkpointing keeps the `Call`s, so a recomputation uses the crossings of its own
pass, whatever ran since. Crossings only see image tokens.

B batch, N image tokens, K image tokens present, T other tokens of the same sequence, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tread_zoo.contract.crossing import Crossing, Exit, Layout, Tokens, check_crossings
from tread_zoo.routing.others.arguments import (
    Adapter,
    First,
    image_of,
    sequence,
    take,
    with_image,
)
from tread_zoo.routing.others.check import Verdict, cycle, examine, likest
from tread_zoo.routing.select import Ranked, Select, Skip


class Call:
    """Stands in for a block in a list; `index` is None if the list is only watched to find N."""

    def __init__(self, frame: "Frame", index: int | None, block: nn.Module) -> None:
        self.frame, self.index, self.block = frame, index, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.frame.run(self.index, self.block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


@dataclass
class Visit:
    """One call of a block: its arguments by name, and where its image tokens are."""

    index: int
    block: nn.Module
    named: dict[str, Any]
    key: str
    present: int  # K before the block
    first: First

    @property
    def x(self) -> Tensor:
        """The sequence [B, K + T, D]."""
        value: Tensor = self.named[self.key]
        return value


class Frame:
    """The state of one forward pass: its crossings, and their exits that are still to run.

    After the pass is closed it keeps no autograd graph, so that memory can be freed.

    Args:
        routes: the handle, a `Routes`.
        arguments: the network's arguments, by name.
        draws: (step, number of the pass within the step).
    """

    def __init__(self, routes: Any, arguments: Mapping[str, Any], draws: Any) -> None:
        self.routes, self.arguments, self.draws = routes, arguments, draws
        self.open, self.num_tokens = True, 0
        self.crossings: list[Crossing] | None = None
        self.called: set[int] = set()
        self.layouts: dict[int, Layout] = {}  # inside each crossing
        self.exits: dict[int, Exit] = {}
        self.starts: dict[int, Tokens] = {}  # without graph
        self.made: Any = WeakIdKeyDictionary()  # crossings in which a block returned a tensor
        self.length: tuple[int, int] | None = None  # the last block's list, and its tokens

    def close(self) -> None:
        """End the pass; recomputations may follow."""
        self.open, self.exits, self.arguments = False, {}, self._light()

    def check_calls(self, before: int | None = None) -> None:
        """Raise `RuntimeError` if a routed block (with an index below `before`) was not called."""
        end = self.routes.num_blocks if before is None else before
        ranges = [range(c.start, min(c.end, end)) for c in self.crossings or ()]
        if self.crossings is None or any(not self.called.issuperset(each) for each in ranges):
            raise RuntimeError(
                f"{self.routes.title} left out routed blocks, or ran them without going through "
                f"its lists ({', '.join(self.routes.lists)}), as a loop over children() does: "
                "route others with start and end, or name other lists with blocks=…."
            )

    def run(self, index: int | None, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return a block's output, with the crossings that start or end at the block applied."""
        named = self.routes.named(block, args, kwargs)
        key = self.routes.tokens or next(iter(named))
        x = named[key]
        if self.crossings is None:
            self._draw(index, x)
        assert self.crossings is not None
        at = -1 if index is None else index
        inside = [n for n, c in enumerate(self.crossings) if c.start <= at < c.end]
        if index is None or not inside:
            return block(**self._whole(named, ()))
        if self.open:
            self._check_call(index, x, inside)
        visit = self._visit(index, block, self._whole(named, inside), key, inside)
        new, tokens, exits = self._enter(visit, inside)
        if all(self.crossings[n].runs for n in inside):
            verdict = self._verdict(visit, new, tokens) if tokens.layout.ids is not None else None
            out = block(**self._arguments(visit, new, tokens, verdict))
            return self._leave(visit, out, tokens, inside, exits, verdict)
        return self._leave(visit, self._unchanged(visit, new), tokens, inside, exits, None)

    # Before a block -------------------------------------------------------------------------------

    def _draw(self, index: int | None, x: Any) -> None:
        if not isinstance(x, Tensor) or x.ndim != 3:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{self.routes.title}: the tokens of its blocks are {shape} and not [batch, "
                "tokens, width]: name the argument with enable_routing(tokens=…)."
            )
        extra = 0 if index is None else self.routes.extra(self.arguments, x)
        self.num_tokens = x.shape[1] - extra
        drawn = self.routes.draw(self.draws, x, self.num_tokens, self.arguments)
        self.crossings = check_crossings(drawn, self.routes.num_blocks)
        for crossing in self.crossings:
            self.routes.check_crossing(crossing)

    def _check_call(self, index: int, x: Tensor, inside: list[int]) -> None:
        """Raise `RuntimeError` if a route would silently give wrong results."""
        assert self.crossings is not None
        self.check_calls(before=index)
        self.called.add(index)
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "a routed block runs without gradients while its network has them: reentrant "
                "gradient checkpointing cannot be routed, set use_reentrant=False."
            )
        number = self.routes.list_of(index)
        starts = all(self.crossings[n].start == index for n in inside)
        last_list, length = self.length or (number, x.shape[1])
        if not starts and last_list == number and length != x.shape[1]:
            raise RuntimeError(
                f"{self.routes.title} changes its sequence from {length} to {x.shape[1]} tokens "
                f"between blocks {index - 1} and {index}, so no route may hold both: route other "
                "blocks, or each alone, as method=random_ltd."
            )

    def _visit(
        self, index: int, block: nn.Module, named: dict[str, Any], key: str, inside: list[int]
    ) -> Visit:
        assert self.crossings is not None
        before = [n for n in inside if self.crossings[n].start < index]
        layout = self.layouts[before[-1]] if before else None
        present = self.num_tokens if layout is None or layout.ids is None else layout.ids.shape[1]
        others = named[key].shape[1] - present
        if others < 0:
            raise RuntimeError(f"{self.routes.title} drops tokens before block {index} itself.")
        return Visit(index, block, named, key, present, self._first(others))

    def _first(self, others: int) -> First:
        offsets, family = self.arguments.get("offsets"), self.routes.family
        if offsets is None and family.offsets is not None:
            offsets = family.offsets(self.arguments)
        if offsets is not None and others:
            return offsets
        return 0 if family.image_first else others

    def _light(self) -> dict[str, Any]:
        """Return the part of the arguments that a recomputation needs."""
        offsets = self.routes.family.offsets
        return {} if offsets is None else {"offsets": offsets(self.arguments)}

    def _enter(self, visit: Visit, inside: list[int]) -> tuple[Tensor, Tokens, dict[int, Exit]]:
        """Return the sequence that the block sees, its image tokens, and exits by crossing."""
        assert self.crossings is not None
        image = image_of(visit.x, visit.present, visit.first)
        before = [n for n in inside if self.crossings[n].start < visit.index]
        whole = Layout((1, self.num_tokens), 0, None, len(image), image.device)
        layout = self.layouts[before[-1]] if before else whole
        tokens, exits = Tokens((image,), {}, None, layout), {}
        for n in inside:
            if n in before:
                continue
            start = tokens
            tokens, exits[n] = self.crossings[n].enter(tokens)
            if self.open:
                leaf = start.streams[0].detach().requires_grad_(start.streams[0].requires_grad)
                self.layouts[n], self.exits[n] = tokens.layout, exits[n]
                self.starts[n] = start._replace(streams=(leaf,))
        if tokens.streams[0] is image:
            return visit.x, tokens, exits
        new = with_image(visit.x, tokens.streams[0], visit.present, visit.first)
        return new, tokens, exits

    def _arguments(
        self,
        visit: Visit,
        new: Tensor,
        tokens: Tokens,
        verdict: Verdict | None,
        turn: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return a block's arguments for the tokens present, optionally reordered by `turn`."""
        ids = tokens.layout.ids
        if ids is None:
            return {**visit.named, visit.key: new}
        form = verdict.form if verdict else "broadcast"
        adapter = Adapter(self.num_tokens, self._sizes(visit), len(ids), form, self.made)
        if turn is not None:
            others = new.shape[1] - ids.shape[1]
            new = take(new, sequence(turn, ids.shape[1], others, self._first(others)), 1)
            ids = ids.gather(1, turn)
        return {**adapter(visit.named, visit.key, ids), visit.key: new}

    def _sizes(self, visit: Visit) -> dict[int, tuple[int, First]]:
        """Return the number of other tokens, and where the image starts, by a dimension's size."""
        others = visit.x.shape[1] - visit.present
        text = visit.named.get("encoder_hidden_states")
        beside = text.shape[1] if isinstance(text, Tensor) and text.ndim == 3 else 0
        start = 0 if self.routes.family.image_first else beside
        sizes: dict[int, tuple[int, First]] = {self.num_tokens + beside: (beside, start)}
        return {
            **sizes,
            self.num_tokens + others: (others, self._first(others)),
            self.num_tokens: (0, 0),
        }

    def _verdict(self, visit: Visit, new: Tensor, tokens: Tokens) -> Verdict:
        """Return the verdict on the block's class, which is examined until one is reached."""
        name = self.routes.kind(visit.index, visit.block)
        known = self.routes.verdicts.get(name)
        if known is not None and (known.error is not None or not self.open):
            return known
        ids = tokens.layout.ids
        assert ids is not None
        if ids.shape[1] < 2:
            raise ValueError("a route keeps one token, with which nothing can be proven: keep two.")
        turn = cycle(ids.shape[1], len(ids), ids.device, self.routes.shared)
        others = new.shape[1] - ids.shape[1]
        reorder = sequence(turn, ids.shape[1], others, self._first(others))

        def call(form: str, order: Tensor | None) -> dict[str, Any]:
            as_form = Verdict(form, None, None)
            return self._arguments(visit, new, tokens, as_form, None if order is None else turn)

        forms = ("shared",) if self.routes.shared else ("broadcast", "plain")
        verdict = examine(visit.block, call, visit.key, reorder, forms)
        self.routes.verdicts[name] = verdict
        return verdict

    # After a block --------------------------------------------------------------------------------

    def _leave(
        self,
        visit: Visit,
        out: Any,
        tokens: Tokens,
        inside: list[int],
        exits: dict[int, Exit],
        verdict: Verdict | None,
    ) -> Any:
        """Return the block's output after the crossings that end with it."""
        assert self.crossings is not None
        at = None
        if not isinstance(out, Tensor):
            at = verdict.output if verdict else self._outputs(visit).index(visit.key)
        y = out if at is None else out[at]
        ids = tokens.layout.ids
        count = self.num_tokens if ids is None else ids.shape[1]
        first = self._first(y.shape[1] - count)
        closing = [n for n in reversed(inside) if self.crossings[n].end == visit.index + 1]
        if closing:
            after = tokens._replace(streams=(image_of(y, count, first),))
            for n in closing:
                after = self._exit(n, exits)(after)
            y = with_image(y, after.streams[0], count, first)
        if self.open:
            self.length = (self.routes.list_of(visit.index), y.shape[1])
            left = [n for n in inside if n not in closing]
            if ids is not None and left:
                self.made[y] = left
        if at is None:
            return y
        return (*out[:at], y, *out[at + 1 :])

    def _exit(self, n: int, exits: Mapping[int, Exit]) -> Exit:
        """Return the exit of a crossing; a recomputation may reach it before the entrance."""
        assert self.crossings is not None
        if n in exits:
            return exits[n]
        if n in self.exits:
            return self.exits[n]
        with torch.no_grad():
            return self.crossings[n].enter(self.starts[n])[1]

    def _whole(self, named: dict[str, Any], inside: Any) -> dict[str, Any]:
        """Return the arguments; long skips from crossings that have ended get all tokens back."""
        for name, value in named.items() if len(self.made) else ():
            gone = self.made.get(value, ()) if isinstance(value, Tensor) else ()
            for n in reversed([n for n in gone if n not in inside]):
                count = self.layouts[n].ids.shape[1]  # type: ignore[union-attr]
                first = self._first(value.shape[1] - count)
                part = Tokens((image_of(value, count, first),), {}, None, self.layouts[n])
                value = with_image(value, self._exit(n, {})(part).streams[0], count, first)
                named = {**named, name: value}
        return named

    def _unchanged(self, visit: Visit, new: Tensor) -> Any:
        """Return the output of a skipped block: the tokens `new`, unchanged."""
        values = {**visit.named, visit.key: new}
        outs = [None if name is None else values[name] for name in self._outputs(visit)]
        return outs[0] if self.routes.single[type(visit.block)] else tuple(outs)

    def _outputs(self, visit: Visit) -> list[str | None]:
        """Return, for each output of the block, the name of the argument that it updates."""
        kind = type(visit.block)
        if kind not in self.routes.outputs:
            with torch.no_grad():
                out = visit.block(**visit.named)
            self.routes.single[kind] = isinstance(out, Tensor)
            self.routes.outputs[kind] = likest(out, visit.named)
        return self.routes.outputs[kind]


def check_shared(crossing: Crossing) -> None:
    """Raise `ValueError` if images of a batch may keep different tokens."""
    if isinstance(crossing, Skip | Select) or (isinstance(crossing, Ranked) and crossing.per_batch):
        return
    raise ValueError(
        f"this network takes one choice of tokens for a whole batch, and {type(crossing).__name__} "
        "chooses by the state of each image: use a method that draws, as tread or random_ltd."
    )


def share(crossing: Crossing) -> Crossing:
    """Return a crossing in which all images keep the first one's tokens."""
    check_shared(crossing)
    if not isinstance(crossing, Select):
        return crossing
    return replace(crossing, ids=crossing.ids[:1].expand(len(crossing.ids), -1))
