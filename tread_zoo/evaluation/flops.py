"""FLOPs of the executed code, counted by torch's flop counter on the meta device.

torch counts matrix products; formulas that `tread_zoo.kernels` registers (see docs/flops.md) count
scans and the convolutions before them. A multiply-add is 2; elementwise work is not counted, as is
usual. Every operation is counted in its torch form, so that machines agree. The recomputation of
activation checkpointing is counted.

In a run of S steps, step s is routed as r(s) with probability p_s, and dense otherwise. An image
costs on average

    1/S sum_s (p_s F(r(s)) + (1 - p_s) F(dense)),   p_s = p between the dense ends, else 0

F is of one pass forward and back, or of all that the loss of a step computes, if it is given.
"""

import json
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.contract.backbone import Backbone
from tread_zoo.diffusion import Objective, SamplingOptions, default_labels, generate
from tread_zoo.kernels import plain_forms, used_ops
from tread_zoo.routing import PathDrop, PendingRoute, Route, Routing, resolve_routes
from tread_zoo.seeding import make_generator

Module = TypeVar("Module", bound=nn.Module)
Routes = Sequence[Route | PendingRoute | PathDrop]
# (network, images [B,C,H,W], labels [B] or None, routes) -> what a step sums and differentiates. If
# it has a `key`, calls of equal keys are traced once.
Loss = Callable[[Backbone, Tensor, Tensor | None, Routes], Tensor]


def count_flops(
    backbone: Backbone,
    *,
    batch: int = 1,
    routes: Routes = (),
    backward: bool = False,
) -> int:
    """Return the FLOPs of a forward pass, or of forward and backward, of `batch` images. A pending
    route includes the cost of the importance."""
    return _trace(without_data(backbone), batch, routes, backward)


def training_flops(backbone: Backbone, routing: Routing, num_steps: int) -> float:
    """Return the FLOPs per image, forward and backward, averaged over a run of `num_steps` steps.
    Random routes and path drops count by their probability."""
    return mean_flops(stage_flops(backbone, routing, num_steps))


def mean_flops(stages: Sequence[tuple[range, float]]) -> float:
    """Return the mean over the steps of all stages."""
    return sum(len(steps) * flops for steps, flops in stages) / sum(len(s) for s, _ in stages)


def stage_flops(
    backbone: Backbone, routing: Routing, num_steps: int, loss: Loss | None = None
) -> list[tuple[range, float]]:
    """Return the steps of each stage of a run with the FLOPs per image, as in `training_flops`; of
    `loss`, or else of one pass."""
    meta = without_data(backbone)
    dense = _trace(meta, 1, (), True, loss)
    stages = []
    for steps, used in routing.stages(num_steps):
        routes = used.draw(1, backbone.grid, make_generator("flops", 0))
        chance, routed = used.path_drop_probability, float(_trace(meta, 1, routes, True, loss))
        if routes and chance:
            dropped = [PathDrop(plan.start, plan.end) for plan in used.plans]
            routed = (1 - chance) * routed + chance * _trace(meta, 1, dropped, True, loss)
        flops = routing.probability * routed + (1 - routing.probability) * dense
        stages.append((steps, flops))
    return stages


@dataclass(frozen=True)
class SamplingCost:
    """The cost of sampling an image: evaluations of the strong and the weak network, and FLOPs."""

    evaluations: int
    flops: int


def count_sampling(
    backbone: Backbone,
    objective: Objective,
    options: SamplingOptions,
    *,
    weak: Backbone | None = None,
) -> SamplingCost:
    """Return the cost of sampling an image with `options`. Raises ValueError if they do not fit.

    `generate` runs with networks that compute nothing and count their calls, so that a branch that
    a level or a scale leaves out is not counted.
    """
    calls: list[int] = []
    network = _stand_in(backbone, calls)
    labels = default_labels([0], network.num_classes)
    if network.context_size:
        labels = torch.zeros(1, network.context_length, network.context_size)
    generate(
        network, objective, options, indices=[0], labels=labels, seed=0, batch_size=1,
        weak=None if weak is None else _stand_in(weak, calls),
    )  # fmt: skip
    return SamplingCost(len(calls), sum(calls))


def _stand_in(network: Backbone, calls: list[int]) -> Backbone:
    """Return `network` with a forward that appends its FLOPs to `calls` and computes nothing."""
    meta = without_data(network)

    def forward(
        x: Tensor, t: Tensor, y: Tensor | None = None, *, r: Any = None, routes: Any = ()
    ) -> Tensor:
        calls.append(_trace(meta, len(x), routes, backward=False))
        return x.new_zeros(len(x), network.out_channels, *network.input_size)

    stand_in = copy(network)
    stand_in.forward = forward  # type: ignore[method-assign,assignment]
    return stand_in


@torch.inference_mode(False)
def without_data(module: Module) -> Module:
    """Return a copy on the meta device, without copying weights."""
    empty: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()
    } | {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    return deepcopy(module, empty)


def _one_pass(network: Backbone, x: Tensor, y: Tensor | None, routes: Routes) -> Tensor:
    t = torch.empty(len(x), device=x.device)
    concrete = resolve_routes(routes, lambda start: network.importance(x, t, y, start))
    out: Tensor = network(x, t, y, routes=concrete)
    return out


@torch.inference_mode(False)
def _trace(
    meta: Backbone, batch: int, routes: Routes, backward: bool, loss: Loss | None = None
) -> int:
    """Return the FLOPs of a call of a copy from `without_data`; equal calls are traced once."""
    of = getattr(loss, "key", loss)
    key = (_structure(meta), batch, tuple(map(_kind, routes)), backward, of)
    if key in _TRACED and meta.name is not None:  # the options of others are unknown
        flops, ops = _TRACED[key]
        used_ops.update(ops)
        return flops
    before = used_ops.copy()
    used_ops.clear()
    meta.requires_grad_(backward).zero_grad()
    x = torch.empty(batch, meta.in_channels, *meta.input_size, device="meta")
    y = torch.empty(batch, dtype=torch.int64, device="meta") if meta.num_classes else None
    moved = [route.to("meta") for route in routes]
    mode = FlopCounterMode(display=False)
    with plain_forms(), torch.set_grad_enabled(backward), mode as counter:
        out = (loss or _one_pass)(meta, x, y, moved)
        if backward:
            out.sum().backward()
    _TRACED[key] = flops, ops = int(counter.get_total_flops()), frozenset(used_ops)
    used_ops.update(before)
    return flops


_TRACED: dict[tuple[Any, ...], tuple[int, frozenset[str]]] = {}  # FLOPs, and the operations


def _kind(route: Route | PendingRoute | PathDrop) -> tuple[Any, ...]:
    bypass = getattr(route, "bypass", None)
    return type(route), route.start, route.end, getattr(route, "num_kept", None), repr(bypass)


def _structure(network: Backbone) -> tuple[Any, ...]:
    """Return what FLOPs depend on: the class, the options, and shapes, which show added layers."""
    shapes = tuple((name, tuple(p.shape)) for name, p in network.named_parameters())
    return type(network), json.dumps(network.config), network.checkpoint_blocks, shapes
