"""How a mixer walks over the tokens present: along a curve, and what it makes of the gaps.

The tokens of a block always stand in raster order. A mixer that wants another order permutes them,
mixes, and puts them back; no block hands permuted tokens to the next. On some of the tokens the
walk is the full curve with the missing ones deleted, and a gap is the number of steps of the full
curve from one token present to the next, 1 for neighbours.

Three ways to deal with gaps, which scans, convolutions and shifts share:

    ignore   run over a gap as if its sides were neighbours
    reset    convolutions and shifts see zeros beyond a gap; the state runs over it
    decay    as reset, and the state decays by the length of the gap

A port of routing to a scan that leaves the kept ids in the order in which they were drawn walks
over them in no order. `unsorted` is that port, to compare with and for nothing else: all tokens in
raster order where none are missing, else the kept tokens in an order drawn from their ids, which
all layers share.

Extra tokens stand ahead of the grid's, and have no place on the curve. A context, the first of
them, comes ahead of the walk backwards too: a state has read it before it meets the image.

B batch, N = h * w tokens of the grid, K tokens present, E extra tokens ahead of them, L = E + K.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.errors import unknown_name
from tread_zoo.routing.orders import ORDERS, inverse, scan_order

Gaps = Literal["ignore", "reset", "decay"]
GAPS: tuple[str, ...] = get_args(Gaps)
PERIODS = {"serpentine8": 8}  # orders that differ between layers
UNSORTED = "unsorted"
PRIME = 2**31 - 1


@dataclass(frozen=True)
class Scan:
    """A walk over the tokens present.

    Args:
        take: int64 [B * L], rows of the flattened tokens in the order of the walk; None: as they
            stand.
        undo: its inverse.
        places: int64 [B, K] or None, place of each token of the walk along the full curve,
            ascending; None if all are present.
        num_extra: E.
        num_context: how many of these are a context's.
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
        """Return tokens [B, L, D] of a walk in raster order."""
        return x if self.take is None else _Permute.apply(x, self.undo, self.take)

    def flip(self, x: Tensor) -> Tensor:
        """Return values [B, L, ..] of the walk for the walk backwards, or the other way round."""
        n = self.num_context
        return torch.cat([x[:, :n], x[:, n:].flip(1)], dim=1) if n else x.flip(1)

    def gaps(self) -> Tensor | None:
        """Return int64 [B, L], the steps from the token before, 1 for the first; None if all
        tokens are present. A context is the neighbour of any token, other extra tokens are those of
        place 0."""
        if self.places is None:
            return None
        steps = torch.diff(self.places, dim=1, prepend=torch.full_like(self.places[:, :1], -1))
        if self.num_extra == self.num_context:
            steps = torch.cat([torch.ones_like(steps[:, :1]), steps[:, 1:]], dim=1)
        return F.pad(steps, (self.num_extra, 0), value=1)

    def gaps_both_ways(self) -> tuple[Tensor, Tensor] | None:
        """Return the gaps of the walk, and of the walk taken backwards; None if there are none."""
        gaps = self.gaps()
        return None if gaps is None else (gaps, reverse_gaps(gaps, self.num_context))

    def segment_ids_both_ways(self) -> tuple[Tensor, Tensor] | None:
        """Return the segments of the walk, and of the walk taken backwards; None without gaps."""
        gaps = self.gaps_both_ways()
        return None if gaps is None else ((gaps[0] > 1).cumsum(1), (gaps[1] > 1).cumsum(1))

    def segment_ids(self) -> Tensor | None:
        """Return int64 [B, L], one higher after every gap; None if all tokens are present."""
        gaps = self.gaps()
        return None if gaps is None else (gaps > 1).cumsum(dim=1)


def reverse_gaps(gaps: Tensor, num_context: int = 0) -> Tensor:
    """Return the gaps [B, L] of the walk taken backwards; a context is ahead of both."""
    ahead = num_context + 1
    return torch.cat([torch.ones_like(gaps[:, :ahead]), gaps[:, ahead:].flip(1)], dim=1)


def make_scan(layout: Any, name: str, index: int) -> Scan:
    """Return the walk of layer `index` over the tokens of a `Layout`; made once for a layout.

    Args:
        layout: with `grid`, `num_extra`, `num_context`, `ids`, `positions()` and `cache`.
        name: in `ORDERS`, or `unsorted`.
        index: of the layer, for orders that differ between layers.
    """
    key = ("scan", name, index % PERIODS.get(name, 1))
    if key not in layout.cache:
        layout.cache[key] = _make_scan(layout, name, key[2])
    out: Scan = layout.cache[key]
    return out


def _make_scan(layout: Any, name: str, index: int) -> Scan:
    extra, context, ids = layout.num_extra, layout.num_context, layout.ids
    if name == "raster" or (name == UNSORTED and ids is None):
        return Scan(None, None, ids, extra, context)
    positions, places = layout.positions(), None
    batch, device = len(positions), positions.device
    if name == UNSORTED:
        walk = _shuffle(ids)
    elif ids is None:
        walk = scan_order(name, layout.grid, index, device).expand(batch, -1)
    else:
        ranks = inverse(scan_order(name, layout.grid, index, device))[ids]
        places, walk = ranks.sort(dim=1)
    ahead = torch.arange(extra, device=device).expand(batch, extra)
    within = torch.cat([ahead, walk + extra], dim=1)
    first = torch.arange(batch, device=device)[:, None] * within.shape[1]
    take = (within + first).flatten()
    return Scan(take, inverse(take), places, extra, context)


def check_scan(scan_order: str, gaps: Gaps) -> None:
    """Raise `ValueError` for an unknown order, or for `unsorted` with gaps that need tokens in
    order."""
    if scan_order not in (*ORDERS, UNSORTED):
        raise unknown_name("scan_order", scan_order, (*ORDERS, UNSORTED))
    if scan_order == UNSORTED and gaps != "ignore":
        raise ValueError(
            f"gaps={gaps} needs tokens in order, and scan_order=unsorted has none; use gaps=ignore."
        )


def _shuffle(ids: Tensor) -> Tensor:
    """Return a permutation [B, K] that looks random and depends on the kept ids [B, K] alone.

    A sum over the ids, each with a weight of its own, makes a sample's key; the tokens are ranked
    by key * (id + 1)^2 mod p, p prime and all numbers below 2^31, so that products fit in int64.
    """
    weights = (torch.arange(ids.shape[1], device=ids.device) + 1) * 1_103_515_245 % PRIME
    key = ((ids + 1) * weights % PRIME).sum(dim=1, keepdim=True) % PRIME
    squares = (ids + 1) * (ids + 1) % PRIME
    return ((key + 12_345) % PRIME * squares % PRIME).argsort(dim=1)


class _Permute(torch.autograd.Function):
    """Reorder rows of tokens [B, L, D]; the gradient is the opposite gather, not a sum by row."""

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
