"""FLOPs of the code that runs, counted by torch's flop counter on the meta device.

Matrix products are counted by torch, scans by the formulas that `tread_zoo.kernels` registers;
elementwise work is not counted, as is usual. A multiply-add is 2 FLOPs.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.backbone import Backbone
from tread_zoo.diffusion import Objective, SamplingOptions, default_labels, generate
from tread_zoo.routing import Route


def count_flops(
    backbone: Backbone, *, batch: int = 1, routes: Sequence[Route] = (), backward: bool = False
) -> int:
    """Return the FLOPs of one forward pass, or of forward and backward, of `batch` images.

    Nothing is computed: a copy of the network without data is traced.
    """
    return _trace(deepcopy(backbone).to("meta").requires_grad_(backward), batch, routes, backward)


@dataclass(frozen=True)
class SamplingCost:
    """What one image costs from noise to data.

    evaluations: calls of a network, of the strong and the weak one.
    flops: of all of them.
    """

    evaluations: int
    flops: int


def count_sampling(
    backbone: Backbone,
    objective: Objective,
    options: SamplingOptions,
    *,
    weak: Backbone | None = None,
) -> SamplingCost:
    """Return what sampling one image with `options` costs.

    `generate` itself runs, with networks whose forward does nothing but say what it was called
    with: so a branch that a level or a scale leaves out is not counted. Each kind of call (which
    network, which routes) is traced once, as `count_flops` does.

    Raises:
        ValueError: options that do not fit the network or the objective.
    """
    calls: list[int] = []
    generate(
        _stand_in(backbone, calls),
        objective,
        options,
        indices=[0],
        labels=default_labels([0], backbone.num_classes),
        seed=0,
        batch_size=1,
        weak=None if weak is None else _stand_in(weak, calls),
    )
    return SamplingCost(len(calls), sum(calls))


def _stand_in(network: Backbone, calls: list[int]) -> Backbone:
    """Return `network` with a forward that appends its FLOPs to `calls` and computes nothing."""
    meta = deepcopy(network).to("meta").requires_grad_(False)
    traced: dict[Any, int] = {}

    def forward(x: Tensor, t: Tensor, y: Tensor | None = None, *, routes: Any = ()) -> Tensor:
        kind = tuple((type(r), r.start, r.end, getattr(r, "num_kept", None)) for r in routes)
        if kind not in traced:
            traced[kind] = _trace(meta, len(x), routes, False)
        calls.append(traced[kind])
        return x.new_zeros(len(x), network.out_channels, *network.input_size)

    stand_in = copy(network)
    stand_in.forward = forward  # type: ignore[method-assign]
    return stand_in


def _trace(meta: Backbone, batch: int, routes: Sequence[Any], backward: bool) -> int:
    """Return the FLOPs of a network that lies on the meta device."""
    x = torch.empty(batch, meta.in_channels, *meta.input_size, device="meta")
    t = torch.empty(batch, device="meta")
    y = torch.empty(batch, dtype=torch.int64, device="meta") if meta.num_classes else None
    moved = [route.to("meta") if isinstance(route, Route) else route for route in routes]
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        out = meta(x, t, y, routes=moved)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()
