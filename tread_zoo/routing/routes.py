"""A concrete route (TREAD, arXiv 2501.04765): blocks `start … end-1` see some of the tokens.

Tokens that are not kept leave the sequence before block `start` and rejoin it, unchanged, before
block `end`, unless `Bypass` says otherwise. A dropped path (SPRINT, arXiv 2510.21986) is the limit
in which every token bypasses.

B batch, N tokens of the grid in raster order, K kept tokens, E extra tokens (time, label) that
stand before the grid's and are never routed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def num_kept_tokens(num_tokens: int, selection_rate: float) -> int:
    """Return K = N - floor(N * rate): `selection_rate` is the fraction that bypasses.

    Raises:
        ValueError: `selection_rate` is outside [0, 1).
    """
    if not 0.0 <= selection_rate < 1.0:
        raise ValueError(
            f"selection_rate={selection_rate} is outside [0, 1): it is the fraction of tokens that "
            "bypass the routed blocks; 0.5 is TREAD's default, routing=none switches routing off."
        )
    # 100 * 0.29 is 28.999… in floating point, so the last digits are rounded away first. TREAD's
    # released code does not, and keeps one token more at such rates.
    return num_tokens - math.floor(round(num_tokens * selection_rate, 9))


@dataclass(frozen=True)
class Bypass:
    """What happens to the tokens that a route does not keep.

    Args:
        carry_from: they rejoin as they were before this block, 0 … start; None: before `start`.
        detach: they rejoin without gradient, in every stream and in long skips made within the
            route. Skips from before the route keep their gradient.
        sparsify: False: they run through the blocks with the others, and the result is discarded at
            `end`. This costs as much as the dense network.
    """

    carry_from: int | None = None
    detach: bool = False
    sparsify: bool = True


UNCHANGED = Bypass()


@dataclass(frozen=True)
class Route:
    """Blocks `start … end-1` run on the tokens `ids` alone.

    Args:
        start: first routed block, 0 … depth-1.
        end: first block that sees all tokens again, start+1 … depth.
        ids: int64 [B, K], raster positions of the kept tokens, strictly ascending in each row.
            Checking them on a GPU waits for it: make routes on the CPU and move them with `to`.
        bypass: what happens to the others.

    Raises:
        ValueError: the range is empty, or the ids are not as above.
    """

    start: int
    end: int
    ids: Tensor
    bypass: Bypass = UNCHANGED

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"route start={self.start}, end={self.end} is empty or negative.")
        if self.ids.dtype != torch.int64 or self.ids.ndim != 2 or self.ids.shape[1] == 0:
            raise ValueError(
                f"route ids are {self.ids.dtype} {list(self.ids.shape)}; "
                "they must be int64 [batch, kept tokens] with at least one kept token."
            )
        if bool((self.ids[:, 1:] <= self.ids[:, :-1]).any()) or bool((self.ids[:, :1] < 0).any()):
            raise ValueError(
                "route ids must be strictly ascending raster positions in every row; "
                "sort them (scans, convolutions and shifts depend on the order)."
            )

    @property
    def num_kept(self) -> int:
        """K, the number of tokens that the routed blocks see."""
        return self.ids.shape[1]

    @classmethod
    def of_sorted(cls, start: int, end: int, ids: Tensor, bypass: Bypass = UNCHANGED) -> "Route":
        """Return a route without checking its ids, which would wait for a GPU."""
        route = object.__new__(cls)
        for name, value in (("start", start), ("end", end), ("ids", ids), ("bypass", bypass)):
            object.__setattr__(route, name, value)
        return route

    def to(self, device: torch.device | str) -> "Route":
        """Return the same route with its ids on `device`; the values are not checked again."""
        ids = self.ids.to(device, non_blocking=True)
        return Route.of_sorted(self.start, self.end, ids, self.bypass)


@dataclass(frozen=True)
class PathDrop:
    """Blocks `start … end-1`, one of `Backbone.fused_ranges`, do not run: every token bypasses
    them, extra tokens included.

    Every stream, and every skip from within the range, has its value at the start. The fusion at
    the end still runs, with an update of zero. Guidance uses it as a weak branch.
    """

    start: int
    end: int

    def to(self, device: torch.device | str) -> "PathDrop":
        """Return itself: it holds no tensor; a `Route` in the same list may."""
        return self


def row_index(ids: Tensor, num_tokens: int, num_extra: int) -> Tensor:
    """Return the rows int64 [B * (E + K)] of extra tokens and of ids [B, K] in a flattened stream
    [B * (E + N), D]."""
    batch, device = ids.shape[0], ids.device
    extra = torch.arange(num_extra, device=device).expand(batch, num_extra)
    within = torch.cat([extra, ids + num_extra], dim=1)
    first = torch.arange(batch, device=device)[:, None] * (num_extra + num_tokens)
    return (within + first).flatten()


def check_routes(
    routes: Sequence[Route | PathDrop],
    *,
    num_blocks: int,
    num_tokens: int,
    batch: int,
    fused_ranges: Sequence[tuple[int, int]] = (),
    masked_ranges: Sequence[tuple[int, int]] = (),
) -> tuple[Route | PathDrop, ...]:
    """Return `routes` as a tuple if a network of this size can run them one after the other.

    Args:
        routes: concrete routes and dropped paths.
        num_blocks, num_tokens, batch: the network's depth and grid, and the input's size.
        fused_ranges, masked_ranges: ranges with a fusion or with mask tokens. If there are any,
            routes are possible there only.

    Raises:
        ValueError: a route is outside the depth, overlaps another or is out of order, has another
            batch size or ids beyond the grid (checked on the CPU only), or is not one of the fused
            or masked ranges; or `carry_from` is a block where tokens are missing.
    """
    routes = tuple(routes)
    previous_end = 0
    check_carries([route for route in routes if isinstance(route, Route)])
    for route in routes:
        kind = "route" if isinstance(route, Route) else "path drop"
        where = f"{kind} [{route.start}, {route.end})"
        if route.end > num_blocks:
            raise ValueError(f"{where} reaches outside the depth: there are {num_blocks} blocks.")
        if route.start < previous_end:
            raise ValueError(
                f"{where} starts before the previous one ends ({previous_end}): "
                "routes must be disjoint and in ascending order."
            )
        _check_range(where, route, fused_ranges, masked_ranges)
        if not isinstance(route, PathDrop):
            _check_ids(where, route.ids, num_tokens, batch)
        previous_end = route.end
    return routes


def check_ranges(
    ranges: Sequence[Sequence[int]], *, num_blocks: int
) -> tuple[tuple[int, int], ...]:
    """Return block ranges [start, end) as pairs if they are disjoint, ascending and in the depth.

    Raises:
        ValueError: they are not.
    """
    pairs = tuple((int(start), int(end)) for start, end in ranges)
    if any(not 0 <= start < end <= num_blocks for start, end in pairs) or any(
        after[0] < before[1] for before, after in pairwise(pairs)
    ):
        raise ValueError(
            f"ranges {_listed(pairs)} must be disjoint, ascending, not empty, and within the "
            f"{num_blocks} blocks."
        )
    return pairs


def bypassed_tokens(
    routes: Sequence[Route | PathDrop],
    batch: int,
    num_tokens: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return bool [B, N] on the device of the routes: True where some route drops the token."""
    away = torch.zeros(batch, num_tokens, dtype=torch.bool, device=device)
    for route in routes:
        if isinstance(route, Route):
            away |= torch.ones_like(away).scatter(1, route.ids, False)
    return away


