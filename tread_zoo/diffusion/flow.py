"""Flow matching on straight lines, as in SiT (arXiv 2401.08740) and SD3 (arXiv 2403.03206).

With clean data x, noise eps ~ N(0, I) and t in [0, 1], noise at t = 1:

    x_t   = (1 - t) x + t eps
    v     = dx_t/dt = eps - x           the network predicts it; its mean given x_t drives the ODE
    loss  = |F(x_t; t) - v|^2
    x     = x_t - t v                   the estimate of the clean data
    t ~ U(0, 1), or logit(t) ~ N(logit_mean, logit_std^2)                     (SD3, section 3.1)

Dimensions: B batch, C channels, H height, W width. A level is t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tread_zoo.diffusion.checks import check_num_steps, check_number
from tread_zoo.diffusion.grids import DEFAULT_GRID, FLOW_GRIDS, TimeGrid
from tread_zoo.diffusion.objective import (
    Draw,
    Network,
    check_draw,
    check_shape,
    per_sample,
    prediction,
)
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register

TIME_DISTRIBUTIONS = ("logit_normal", "uniform")


@register("objective", "flow")
@dataclass(frozen=True, kw_only=True)
class FlowMatching:
    """The flow-matching objective, predicting the velocity.

    Args:
        time_distribution: of t in training, "uniform" or "logit_normal".
        logit_mean: mean of logit(t) for "logit_normal"; above 0 trains more on noisier images.
        logit_std: standard deviation of logit(t) for "logit_normal".

    Raises:
        ValueError: an unknown distribution, a number that is not finite, a logit_std that is not
            positive, or a mean or a deviation given to "uniform", which would not use it.
    """

    name: ClassVar[str] = "flow"

    time_distribution: str = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0

    def __post_init__(self) -> None:
        if self.time_distribution not in TIME_DISTRIBUTIONS:
            raise unknown_name(
                "objective.time_distribution", self.time_distribution, TIME_DISTRIBUTIONS
            )
        check_number("objective.logit_mean", self.logit_mean, default=0.0)
        check_number("objective.logit_std", self.logit_std, default=1.0, above=0.0)
        if self.time_distribution == "uniform" and (self.logit_mean, self.logit_std) != (0, 1):
            raise ValueError(
                f"logit_mean={self.logit_mean}, logit_std={self.logit_std} mean nothing to "
                "time_distribution='uniform'. Drop them, or use time_distribution='logit_normal'."
            )

    @property
    def initial_std(self) -> float:
        """Sampling starts from standard normal noise, at t = 1."""
        return 1.0

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        """Draw t [B] by `time_distribution`, then the noise, for a batch of `shape` [B,C,H,W]."""
        check_shape(shape)
        if self.time_distribution == "uniform":
            t = torch.rand(shape[0], generator=generator)
        else:
            logit = torch.randn(shape[0], generator=generator)
            t = torch.sigmoid(self.logit_mean + self.logit_std * logit)
        return Draw(noise=torch.randn(*shape, generator=generator), level=t)

    def noised(self, x: Tensor, draw: Draw) -> Tensor:
        """Return (1 - t) x + t noise, [B,C,H,W]."""
        check_draw(x, draw)
        t = per_sample(draw.level)
        return (1 - t) * x + t * draw.noise

    def loss(self, network: Network, x: Tensor, draw: Draw) -> Tensor:
        """Return |v_network - (noise - x)|^2 of each sample, averaged over C, H and W: [B]."""
        velocity = self.drift(network, self.noised(x, draw), draw.level)
        return (velocity - (draw.noise - x)).square().mean(dim=(1, 2, 3))

    def denoise(self, network: Network, x_t: Tensor, level: Tensor) -> Tensor:
        """Return x_t - t v [B,C,H,W] at `level` = t [B]."""
        return self.estimate(x_t, self.drift(network, x_t, level), level)

    def drift(self, network: Network, x_t: Tensor, level: Tensor) -> Tensor:
        """Return the velocity dx/dt [B,C,H,W] at `level` = t [B]."""
        return prediction(network(x_t, level), x_t.shape[1])

    def estimate(self, x_t: Tensor, drift: Tensor, level: Tensor) -> Tensor:
        """Return x_t - t v [B,C,H,W] for the velocity v = `drift` at `level` = t [B]."""
        return x_t - per_sample(level) * drift

    def signal(self, level: Tensor) -> Tensor:
        """Return 1 - t."""
        return 1 - level

    def noise(self, level: Tensor) -> Tensor:
        """Return t."""
        return level

    def levels(self, num_steps: int, grid: TimeGrid = DEFAULT_GRID) -> Tensor:
        """Return times from 1 to 0, even unless `grid` spreads them: float64 [num_steps + 1].

        Raises:
            ValueError: no steps, a grid that is not one of `FLOW_GRIDS`, or a rho.
        """
        check_num_steps(num_steps)
        grid.refuse("rho", self.name, "whose times crowd by sampler.grid and sampler.shift")
        t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        shape = grid.choose(FLOW_GRIDS, self.name)
        if shape == "quadratic":
            t = t.square()
        elif shape == "logit_normal":
            t = torch.special.ndtri(t).sigmoid()
        return grid.shift * t / (1 + (grid.shift - 1) * t)
