"""Flow matching on straight lines, as in SiT (arXiv 2401.08740) and SD3 (arXiv 2403.03206).

With clean data x, noise eps ~ N(0, I) and t in [0, 1], noise at t = 1:

    x_t = (1 - t) x + t eps
    v   = dx_t/dt = eps - x             its mean given x_t is the slope of the ODE
    x   = x_t - t v                     the estimate of the clean data
    eps = x_t + (1 - t) v

The network predicts v, x or eps, and the loss is the squared error of v, x or eps (JiT, arXiv
2511.13720, Table 1). The three errors are in the ratio v : x : eps = 1 : t : 1 - t, so each of the
nine losses is the error of the prediction times a weight that depends on t.

t has one of these distributions (SD3, section 3.1) and is then shifted, with s = `shift`, to
t' = s t / (1 + (s - 1) t) (eq. 23):

    uniform       t ~ U(0, 1)
    logit_normal  logit(t) ~ N(logit_mean, logit_std^2)
    cosmap        t = sin a / (sin a + cos a), a ~ U(0, pi / 2)

With a second level (Self-Flow's dual-timestep schedule, arXiv 2603.06507), an image has two times
from the same distribution, and each token takes one of them, so a token's time is distributed as
before. The authors give the second time to exactly a quarter of the tokens; here every token
chooses by itself, with that probability.

Dimensions: B batch, N tokens, C channels, H height, W width. A level is t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid, shift_time
from tread_zoo.diffusion.objective import AdditiveNoise, Draw, Predict, per_image, prediction
from tread_zoo.registry import register
from tread_zoo.routing import Method
from tread_zoo.seeding import Generator, per_image_generator

Space = Literal["velocity", "x", "noise"]


@register("objective", "flow")
@dataclass(frozen=True, kw_only=True)
class FlowMatching(AdditiveNoise):
    """The flow-matching objective.

    Args:
        prediction: what the network predicts: velocity, x or noise.
        loss_space: the quantity whose squared error is the loss: velocity, x or noise.
        time_clip: lower bound of t and 1 - t where the loss divides by them. In sampling with a
            noise prediction it bounds 1 - t: at t = 1 the noise says nothing about the data.
        time_distribution: distribution of t in training: uniform, logit_normal or cosmap.
        logit_mean: mean of logit(t) for "logit_normal"; above 0 trains more on noisier images.
        logit_std: standard deviation of logit(t) for "logit_normal".
        shift: shift of t in training; above 1 trains more on noisier images.
        second_level_fraction: fraction of an image's tokens that train at a second t.

    Raises:
        ValueError: logit_mean or logit_std is set, but time_distribution does not use it.
    """

    prediction: Space = "velocity"
    loss_space: Space = "velocity"
    time_clip: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    time_distribution: Literal["uniform", "logit_normal", "cosmap"] = "uniform"
    logit_mean: float = 0.0
    logit_std: PositiveFloat = 1.0
    shift: PositiveFloat = 1.0
    second_level_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    def __post_init__(self) -> None:
        has_logit = self.time_distribution == "logit_normal"
        if not has_logit and (self.logit_mean, self.logit_std) != (0, 1):
            raise ValueError(
                f"objective.logit_mean={self.logit_mean}, objective.logit_std={self.logit_std} "
                f"mean nothing to objective.time_distribution={self.time_distribution}: leave them "
                "out, or set objective.time_distribution=logit_normal."
            )

    def check_training(self, backbone: Backbone, label_dropout: float, routing: Method) -> None:
        """Raise `ValueError` if tokens of one image get different times (`second_level_fraction`
        above 0), and the network or the routing does not allow it."""
        if self.second_level_fraction and not backbone.per_token_time:
            raise ValueError(
                f"objective.second_level_fraction={self.second_level_fraction} gives each token a "
                "time, and this backbone has one per image: take dit, sit, lightning_dit or one "
                "without a token for the time, no registers, and labels in place of contexts."
            )
        if self.second_level_fraction and routing.splits_loss:
            raise ValueError(
                f"objective.second_level_fraction={self.second_level_fraction} and "
                f"routing={routing.name}, which splits the loss, exclude each other: leave one out."
            )

    @property
    def initial_std(self) -> float:
        """Standard deviation of the noise that sampling starts from, at t = 1."""
        return 1.0

    def draw(self, shape: Sequence[int], generator: Generator) -> Draw:
        """Return t [B] and noise for a batch of `shape` [B,C,H,W]."""
        images = per_image_generator(generator, shape[0])
        if self.time_distribution == "logit_normal":
            t = torch.sigmoid(self.logit_mean + self.logit_std * images.randn())
        else:
            t = images.rand()
        if self.time_distribution == "cosmap":
            sine, cosine = (math.pi / 2 * t).sin(), (math.pi / 2 * t).cos()
            t = sine / (sine + cosine)
        return Draw(noise=images.randn(*shape[1:]), level=shift_time(t, self.shift))

    def draw_token_levels(self, level: Tensor, num_tokens: int, generator: Generator) -> Tensor:
        """Return a time per token, [B, N]: its image's `level` [B] or its image's second time."""
        images = per_image_generator(generator, len(level))
        second = self.draw((len(level), 1, 1, 1), images).level
        chosen = images.rand(num_tokens) < self.second_level_fraction
        return torch.where(chosen, second[:, None], level[:, None])

    def loss(self, predict: Predict, x: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss [B], {}): the squared error in `loss_space`, averaged over C, H and W."""
        output = prediction(predict(self.noised(x, draw), draw.level), x.shape[1])
        target = {"velocity": draw.noise - x, "x": x, "noise": draw.noise}[self.prediction]
        return self.weight(draw.level) * (output - target).square().mean(dim=(1, 2, 3)), {}

    def weight(self, t: Tensor) -> Tensor:
        """Return the factor [B] that turns, at t [B], a squared error of `prediction` into one of
        `loss_space`."""
        if self.prediction == self.loss_space:
            return torch.ones_like(t)
        size = {"velocity": torch.ones_like(t), "x": t, "noise": 1 - t}
        return (size[self.loss_space] / size[self.prediction].clamp(min=self.time_clip)).square()

    def dx_dt(self, predict: Predict, x_t: Tensor, level: Tensor) -> Tensor:
        """Return the velocity [B,C,H,W] at `level` = t [B]; an x prediction needs t > 0."""
        if self.prediction == "noise":
            level = level.clamp(max=1 - self.time_clip)
        output, t = prediction(predict(x_t, level), x_t.shape[1]), per_image(level)
        if self.prediction == "x":
            return (x_t - output) / t.clamp(min=1e-12)  # a random t may be 0
        if self.prediction == "noise":
            return (output - x_t) / (1 - t)
        return output

    def signal(self, level: Tensor) -> Tensor:
        """Return 1 - t, the factor of the clean data."""
        return 1 - level

    def levels(self, num_steps: int, grid: TimeGrid = DEFAULT_GRID) -> Tensor:
        """Return times from 1 to 0, evenly spaced by default: float64 [num_steps + 1].

        Raises:
            ValueError: flow matching has no such grid, or rho is set.
        """
        t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        name = grid.choose(("uniform", "quadratic", "logit_normal"), "flow", uses="shift")
        if name == "quadratic":
            t = t.square()
        elif name == "logit_normal":
            t = torch.special.ndtri(t).sigmoid()
        t = shift_time(t, grid.shift)
        t[0] = 1  # rounding may give more than 1
        return t
