"""Checks of the backbone contract; each takes a `Probe` and raises `AssertionError`, saying why.

A network starts at zero output in many architectures, which would let most faults pass unseen: the
probe therefore gives it random weights first. B batch, N tokens, K kept tokens, E extra tokens.
"""

from collections.abc import Callable
from copy import deepcopy

import torch

from tread_zoo.registry import create_backbone
from tread_zoo.routing import Route
from tread_zoo.seeding import make_generator
from tread_zoo.testing import block_checks, context_checks, fusion_checks
from tread_zoo.testing.probe import (
    BATCH,
    Probe,
    bypassed,
    gradients_equal_differences,
    output_and_gradients,
    raises,
    watching,
)


def check_shapes(probe: Probe) -> None:
    """Output [B, C_out, H, W]; wrong inputs raise."""
    backbone = probe.build()
    x, t, y = probe.inputs()
    out = backbone(x, t, y)
    assert out.shape == (BATCH, backbone.out_channels, *probe.input_size), out.shape
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
    """No randomness and no memory inside: repeated calls agree to the bit, in train and eval mode,
    a routed call leaves no trace in a dense one, and the global generator is left alone."""
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
    """An image's output does not depend on the others in its batch."""
    backbone = probe.build()
    x, t, y = probe.inputs()
    route = probe.route(backbone)
    together = backbone(x, t, y, routes=[route])
    one = Route(route.start, route.end, route.ids[1:2])
    alone = backbone(x[1:2], t[1:2], None if y is None else y[1:2], routes=[one])
    torch.testing.assert_close(together[1:2], alone, atol=1e-5, rtol=1e-4)


def check_conditions_matter(probe: Probe) -> None:
    """Time and label change the output; y=None is the null label."""
    backbone = probe.build()
    x, t, y = probe.inputs()
    out = backbone(x, t, y)
    assert not torch.equal(backbone(x, t + 0.1, y), out), "t is ignored"
    if y is not None:
        other = y + 1 if probe.context else (y + 1) % probe.num_classes
        assert not torch.equal(backbone(x, t, other), out), "y is ignored"
        null = backbone(x, t, backbone.null_like(y))
        assert torch.equal(backbone(x, t), null), "y=None is not the null label"
        assert not torch.equal(null, out), "the null label equals a class"


def check_keeping_all_equals_no_route(probe: Probe) -> None:
    """A route that keeps every token changes nothing, to the bit, in output and gradient."""
    backbone = probe.build()
    inputs = probe.inputs()
    dense, grads = output_and_gradients(backbone, inputs, ())
    for start, end in ((1, -1), (0, backbone.num_blocks)):
        all_kept = [probe.route(backbone, start, end, rate=0.0)]
        routed, routed_grads = output_and_gradients(backbone, inputs, all_kept)
        assert torch.equal(dense, routed), f"route [{start}, {end}) that keeps all changes output"
        for name, grad in grads.items():
            torch.testing.assert_close(grad, routed_grads[name], atol=1e-6, rtol=1e-4, msg=name)


def check_unsorted_ids(probe: Probe) -> None:
    """Ids that are not ascending raise, or give what sorted ones give."""
    backbone = probe.build()
    inputs, route = probe.inputs(), probe.route(backbone)
    try:
        shuffled = Route(route.start, route.end, route.ids.flip(1))
    except ValueError:
        return
    out = backbone(*inputs, routes=[shuffled])
    assert torch.equal(out, backbone(*inputs, routes=[route])), "order of ids matters silently"


def check_ids_matter(probe: Probe) -> None:
    """Another choice of tokens gives another output: ids are not ignored."""
    backbone = probe.build()
    inputs = probe.inputs()
    one, other = (backbone(*inputs, routes=[probe.route(backbone, seed=s)]) for s in (1, 2))
    assert not torch.equal(one, other), "the kept ids are ignored"
    assert not torch.equal(one, backbone(*inputs)), "the route is ignored"


def check_blocks_see_kept_tokens(probe: Probe) -> None:
    """Routed blocks get E + K tokens in every stream, the kept ones, and the others all of them."""
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
        assert same, f"block {index} is told of other ids"


