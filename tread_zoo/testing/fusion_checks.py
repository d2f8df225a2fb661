"""Checks of fusions, where routes rejoin, and of dropped paths.

Each check adds fusions to a network and compares the inputs of blocks with the formula of
`tread_zoo.routing.fusion`, written here as two products.

B batch, E extra tokens, N tokens of the grid, D width of a stream.
"""

import torch

from tread_zoo.contract.backbone import Backbone, Streams
from tread_zoo.routing import Fusion, PathDrop, Route
from tread_zoo.testing.probe import (
    BlockCall,
    Probe,
    bypassed,
    gradients_equal_differences,
    gradients_flow,
    output_and_gradients,
    raises,
    watching,
)


def check_fusion_starts_as_replacement(probe: Probe) -> None:
    """New fusions change outputs and gradients by rounding only, dense and routed."""
    backbone, inputs = probe.build(), probe.inputs()
    calls = ((), (probe.route(backbone, rate=0.5),))
    plain = [output_and_gradients(backbone, inputs, routes) for routes in calls]
    backbone.add_fusions([(1, backbone.num_blocks - 1)])
    for routes, (out, grads) in zip(calls, plain, strict=True):
        fused, fused_grads = output_and_gradients(backbone, inputs, routes)
        torch.testing.assert_close(fused, out, atol=1e-5, rtol=1e-4)
        for name, grad in grads.items():
            torch.testing.assert_close(fused_grads[name], grad, atol=1e-5, rtol=1e-3, msg=name)


@torch.no_grad()
def check_fusion_is_part_of_every_call(probe: Probe) -> None:
    """The block after a fused range gets W cat(dense, update) + b, whether the range ran dense or
    routed; the update of a bypassed token is 0."""
    depth, inputs = probe.build().num_blocks, probe.inputs()
    ranges = ((1, 2), (2, max(3, depth - 1)))
    backbone = probe.build_fused(*ranges)
    routes = [probe.route(backbone, *pair, rate=0.5, seed=n) for n, pair in enumerate(ranges)]
    for used in ([], routes[:1], routes[1:], routes):
        with watching(backbone) as seen:
            backbone(*inputs, routes=used)
        streams = seen[0].after
        length = streams[0].shape[1]
        for start, end in ranges:
            if end == depth:
                continue
            route = next((r for r in used if r.start == start), None)
            update = _update(backbone, streams, seen[end - 1], route)
            streams = _fused(backbone, (start, end), streams, update)
            for stream, entered in zip(streams, seen[end].before, strict=True):
                if entered.shape[1] < length:  # the next range is routed
                    continue
                torch.testing.assert_close(
                    entered, stream, atol=1e-5, rtol=1e-4,
                    msg=f"block {end} does not get the fusion of [{start}, {end}), with "
                    f"{[(r.start, r.end) for r in used]} routed",
                )  # fmt: skip


def check_fused_routes_that_keep_all_equal_none(probe: Probe) -> None:
    """In a fused network a route that keeps every token changes nothing, to the bit."""
    depth, inputs = probe.build().num_blocks, probe.inputs()
    for start, end in ((1, depth - 1), (0, depth)):
        backbone = probe.build_fused((start, end))
        dense = backbone(*inputs)
        routed = backbone(*inputs, routes=[probe.route(backbone, start, end, rate=0.0)])
        assert torch.equal(dense, routed), f"a fused route [{start}, {end}) that keeps all differs"


def check_fused_gradients_flow(probe: Probe) -> None:
    """Under a fused route every parameter and every pixel gets a gradient; under a dropped path,
    all except the blocks that do not run."""
    depth = probe.build().num_blocks
    span = (1, depth - 1)
    backbone = probe.build_fused(span)
    gradients_flow(probe, backbone, probe.route(backbone, *span))
    gradients_flow(probe, backbone, PathDrop(*span), idle=range(*span))


def check_fused_gradients_equal_differences(probe: Probe) -> None:
    """Under a fused route and under a dropped path, float64 gradients agree with differences."""
    span = (1, probe.build().num_blocks - 1)
    for route in (probe.route(probe.build(), *span, rate=0.5), PathDrop(*span)):
        gradients_equal_differences(probe.build_fused(span), probe.inputs(), (route,))


@torch.no_grad()
def check_dropped_paths_leave_streams(probe: Probe) -> None:
    """The blocks of a dropped path do not run. The next block gets the streams of the path's start,
    extra tokens included, fused with an update of 0, and skips of that state."""
    backbone, inputs = probe.build(), probe.inputs()
    depth = backbone.num_blocks
    span = (1, max(2, depth // 2))
    assert raises(ValueError, lambda: backbone(*inputs, routes=[PathDrop(*span)])), (
        "a path is dropped in a network without fusions"
    )
    backbone = probe.build_fused(span)
    elsewhere = probe.route(backbone, 0, 1)
    assert raises(ValueError, lambda: backbone(*inputs, routes=[elsewhere])), (
        "a route beside the fused ranges is accepted"
    )
    for fused in (backbone, probe.build_fused(span, fresh=True)):
        with watching(fused) as seen:
            fused(*inputs, routes=[PathDrop(*span)])
        ran = [call.block for call in seen]
        assert ran == [i for i in range(depth) if not span[0] <= i < span[1]], f"{ran} ran"
        left, after = seen[0].after, seen[1]
        zero = tuple(torch.zeros_like(stream) for stream in left)
        for stream, entered in zip(_fused(fused, span, left, zero), after.before, strict=True):
            torch.testing.assert_close(entered, stream, atol=1e-5, rtol=1e-4)
    for kept, entered in zip(left, after.before, strict=True):  # weights [I, I], biases 0
        torch.testing.assert_close(entered, kept, atol=1e-6, rtol=1e-6)
    for call in seen[1:]:
        if backbone.skips.get(call.block) in range(*span):
            assert call.skip is not None
            assert torch.equal(call.skip, left[0]), f"block {call.block} gets another skip"


def _fused(backbone: Backbone, span: tuple[int, int], dense: Streams, update: Streams) -> Streams:
    """Return W [D, 2D] cat(dense, update) + b of each stream, as two products."""
    fusion = backbone.fusions[f"{span[0]}_{span[1]}"]
    assert isinstance(fusion, Fusion)
    fused = []
    for weight, bias, before, added in zip(
        fusion.weights, fusion.biases, dense, update, strict=True
    ):
        width = before.shape[-1]
        fused.append(before @ weight[:, :width].mT + added @ weight[:, width:].mT + bias)
    return tuple(fused)


def _update(backbone: Backbone, dense: Streams, last: BlockCall, route: Route | None) -> Streams:
    """Return what a range added to each token, [B, E + N, D]; 0 for bypassed tokens."""
    if route is None:
        return tuple(after - before for before, after in zip(dense, last.after, strict=True))
    extra = backbone.num_extra_tokens
    kept = ~bypassed(route, backbone.num_tokens)
    kept = torch.cat([torch.ones(len(kept), extra, dtype=torch.bool), kept], dim=1)
    updates = []
    for before, after in zip(dense, last.after, strict=True):
        update = torch.zeros_like(before)
        update[kept] = after.flatten(0, 1) - before[kept]
        updates.append(update)
    return tuple(updates)
