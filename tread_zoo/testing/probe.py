"""Tools of the checks: a small backbone with random weights, and a record of its block calls.

B batch, N tokens, K kept tokens, E extra tokens.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone, Layout, Streams
from tread_zoo.contract.crossing import change_condition, gather, plain_condition, row_index
from tread_zoo.factory import add_routing, create_backbone
from tread_zoo.routing import Method, Select, num_kept_tokens
from tread_zoo.seeding import make_generator

BATCH = 3
CONTEXT_KEYWORDS = ("context_length", "context_size")
Inputs = tuple[Tensor, Tensor, Tensor | None]  # x [B, C, H, W], t [B], y [B] or [B, T, S]


@dataclass
class Probe:
    """A small registered backbone, and random inputs for it.

    Args:
        name: registered name of the backbone.
        input_size: height and width of the inputs; not square, to catch swapped axes.
        in_channels: C.
        num_classes: number of classes of the labels; 0 if there are contexts.
        overrides: further keywords for `create_backbone`; with context_length and context_size, the
            backbone takes contexts instead of labels.
    """

    name: str
    input_size: tuple[int, int] = (8, 12)
    in_channels: int = 2
    num_classes: int = 5
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.context:
            self.num_classes = 0

    @property
    def context(self) -> tuple[int, int] | None:
        """Number and width of the embeddings of a context; None without contexts."""
        length, size = (self.overrides.get(key, 0) for key in CONTEXT_KEYWORDS)
        return (length, size) if length or size else None

    def with_contexts(self) -> "Probe":
        """Return a probe of the same backbone with contexts of 3 embeddings of width 4."""
        overrides = {**self.overrides, **dict(zip(CONTEXT_KEYWORDS, (3, 4), strict=True))}
        return Probe(self.name, self.input_size, self.in_channels, 0, overrides)

    def without_condition(self) -> "Probe":
        """Return a probe of the same backbone without labels or contexts."""
        overrides = {k: v for k, v in self.overrides.items() if k not in CONTEXT_KEYWORDS}
        return Probe(self.name, self.input_size, self.in_channels, 0, overrides)

    def build(self, seed: int = 0) -> Backbone:
        """Return the backbone in float32 with random values for all weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            backbone = create_backbone(
                self.name,
                input_size=self.input_size,
                in_channels=self.in_channels,
                num_classes=self.num_classes,
                **self.overrides,
            )
            with torch.no_grad():
                for parameter in backbone.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return backbone

    def build_routed(self, method: Method, seed: int = 0, fresh: bool = False) -> Backbone:
        """Return the backbone of `build` with the weights of a routing method added. These are
        random or, if `fresh`, as the method initialises them."""
        backbone = self.build(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            add_routing(backbone, method)
        generator = make_generator("probe routing", seed)
        own = () if fresh or backbone.routing is None else backbone.routing.parameters()
        with torch.no_grad():
            for parameter in own:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return backbone

    def inputs(self, batch: int = BATCH, seed: int = 0) -> Inputs:
        """Return random x [B, C, H, W], t [B] and y. B is `batch`; y is labels [B], contexts
        [B, T, S] of T embeddings of width S, or None if the backbone is unconditional."""
        generator = make_generator("probe", seed)
        x = torch.randn(batch, self.in_channels, *self.input_size, generator=generator)
        t = torch.rand(batch, generator=generator)
        if self.context:
            return x, t, torch.randn(batch, *self.context, generator=generator)
        y = torch.randint(max(self.num_classes, 1), (batch,), generator=generator)
        return x, t, y if self.num_classes else None

    def route(
        self,
        backbone: Backbone,
        start: int = 1,
        end: int = -1,
        rate: float = 0.25,
        seed: int = 0,
        batch: int = BATCH,
    ) -> Select:
        """Return a `Select` of blocks start … end-1 that keeps a random fraction 1 - `rate` of
        tokens. A negative `end` counts from the last block."""
        num_kept = num_kept_tokens(backbone.num_tokens, rate)
        generator = make_generator("probe route", seed)
        scores = torch.rand(batch, backbone.num_tokens, generator=generator)
        ids = scores.argsort(dim=1)[:, :num_kept].sort(dim=1).values
        return Select(start, end + backbone.num_blocks if end < 0 else end, ids)


class BlockCall(NamedTuple):
    """One call of `run_block`: `before` and `after` are the streams (tensors of tokens) that it got
    and returned, `block` is the block's index, and the others are arguments of the same names."""

    before: Streams
    layout: Layout
    after: Streams
    block: int
    condition: Any
    skip: Tensor | None


@contextmanager
def watching(backbone: Backbone) -> Iterator[list[BlockCall]]:
    """Yield a list to which every call of `run_block` is appended as a `BlockCall`."""
    seen: list[BlockCall] = []
    original = backbone.run_block

    def spy(
        index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        after = original(index, streams, condition, layout, skip)
        seen.append(BlockCall(streams, layout, after, index, condition, skip))
        return after

    backbone.run_block = spy  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del backbone.run_block


def fresh_condition(backbone: Backbone, inputs: Inputs, layout: Layout) -> Any:
    """Return the condition that a block with `layout` gets if the network is called on `inputs`."""
    condition = backbone.embed(*inputs)[1]
    if layout.ids is not None:
        rows = row_index(layout.ids, backbone.num_tokens, layout.num_extra)
        condition = change_condition(condition, lambda values: gather(values, rows))
    return plain_condition(condition)


def run_again(
    backbone: Backbone,
    inputs: Inputs,
    call: BlockCall,
    change: Callable[[Tensor], Tensor],
    layout: Layout,
) -> Streams:
    """Return the output of the block of `call` if it runs again: with `change` applied to the
    tokens and the long skip of `call`, the condition made anew from `inputs`, and a copy of
    `layout` without its cache."""
    streams = tuple(change(stream) for stream in call.before)
    skip = None if call.skip is None else change(call.skip)
    condition = fresh_condition(backbone, inputs, layout)
    return backbone.run_block(call.block, streams, condition, replace(layout), skip)


def shuffled_tokens(num_tokens: int, num_extra: int) -> Tensor:
    """Return an order of tokens, int64 [num_extra + num_tokens]: extra tokens first, as they were,
    then the others shuffled."""
    shuffle = torch.randperm(num_tokens, generator=make_generator("probe shuffle"))
    return torch.cat([torch.arange(num_extra), shuffle + num_extra])


@torch.no_grad()
def what_blocks_depend_on(probe: Probe, backbone: Backbone) -> set[str]:
    """Return which of "order" (of tokens), "ids" (raster positions) and "grid" (its height) change
    the output of some routed block."""
    inputs, measured = probe.inputs(), set()
    route, other = (probe.route(backbone, rate=0.5, seed=seed) for seed in (0, 1))
    with watching(backbone) as seen:
        backbone(*inputs, routes=[route])
    taller = _taller(probe, backbone)
    shuffle = shuffled_tokens(route.num_kept, backbone.num_extra_tokens)
    for call in seen[route.start : route.end]:
        same, moved = (replace(call.layout, ids=way.ids) for way in (route, other))
        after = run_again(backbone, inputs, call, lambda s: s[:, shuffle], same)
        if _differ(after, tuple(stream[:, shuffle] for stream in call.after)):
            measured.add("order")
        if _differ(run_again(backbone, inputs, call, Tensor.clone, moved), call.after):
            measured.add("ids")
        if taller is not None:
            larger = replace(call.layout, grid=taller.grid)
            after = taller.run_block(call.block, call.before, call.condition, larger, call.skip)
            if _differ(after, call.after):
                measured.add("grid")
    return measured


def _taller(probe: Probe, backbone: Backbone) -> Backbone | None:
    """Return a backbone for images of twice the height, with the same weights where shapes agree;
    None if it cannot be built. A raster position is the same row and column in both."""
    height, width = probe.input_size
    try:
        taller = replace(probe, input_size=(2 * height, width)).build()
    except ValueError:
        return None
    state = taller.state_dict()
    same = {k: v for k, v in backbone.state_dict().items() if state[k].shape == v.shape}
    taller.load_state_dict(same, strict=False)
    return taller


def _differ(some: Streams, others: Streams) -> bool:
    return any(
        bool((a - b).abs().max() > 1e-5 * b.abs().max()) for a, b in zip(some, others, strict=True)
    )


def output_and_gradients(
    backbone: Backbone, inputs: Inputs, routes: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and {parameter name: gradient of the output's mean square}. Gradients in
    `.grad` are cleared. For `routes` see `Backbone.forward`."""
    backbone.zero_grad()
    out = backbone(*inputs, routes=routes)
    out.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None}
    backbone.zero_grad()
    return out.detach(), grads


def recomputation_agrees(backbone: Backbone, inputs: Inputs, routes: Sequence[Any]) -> None:
    """Assert that activation checkpointing changes neither output nor gradients, to the bit."""
    results = []
    for backbone.checkpoint_blocks in (0, 1):
        results.append(output_and_gradients(backbone, inputs, routes))
    (out, grads), (again, again_grads) = results
    assert torch.equal(out, again), "the output differs"
    assert grads.keys() == again_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, again_grads[name]), f"the gradient of {name} differs"


def compilation_agrees(
    backbone: Backbone, inputs: Inputs, routes: Sequence[Any], blocks: Sequence[int]
) -> None:
    """Assert that compiling the blocks with the indices `blocks` (graph capture, no code
    generation) changes neither output nor gradients beyond rounding."""
    out, grads = output_and_gradients(backbone, inputs, routes)
    torch.compiler.reset()
    for index in blocks:
        backbone.blocks[index].compile(backend="aot_eager")
    again, again_grads = output_and_gradients(backbone, inputs, routes)
    torch.testing.assert_close(out, again, atol=1e-5, rtol=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(again_grads[name], grad, atol=1e-5, rtol=1e-3, msg=name)


def gradients_equal_differences(backbone: Backbone, inputs: Inputs, routes: Sequence[Any]) -> None:
    """Assert that gradients agree with finite differences along three random directions of inputs
    and parameters. The backbone is converted to float64."""
    backbone = backbone.double()
    x, t, y = inputs
    x, t = x.double().requires_grad_(), t.double()
    generator = make_generator("probe direction")
    weight = torch.randn(backbone(x, t, y).shape, generator=generator, dtype=torch.float64)
    (backbone(x, t, y, routes=routes) * weight).sum().backward()
    moved = [x, *backbone.parameters()]
    sizes = [p.detach().square().mean().sqrt() for p in moved]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved]
    typical = torch.stack([(g.norm() * s) for g, s in zip(grads, sizes, strict=True)]).norm()
    for _ in range(3):
        steps = [
            s * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for p, s in zip(moved, sizes, strict=True)
        ]
        values = []
        with torch.no_grad():
            for distance in (1e-4, -2e-4, 1e-4):  # forward, backward, and to the start
                for p, step in zip(moved, steps, strict=True):
                    p.add_(step, alpha=distance)
                values.append((backbone(x, t, y, routes=routes) * weight).sum())
        slope = (values[0] - values[1]) / 2e-4
        predicted = sum((g * s).sum() for g, s in zip(grads, steps, strict=True))
        error = abs(float((slope - predicted) / typical))
        assert error < 0.01, f"gradients and differences disagree by {error:.1%}"


class Advice(UserWarning):
    """A broken rule of thumb: suspicious, but not necessarily wrong."""


def advise(holds: bool, text: str) -> None:
    """Warn with `text` if a rule of thumb is broken, that is, `holds` is false."""
    if not holds:
        warnings.warn(text, Advice, stacklevel=3)


def raises(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> bool:
    """Return whether `call` raises one of `kinds`."""
    try:
        call()
    except kinds:
        return True
    return False