def check_kept_tokens_are_the_right_ones(probe: Probe) -> None:
    """What enters a route are the rows of the kept ids; the extra tokens all enter."""
    backbone = probe.build()
    route = probe.route(backbone)
    with watching(backbone) as seen:
        backbone(*probe.inputs(), routes=[route])
    extra = backbone.num_extra_tokens
    for full, kept in zip(seen[route.start - 1][2], seen[route.start][0], strict=True):
        assert torch.equal(kept[:, :extra], full[:, :extra]), "extra tokens were routed"
        ids = route.ids[:, :, None].expand(-1, -1, full.shape[-1])
        assert torch.equal(kept[:, extra:], full[:, extra:].gather(1, ids)), "other tokens entered"


def check_bypassed_tokens_are_unchanged(probe: Probe) -> None:
    """A bypassed token rejoins as it left, to the bit, in every stream; kept ones as processed."""
    backbone = probe.build()
    route = probe.route(backbone)
    with watching(backbone) as seen:
        backbone(*probe.inputs(), routes=[route])
    out, extra = bypassed(route, backbone.num_tokens), backbone.num_extra_tokens
    left, inside, rejoined = seen[route.start - 1][2], seen[route.end - 1][2], seen[route.end][0]
    for before, processed, after in zip(left, inside, rejoined, strict=True):
        assert torch.equal(before[:, extra:][out], after[:, extra:][out]), "bypassed ones changed"
        kept = processed[:, extra:].flatten(0, 1)
        assert torch.equal(after[:, extra:][~out], kept), "kept tokens did not rejoin in place"
        assert torch.equal(after[:, :extra], processed[:, :extra]), "extra tokens did not rejoin"


def check_bypassed_tokens_are_unseen(probe: Probe) -> None:
    """With every block routed, what is bypassed cannot reach the output of what is kept."""
    backbone = probe.build()
    route = probe.route(backbone, 0, backbone.num_blocks)
    x, t, y = probe.inputs()
    out = bypassed(route, backbone.num_tokens).view(BATCH, 1, *backbone.grid)
    pixels = out.repeat_interleave(backbone.patch_size, 2).repeat_interleave(backbone.patch_size, 3)
    with watching(backbone) as seen:
        backbone(x, t, y, routes=[route])
        backbone(torch.where(pixels, x + 1, x), t, y, routes=[route])
    depth = backbone.num_blocks
    for one, other in zip(seen[depth - 1][2], seen[2 * depth - 1][2], strict=True):
        assert torch.equal(one, other), "bypassed tokens reach routed blocks"


def check_gradients_flow(probe: Probe) -> None:
    """Every parameter and every pixel, bypassed ones too, gets a finite gradient that is not 0."""
    backbone = probe.build()
    x, t, y = probe.inputs()
    x.requires_grad_()
    routes = [probe.route(backbone)]
    weight = torch.randn(backbone(x, t, y).shape, generator=make_generator("probe weight"))
    (backbone(x, t, y, routes=routes) * weight).sum().backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite"
        assert parameter.grad.abs().sum() > 0, f"the gradient of {name} is 0"
    assert x.grad is not None
    assert (x.grad.abs().sum(dim=1) > 0).all(), "some pixels get no gradient"


def check_gradients_equal_differences(probe: Probe) -> None:
    """Under a route, gradients predict in float64 how the output moves with inputs and parameters:
    none is cut on the way, and hand-written backward passes are right."""
    backbone = probe.build()
    gradients_equal_differences(backbone, probe.inputs(), (probe.route(backbone, rate=0.5),))


def check_recomputation(probe: Probe) -> None:
    """Activation checkpointing changes neither output nor gradient."""
    backbone = probe.build()
    inputs, routes = probe.inputs(), (probe.route(backbone),)
    out, grads = output_and_gradients(backbone, inputs, routes)
    backbone.checkpoint_blocks = True
    again, again_grads = output_and_gradients(backbone, inputs, routes)
    assert torch.equal(out, again), "the output differs"
    for name, grad in grads.items():
        assert torch.equal(grad, again_grads[name]), f"the gradient of {name} differs"


