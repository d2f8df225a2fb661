"""Time grids: the noise levels of n sampling steps, from the highest (i = 0) to 0 (i = n).

    flow   u = 1 - i / n,  t = g(u),  t' = s t / (1 + (s - 1) t)       shift s (SD3, eq. 23)
           uniform       g(u) = u
           quadratic     g(u) = u^2                         small steps where the data is near
           logit_normal  logit g(u) = quantile of N(0, 1) at u         small steps at both ends
    EDM    rho           sigma^(1 / rho) falls evenly (arXiv 2206.00364, eq. 5)
           log           ln sigma falls evenly: the limit of a large rho
    DDPM   uniform       the steps fall evenly from 999 to 0, rounded

Every sampler runs on every grid of its objective (`Objective.levels`); `auto` is the first one
listed."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TimeGrid:
    """The name of a time grid, and its options: the shift of times, and the exponent rho of EDM's
    levels. `tread_zoo.config.SamplingGrid` documents the fields."""

    grid: str = "auto"
    shift: float = 1.0
    rho: float | str = "auto"

    def choose(self, names: tuple[str, ...], objective: str, uses: str = "") -> str:
        """Return the name of this grid; `auto` becomes the first of `names`.

        Args:
            names: the grids of the objective.
            objective: name of the objective.
            uses: the option, shift or rho, that this grid uses; "" for none.

        Raises:
            ValueError: the objective has no such grid, or an option is set that it does not use.
        """
        for field in ("shift", "rho"):
            value, default = getattr(self, field), getattr(TimeGrid, field)
            if field != uses and value != default:
                raise ValueError(
                    f"sampler.{field}={value} has no effect with objective={objective} and "
                    f"sampler.grid={self.grid}: leave it at {default}."
                )
        if self.grid not in ("auto", *names):
            raise ValueError(
                f"sampler.grid={self.grid!r} is not for objective={objective}; use one of "
                f"{', '.join(('auto', *names))}."
            )
        return names[0] if self.grid == "auto" else self.grid


DEFAULT_GRID = TimeGrid()


def shift_time(t: Tensor, shift: float) -> Tensor:
    """Return shift t / (1 + (shift - 1) t): t if shift = 1, closer to noise if shift > 1."""
    return shift * t / (1 + (shift - 1) * t)
