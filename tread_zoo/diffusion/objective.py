"""The interface of an objective: noise levels, scalings, targets and loss weights.

    x -> `draw` picks the noise and its level -> network -> `loss`                   (training)
    noise -> a sampler integrates `dx_dt` over `levels`, from high to 0 -> x         (sampling)

A level t is sigma for EDM and DDPM and the time for flow matching. It grows with the noise, and 0
is clean data. The probability-flow ODE is written in the level itself: dx/dt is dx/dsigma for EDM.
Most samplers need nothing else; some also use `signal` and `noise`: x_t = signal(t) x + noise(t) n.

Dimensions: B batch, C data channels, C_out output channels of the network (C or 2C), H height,
W width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid
from tread_zoo.seeding import ImageGenerator

# (x [B,C,H,W], noise label [B] of order 1) -> [B,C_out,H,W]; condition and routes are bound.
# Keywords: `r` [B], see `Backbone.forward`, and y=None for the prediction without a condition.
Predict = Callable[..., Tensor]


@dataclass(frozen=True)
class Draw:
    """The random numbers of one loss: `noise` [B,C,H,W], standard normal, and its `level` [B].

    end: for MeanFlow, the lower end [B] of an interval of levels whose upper end is `level`.
    token_levels: a level for each token [B,N]; None if all tokens of an image have its `level`.
    """

    noise: Tensor
    level: Tensor
    end: Tensor | None = None
    token_levels: Tensor | None = None

    def to(self, device: torch.device | str) -> "Draw":
        """Return the same random numbers on `device`."""
        tensors = (self.noise, self.level, self.end, self.token_levels)
        return Draw(*(None if each is None else each.to(device) for each in tensors))  # type: ignore[arg-type]


class Objective(Protocol):
    """The interface of an objective, which training and sampling use.

    Only some samplers use `estimate`, `signal` and `noise`. An optional method
    `check_training(backbone, label_dropout, routing)` raises ValueError if one of these does not
    suit the objective.
    """

    @property
    def initial_std(self) -> float:
        """Standard deviation of the noise that sampling starts from, at `levels(n)[0]`."""

    def draw(self, shape: Sequence[int], generator: ImageGenerator) -> Draw:
        """Return random levels and noise for a batch of `shape` [B,C,H,W]: float32, on the
        generator's device."""

    def loss(self, predict: Predict, x: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss per image [B], and other tensors by name, whose means are logged. This
        must also run on the meta device, where FLOPs are counted."""

    def dx_dt(self, predict: Predict, x_t: Tensor, level: Tensor) -> Tensor:
        """Return dx/dt [B,C,H,W] of the probability-flow ODE at `level` [B] > 0."""

    def estimate(self, x_t: Tensor, dx_dt: Tensor, level: Tensor) -> Tensor:
        """Return the estimate [B,C,H,W] of the clean data behind `x_t`, whose slope is `dx_dt`."""

    def signal(self, level: Tensor) -> Tensor:
        """Return the factor of the clean data in x_t at `level`, in the shape of `level`."""

    def noise(self, level: Tensor) -> Tensor:
        """Return the factor of the noise in x_t at `level`, in the shape of `level`."""

    def levels(self, num_steps: int, grid: TimeGrid = DEFAULT_GRID) -> Tensor:
        """Return the float64 levels [num_steps + 1], which fall strictly and end at exactly 0.

        Raises:
            ValueError: this objective has no such grid.
        """


class AdditiveNoise:
    """Base of objectives whose level t is the factor of the noise: x_t = signal(t) x + t noise,
    with signal(t) = 1 or 1 - t."""

    def noised(self, x: Tensor, draw: Draw) -> Tensor:
        """Return the noisy data signal(t) x + t noise [B,C,H,W], with the noise and t of `draw`."""
        check_draw(x, draw)
        return per_image(self.signal(draw.level)) * x + per_image(draw.level) * draw.noise

    def estimate(self, x_t: Tensor, dx_dt: Tensor, level: Tensor) -> Tensor:
        """Return the clean estimate x_t - t dx/dt [B,C,H,W] at `level` = t [B]."""
        return x_t - per_image(level) * dx_dt

    def signal(self, level: Tensor) -> Tensor:
        """Return ones in the shape of `level`: the data is not scaled."""
        return torch.ones_like(level)

    def noise(self, level: Tensor) -> Tensor:
        """Return t, the level itself."""
        return level


def prediction(output: Tensor, num_channels: int) -> Tensor:
    """Return the first `num_channels` channels of a network's output, in float32 or float64.

    A network with a learned sigma returns 2C channels: the prediction, then variance parameters,
    which are not used here.

    Raises:
        ValueError: the output has neither C nor 2C channels.
    """
    if output.shape[1] not in (num_channels, 2 * num_channels):
        raise ValueError(
            f"the network returns {output.shape[1]} channels for data with {num_channels}; it must "
            f"return {num_channels}, or {2 * num_channels} with a learned sigma."
        )
    kept = output[:, :num_channels]
    return kept if kept.dtype == torch.float64 else kept.float()


def per_image(level: Tensor) -> Tensor:
    """Return `level` [B] in the shape [B,1,1,1], to scale images."""
    return level.view(-1, 1, 1, 1)


def check_draw(x: Tensor, draw: Draw) -> None:
    """Raise `ValueError` if the shapes of a draw and of `x` differ: they might broadcast."""
    if draw.noise.shape != x.shape or draw.level.shape != x.shape[:1]:
        raise ValueError(
            f"draw.noise {tuple(draw.noise.shape)} and draw.level {tuple(draw.level.shape)} do not "
            f"fit x {tuple(x.shape)}: use objective.draw(x.shape, generator)."
        )