def check_half_precision(probe: Probe) -> None:
    """bfloat16 autocast gives finite gradients and nearly the output of float32."""
    backbone = probe.build()
    inputs, routes = probe.inputs(), (probe.route(backbone),)
    full, _ = output_and_gradients(backbone, inputs, routes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = backbone(*inputs, routes=routes)
    half.float().square().mean().backward()
    error = (half.float() - full).norm() / full.norm()
    assert error < 0.1, f"bfloat16 differs by {float(error):.3f} of the output's norm"
    for name, parameter in backbone.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} gets no gradient in bfloat16"
        assert torch.isfinite(grad).all(), f"the bfloat16 gradient of {name} is not finite"


def check_stored_half_precision(probe: Probe) -> None:
    """Weights and images stored in bfloat16, without autocast, give nearly the output of float32,
    in bfloat16, and finite gradients."""
    backbone = probe.build()
    (x, t, y), routes = probe.inputs(), (probe.route(backbone),)
    full, _ = output_and_gradients(backbone, (x, t, y), routes)
    backbone = backbone.to(torch.bfloat16)
    backbone.zero_grad()
    try:
        half = backbone(x.bfloat16(), t, y, routes=routes)
    except RuntimeError as error:
        raise AssertionError(f"weights stored in bfloat16 do not run: {error}") from error
    assert half.dtype == torch.bfloat16, f"the output is {half.dtype}, not bfloat16 as the weights"
    half.float().square().mean().backward()
    gap = (half.float() - full).norm() / full.norm()
    assert gap < 0.1, f"stored bfloat16 differs by {float(gap):.3f} of the output's norm"
    for name, parameter in backbone.named_parameters():
        grad = parameter.grad
        assert grad is None or torch.isfinite(grad).all(), f"the gradient of {name} is not finite"


def check_compiles(probe: Probe) -> None:
    """torch.compile (graph capture; no code generation) gives the same output and gradient."""
    backbone = probe.build()
    inputs, routes = probe.inputs(), (probe.route(backbone),)
    out, grads = output_and_gradients(backbone, inputs, routes)
    torch.compiler.reset()
    compiled = torch.compile(backbone, backend="aot_eager")
    again = compiled(*inputs, routes=routes)
    torch.testing.assert_close(out, again.detach(), atol=1e-5, rtol=1e-4)
    backbone.zero_grad()
    again.square().mean().backward()
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-5, rtol=1e-3, msg=name)


def check_save_and_load(probe: Probe) -> None:
    """A state dict carries all: another network with it gives the same output."""
    backbone, other = probe.build(seed=0), probe.build(seed=1)
    inputs = probe.inputs()
    assert not torch.equal(backbone(*inputs), other(*inputs)), "weights do not matter"
    other.load_state_dict(deepcopy(backbone.state_dict()))
    assert torch.equal(backbone(*inputs), other(*inputs)), "the loaded network differs"


def check_config_rebuilds(probe: Probe) -> None:
    """`backbone.config` builds the same network again."""
    backbone = probe.build()
    again = create_backbone(probe.name, **backbone.config)
    shapes = {key: value.shape for key, value in backbone.state_dict().items()}
    assert {key: value.shape for key, value in again.state_dict().items()} == shapes


def check_wrong_keyword(probe: Probe) -> None:
    """A misspelt keyword raises, in the constructor and in forward."""
    backbone = probe.build()
    wrong = {**probe.overrides, "hiden_size": 8}
    assert raises(
        (TypeError, ValueError),
        lambda: create_backbone(probe.name, input_size=8, in_channels=1, num_classes=0, **wrong),
    ), "a misspelt keyword of the constructor passes"
    assert raises(TypeError, lambda: backbone(*probe.inputs(), route=())), (
        "a misspelt keyword of forward passes"
    )


def check_unconditional(probe: Probe) -> None:
    """num_classes=0 makes a network without labels, whose parameters all get a gradient."""
    free = probe.without_condition()
    check_gradients_flow(free)
    x, t, _ = free.inputs()
    backbone = free.build()
    labels = torch.zeros(BATCH, dtype=torch.int64)
    assert raises(ValueError, lambda: backbone(x, t, labels)), "labels are ignored silently"


CHECKS: dict[str, Callable[[Probe], None]] = {
    name.removeprefix("check_"): check
    for module in (globals(), vars(block_checks), vars(context_checks), vars(fusion_checks))
    for name, check in module.items()
    if name.startswith("check_")
}
