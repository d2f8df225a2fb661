"""The loop that routes, compared with a loop over whole streams: float64, outputs and all
gradients."""

import pytest
import torch

from tests.test_contract import SMALL
from tread_zoo import create
from tread_zoo.contract.backbone import Layout
from tread_zoo.contract.crossing import change_condition, plain_condition
from tread_zoo.routing import Skip
from tread_zoo.testing import Probe

ROUTES = {  # method, ranges
    "tread": ("tread", [(0, 1), (1, 2), (2, -1)]),
    "dense": ({"name": "sprint", "absent": "dense", "start": 1, "end": -1}, [(1, -1)]),
    "zero": ({"name": "sprint", "absent": "zero", "start": 1, "end": -1}, [(1, -1)]),
    "token": ({"name": "sprint", "absent": "token", "start": 1, "end": -1}, [(1, -1)]),
    "mask": ({"name": "maskdit", "start": 1, "end": -1}, [(1, -1)]),
    "left out": ("tread", [(1, 2), (2, -1)]),
}


def whole_streams(backbone, inputs, routes):
    """Return the output; a route is a boolean mask [B, E + N] over streams of all tokens."""
    streams, condition = backbone.embed(*inputs)
    batch, length, extra = *streams[0].shape[:2], backbone.num_extra_tokens
    own, skips, start = backbone.routing, {}, streams
    masks = hasattr(own, "tokens")
    for i in range(backbone.num_blocks):
        route = next((r for r in routes if r.start <= i < r.end), None)
        left_out = isinstance(route, Skip)
        if route is not None and i == route.start:
            start = streams
        kept = torch.ones(batch, length, dtype=torch.bool)
        if route is not None and not left_out:
            kept = (torch.arange(length) < extra).expand(batch, -1).clone()
            kept[torch.arange(batch)[:, None], route.ids + extra] = True

        def narrow(stream, seen=kept):
            return stream[seen].view(len(stream), -1, stream.shape[-1])

        if not left_out:
            after = backbone.run_block(
                i, tuple(map(narrow, streams)),
                plain_condition(change_condition(condition, narrow)),
                Layout(backbone.grid, extra, None if kept.all() else route.ids, batch),
                narrow(skips[backbone.skips[i]]) if i in backbone.skips else None,
            )  # fmt: skip
            streams = tuple(
                s.masked_scatter(kept[..., None], a) for s, a in zip(streams, after, strict=True)
            )
        skips[i] = streams[0]
        if route is None or i + 1 < route.end or own is None:
            continue
        ran = kept[..., None] & (not left_out)
        if masks:
            zeros = [s.new_zeros(batch, extra, s.shape[2]) for s in streams]
            tokens = [m.expand(batch, -1, -1) for m in own.tokens]
            away = tuple(torch.cat(pair, 1) for pair in zip(zeros, tokens, strict=True))
            streams = tuple(torch.where(ran, s, a) for s, a in zip(streams, away, strict=True))
            skips = {p: torch.where(ran, skip, away[0]) for p, skip in skips.items()}
        else:
            streams = tuple(
                s0 @ w[:, : len(w)].T + torch.where(ran, s, absent) @ w[:, len(w) :].T + b
                if own.kind != "dense"
                else s0 @ w[:, : len(w)].T + torch.where(ran, s - s0, 0.0) @ w[:, len(w) :].T + b
                for s0, s, absent, w, b in zip(
                    start, streams, absents(own, streams), own.weights, own.biases, strict=True
                )
            )
    return backbone.head(streams, plain_condition(condition))


def absents(fusions, streams):
    """Return the input of the map for a token that did not run, per stream."""
    if fusions.kind == "token":
        return [getattr(fusions, f"token_{i}") for i in range(len(streams))]
    return [torch.zeros((), dtype=s.dtype) for s in streams]


FEW = ("uvit_tiny", "mamba_tiny", "lightning_dit_tiny")  # skips, two streams, positions by id


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=() if k == "tread" or n in FEW else pytest.mark.nightly)
        for n in SMALL
        for k in ROUTES
    ],
)
def test_tokens_rejoin_as_in_a_loop_over_whole_streams(name, kind):
    probe = Probe(name, overrides=SMALL[name])
    method, spans = ROUTES[kind]
    backbone = probe.build_routed(create("routing", method))
    routes = [
        probe.route(backbone, start, end, rate=0.4, seed=seed)
        for seed, (start, end) in enumerate(spans)
    ]
    if kind == "left out":
        routes[0] = Skip(routes[0].start, routes[0].end)
    backbone = backbone.double()
    x, t, y = probe.inputs()
    inputs = x.double().requires_grad_(), t.double(), y
    moved = [inputs[0], *backbone.parameters()]
    results = []
    for out in (backbone(*inputs, routes=routes), whole_streams(backbone, inputs, routes)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum(), moved, allow_unused=True)])
    torch.testing.assert_close(*results)
