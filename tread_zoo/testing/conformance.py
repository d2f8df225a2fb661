"""Checks of the backbone contract; each takes a `Probe` and raises `AssertionError` with a reason.

Many architectures start with zero output, which hides most faults, so the probe makes all weights
random. B batch, N tokens, K kept tokens, E extra tokens.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

import tread_zoo.testing.block_checks as block_checks
import tread_zoo.testing.flow_checks as flow_checks
from tread_zoo.contract.backbone import Backbone
from tread_zoo.kernels.dispatch import plain_forms
from tread_zoo.registry import available
from tread_zoo.routing import Select, Skip, bypassed_tokens
from tread_zoo.seeding import make_generator
from tread_zoo.testing.probe import (
    BATCH,
    Inputs,
    Probe,
    compilation_agrees,
    gradients_equal_differences,
    output_and_gradients,
    raises,
    recomputation_agrees,
    watching,
)


def check_shapes(probe: Probe) -> None:
    """The output is [B, C_out, H, W]; inputs that do not fit raise ValueError."""
    backbone = probe.build()
    x, t, y = probe.inputs()
    out = backbone(x, t, y)
    assert out.shape == (BATCH, backbone.out_channels, *probe.input_size), out.shape
    assert out.dtype == x.dtype, f"the output is {out.dtype}, not {x.dtype}"
    assert torch.isfinite(out).all(), "the output is not finite"
    for bad in (
        lambda: backbone(x[:, :, :-1], t, y),
        lambda: backbone(x[:, :1], t, y),
        lambda: backbone(x, t[:1], y),
        lambda: backbone(x, t, y, routes=[probe.route(backbone, batch=BATCH + 1)]),
        lambda: backbone(x, t, y, routes=[probe.route(backbone, 0, backbone.num_blocks + 1)]),
    ):
        assert raises(ValueError, bad), "an input that does not fit was accepted"


def check_pure(probe: Probe) -> None:
    """Forward has no randomness and no state: repeated calls agree to the bit, in train and eval
    mode and after a routed call, and torch's global generator is not used."""
    backbone = probe.build()
    inputs, routes = probe.inputs(), [probe.route(backbone)]
    state = torch.get_rng_state()
    dense = backbone(*inputs)
    first = backbone(*inputs, routes=routes)
    assert torch.equal(torch.get_rng_state(), state), "forward draws from the global generator"
    assert torch.equal(backbone(*inputs, routes=routes), first), "two calls differ"
    assert torch.equal(backbone(*inputs), dense), "a routed call changes the dense one after it"
    assert torch.equal(backbone.eval()(*inputs, routes=routes), first), "train and eval differ"


