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
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid
from tread_zoo.diffusion.objective import Draw, Predict, check_draw, per_image, prediction
from tread_zoo.registry import register


@register("objective", "flow")
@dataclass(frozen=True, kw_only=True)
class FlowMatching:
    """The flow-matching objective, predicting the velocity.

    Args:
        time_distribution: of t in training, "uniform" or "logit_normal".
        logit_mean: mean of logit(t) for "logit_normal"; above 0 trains more on noisier images.
        logit_std: standard deviation of logit(t) for "logit_normal".

    Raises:
        ValueError: a mean or a standard deviation for "uniform", which would not use it.
    """

    time_distribution: Literal["uniform", "logit_normal"] = "uniform"
    logit_mean: float = 0.0
    logit_std: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        if self.time_distribution == "uniform" and (self.logit_mean, self.logit_std) != (0, 1):
            raise ValueError(
                f"objective.logit_mean={self.logit_mean}, objective.logit_std={self.logit_std} "
                "mean nothing to objective.time_distribution=uniform: leave them out, or set "
                "objective.time_distribution=logit_normal."
            )

    @property
    def initial_std(self) -> float:
        """Sampling starts from standard normal noise, at t = 1."""
        return 1.0

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        """Draw t [B] by `time_distribution`, then the noise, for a batch of `shape` [B,C,H,W]."""
        if self.time_distribution == "uniform":
            t = torch.rand(shape[0], generator=generator)
        else:
            logit = torch.randn(shape[0], generator=generator)
            t = torch.sigmoid(self.logit_mean + self.logit_std * logit)
        return Draw(noise=torch.randn(*shape, generator=generator), level=t)

    def noised(self, x: Tensor, draw: Draw) -> Tensor:
        """Return (1 - t) x + t noise, [B,C,H,W]."""
        check_draw(x, draw)
        t = per_image(draw.level)
        return (1 - t) * x + t * draw.noise

    def loss(self, predict: Predict, x: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """Return |v_predicted - (noise - x)|^2 of each image, averaged over C, H and W: [B]."""
        velocity = self.dx_dt(predict, self.noised(x, draw), draw.level)
        return (velocity - (draw.noise - x)).square().mean(dim=(1, 2, 3)), {}

    def dx_dt(self, predict: Predict, x_t: Tensor, level: Tensor) -> Tensor:
        """Return the velocity [B,C,H,W] at `level` = t [B]."""
        return prediction(predict(x_t, level), x_t.shape[1])

    def estimate(self, x_t: Tensor, dx_dt: Tensor, level: Tensor) -> Tensor:
        """Return x_t - t v [B,C,H,W] for the velocity v = `dx_dt` at `level` = t [B]."""
        return x_t - per_image(level) * dx_dt

    def signal(self, level: Tensor) -> Tensor:
        """Return 1 - t."""
        return 1 - level

    def noise(self, level: Tensor) -> Tensor:
        """Return t."""
        return level

    def levels(self, num_steps: int, grid: TimeGrid = DEFAULT_GRID) -> Tensor:
        """Return times from 1 to 0, even unless `grid` says otherwise: float64 [num_steps + 1].

        Raises:
            ValueError: a grid of another objective, or a rho.
        """
        t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        name = grid.choose(("uniform", "quadratic", "logit_normal"), "flow", unused="rho")
        if name == "quadratic":
            t = t.square()
        elif name == "logit_normal":
            t = torch.special.ndtri(t).sigmoid()
        return grid.shift * t / (1 + (grid.shift - 1) * t)
