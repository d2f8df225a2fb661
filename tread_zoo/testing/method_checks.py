"""Checks of a routing method; each takes a `MethodProbe` and raises `AssertionError` with a reason.

A probe has a method and a small backbone with random weights. B batch, N tokens, E extra tokens.
"""

import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone, Layout, Streams
from tread_zoo.contract.crossing import Crossing, Tokens
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.factory import build_backbone, describe_backbone
from tread_zoo.registry import create, describe_part
from tread_zoo.routing import Method, Skip, Stack, Step
from tread_zoo.seeding import make_generator, make_image_generator
from tread_zoo.testing.probe import (
    BATCH,
    Probe,
    advise,
    compilation_agrees,
    gradients_equal_differences,
    output_and_gradients,
    recomputation_agrees,
    watching,
)

NUM_STEPS = 12  # length of the run that is checked
STEPS = (0, 1, 4, 7, 10)


@dataclass
class MethodProbe:
    """A routing method to check, and a small backbone to check it on.

    Args:
        part: the method's name, or a mapping with its name and options.
        backbone: a probe of the backbone.
    """

    part: str | dict[str, Any]
    backbone: Probe

    @property
    def method(self) -> Method:
        """The method that `part` describes."""
        return create("routing", self.part)

    def build(self, method: Method | None = None, fresh: bool = False) -> Backbone:
        """Return the backbone with the weights of `method` (None: of this probe's method). They are
        random or, if `fresh`, as the method initialises them."""
        return self.backbone.build_routed(method or self.method, fresh=fresh)

    def draw(
        self,
        backbone: Backbone,
        index: int = 0,
        images: Sequence[int] = range(BATCH),
        method: Method | None = None,
    ) -> tuple[Crossing, ...]:
        """Return the crossings (ranges of blocks that see fewer tokens) that `method` (None: this
        probe's method) chooses at step `index`. `images` are the numbers of the images, on which
        random choices depend."""
        generator = make_image_generator("kit", index, images=images)
        step = Step(index, NUM_STEPS, seed=0)
        return (method or self.method).draw(Stack.of(backbone), generator, step)

    def each_draw(self, backbone: Backbone) -> list[tuple[Crossing, ...]]:
        """Return what `draw` returns at some steps, one example of each kind: crossings of one kind
        have equal classes, ranges and shapes of tensors."""
        drawn = {}
        for index in STEPS:
            crossings = self.draw(backbone, index)
            drawn[repr([_shape(crossing) for crossing in crossings])] = crossings
        return list(drawn.values())


def check_options_round_trip(probe: MethodProbe) -> None:
    """A method can be rebuilt from its name and options, and by pickle. Its `describe` returns one
    line, and its `check` accepts the backbone."""
    method, backbone = probe.method, probe.build()
    described = describe_part("routing", method)
    assert create("routing", described) == method, "its options do not describe it"
    assert pickle.loads(pickle.dumps(method)) == method, "it does not survive pickle"
    line = method.describe(Stack.of(backbone))
    assert line.count("\n") == 0 < len(line), f"describe gives {line!r}, and not one line"
    method.check(Stack.of(backbone))


def check_tokens_return_whole(probe: MethodProbe) -> None:
    """At the end of every `Crossing`, all tokens are back: in streams (tensors of tokens), in long
    skips and in the layout. At the start, all extra tokens enter the crossing unchanged."""
    backbone = probe.build()
    for crossings in probe.each_draw(backbone):
        for crossing in _own(backbone, crossings):
            start = _tokens(backbone)
            tokens, exit = crossing.enter(start)
            _assert_lengths(tokens, start)
            for full, entered in zip(start.streams, tokens.streams, strict=True):
                extra = backbone.num_extra_tokens
                assert torch.equal(entered[:, :extra], full[:, :extra]), "extra tokens are routed"
            made = {4: tokens.streams[0]}  # a skip from inside to after the crossing
            used = {k: v for k, v in tokens.skips.items() if k not in tokens.inner}
            after = exit(tokens._replace(skips={**used, **made}))
            assert after.layout.ids is start.layout.ids, "the layout is not the one at the start"
            assert {1, 4} <= set(after.skips), "skips are lost"
            for each in (*after.streams, *after.skips.values()):
                assert each.shape[1] == start.streams[0].shape[1], "tokens are missing at the end"


