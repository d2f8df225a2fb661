"""Checks of single blocks: which tokens they get, and what they compute.

B batch, L = E + K tokens present, K kept tokens, E extra tokens, D width.
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.routing import Select
from tread_zoo.seeding import make_generator
from tread_zoo.testing.probe import BlockCall, Probe, run_again, watching, what_blocks_depend_on

NUM_TARGETS = 6


@torch.no_grad()
def check_skips_carry_their_tokens(probe: Probe) -> None:
    """A long skip leads from an earlier to a later block. It gives each token of the later block
    the token's own state after the earlier one or, if a route let the token bypass the earlier one,
    its state at the start of that route."""
    backbone = probe.build()
    depth, inputs = backbone.num_blocks, probe.inputs()
    if not backbone.skips:
        return
    middle = depth // 2
    bounds = sorted({0, 1, middle, middle + 1, depth - 1, depth})
    plans = [[pair] for pair in combinations(bounds, 2)]
    plans += [[(0, middle), (middle, depth)], [(1, middle), (middle + 1, depth)]]
    for plan in plans:
        routes = [
            probe.route(backbone, *pair, rate=0.5, seed=seed)
            for seed, pair in enumerate(plan)
            if pair[0] < pair[1]
        ]
        with watching(backbone) as seen:
            backbone(*inputs, routes=routes)
        state = backbone.embed(*inputs)[0][0]
        states: dict[int, Tensor] = {}  # after each block
        for call in seen:
            inside = [r for r in routes if r.start <= call.block < r.end]
            rows = _rows(backbone, inside[0] if inside else None, len(state))
            if call.block in backbone.skips:
                producer = backbone.skips[call.block]
                where = f"the skip {producer} -> {call.block} under routes {plan}"
                assert call.skip is not None, f"{where} is missing"
                expected = states[producer].gather(1, _wide(rows, states[producer]))
                assert torch.equal(call.skip, expected), f"{where} has other tokens"
            state = states[call.block] = state.scatter(1, _wide(rows, state), call.after[0])


@torch.no_grad()
def check_blocks_depend_on_what_they_declare(probe: Probe) -> None:
    """`depends_on` lists exactly what changes the blocks' outputs: another order of the tokens,
    other raster positions (ids), or a taller grid.

    This detects positions that count only kept tokens, scans that ignore gaps, and decays that are
    divided by the number of kept tokens.
    """
    backbone = probe.build()
    measured = what_blocks_depend_on(probe, backbone)
    assert measured == set(backbone.depends_on), (
        f"depends_on={backbone.depends_on}, but what changes the blocks' outputs is: "
        f"{', '.join(sorted(measured)) or 'nothing'}"
    )


@torch.no_grad()
def check_blocks_depend_on_their_arguments_alone(probe: Probe) -> None:
    """A block that is called again, out of order, with a new layout and condition of equal values,
    has the same output. So no block passes tokens to another through the network, the layout's
    cache or the condition, where a route would miss them. Blocks and `forward` do not write into
    their inputs."""
    backbone, inputs = probe.build(), probe.inputs()
    route = probe.route(backbone)
    tensors = [v for v in (*inputs, route.ids) if v is not None]
    versions = [v._version for v in tensors]
    with watching(backbone) as seen:
        backbone(*inputs, routes=[route])
    assert [v._version for v in tensors] == versions, "forward writes into its inputs"
    backbone(*probe.inputs(seed=1))  # overwrites anything that a block keeps
    for call in reversed(seen):
        copies: list[Tensor] = []

        def copy(tensor: Tensor, copies: list[Tensor] = copies) -> Tensor:
            copies.append(tensor.clone())
            return copies[-1]

        try:
            after = run_again(backbone, inputs, call, copy, call.layout)
        except Exception as error:
            raise AssertionError(f"block {call.block} cannot be called alone: {error!r}") from error
        assert not any(v._version for v in copies), f"block {call.block} writes into its input"
        for one, other in zip(after, call.after, strict=True):
            assert torch.equal(one, other), (
                f"block {call.block} depends on hidden state of other blocks; is a skip missing in "
                "self.skips?"
            )


@torch.no_grad()
def check_blocks_are_called_as_modules(probe: Probe) -> None:
    """`run_block` calls `self.blocks[i]` once, as a module, as compilation and sharding require."""
    backbone, calls = probe.build(), []
    for index, block in enumerate(backbone.blocks):
        block.register_forward_hook(lambda *_, index=index: calls.append(index))
    backbone(*probe.inputs(), routes=[probe.route(backbone)])
    assert calls == list(range(backbone.num_blocks)), (
        f"of blocks 0 … {backbone.num_blocks - 1}, only {calls} are called as modules; write "
        "self.blocks[index](…)"
    )


def check_scan_order_is_the_dense_one(probe: Probe) -> None:
    """If token a affects b in a block without a route, but b does not affect a, then b must not
    affect a with a route either: the order of a subset is the full order without the missing
    tokens."""
    backbone = probe.build()
    inputs = probe.inputs(batch=1)
    route = probe.route(backbone, rate=0.5, batch=1)
    places = torch.linspace(0, route.num_kept - 1, NUM_TARGETS).long().unique().tolist()
    tokens = [int(route.ids[0, place]) for place in places]
    with torch.no_grad(), watching(backbone) as dense:
        backbone(*inputs)
    with torch.no_grad(), watching(backbone) as routed:
        backbone(*inputs, routes=[route])
    for index in range(route.start, route.end):
        full = _reach(backbone, dense[index], tokens)
        kept = _reach(backbone, routed[index], places)
        wrong = (full == 0) & (full.T > 0) & (kept > 1e-4)
        assert not wrong.any(), (
            f"block {index}: routed tokens reach others that precede them in the dense order; is "
            "the order of the kept tokens rank[ids].argsort(), undone afterwards?"
        )


def _rows(backbone: Backbone, route: Select | None, batch: int) -> Tensor:
    """Return the indices in the full sequence, extra tokens first, of the L tokens that a block
    inside `route` gets: int64 [B, L]. `route` is None outside of all routes; `batch` is B."""
    extra = backbone.num_extra_tokens
    ids = torch.arange(backbone.num_tokens).expand(batch, -1) if route is None else route.ids
    return torch.cat([torch.arange(extra).expand(batch, -1), ids + extra], dim=1)


def _wide(rows: Tensor, stream: Tensor) -> Tensor:
    return rows[:, :, None].expand(-1, -1, stream.shape[-1])


def _reach(backbone: Backbone, call: BlockCall, places: Sequence[int]) -> Tensor:
    """Return how strongly P of a block's tokens affect each other, [P out, P in]: the sum of the
    absolute gradients of an output token with respect to an input token, divided by the output
    token's largest such sum. `places` are the P tokens' indices among the grid's tokens present.
    """
    streams = tuple(s.detach().requires_grad_() for s in call.before)
    after = backbone.run_block(call.block, streams, call.condition, call.layout, call.skip)
    rows = [place + backbone.num_extra_tokens for place in places]
    generator = make_generator("probe reach")
    weights = [torch.randn(s.shape[-1], generator=generator) for s in after]
    reach = []
    for row in rows:
        seen = [(s[0, row] * w).sum() for s, w in zip(after, weights, strict=True)]
        grads = torch.autograd.grad(seen, streams, retain_graph=True, allow_unused=True)
        total = torch.stack([g[0].abs().sum(dim=-1) for g in grads if g is not None]).sum(dim=0)
        reach.append(total[rows] / total.max())
    return torch.stack(reach)
