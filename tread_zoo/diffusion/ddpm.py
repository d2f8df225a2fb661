"""DDPM: the noise, predicted at 1000 discrete steps (Ho et al. 2020, arXiv 2006.11239).

With clean data y, noise n ~ N(0, I), the step k = 0 … 999 and a schedule of beta_k:

    abar_k = (1 - beta_0) … (1 - beta_k)
    x_k    = sqrt(abar_k) y + sqrt(1 - abar_k) n                            (eq. 4)
    loss   = |F(x_k; k) - n|^2,  k uniform                                  (eq. 14)

Outside of the network, x stands for x_k / sqrt(abar_k) = y + sigma n, at the level
sigma = sqrt(1 / abar_k - 1). Then

    dx/dsigma = F(x / sqrt(1 + sigma^2); k)

and Euler's rule is deterministic DDIM (arXiv 2010.02502, eq. 13).

    linear         beta from 1e-4 to 0.02, evenly
    cosine         abar_k = f(k + 1) / f(0),  f(i) = cos^2(pi/2 (i / 1000 + 0.008) / 1.008), but
                   beta <= 0.999                                (arXiv 2102.09672, eq. 17)
    scaled_linear  sqrt(beta) from sqrt(0.00085) to sqrt(0.012), evenly: Stable Diffusion's

Dimensions: B batch, C channels, H height, W width. A level is sigma > 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid
from tread_zoo.diffusion.objective import AdditiveNoise, Draw, Predict, per_image, prediction
from tread_zoo.registry import register
from tread_zoo.seeding import Generator, per_image_generator

NUM_STEPS = 1000


@register("objective", "ddpm")
@dataclass(frozen=True, kw_only=True)
class DDPM(AdditiveNoise):
    """The DDPM objective: predict the noise. The network gets t = step / 1000.

    Args:
        schedule: how the noise grows over the steps: linear, cosine or scaled_linear.
        first_step: number that the network gets for the least noisy step; U-ViT counts from 1.
    """

    schedule: Literal["linear", "cosine", "scaled_linear"] = "linear"
    first_step: Literal[0, 1] = 0

    @property
    def sigmas(self) -> Tensor:
        """The level sigma of each step, rising: float64 [1000]."""
        return _sigmas(self.schedule)

    @property
    def initial_std(self) -> float:
        """Standard deviation 1 / sqrt(abar_999) of x at the start of sampling, where x is
        x_999 / sqrt(abar_999) and x_999 ~ N(0, I)."""
        return math.sqrt(1 + float(self.sigmas[-1]) ** 2)

    def draw(self, shape: Sequence[int], generator: Generator) -> Draw:
        """Return sigma [B] at steps drawn uniformly, and noise for a batch of `shape` [B,C,H,W]."""
        images = per_image_generator(generator, shape[0])
        step = images.randint(NUM_STEPS)
        levels = _levels(self.schedule, step.device)
        return Draw(noise=images.randn(*shape[1:]), level=levels[step])

    def loss(self, predict: Predict, x: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss [B], {}): the squared error of the predicted noise, averaged over C, H and
        W."""
        noise = self.dx_dt(predict, self.noised(x, draw), draw.level)
        return (noise - draw.noise).square().mean(dim=(1, 2, 3)), {}

    def dx_dt(self, predict: Predict, x_t: Tensor, level: Tensor) -> Tensor:
        """Return dx/dsigma, which is the predicted noise, [B,C,H,W] at `level` = sigma [B]."""
        t = (self.step(level) + self.first_step) / NUM_STEPS
        scaled = x_t * per_image((1 + level.square()).rsqrt())
        return prediction(predict(scaled, t), x_t.shape[1])

    def step(self, level: Tensor) -> Tensor:
        """Return the step whose ln sigma is nearest to ln `level` [B]: int64 [B]."""
        return torch.bucketize(level.log(), _log_edges(self.schedule, level.device))

    def levels(self, num_steps: int, grid: TimeGrid = DEFAULT_GRID) -> Tensor:
        """Return sigma at evenly spaced, rounded steps from 999 to 0, then a final 0: float64
        [num_steps + 1]. A single step goes from sigma at step 999 to 0.

        Raises:
            ValueError: the grid is not `uniform`, shift or rho is set, or num_steps is above 1000.
        """
        grid.choose(("uniform",), "ddpm")
        if num_steps > NUM_STEPS:
            raise ValueError(
                f"sampler.num_steps={num_steps} is more than the {NUM_STEPS} of objective=ddpm."
            )
        steps = torch.linspace(NUM_STEPS - 1, 0, num_steps, dtype=torch.float64).round().long()
        return torch.cat([self.sigmas[steps], self.sigmas.new_zeros(1)])


@cache
def _levels(schedule: str, device: torch.device) -> Tensor:
    """Return the level sigma of each step, float32 [1000], on `device`; cached."""
    return _sigmas(schedule).float().to(device)


@cache
def _log_edges(schedule: str, device: torch.device) -> Tensor:
    """Return the midpoints of ln sigma between steps, float32 [999], on `device`; cached."""
    log_sigma = _sigmas(schedule).log().float()
    return ((log_sigma[1:] + log_sigma[:-1]) / 2).to(device)


@cache
def _sigmas(schedule: str) -> Tensor:
    if schedule == "cosine":
        i = torch.arange(NUM_STEPS + 1, dtype=torch.float64) / NUM_STEPS
        f = (math.pi / 2 * (i + 0.008) / 1.008).cos().square()
        beta = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    elif schedule == "scaled_linear":
        ends = math.sqrt(0.00085), math.sqrt(0.012)
        beta = torch.linspace(*ends, NUM_STEPS, dtype=torch.float64).square()
    else:
        beta = torch.linspace(1e-4, 0.02, NUM_STEPS, dtype=torch.float64)
    return (1 / (1 - beta).cumprod(dim=0) - 1).sqrt()