def check_calls_are_pure(probe: MethodProbe) -> None:
    """Calls with equal `routes` give equal outputs, to the bit, whatever was called in between.
    They do not change a later call without routes, and torch's global generator is not used."""
    backbone, inputs = probe.build(), probe.backbone.inputs()
    state = torch.get_rng_state()
    dense = backbone(*inputs)
    draws = probe.each_draw(backbone)
    outs = [backbone(*inputs, routes=crossings) for crossings in draws]
    assert torch.equal(dense, backbone(*inputs)), "a routed call changes the dense one after it"
    for crossings, out in zip(draws, outs, strict=True):
        assert torch.equal(backbone(*inputs, routes=crossings), out), "two equal calls differ"
    assert torch.equal(torch.get_rng_state(), state), "torch's global generator is used"


def check_draws_belong_to_images(probe: MethodProbe) -> None:
    """An image's random choices depend only on (seed, step, image). So two halves of a batch, as on
    two ranks, get the same choices as the whole batch, and equal calls get equal choices. If all
    images have the same choice at all steps, this only warns."""
    backbone, choices = probe.build(), []
    for index in STEPS:
        whole = probe.draw(backbone, index, range(4))
        again = probe.draw(backbone, index, range(4))
        halves = [probe.draw(backbone, index, part) for part in (range(2), range(2, 4))]
        assert len(whole) == len(halves[0]) == len(halves[1]), "ranks draw other crossings"
        for one, same, *parts in zip(whole, again, *halves, strict=True):
            assert _plain(one) == _plain(same) == _plain(parts[0]), "two equal draws differ"
            for name, value in one.tensors().items():
                assert torch.equal(value, same.tensors()[name]), "two equal draws differ"
                both = torch.cat([part.tensors()[name] for part in parts])
                assert len(value) == 1 or torch.equal(value, both[: len(value)]), (
                    f"{name} of an image depends on the images beside it"
                )
                choices += value
    alike = len(choices) > 1 and all(torch.equal(choice, choices[0]) for choice in choices)
    advise(not alike, "every image has the same choice in every step")


def check_an_image_alone_equals_itself(probe: MethodProbe) -> None:
    """An image's output does not depend on other images in its batch, beyond rounding."""
    backbone, (x, t, y) = probe.build(), probe.backbone.inputs()
    for index in STEPS:
        together = backbone(x, t, y, routes=probe.draw(backbone, index, range(len(x))))
        alone = backbone(
            x[1:2], t[1:2], None if y is None else y[1:2],
            routes=probe.draw(backbone, index, range(1, 2)),
        )  # fmt: skip
        torch.testing.assert_close(together[1:2], alone, atol=1e-5, rtol=1e-4)


def check_keeping_all_is_dense(probe: MethodProbe) -> None:
    """With all rates at 0, a routed call equals a call without routes, to the bit. Methods with
    `keep_all_is_dense = False` are exempt."""
    method = probe.method
    names = {f.name for f in fields(method)} & {"selection_rate", "rate", "drop", "path_drop"}
    if not (names and method.keep_all_is_dense):
        return
    method = replace(method, **dict.fromkeys(names, 0.0))
    backbone, inputs = probe.build(method), probe.backbone.inputs()
    dense = backbone(*inputs)
    for index in STEPS:
        routed = backbone(*inputs, routes=probe.draw(backbone, index, method=method))
        assert torch.equal(dense, routed), f"{', '.join(sorted(names))} = 0 changes the output"