def check_samples_do_not_mix(probe: Probe) -> None:
    """An image's output does not depend on other images in its batch, beyond rounding."""
    backbone = probe.build()
    x, t, y = probe.inputs()
    route = probe.route(backbone)
    together = backbone(x, t, y, routes=[route])
    one = Select(route.start, route.end, route.ids[1:2])
    alone = backbone(x[1:2], t[1:2], None if y is None else y[1:2], routes=[one])
    torch.testing.assert_close(together[1:2], alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def check_conditions_matter(probe: Probe) -> None:
    """Times that differ by 1e-5 give different outputs. So do any two labels, including the null
    label, or a context and the null context. y=None means the null label or context."""
    backbone = probe.build()
    x, t, y = probe.inputs(batch=1)

    def call(t: Tensor, y: Tensor | None) -> Tensor:
        return backbone(x.expand(len(t), -1, -1, -1), t, y)

    times = torch.linspace(0.1, 0.9, 5)
    condition = None if y is None else y.expand(5, *y.shape[1:])
    moved = call(times + 1e-5, condition) - call(times, condition)
    assert moved.flatten(1).any(1).all(), "t is ignored, or rounded"
    if y is None:
        return
    null = call(t, backbone.null_like(y))
    assert torch.equal(call(t, None), null), "y=None is not the null label"
    if probe.context:
        assert not torch.equal(call(t, y), null), "y is ignored"
        return
    labels = torch.arange(probe.num_classes + 1)  # the last one is the null label
    outputs = call(t.expand(len(labels)), labels)
    for one, other in combinations(labels.tolist(), 2):
        assert not torch.equal(outputs[one], outputs[other]), (
            f"labels {one} and {other} give the same output; {probe.num_classes} is the null label"
        )


def check_keeping_all_equals_no_route(probe: Probe) -> None:
    """A route that keeps every token leaves the output as it is, to the bit, and gradients up to
    rounding. Blocks compute the same whether the layout's `ids` list all tokens or are None."""
    backbone = probe.build()
    inputs = probe.inputs()
    dense, grads = output_and_gradients(backbone, inputs, ())
    for start, end in ((1, -1), (0, backbone.num_blocks)):
        all_kept = [probe.route(backbone, start, end, rate=0.0)]
        routed, routed_grads = output_and_gradients(backbone, inputs, all_kept)
        assert torch.equal(dense, routed), f"route [{start}, {end}) that keeps all changes output"
        for name, grad in grads.items():
            torch.testing.assert_close(grad, routed_grads[name], atol=1e-6, rtol=1e-4, msg=name)
    with torch.no_grad(), watching(backbone) as seen:
        backbone(*inputs)
    for call in seen:
        layout = replace(call.layout, ids=call.layout.positions())
        after = backbone.run_block(call.block, call.before, call.condition, layout, call.skip)
        for one, other in zip(after, call.after, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def check_ids_matter(probe: Probe) -> None:
    """Different kept tokens give different outputs: ids are not ignored."""
    backbone = probe.build()
    inputs = probe.inputs()
    one, other = (backbone(*inputs, routes=[probe.route(backbone, seed=s)]) for s in (1, 2))
    assert not torch.equal(one, other), "the kept ids are ignored"
    assert not torch.equal(one, backbone(*inputs)), "the route is ignored"


def check_blocks_see_kept_tokens(probe: Probe) -> None:
    """In each stream (tensor of tokens), routed blocks get the E extra tokens and the K kept
    tokens, and other blocks get all tokens. Each block's `Layout` says which tokens it gets."""
    backbone = probe.build()
    extra, num_tokens = backbone.num_extra_tokens, backbone.num_tokens
    end = max(3, backbone.num_blocks - 1)
    routes = [probe.route(backbone, 1, 2), probe.route(backbone, 2, end, rate=0.5, seed=1)]
    with watching(backbone) as seen:
        backbone(*probe.inputs(), routes=routes)
    assert len(seen) == backbone.num_blocks, "run_block does not run once a block"
    for index, (before, layout, after, *_) in enumerate(seen):
        active = [route for route in routes if route.start <= index < route.end]
        count = extra + (active[0].num_kept if active else num_tokens)
        for stream in (*before, *after):
            assert stream.shape[1] == count, f"block {index} sees {stream.shape[1]}, not {count}"
        expected = active[0].ids if active else None
        if expected is None or layout.ids is None:
            same = layout.ids is expected
        else:
            same = torch.equal(layout.ids, expected)
        assert same, f"block {index} gets other ids"
        assert layout.num_extra == extra, f"block {index} gets other extra tokens"
        context = backbone.num_context_tokens
        assert layout.num_context == context, f"block {index} gets no context"


def check_tokens_leave_and_rejoin(probe: Probe) -> None:
    """Kept tokens and all extra tokens enter a route. In every tensor of tokens, a bypassed token
    rejoins unchanged, to the bit, and a kept token rejoins as the blocks left it."""
    backbone = probe.build()
    route = probe.route(backbone)
    with watching(backbone) as seen:
        backbone(*probe.inputs(), routes=[route])
    out, extra = bypassed_tokens([route], BATCH, backbone.num_tokens), backbone.num_extra_tokens
    left, entered = seen[route.start - 1].after, seen[route.start].before
    inside, rejoined = seen[route.end - 1].after, seen[route.end].before
    for full, kept, done, after in zip(left, entered, inside, rejoined, strict=True):
        assert kept.shape[1] == extra + route.num_kept, "another number of tokens entered"
        assert torch.equal(kept[:, :extra], full[:, :extra]), "extra tokens were routed"
        chosen = full[:, extra:][~out].view_as(kept[:, extra:])
        assert torch.equal(kept[:, extra:], chosen), "other tokens entered"
        assert torch.equal(full[:, extra:][out], after[:, extra:][out]), "bypassed ones changed"
        chosen = after[:, extra:][~out].view_as(done[:, extra:])
        assert torch.equal(chosen, done[:, extra:]), "kept tokens did not rejoin in place"
        assert torch.equal(after[:, :extra], done[:, :extra]), "extra tokens did not rejoin"


def check_bypassed_tokens_are_unseen(probe: Probe) -> None:
    """With every block routed, bypassed tokens cannot change the output of kept ones."""
    backbone = probe.build()
    route = probe.route(backbone, 0, backbone.num_blocks)
    x, t, y = probe.inputs()
    out = bypassed_tokens([route], BATCH, backbone.num_tokens).view(BATCH, 1, *backbone.grid)
    pixels = out.repeat_interleave(backbone.patch_size, 2).repeat_interleave(backbone.patch_size, 3)
    with watching(backbone) as seen:
        backbone(x, t, y, routes=[route])
        backbone(torch.where(pixels, x + 1, x), t, y, routes=[route])
    depth = backbone.num_blocks
    for one, other in zip(seen[depth - 1][2], seen[2 * depth - 1][2], strict=True):
        assert torch.equal(one, other), "bypassed tokens reach routed blocks"


@torch.no_grad()
def check_blocks_can_be_left_out(probe: Probe) -> None:
    """Blocks left out by `Skip` do not run. The block after them, and a long skip from one of them,
    get all tokens, extra ones included, as they were before the blocks that are left out."""
    backbone, depth = probe.build(), probe.build().num_blocks
    start, end = 1, max(2, depth // 2)
    with watching(backbone) as seen:
        backbone(*probe.inputs(), routes=[Skip(start, end)])
    ran = [call.block for call in seen]
    assert ran == [i for i in range(depth) if not start <= i < end], f"{ran} ran"
    left, after = seen[0].after, seen[1]
    for kept, entered in zip(left, after.before, strict=True):
        assert torch.equal(entered, kept), "the streams change where no block runs"
    for call in seen[1:]:
        if backbone.skips.get(call.block) in range(start, end):
            assert call.skip is not None
            assert torch.equal(call.skip, left[0]), f"block {call.block} gets another skip"


def check_gradients_flow(probe: Probe) -> None:
    """Every parameter and every pixel, bypassed or not, gets a finite nonzero gradient."""
    backbone, (x, t, y) = probe.build(), probe.inputs()
    x.requires_grad_()
    out = backbone(x, t, y, routes=[probe.route(backbone)])
    (out * torch.randn(out.shape, generator=make_generator("probe weight"))).sum().backward()
    for name, parameter in backbone.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} gets no gradient"
        assert torch.isfinite(grad).all(), f"the gradient of {name} is not finite"
        assert grad.any(), f"the gradient of {name} is 0"
    assert x.grad is not None
    assert (x.grad.abs().sum(dim=1) > 0).all(), "some pixels get no gradient"


def check_gradients_equal_differences(probe: Probe) -> None:
    """Under a route, float64 gradients agree with finite differences: no gradient is cut, and
    hand-written backward passes are right."""
    backbone = probe.build()
    gradients_equal_differences(backbone, probe.inputs(), (probe.route(backbone, rate=0.5),))


def check_recomputation(probe: Probe) -> None:
    """Activation checkpointing changes neither output nor gradients."""
    backbone = probe.build()
    recomputation_agrees(backbone, probe.inputs(), (probe.route(backbone),))


def check_half_precision(probe: Probe) -> None:
    """With bfloat16, by autocast or as the dtype of weights and images, gradients are finite and
    the output is near the float32 output. With bfloat16 weights, the output is bfloat16, too."""
    backbone = probe.build()
    (x, t, y), routes = probe.inputs(), (probe.route(backbone),)
    full, _ = output_and_gradients(backbone, (x, t, y), routes)
    for stored in (False, True):
        backbone.zero_grad()
        images = x
        if stored:
            backbone, images = backbone.to(torch.bfloat16), x.bfloat16()
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not stored):
                half = backbone(images, t, y, routes=routes)
        except RuntimeError as error:
            raise AssertionError(f"bfloat16 (stored: {stored}) does not run: {error}") from error
        types = (torch.bfloat16,) if stored else (torch.float32, torch.bfloat16)
        assert half.dtype in types, f"the output is {half.dtype}"
        half.float().square().mean().backward()
        gap = float((half.detach().float() - full).norm() / full.norm())
        assert gap < 0.1, f"bfloat16 differs by {gap:.3f} of the output's norm"
        for name, parameter in backbone.named_parameters():
            assert parameter.grad is not None, f"{name} gets no gradient in bfloat16"
            assert torch.isfinite(parameter.grad).all(), f"{name}'s gradient is not finite"


def check_compiles(probe: Probe) -> None:
    """Compiling a routed block, and the last block, which may take a long skip, changes neither
    output nor gradients beyond rounding."""
    backbone = probe.build()
    compilation_agrees(backbone, probe.inputs(), (probe.route(backbone),), blocks=(1, -1))


def check_meta(probe: Probe) -> None:
    """The constructor, forward and backward run on the meta device, which is used to check weights
    and count FLOPs. Nothing may depend on a value (`.item()`, `if x.any()`) or name a device."""
    x, t, y = (None if v is None else v.to("meta") for v in probe.inputs())
    routes = [probe.route(probe.build()).to("meta")]
    try:
        with torch.device("meta"):
            backbone = probe.build()
        with plain_forms():
            out = backbone(x, t, y, routes=routes)
            out.sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(f"it does not run on the meta device: {error}") from error
    assert out.is_meta, f"the output of inputs on meta is on {out.device}"


def check_default_selector_exists(probe: Probe) -> None:
    """`default_selector` is the name of a registered selector."""
    selector, names = probe.build().default_selector, available("selector")
    assert selector in names, f"default_selector={selector!r} is none of {', '.join(names)}"


def check_default_route_cuts_no_skip(probe: Probe) -> None:
    """A long skip has both ends inside `default_range`, or both outside."""
    backbone = probe.build()
    routed = range(backbone.num_blocks)[slice(*backbone.default_range)]
    for consumer, producer in backbone.skips.items():
        assert (consumer in routed) == (producer in routed), (
            f"default_range={backbone.default_range} of {backbone.num_blocks} blocks cuts the skip "
            f"from block {producer} to {consumer}"
        )


def check_features(probe: Probe) -> None:
    """Features, which `forward` returns on request, are the tokens after each block, with
    gradients. Requesting them does not change the output, and activation checkpointing does not
    change their gradients."""
    backbone = probe.build()
    inputs, route = probe.inputs(), probe.route(backbone, rate=0.5)
    plain, wanted = backbone(*inputs, routes=[route]), range(backbone.num_blocks)
    with watching(backbone) as seen:
        out, features = backbone(*inputs, routes=[route], features=wanted)
    assert torch.equal(out, plain), "features change the output"
    grads = []
    for call, (block, (tokens, ids)) in zip(seen, features.items(), strict=True):
        expected = backbone.hidden_state(call.after)[:, backbone.num_extra_tokens :]
        assert block == call.block
        assert torch.equal(tokens, expected), f"features of block {block} are other tokens"
        assert ids is call.layout.ids, f"features of block {block} have other ids"
    for backbone.checkpoint_blocks in (0, 1):
        _, features = backbone(*inputs, routes=[route], features=[1])
        backbone.zero_grad()
        assert features[1].tokens.requires_grad, "features have no gradient"
        features[1].tokens.square().mean().backward()
        grads.append(next(p.grad for p in backbone.blocks[0].parameters() if p.grad is not None))
    assert torch.equal(grads[0], grads[1]), "recomputation changes the gradient of features"


def check_times_of_tokens(probe: Probe) -> None:
    """If a backbone takes a time per token (`per_token_time`), N equal times give the output of one
    time. Under a route, blocks use the times of kept tokens and not those of bypassed tokens."""
    backbone = probe.build()
    x, t, y = probe.inputs()
    if not backbone.per_token_time:
        assert raises(ValueError, lambda: backbone(x, t[:, None].expand(-1, backbone.num_tokens)))
        return
    each = t[:, None].expand(-1, backbone.num_tokens)
    torch.testing.assert_close(backbone(x, each, y), backbone(x, t, y), atol=1e-5, rtol=1e-4)
    depth = backbone.num_blocks
    route = probe.route(backbone, 0, depth, rate=0.5)
    out = bypassed_tokens([route], BATCH, backbone.num_tokens)
    with watching(backbone) as seen:
        for times in (each, torch.where(out, each + 0.1, each), torch.where(out, each, each + 0.1)):
            backbone(x, times, y, routes=[route])
    first, others, kept = (seen[n * depth - 1].after[0] for n in (1, 2, 3))
    assert torch.equal(first, others), "a routed block takes the times of bypassed tokens"
    assert not torch.isclose(first, kept).all(-1).any(), "a kept token's time is ignored"


def check_save_and_load(probe: Probe) -> None:
    """The state dict is complete: another network that loads it has the same output."""
    backbone, other = probe.build(seed=0), probe.build(seed=1)
    inputs = probe.inputs()
    assert not torch.equal(backbone(*inputs), other(*inputs)), "weights do not matter"
    other.load_state_dict(deepcopy(backbone.state_dict()))
    assert torch.equal(backbone(*inputs), other(*inputs)), "the loaded network differs"


def check_wrong_keyword(probe: Probe) -> None:
    """A misspelt keyword of `forward` raises TypeError; the registry checks constructors."""
    backbone = probe.build()
    assert raises(TypeError, lambda: backbone(*probe.inputs(), route=())), "route= passes"


def check_unconditional(probe: Probe) -> None:
    """A network with num_classes=0 refuses labels, and all its parameters get a gradient."""
    free = probe.without_condition()
    check_gradients_flow(free)
    x, t, _ = free.inputs()
    backbone = free.build()
    labels = torch.zeros(BATCH, dtype=torch.int64)
    assert raises(ValueError, lambda: backbone(x, t, labels)), "labels are ignored silently"


def check_contexts_condition_or_are_refused(probe: Probe) -> None:
    """Each embedding of a context changes the output. y=None equals a context of zeros, to the bit.
    Contexts may be float16. Contexts of other shapes or of integers, and labels in their place or
    beside them, raise ValueError. So do contexts for a backbone without `takes_contexts`."""
    contextual = probe.with_contexts()
    if not probe.build().takes_contexts:
        assert raises(ValueError, contextual.build), "contexts are ignored silently"
        return
    backbone = contextual.build()
    x, t, y = contextual.inputs()
    assert y is not None
    null = backbone(x, t, torch.zeros_like(y))
    assert torch.equal(backbone(x, t), null), "y=None is not the context of zeros"
    _each_embedding_matters(backbone, (x, t, y), ())
    half = y.half()
    assert torch.equal(backbone(x, t, half), backbone(x, t, half.float())), "half differs"
    labels = torch.zeros(BATCH, dtype=torch.int64)
    for bad in (y[:, 1:], y[:, :, 1:], y[:1], y.long(), labels):
        refused = raises(ValueError, partial(backbone, x, t, bad))
        assert refused, f"a condition {list(bad.shape)}, {bad.dtype} was accepted"
    both = probe.with_contexts()
    both.num_classes = 5
    assert raises(ValueError, both.build), "labels and contexts were accepted together"


def check_contexts_stay_with_their_images(probe: Probe) -> None:
    """An image's output does not depend on another image's context. Context tokens never bypass
    blocks: each reaches the output with every block routed. A route that keeps all tokens changes
    nothing."""
    if not probe.build().takes_contexts:
        return
    contextual = probe.with_contexts()
    check_samples_do_not_mix(contextual)
    check_blocks_see_kept_tokens(contextual)
    check_tokens_leave_and_rejoin(contextual)
    check_keeping_all_equals_no_route(contextual)
    backbone = contextual.build()
    everywhere = contextual.route(backbone, 0, backbone.num_blocks, rate=0.5)
    _each_embedding_matters(backbone, contextual.inputs(), [everywhere])


def _each_embedding_matters(backbone: Backbone, inputs: Inputs, routes: Sequence[Select]) -> None:
    x, t, y = inputs
    assert y is not None
    out = backbone(x, t, y, routes=routes)
    for place in range(y.shape[1]):
        changed = y.clone()
        changed[:, place] += 1
        again = backbone(x, t, changed, routes=routes)
        assert not torch.equal(again, out), f"embedding {place} does not reach the output"


OTHERS = (block_checks, flow_checks)
CHECKS: dict[str, Callable[[Probe], None]] = {
    name.removeprefix("check_"): check
    for checks in (globals(), *map(vars, OTHERS))
    for name, check in checks.items()
    if name.startswith("check_")
}
