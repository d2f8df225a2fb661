"""Time grids: how the levels of sampling are spread between the first one and 0.

    flow   u = 1 - i / n,  t = g(u),  t' = s t / (1 + (s - 1) t)       shift s (SD3, eq. 23)
           uniform       g(u) = u
           quadratic     g(u) = u^2                         small steps where the data is near
           logit_normal  logit g(u) = quantile of N(0, 1) at u         small steps at both ends
    EDM    rho           sigma^(1 / rho) falls evenly (arXiv 2206.00364, eq. 5)
           log           ln sigma falls evenly: what rho grows towards

A grid belongs to no sampler: every sampler runs on every grid of its objective. The objective knows
which grids its level has (`Objective.levels`); `auto` is the first named for it above.
"""

from dataclasses import dataclass

from tread_zoo.diffusion.checks import check_number
from tread_zoo.errors import unknown_name

FLOW_GRIDS = ("uniform", "quadratic", "logit_normal")
EDM_GRIDS = ("rho", "log")


@dataclass(frozen=True, kw_only=True)
class TimeGrid:
    """A choice of grid.

    Args:
        grid: a name above, or `auto`.
        shift: s, of flow matching; above 1 spends more steps on the noisier images, as larger
            images need. 1 leaves the grid as it is.
        rho: of EDM's grid `rho`; `auto` is the objective's own.

    Raises:
        ValueError: an unknown name, or a number that is not positive.
    """

    grid: str = "auto"
    shift: float = 1.0
    rho: float | str = "auto"

    def __post_init__(self) -> None:
        if self.grid not in ("auto", *FLOW_GRIDS, *EDM_GRIDS):
            raise unknown_name("sampler.grid", self.grid, ("auto", *FLOW_GRIDS, *EDM_GRIDS))
        check_number("sampler.shift", self.shift, default=1.0, above=0.0)
        if self.rho != "auto":
            check_number("sampler.rho", self.rho, default="auto", above=0.0)

    def choose(self, known: tuple[str, ...], objective: str) -> str:
        """Return the grid's name among those that `objective` has.

        Raises:
            ValueError: it has no such grid.
        """
        if self.grid == "auto":
            return known[0]
        if self.grid not in known:
            raise ValueError(
                f"sampler.grid={self.grid!r} is no grid of objective={objective}; use one of "
                f"{', '.join(('auto', *known))}."
            )
        return self.grid

    def refuse(self, field: str, objective: str, instead: str) -> None:
        """Raise `ValueError` if `field` (shift or rho) is set where it would mean nothing."""
        value, default = getattr(self, field), getattr(TimeGrid, field)
        if value != default:
            raise ValueError(
                f"sampler.{field}={value} means nothing to objective={objective}, {instead}; "
                f"use sampler.{field}={default}."
            )


DEFAULT_GRID = TimeGrid()