def check_gradients_flow(probe: MethodProbe) -> None:
    """Every weight, the method's included, gets a finite nonzero gradient in each step, or in some
    step if the method has `idle_weights`. Every pixel gets one in some step."""
    backbone, (x, t, y) = probe.build(), probe.backbone.inputs()
    x.requires_grad_()
    moved: Counter[str] = Counter()
    draws = [probe.draw(backbone, index) for index in range(NUM_STEPS)]
    for crossings in draws:
        backbone.zero_grad()
        out = backbone(x, t, y, routes=crossings)
        (out * torch.randn(out.shape, generator=make_generator("kit weight"))).sum().backward()
        for name, parameter in backbone.named_parameters():
            if parameter.grad is not None:
                assert torch.isfinite(parameter.grad).all(), f"{name}'s gradient is not finite"
                moved[name] += bool(parameter.grad.any())
    least = 1 if probe.method.idle_weights else len(draws)
    for name, _ in backbone.named_parameters():
        assert moved[name] >= least, f"{name} gets a gradient in {moved[name]} of {len(draws)}"
    assert x.grad is not None
    assert (x.grad.abs().sum(dim=1) > 0).all(), "some pixels get no gradient"


def check_gradients_equal_differences(probe: MethodProbe) -> None:
    """In float64, gradients agree with finite differences, also for the method's weights."""
    for crossings in probe.each_draw(probe.build())[:3]:
        gradients_equal_differences(probe.build(), probe.backbone.inputs(), crossings)


def check_recomputation(probe: MethodProbe) -> None:
    """Activation checkpointing changes neither output nor gradients."""
    backbone = probe.build()
    for crossings in probe.each_draw(backbone):
        recomputation_agrees(backbone, probe.backbone.inputs(), crossings)


def check_half_precision(probe: MethodProbe) -> None:
    """Under bfloat16 autocast, output and gradients are finite. The output is near the float32
    output, unless the method chooses tokens by activations, which are rounded."""
    backbone, inputs = probe.build(), probe.backbone.inputs()
    for crossings in probe.each_draw(backbone):
        full, _ = output_and_gradients(backbone, inputs, crossings)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half, grads = output_and_gradients(backbone, inputs, crossings)
        assert all(torch.isfinite(each).all() for each in (half, *grads.values())), "not finite"
        gap = float((half.float() - full).norm() / full.norm())
        assert gap < 0.1 or not probe.method.drawn, f"bfloat16 differs by {gap:.3f} of the norm"


def check_compiles(probe: MethodProbe) -> None:
    """Compiling a block changes neither output nor gradients beyond rounding."""
    backbone = probe.build()
    crossings = probe.each_draw(backbone)[0]
    compilation_agrees(backbone, probe.backbone.inputs(), crossings, blocks=(1,))


def check_costs_are_counted(probe: MethodProbe) -> None:
    """The probabilities that `variants` gives sum to 1 at every step, and each variant runs on the
    meta device and costs FLOPs. If choices are made before the network runs (`drawn`), `draw`
    returns only crossings with the classes, ranges and shapes of tensors per image of some variant.
    """
    backbone, method = probe.build(), probe.method
    variants = list(method.variants(Stack.of(backbone), NUM_STEPS))
    for index in range(NUM_STEPS):
        total = sum(weight for steps, weight, _ in variants if index in steps)
        assert math.isclose(total, 1, abs_tol=1e-9), f"step {index}: the weights sum to {total}"
    costs = [count_flops(backbone, routes=crossings) for _, _, crossings in variants]
    assert all(cost > 0 for cost in costs), "a variant costs nothing"
    if method.drawn:
        kinds = {repr([_shape(c, skip=1) for c in crossings]) for *_, crossings in variants}
        for index in STEPS:
            drawn = repr([_shape(c, skip=1) for c in probe.draw(backbone, index)])
            assert drawn in kinds, f"step {index} draws {drawn}, which no variant has"


def check_described_weights_load(probe: MethodProbe) -> None:
    """A network that is rebuilt from its description and loads the saved weights, the method's
    included, has the same output. A copy, such as the averaged network, uses its own weights."""
    backbone, inputs = probe.build(), probe.backbone.inputs()
    crossings = probe.each_draw(backbone)[0]
    out = backbone(*inputs, routes=crossings)
    anew = build_backbone(describe_backbone(backbone))
    anew.load_state_dict(backbone.state_dict())
    assert torch.equal(anew(*inputs, routes=crossings), out), "the rebuilt network differs"
    if backbone.routing is None:
        return
    copy = deepcopy(backbone)
    with torch.no_grad():
        for parameter in copy.routing.parameters():
            parameter.add_(0.5)
    routed = [c for c in probe.each_draw(backbone) if c] or [()]
    moved = [not torch.equal(copy(*inputs, routes=c), backbone(*inputs, routes=c)) for c in routed]
    assert torch.equal(backbone(*inputs, routes=crossings), out), "a copy shares its weights"
    assert any(moved), "a copy does not use its own weights"


