"""What becomes of bypassed tokens, beside a loop in float64 in which every stream stays whole."""

import pytest
import torch
from tread_zoo.contract.frame import rows_of

from tests.test_contract import SMALL
from tests.testing.own_loops import MixingNet
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import Bypass, Route
from tread_zoo.testing import Probe

ROUTES = {  # start, end, options of the bypass
    "replace": [(0, 1, {"sparsify": False}), (1, 2, {"carry_from": 0}),
                (2, -1, {"carry_from": 1, "detach": True})],
    "carried": [(1, -1, {"sparsify": False, "carry_from": 0})],
    "project": [(1, -1, {"carry_from": 0, "detach": True})],
    "zero": [(1, -1, {"carry_from": 0, "detach": True})],
    "mask": [(1, -1, {})],
}  # fmt: skip


def whole_streams(backbone, inputs, routes):
    """Return the output; a route is a boolean mask [B, E + N] over streams of all tokens."""
    streams, condition = backbone.embed(*inputs)
    batch, length, extra = *streams[0].shape[:2], backbone.num_extra_tokens
    before, skips = [], {}
    for i in range(backbone.num_blocks):
        before.append(streams)
        route = next((r for r in routes if r.start <= i < r.end), None)
        kept = seen = torch.ones(batch, length, dtype=torch.bool)
        if route is not None:
            kept = (torch.arange(length) < extra).expand(batch, -1).clone()
            kept[torch.arange(batch)[:, None], route.ids + extra] = True
            seen = kept if route.bypass.sparsify else seen
        ids = None if seen.all() else route.ids

        def narrow(stream, seen=seen):
            return stream[seen].view(len(stream), -1, stream.shape[-1])

        after = backbone.run_block(
            i, tuple(map(narrow, streams)),
            rows_of(condition, None if ids is None else seen.flatten().nonzero().flatten()),
            Layout(backbone.grid, extra, ids, batch),
            narrow(skips[backbone.skips[i]]) if i in backbone.skips else None,
        )  # fmt: skip
        streams = tuple(
            s.masked_scatter(seen[..., None], a) for s, a in zip(streams, after, strict=True)
        )
        skips[i] = streams[0]
        if route is None or i + 1 < route.end:
            continue
        name, carry, kept = f"{route.start}_{route.end}", route.bypass.carry_from, kept[..., None]
        away = before[route.start if carry is None else carry]
        if route.bypass.detach:
            away = tuple(stream.detach() for stream in away)
        masked = name in backbone.mask_tokens
        if masked:
            zeros = [s.new_zeros(batch, extra, s.shape[2]) for s in streams]
            tokens = [m.expand(batch, -1, -1) for m in backbone.mask_tokens[name].tokens]
            away = tuple(torch.cat(pair, 1) for pair in zip(zeros, tokens, strict=True))
        streams = tuple(torch.where(kept, s, a) for s, a in zip(streams, away, strict=True))
        for producer, skip in skips.items():
            if masked or producer >= route.start:
                skips[producer] = torch.where(kept, skip, away[0])
        zero = f"{name}_zero" in backbone.fusions
        if zero or name in backbone.fusions:
            fusion = backbone.fusions[f"{name}_zero" if zero else name]
            streams = tuple(
                torch.where(kept, s0, a) @ w[:, : len(w)].T
                + torch.where(kept, s if zero else s - s0, 0.0) @ w[:, len(w) :].T + b
                for s0, s, a, w, b in zip(
                    before[route.start], streams, away, fusion.weights, fusion.biases, strict=True
                )
            )  # fmt: skip
    return backbone.head(streams, rows_of(condition, None))


FEW = ("uvit_tiny", "mamba_tiny", "lightning_dit_tiny")  # skips, two streams, positions by id


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=() if k == "replace" or n in FEW else pytest.mark.slow)
        for n in SMALL
        for k in ROUTES
    ],
)
def test_bypassed_tokens_rejoin_as_in_a_loop_over_whole_streams(name, kind):
    probe = Probe(name, overrides=SMALL[name])
    backbone = probe.build()
    routes = []
    for seed, (start, end, options) in enumerate(ROUTES[kind]):
        plain = probe.route(backbone, start, end, rate=0.4, seed=seed)
        routes.append(Route(plain.start, plain.end, plain.ids, Bypass(**options)))
    spans = [(route.start, route.end) for route in routes]
    if kind in ("project", "zero"):
        backbone = probe.build_fused(*spans, bypassed="zero" if kind == "zero" else "dense")
    if kind == "mask":
        backbone.add_mask_tokens(spans)
    backbone = backbone.double()
    x, t, y = probe.inputs()
    inputs = x.double().requires_grad_(), t.double(), y
    moved = [inputs[0], *backbone.parameters()]
    results = []
    for out in (backbone(*inputs, routes=routes), whole_streams(backbone, inputs, routes)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum(), moved, allow_unused=True)])
    torch.testing.assert_close(*results)


class Pointwise(MixingNet):
    """Blocks that do not mix tokens."""

    dependence = ()

    def mix(self, x, layout, index):
        return x


def test_carried_equals_dropped_where_tokens_do_not_mix():
    network = Pointwise(input_size=8, in_channels=2, num_classes=0).double()
    x, t = torch.randn(2, 2, 8, 8, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    ids = torch.tensor([[0, 3, 5], [2, 9, 15]])
    dense, dropped, carried = (
        network(x, t, routes=routes)
        for routes in ([], [Route(1, 3, ids)], [Route(1, 3, ids, Bypass(sparsify=False))])
    )
    torch.testing.assert_close(carried, dropped)
    assert not torch.allclose(dense, dropped)


@pytest.mark.parametrize(("carry", "message"), [(2, "carry_from=2"), (-1, "-1"), (4, "0 … 3")])
def test_states_that_lack_tokens_cannot_be_carried(carry, message):
    probe = Probe("dit_tiny", overrides=SMALL["dit_tiny"])
    backbone = probe.build()
    first, second = probe.route(backbone, 1, 3), probe.route(backbone, 3, 4)
    second = Route(3, 4, second.ids, Bypass(carry_from=carry))
    with pytest.raises(ValueError, match=message):
        backbone(*probe.inputs(), routes=[first, second])
