"""The q-shift of Vision-RWKV (arXiv 2403.02308): a quarter of the channels from each neighbour.

A token takes one quarter of its channels from each of its left, right, upper and lower neighbours
on the grid. At the edge of the grid, the quarter of the missing neighbour is zero. Under a route, a
neighbour that bypasses the block counts as zero, too, or the nearest token present in that
direction takes its place. Extra tokens have no neighbours and stay as they are.

B batch, K tokens present, N = h * w tokens of the full grid, D width.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.mixers.base import check_width
from backbones.mixers.scan import ScanMixer
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing.scans import Gaps, Scan, make_scan

OPPOSITE = (1, 0, 3, 2)  # index of the opposite of left, right, up, down


class Neighbours(NamedTuple):
    """Which quarter of its channels each token takes from which neighbour.

    Both fields are int64 [B * K * 4] for the B * K tokens present, one entry for each quarter of a
    token. An entry is an index into the quarters of all tokens [B * K * 4, D / 4]; B * K * 4 stands
    for no neighbour.

    Args:
        sources: for each quarter, the one whose channels it takes.
        targets: for each quarter, the one that takes its channels, so sends back its gradient.
    """

    sources: Tensor
    targets: Tensor


def find_neighbours(layout: Layout, over_gaps: bool = False) -> Neighbours:
    """Return the `Neighbours` of the tokens that are present in `layout`. If a route left a
    neighbour out, the token has no neighbour on that side; with `over_gaps`, the nearest token
    present on that side takes its place."""
    height, width = layout.grid
    num_tokens, ids = height * width, layout.positions()
    (batch, num_kept), device = ids.shape, ids.device
    raster = torch.arange(num_tokens, device=device).view(height, width)
    around = F.pad(raster, (1, 1, 1, 1), value=num_tokens)  # N stands for outside
    sides = (around[1:-1, :-2], around[1:-1, 2:], around[:-2, 1:-1], around[2:, 1:-1])
    table = torch.stack(sides, dim=-1).view(num_tokens, 4)
    places = torch.full((batch, num_tokens + 1), num_kept, device=device)
    places = places.scatter(1, ids, torch.arange(num_kept, device=device).expand_as(ids))
    sought = _nearest_present(raster, ids) if over_gaps else table[ids]
    near = places.gather(1, sought.flatten(1)).view(batch, num_kept, 4)
    first = torch.arange(batch, device=device).view(-1, 1, 1) * num_kept
    quarters = torch.arange(4, device=device)

    def rows(tokens: Tensor) -> Tensor:
        inside = (first + tokens) * 4 + quarters
        return torch.where(tokens == num_kept, batch * num_kept * 4, inside).flatten()

    return Neighbours(rows(near), rows(near[..., list(OPPOSITE)]))


def _nearest_present(raster: Tensor, ids: Tensor) -> Tensor:
    """Return the raster positions [B, K, 4] of the nearest tokens present to the left, to the
    right, above and below each of K tokens; N if there is none.

    Args:
        raster: 0 … N - 1 as a grid [h, w].
        ids: raster positions of the tokens present [B, K].
    """
    (height, width), num_tokens = raster.shape, raster.numel()
    present = torch.zeros(len(ids), num_tokens, dtype=torch.bool, device=ids.device)
    present = present.scatter(1, ids, True).view(-1, height, width)
    before = torch.where(present, raster, -1)
    after = torch.where(present, raster, num_tokens)
    left = F.pad(before.cummax(dim=2).values, (1, 0), value=-1)[:, :, :-1]
    up = F.pad(before.cummax(dim=1).values, (0, 0, 1, 0), value=-1)[:, :-1]
    right = F.pad(after.flip(2).cummin(dim=2).values, (1, 0), value=num_tokens)[:, :, :-1].flip(2)
    down = F.pad(after.flip(1).cummin(dim=1).values, (0, 0, 1, 0), value=num_tokens)[:, :-1].flip(1)
    near = torch.stack([left, right, up, down], dim=-1).view(len(ids), num_tokens, 4)
    near = near.masked_fill(near < 0, num_tokens)
    return near.gather(1, ids.unsqueeze(-1).expand(-1, -1, 4))


class QShift(torch.autograd.Function):
    """Take each quarter of the channels from a neighbour: [B, K, D] -> [B, K, D]. The backward pass
    shifts the gradient in the opposite directions, by a gather instead of a scatter."""

    @staticmethod
    def forward(x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        return _take_quarters(x, sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (targets,) = ctx.saved_tensors
        return _take_quarters(grad, targets), None, None


def _take_quarters(x: Tensor, rows: Tensor) -> Tensor:
    quarters = x.reshape(-1, x.shape[-1] // 4)
    padded = torch.cat([quarters, quarters.new_zeros(1, quarters.shape[-1])])
    return padded.index_select(0, rows).view(x.shape)


@dataclass(frozen=True)
class GridWalk:
    """What a `ShiftingMixer` must know about the tokens present.

    Args:
        scan: their order along a curve.
        neighbours: their neighbours on the grid.
        num_tokens: N, the number of tokens of the full grid.
    """

    scan: Scan
    neighbours: Neighbours
    num_tokens: int


class ShiftingMixer(ScanMixer):
    """Base of mixers that take channels from neighbours on the grid (`q_shift`) and scan along a
    curve: `forward(x, walk: GridWalk)`.

    Args:
        gaps: what happens where a route left tokens out. `ignore`: the nearest tokens present count
            as neighbours. `reset`: the shift takes zeros for a neighbour that was left out.
            `decay`: as `reset`, and the scan also decays with the length of the gap.
        scan: `scan_order` and `index`, see `ScanMixer`.
    """

    default_selector: ClassVar[str] = "blocks"

    def __init__(self, hidden_size: int, *, gaps: Gaps = "decay", **scan: Any) -> None:
        check_width(hidden_size, 4, "the number of neighbours")
        super().__init__(gaps=gaps, **scan)
        if self.depends_on == ("order",):
            self.depends_on = ("order", "ids")

    def prepare(self, layout: Layout) -> GridWalk:
        scan = make_scan(layout, self.scan_order, self.index)
        over_gaps = self.gaps == "ignore"
        key = ("neighbours", over_gaps)
        neighbours = layout.cached(key, lambda: find_neighbours(layout, over_gaps))
        return GridWalk(scan, neighbours, layout.grid[0] * layout.grid[1])


def q_shift(x: Tensor, neighbours: Neighbours, num_extra: int = 0) -> Tensor:
    """Return tokens x [B, E + K, D] with each quarter of the channels taken from a neighbour (zero
    if there is none). The first E = `num_extra` tokens stay as they are."""
    extra, x = x[:, :num_extra], x[:, num_extra:]
    out: Tensor = QShift.apply(x, *neighbours)
    return torch.cat([extra, out], dim=1) if num_extra else out


def shift_and_blend(x: Tensor, walk: GridWalk, share: Tensor) -> list[Tensor]:
    """Return x * own + q_shift(x) * (1 - own) for each row `own` [D] of `share`. Tokens x are
    [B, E + K, D]; `walk` has their neighbours."""
    shifted = q_shift(x, walk.neighbours, walk.scan.num_extra)
    away = x - shifted
    return [torch.addcmul(shifted, away, row) for row in share.to(x.dtype).unbind()]