def check_carries(routes: Sequence[Any]) -> None:
    """Raise `ValueError` if a route, or a plan, carries from within a route or from after its
    start, where tokens are missing."""
    for route in routes:
        carry = route.bypass.carry_from
        inside = carry is not None and any(r.start < carry < r.end for r in routes)
        if carry is not None and (inside or not 0 <= carry <= route.start):
            raise ValueError(
                f"carry_from={carry} of the route [{route.start}, {route.end}) must be a block in "
                f"0 … {route.start} outside every route, where all tokens are present; the start "
                "and the end of an earlier route count as outside."
            )


def _listed(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"[{start}, {end})" for start, end in ranges)


def _check_range(
    where: str,
    route: Route | PathDrop,
    fused_ranges: Sequence[tuple[int, int]],
    masked_ranges: Sequence[tuple[int, int]],
) -> None:
    trained = fused_ranges if isinstance(route, PathDrop) else (*fused_ranges, *masked_ranges)
    if (route.start, route.end) in trained:
        return
    if trained:
        raise ValueError(
            f"{where} is none of the ranges at whose end this network fuses or masks tokens: "
            f"{_listed(trained)}. Route there, or train with routing.rejoin=replace."
        )
    if isinstance(route, PathDrop):
        raise ValueError(
            f"{where}: this network has no fusion, so it has not learned to skip the path. "
            "Train with routing.rejoin=project, or call backbone.add_fusions first."
        )


def _check_ids(where: str, ids: Tensor, num_tokens: int, batch: int) -> None:
    if ids.shape[0] != batch:
        raise ValueError(f"{where} has ids for a batch of {ids.shape[0]}, not {batch}.")
    readable = bool(batch) and ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if ids.shape[1] > num_tokens or (readable and int(ids[:, -1].max()) >= num_tokens):
        raise ValueError(f"{where} keeps ids beyond the grid's {num_tokens} tokens.")
