"""How a mixer walks along a curve over the tokens present, and what it does at gaps.

A block gets its tokens in raster order. A mixer that needs another order permutes them, mixes, and
restores the order. Under a route the walk is the full curve with the missing tokens deleted. A gap
is the number of steps along the full curve from one token present to the next, 1 for neighbours.
Scans, convolutions and shifts treat gaps in one of three ways:

    ignore   treat both sides of a gap as neighbours
    reset    convolutions and shifts see zeros beyond a gap; the state passes over it unchanged
    decay    as reset, and the state decays with the length of the gap

Extra tokens come before the grid's tokens and have no position on the curve. Context tokens come
before all others and start the walk in both directions, so a state reads them before the image.

B batch, N = h * w tokens of the grid, K tokens present, E extra tokens, L = E + K.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.contract.crossing import row_index
from tread_zoo.routing.orders import inverse, scan_order

Gaps = Literal["ignore", "reset", "decay"]
GAPS: tuple[str, ...] = get_args(Gaps)
PERIODS = {"serpentine8": 8}  # orders that differ between layers


@dataclass(frozen=True)
class Scan:
    """The order in which a mixer walks over the tokens present.

    Args:
        take: int64 [B * L], where L = E + K: for each step of the walk, the index of its token in
            the tokens flattened to [B * L, D]. None: the walk is in raster order.
        undo: the inverse permutation of `take`.
        places: int64 [B, K], ascending indices along the full curve of the K grid tokens present;
            None if no token is missing.
        num_extra: E, the number of extra tokens, which come first.
        num_context: number of context tokens among the extra tokens.
    """

    take: Tensor | None
    undo: Tensor | None
    places: Tensor | None
    num_extra: int
    num_context: int

    def permute(self, x: Tensor) -> Tensor:
        """Return tokens [B, L, D] in the order of the walk."""
        return x if self.take is None else _Permute.apply(x, self.take, self.undo)

    def restore(self, x: Tensor) -> Tensor:
        """Put tokens x [B, L, D], which are in the order of the walk, back into raster order."""
        return x if self.take is None else _Permute.apply(x, self.undo, self.take)

    def flip(self, x: Tensor) -> Tensor:
        """Change the order of x [B, L, ..] from that of the forward walk to that of the backward
        walk, or back."""
        n = self.num_context
        return torch.cat([x[:, :n], x[:, n:].flip(1)], dim=1) if n else x.flip(1)

    def gaps(self) -> tuple[Tensor, Tensor] | None:
        """Return each token's distance from the previous one along the full curve, as two tensors
        int64 [B, L]: for the forward and for the backward walk. Return None if no token is missing.

        The first token's distance is 1. Context tokens are neighbours of any token; other extra
        tokens come just before index 0 of the curve.
        """
        if self.places is None:
            return None
        steps = torch.diff(self.places, dim=1, prepend=torch.full_like(self.places[:, :1], -1))
        if self.num_extra == self.num_context:
            steps = torch.cat([torch.ones_like(steps[:, :1]), steps[:, 1:]], dim=1)
        gaps = F.pad(steps, (self.num_extra, 0), value=1)
        first = self.num_context + 1
        backward = torch.cat([torch.ones_like(gaps[:, :first]), gaps[:, first:].flip(1)], dim=1)
        return gaps, backward

    def segment_ids(self) -> tuple[Tensor, Tensor] | None:
        """Return segment numbers, one higher after each gap, as two tensors int64 [B, L]: for the
        forward and for the backward walk. Return None if no token is missing."""
        gaps = self.gaps()
        return None if gaps is None else ((gaps[0] > 1).cumsum(1), (gaps[1] > 1).cumsum(1))


def make_scan(layout: Any, name: str, index: int) -> Scan:
    """Return the walk of layer `index` over the tokens of a `Layout`. It is cached in the layout.

    Args:
        layout: a `tread_zoo.contract.crossing.Layout`.
        name: name of the scan order, a key of `ORDERS`.
        index: index of the layer, for orders that differ between layers.
    """
    index %= PERIODS.get(name, 1)
    return layout.cached(("scan", name, index), lambda: _make_scan(layout, name, index))


def _make_scan(layout: Any, name: str, index: int) -> Scan:
    extra, context, ids = layout.num_extra, layout.num_context, layout.ids
    if name == "raster":
        return Scan(None, None, ids, extra, context)
    positions, places = layout.positions(), None
    order = scan_order(name, layout.grid, index, positions.device)
    if ids is None:
        walk = order.expand(len(positions), -1)
    else:
        places, walk = inverse(order)[ids].sort(dim=1)
    take = row_index(walk, walk.shape[1], extra)
    return Scan(take, inverse(take), places, extra, context)


class _Permute(torch.autograd.Function):
    """Reorder tokens [B, L, D] by `take`. The backward pass gathers the gradient by `undo`, the
    inverse, which is faster than scatter-add."""

    @staticmethod
    def forward(x: Tensor, take: Tensor, undo: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, take).view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (undo,) = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, undo).view(grad.shape), None, None
