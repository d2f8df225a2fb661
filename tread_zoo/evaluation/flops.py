"""FLOPs of the executed code, counted by torch's flop counter on the meta device.

torch counts matrix products; formulas that `tread_zoo.kernels` registers (docs/evaluation.md) count
scans and the convolutions before them. A multiply-add is 2 FLOPs. Elementwise work is not counted,
as is usual. Every operation is counted as implemented in plain torch, so that all machines agree.
The recomputation of activation checkpointing is counted.

A routing method may choose between variants of a step, such as a route with probability p and no
route with 1 - p. The step's cost is the mean over them. The cost of a variant is that of one
forward and one backward pass or, if a loss is given, of all that it computes and of its gradient.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.crossing import Crossing
from tread_zoo.diffusion import Objective, SamplingOptions, generate
from tread_zoo.diffusion.sampling import any_condition, blank
from tread_zoo.kernels import plain_forms, used_ops
from tread_zoo.routing import Method, Stack

Module = TypeVar("Module", bound=nn.Module)
Routes = Sequence[Crossing]
# (network, images [B,C,H,W], labels [B] or None, routes) -> the loss that a step differentiates. If
# the function has a `key`, functions with equal keys are traced once.
Loss = Callable[[Backbone, Tensor, Tensor | None, Routes], Tensor]


def count_flops(
    backbone: Backbone, *, batch: int = 1, routes: Routes = (), backward: bool = False
) -> int:
    """Return the FLOPs of a forward pass on `batch` images; with `backward`, of the backward pass,
    too. `routes` are the crossings of the pass: ranges of blocks that see fewer tokens."""
    return _trace(without_data(backbone), batch, routes, backward)


def training_flops(backbone: Backbone, routing: Method, num_steps: int) -> float:
    """Return the FLOPs per image, forward and backward, averaged over a run of `num_steps` steps.
    Where steps choose at random, each choice is weighted by its probability."""
    return mean_flops(stage_flops(backbone, routing, num_steps))


def mean_flops(stages: Sequence[tuple[range, float]]) -> float:
    """Return the mean FLOPs over all steps of `stages`, pairs of (steps, FLOPs)."""
    return sum(len(steps) * flops for steps, flops in stages) / sum(len(s) for s, _ in stages)


def stage_flops(
    backbone: Backbone, routing: Method, num_steps: int, loss: Loss | None = None
) -> list[tuple[range, float]]:
    """Return (steps, FLOPs per image) for each stage of a run; all steps of a stage cost the same.
    The FLOPs are those of one forward and one backward pass or, with a `loss`, of all that it
    computes and of its gradient."""
    meta, stages = without_data(backbone), dict[range, float]()
    for steps, weight, crossings in routing.variants(Stack.of(backbone), num_steps):
        flops = weight * _trace(meta, 1, crossings, True, loss)
        stages[steps] = stages.get(steps, 0.0) + flops
    return list(stages.items())


@dataclass(frozen=True)
class SamplingCost:
    """The cost of sampling one image: the number of calls of networks, those of a second network of
    guidance included, and the FLOPs."""

    evaluations: int
    flops: int


def count_sampling(
    backbone: Backbone,
    objective: Objective,
    options: SamplingOptions,
    *,
    weak: Backbone | None = None,
) -> SamplingCost:
    """Return the cost of sampling one image with `options`. Raises ValueError if these do not fit
    the network.

    `generate` runs with networks that compute nothing and count their calls, so guidance costs
    nothing at the noise levels where it is off. `weak` is the second network of a guidance that has
    one.
    """
    calls: list[int] = []

    def counted(network: Backbone) -> Backbone:
        meta = without_data(network)
        return blank(network, lambda n, routes: calls.append(_trace(meta, n, routes, False)))

    generate(
        counted(backbone), objective, options, indices=[0], labels=any_condition(backbone), seed=0,
        batch_size=1, weak=None if weak is None else counted(weak),
    )  # fmt: skip
    return SamplingCost(len(calls), sum(calls))


@torch.inference_mode(False)
def without_data(module: Module) -> Module:
    """Return a copy of a module on the meta device, without copying its weights."""
    empty: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()
    } | {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    return deepcopy(module, empty)


def _one_pass(network: Backbone, x: Tensor, y: Tensor | None, routes: Routes) -> Tensor:
    t = torch.empty(len(x), device=x.device)
    return network(x, t, y, routes=routes)


@torch.inference_mode(False)
def _trace(
    meta: Backbone, batch: int, routes: Routes, backward: bool, loss: Loss | None = None
) -> int:
    """Return the FLOPs of one call of `meta`, a network from `without_data`, on `batch` images with
    the crossings `routes`. If `loss` is given, it is called instead of the network. `backward` adds
    the gradient. Equal calls of networks with a name are traced once."""
    of = getattr(loss, "key", loss)
    key = (_structure(meta), batch, tuple(map(_kind, routes)), backward, of)
    if key in _TRACED and meta.name is not None:  # without a name the options are unknown
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


def _kind(crossing: Crossing) -> tuple[Any, ...]:
    """Return a hashable description of what the FLOPs under a `Crossing` depend on: its class and
    the values of its fields, where a tensor counts by its shape alone."""
    values = [getattr(crossing, field.name) for field in fields(crossing)]
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else repr(v) for v in values]
    return type(crossing), *shapes


def _structure(network: Backbone) -> tuple[Any, ...]:
    """Return a hashable description of what a network's FLOPs depend on: its class, its options and
    those of a routing method with weights, which blocks are recomputed, and the shapes of its
    parameters."""
    shapes = tuple((name, tuple(p.shape)) for name, p in network.named_parameters())
    options = json.dumps([network.config, network.routing_config])
    return type(network), options, network.checkpoint_blocks, shapes
