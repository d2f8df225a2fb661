"""Checks of the flow of information between pixels, and between tokens along their order.

B batch, L = E + K tokens present, K kept tokens, E extra tokens, D width.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from tread_zoo.contract.backbone import Backbone, Layout
from tread_zoo.contract.crossing import gather, row_index
from tread_zoo.routing import Select, bypassed_tokens
from tread_zoo.seeding import make_generator
from tread_zoo.testing.probe import (
    BlockCall,
    Probe,
    advise,
    fresh_condition,
    run_again,
    shuffled_tokens,
    watching,
    what_blocks_depend_on,
)

NUM_PLACES = 6
EDGE = 5  # tokens at each end of a sequence, where convolutions act differently


@torch.no_grad()
def check_patches_stay_in_place(probe: Probe) -> None:
    """With every block routed, changing a bypassed token's pixels changes its own output patch
    most: the head reads all tokens and puts patches back in place."""
    backbone = probe.build()
    route = probe.route(backbone, 0, backbone.num_blocks, batch=1)
    places = bypassed_tokens([route], 1, backbone.num_tokens)[0].nonzero().flatten().tolist()
    batch, p, width = len(places) + 1, backbone.patch_size, backbone.grid[1]
    x, t, y = (None if v is None else v.repeat(batch, *[1] * (v.ndim - 1)) for v in probe.inputs(1))
    assert x is not None
    for image, place in zip(x[1:], places, strict=True):
        row, col = place // width * p, place % width * p
        image[:, row : row + p, col : col + p] += 1
    routes = [Select(route.start, route.end, route.ids.expand(batch, -1))]
    out = backbone(x, t, y, routes=routes)
    moved = avg_pool2d((out[1:] - out[:1]).abs().sum(1, keepdim=True), p).flatten(1)
    for place, moves in zip(places, moved, strict=True):
        assert moves[place] > 0, f"the pixels of bypassed token {place} do not reach its patch"
        assert moves.argmax() == place, f"token {place} appears at the place of another"


def check_pixels_reach_each_other(probe: Probe) -> None:
    """If token a's pixels affect token b's output, then b's pixels affect a's output. This fails if
    all blocks scan, or convolve causally, in the same direction."""
    backbone = probe.build().double()
    x, t, y = probe.inputs(1)
    x, t = x.double().requires_grad_(), t.double()
    out = backbone(x, t, None if y is None else y.double() if probe.context else y)
    p, width = backbone.patch_size, backbone.grid[1]
    places = torch.linspace(0, backbone.num_tokens - 1, NUM_PLACES).long().unique()
    weight = torch.randn(out.shape, generator=make_generator("probe flow"), dtype=out.dtype)
    reach = []
    for place in places.tolist():
        row, col = place // width * p, place % width * p
        patch = (..., slice(row, row + p), slice(col, col + p))
        (grad,) = torch.autograd.grad((out[patch] * weight[patch]).sum(), x, retain_graph=True)
        reach.append(avg_pool2d(grad.abs().sum(1, keepdim=True), p).flatten()[places] > 0)
    reached = torch.stack(reach)
    one_way = (reached & ~reached.T).nonzero()
    assert not len(one_way), (
        f"token {places[one_way[0][1]]} reaches token {places[one_way[0][0]]}, which does not "
        "reach it; a scan or a causal convolution must also run backwards, in some block"
    )


@torch.no_grad()
def check_a_missing_token_leaves_the_others(probe: Probe) -> None:
    """Leaving out one token hardly changes a block's output for the others. If it does, the order
    of a subset may not be the full order without the missing tokens, or may not be undone
    afterwards. A rule of thumb, which only warns."""
    backbone, inputs = probe.build(), probe.inputs()
    batch, num_tokens, extra = len(inputs[0]), backbone.num_tokens, backbone.num_extra_tokens
    missing = torch.linspace(num_tokens // 3, 2 * num_tokens // 3, batch).long()
    every = torch.arange(num_tokens).expand(batch, -1)
    ids = every[every != missing[:, None]].view(batch, -1)
    rows = row_index(ids, num_tokens, extra)
    shuffle = shuffled_tokens(num_tokens, extra)
    with watching(backbone) as seen:
        backbone(*inputs)
    for call in seen:
        layout = replace(call.layout, ids=ids)
        fewer = run_again(backbone, inputs, call, lambda s: gather(s, rows), layout)
        mixed = run_again(backbone, inputs, call, lambda s: s[:, shuffle], call.layout)
        for one, other, before in zip(fewer, mixed, call.after, strict=True):
            full = gather(before, rows)
            change, size, shuffled = (
                float(v.norm(dim=-1).median())
                for v in (one - full, full, other - before[:, shuffle])
            )
            if shuffled > 1e-5 * size:
                size = shuffled
            advise(
                change <= 0.5 * size,
                f"block {call.block}: one token less changes the others {change / size:.2f} times "
                "as much as shuffling all tokens; is the order of the kept tokens "
                "rank[ids].argsort(), undone afterwards?",
            )


def check_order_alone_is_a_scans(probe: Probe) -> None:
    """A block that depends on the order of tokens but not on their ids is a scan: among equal
    tokens, those farther away have less influence. If influence oscillates along the sequence, the
    block may take rotary or sine positions by index. A rule of thumb, which only warns."""
    backbone = probe.build()
    num_kept = backbone.num_tokens - 1
    if num_kept < 3 * EDGE or what_blocks_depend_on(probe, backbone) != {"order"}:
        return
    inputs = probe.inputs(1)
    with torch.no_grad(), watching(backbone) as seen:
        backbone(*inputs)
    layout = replace(seen[0].layout, ids=torch.arange(num_kept)[None])
    swings = [
        _swing(backbone, call, layout, fresh_condition(backbone, inputs, layout)) for call in seen
    ]
    typical = sorted(swings)[len(swings) // 2]
    advise(
        typical < 1.4,
        "blocks seem to take positions by index in the routed sequence: the weight of tokens "
        f"oscillates {typical:.1f} times along it; index by layout.positions()",
    )


def _swing(backbone: Backbone, call: BlockCall, layout: Layout, condition: object) -> float:
    """Return how much, in the block of `call`, the influence on the first token oscillates along a
    sequence of equal tokens: the total variation of the influence divided by its range, which is 1
    if the influence only falls. `layout` and `condition` replace those of `call`."""
    extra, length = layout.num_extra, layout.positions().shape[1]

    def alike(stream: Tensor) -> Tensor:
        return torch.cat(
            [stream[:, :extra], stream[:, extra : extra + 1].expand(-1, length, -1)], 1
        )

    streams = tuple(alike(s).requires_grad_() for s in call.before)
    skip = None if call.skip is None else alike(call.skip)
    after = backbone.run_block(call.block, streams, condition, layout, skip)
    generator = make_generator("probe swing")
    first = [s[0, extra] @ torch.randn(s.shape[-1], generator=generator) for s in after]
    grads = torch.autograd.grad(first, streams, allow_unused=True)
    weights = torch.cat([g[0, extra + EDGE : -EDGE] for g in grads if g is not None], dim=-1)
    series = weights.double() @ weights.double().mean(dim=0)
    span = series.max() - series.min()
    return float(series.diff().abs().sum() / span) if span > 0 else 0.0