def check_a_block_can_be_left_out(probe: MethodProbe) -> None:
    """`Skip` can leave any block, and any range that the method routes, out of a call, as
    evaluation does."""
    backbone, inputs = probe.build(), probe.backbone.inputs()
    spans = [(i, i + 1) for i in range(backbone.num_blocks)]
    for start, end in [*spans, *probe.method.ranges(Stack.of(backbone))]:
        with watching(backbone) as seen:
            backbone(*inputs, routes=[Skip(start, end)])
        ran = {call.block for call in seen}
        assert ran == set(range(backbone.num_blocks)) - set(range(start, end)), f"{ran} ran"


def check_sampling(probe: MethodProbe) -> None:
    """Calls with the crossings of `sample`, at rates 0.5 and 0, and of `weak` have finite outputs,
    unless `sample` or `weak` raises ValueError."""
    backbone, inputs, method = probe.build(), probe.backbone.inputs(), probe.method
    stack = Stack.of(backbone)
    calls: list[Callable[[], Sequence[Crossing]]] = [lambda: method.weak(stack)]
    images = make_image_generator("kit sample", images=range(BATCH))
    calls += [lambda: method.sample(stack, images, 0.5), lambda: method.sample(stack, images, 0.0)]
    for call in calls:
        try:
            crossings = call()
        except ValueError:
            continue
        with torch.no_grad():
            out = backbone(*inputs, routes=crossings)
        assert torch.isfinite(out).all(), "the output is not finite"


def _tokens(backbone: Backbone) -> Tokens:
    """Return random tokens for the start of a `Crossing`. They have long skips from blocks 0 and 1;
    blocks of the crossing consume only the skip from block 0."""
    generator, batch = make_generator("kit tokens"), BATCH
    length = backbone.num_extra_tokens + backbone.num_tokens

    def draw(width: int) -> Tensor:
        return torch.randn(batch, length, width, generator=generator)

    streams: Streams = tuple(map(draw, backbone.widths))
    layout = Layout(
        backbone.grid, backbone.num_extra_tokens, batch=batch,
        num_context=backbone.num_context_tokens,
    )  # fmt: skip
    skips = {0: draw(backbone.widths[0]), 1: draw(backbone.widths[0])}
    return Tokens(streams, skips, None, layout, frozenset({0}))


def _assert_lengths(tokens: Tokens, start: Tokens) -> None:
    length = tokens.streams[0].shape[1]
    assert all(stream.shape[1] == length for stream in tokens.streams), "streams differ in length"
    for producer in tokens.inner & tokens.skips.keys():
        assert tokens.skips[producer].shape[1] == length, "an inner skip has other tokens"
    if tokens.layout.ids is not None:
        ids, extra = tokens.layout.ids, start.layout.num_extra
        assert ids.shape[1] == length - extra, "the layout has another number of tokens"
        assert bool((ids[:, 1:] > ids[:, :-1]).all()), "the ids do not ascend"


def _own(backbone: Backbone, crossings: Sequence[Crossing]) -> Sequence[Crossing]:
    """Return the crossings that a call of the backbone runs, given those that the method chose."""
    own: Sequence[Crossing] = crossings
    return own if backbone.routing is None else backbone.routing.cross(own)


def _plain(crossing: Crossing) -> Any:
    return type(crossing), crossing.start, crossing.end


def _shape(crossing: Crossing, skip: int = 0) -> Any:
    """Return a `Crossing`'s kind: its class and range, and the shapes of its tensors without their
    first `skip` dimensions."""
    shapes = {name: tuple(v.shape)[skip:] for name, v in crossing.tensors().items()}
    return type(crossing).__name__, crossing.start, crossing.end, shapes


CHECKS: dict[str, Callable[[MethodProbe], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
