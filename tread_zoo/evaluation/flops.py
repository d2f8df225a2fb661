"""FLOPs of the code that runs, counted by torch's flop counter on the meta device.

Matrix products are counted by torch, scans by the formulas that `tread_zoo.kernels` registers;
elementwise work is not counted, as is usual. A multiply-add is 2 FLOPs.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.backbone import Backbone
from tread_zoo.routing import PathDrop, Route


def count_flops(
    backbone: Backbone,
    *,
    batch: int = 1,
    routes: Sequence[Route | PathDrop] = (),
    backward: bool = False,
) -> int:
    """Return the FLOPs of one forward pass, or of forward and backward, of `batch` images.

    Nothing is computed: a copy of the network without data is traced.
    """
    copy = deepcopy(backbone).to("meta").requires_grad_(backward)
    x = torch.empty(batch, copy.in_channels, *copy.input_size, device="meta")
    t = torch.empty(batch, device="meta")
    y = torch.empty(batch, dtype=torch.int64, device="meta") if copy.num_classes else None
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        out = copy(x, t, y, routes=[route.to("meta") for route in routes])
        if backward:
            out.sum().backward()
    return counter.get_total_flops()
