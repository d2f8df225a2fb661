"""EDM: a preconditioned denoiser (Karras et al. 2022, arXiv 2206.00364, Table 1, column "Ours").

With clean data y, noise n ~ N(0, I), x = y + sigma n and the raw network F:

    D(x; sigma) = c_skip x + c_out F(c_in x; c_noise)                                    (eq. 7)
    c_skip  = sigma_data^2 / (sigma^2 + sigma_data^2)
    c_out   = sigma sigma_data / sqrt(sigma^2 + sigma_data^2)
    c_in    = 1 / sqrt(sigma^2 + sigma_data^2)
    c_noise = ln(sigma) / 4
    loss    = lambda |D(x; sigma) - y|^2,  lambda = 1 / c_out^2,  ln sigma ~ N(p_mean, p_std^2)
    dx/dsigma = (x - D(x; sigma)) / sigma                              (eq. 4, with sigma(t) = t)

For data of standard deviation sigma_data, c_in and c_out give the network's input and target unit
variance. lambda c_out^2 = 1 gives all levels equal weight at the start of training.

Dimensions: B batch, C channels, H height, W width. A level is sigma > 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import PositiveFloat
from torch import Tensor

from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid
from tread_zoo.diffusion.objective import AdditiveNoise, Draw, Predict, per_image, prediction
from tread_zoo.registry import register
from tread_zoo.seeding import Generator, per_image_generator


class Preconditioning(NamedTuple):
    """The factors of the skip, the output and the input, and the noise level as the network gets
    it, [B] each (EDM, arXiv 2206.00364, Table 1)."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


@register("objective", "edm")
@dataclass(frozen=True, kw_only=True)
class EDM(AdditiveNoise):
    """The EDM objective.

    Args:
        sigma_data: standard deviation of the data, as the network sees it.
        p_mean: mean of ln(sigma) in training.
        p_std: standard deviation of ln(sigma) in training.
        sigma_min: last level of sampling before 0.
        sigma_max: first level of sampling.
        rho: how strongly sampling levels concentrate near sigma_min; 1 spaces them evenly.

    Raises:
        ValueError: sigma_min is not below sigma_max.
    """

    sigma_data: PositiveFloat = 0.5
    p_mean: float = -1.2
    p_std: PositiveFloat = 1.2
    sigma_min: PositiveFloat = 0.002
    sigma_max: PositiveFloat = 80.0
    rho: PositiveFloat = 7.0

    def __post_init__(self) -> None:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(
                f"objective.sigma_min={self.sigma_min} must be below "
                f"objective.sigma_max={self.sigma_max}; the defaults are 0.002 and 80."
            )

    @property
    def initial_std(self) -> float:
        """Standard deviation of the noise that sampling starts from: sigma_max."""
        return self.sigma_max

    def preconditioning(self, sigma: Tensor) -> Preconditioning:
        """Return the `Preconditioning` at `sigma` [B] (Table 1, "Network and preconditioning")."""
        total = sigma.square() + self.sigma_data**2
        return Preconditioning(
            c_skip=self.sigma_data**2 / total,
            c_out=sigma * self.sigma_data * total.rsqrt(),
            c_in=total.rsqrt(),
            c_noise=sigma.log() / 4,
        )

    def weight(self, sigma: Tensor) -> Tensor:
        """Return the loss weight lambda(sigma) [B], the inverse of c_out^2."""
        return (sigma.square() + self.sigma_data**2) / (sigma * self.sigma_data).square()

    def draw(self, shape: Sequence[int], generator: Generator) -> Draw:
        """Return log-normal sigma [B] and noise for a batch of `shape` [B,C,H,W]."""
        images = per_image_generator(generator, shape[0])
        sigma = (self.p_mean + self.p_std * images.randn()).exp()
        return Draw(noise=images.randn(*shape[1:]), level=sigma)

    def loss(self, predict: Predict, x: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss [B], {}): lambda |D - x|^2 of each image, averaged over C, H and W."""
        denoised = self.denoise(predict, self.noised(x, draw), draw.level)
        return self.weight(draw.level) * (denoised - x).square().mean(dim=(1, 2, 3)), {}

    def denoise(self, predict: Predict, x_t: Tensor, level: Tensor) -> Tensor:
        """Return the denoised images D(x_t; sigma) [B,C,H,W] at `level` = sigma [B] (eq. 7)."""
        c_skip, c_out, c_in, c_noise = self.preconditioning(level)
        raw = prediction(predict(per_image(c_in) * x_t, c_noise), x_t.shape[1])
        return per_image(c_skip) * x_t + per_image(c_out) * raw

    def dx_dt(self, predict: Predict, x_t: Tensor, level: Tensor) -> Tensor:
        """Return dx/dsigma [B,C,H,W] at `level` = sigma [B] > 0 (eq. 4); undefined at 0."""
        return (x_t - self.denoise(predict, x_t, level)) / per_image(level)

    def levels(self, num_steps: int, grid: TimeGrid = DEFAULT_GRID) -> Tensor:
        """Return n = `num_steps` levels from sigma_max down to sigma_min, and 0: float64 [n + 1].

        A single step goes from sigma_max to 0. The grid `rho` is eq. 5 of the paper; on `log`,
        ln sigma is evenly spaced.

        Raises:
            ValueError: EDM has no such grid, shift is set, or rho is set with the grid `log`.
        """
        fraction = torch.linspace(0, 1, num_steps, dtype=torch.float64)
        if grid.choose(("rho", "log"), "edm", uses="" if grid.grid == "log" else "rho") == "log":
            sigma = self.sigma_max * (self.sigma_min / self.sigma_max) ** fraction
        else:
            rho = self.rho if isinstance(grid.rho, str) else grid.rho
            low, high = self.sigma_min ** (1 / rho), self.sigma_max ** (1 / rho)
            sigma = (high + fraction * (low - high)) ** rho
        return torch.cat([sigma, sigma.new_zeros(1)])
