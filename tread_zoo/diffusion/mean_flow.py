"""MeanFlow: the mean velocity between two times, for sampling in few steps (arXiv 2505.13447).

With flow matching's x_t and velocity v, and noise at t = 1, the network predicts the mean

    u(x_t, r, t) = (t - r)^-1 (integral of v(x_s, s) over s from r to t)                  (eq. 3)
    u(x_t, r, t) = v - (t - r) d/dt u(x_t, r, t),   d/dt u = v ∂u/∂x + ∂u/∂t              (eq. 6, 8)
    x_r          = x_t - (t - r) u(x_t, r, t)                                             (eq. 12)

so one evaluation at r = 0, t = 1 turns noise into an image. The loss is D / (D + c)^p (eq. 22) with
p = `loss_power`. D is the squared distance of u from the right side of eq. 6, which has
v = noise - x and gets no gradient. In the authors' code D is a sum over C, H and W, and c is 0.01.
Here D is the mean, and c is 0.01 / (C H W). The derivative d/dt u, at a fixed r, is computed in one
of two ways:

    exact        by forward-mode differentiation, which every operation must support
    difference   from one more evaluation, at t - h on the line along v, with any kernel:

                 u = v - (t - r - h) (u(x_t, r, t) - u(x_t - h v, r, t - h)) / h,  h = step

The difference follows from (t - r) u = h v + (t - h - r) u(x_t - h v, r, t - h), which holds if v
is constant over h. Where t - r <= h, this is flow matching. This form is ours (a related one is in
arXiv 2604.08837).

Guidance by a label y is part of the target; sampling needs one evaluation (section 4.2, eq. 19):

    v~ = w v + k u(x_t, t, t | y) + (1 - w - k) u(x_t, t, t)

with w = `guidance_scale` and k = `guidance_mix` (omega and kappa in the paper). This is
classifier-free guidance of scale w / (1 - k). The paper does not guide images whose label was
dropped. Here all images are guided: without a label both terms are the same u, and the fixed point
is the plain v.

Dimensions: B batch, C channels, H height, W width. A level is t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tread_zoo.contract.backbone import Backbone
from tread_zoo.diffusion.flow import FlowMatching
from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid
from tread_zoo.diffusion.objective import AdditiveNoise, Draw, Predict, per_image, prediction
from tread_zoo.registry import register
from tread_zoo.routing import Method, Stack
from tread_zoo.seeding import Generator, per_image_generator

_FLOW = FlowMatching()
_C = 0.01  # c for a squared error that is summed over C, H and W


@register("objective", "mean_flow")
@dataclass(frozen=True, kw_only=True)
class MeanFlow(AdditiveNoise):
    """The MeanFlow objective. `sampler=mean` steps with the mean velocity; other samplers use the
    network like a flow-matching network.

    Args:
        equal_fraction: fraction of the images with r = t, which train as in flow matching.
        logit_mean: mean of logit(t) and logit(r); t is the larger of two samples.
        logit_std: standard deviation of logit(t) and logit(r).
        loss_power: p of the weight 1 / (D + c)^p, with an image's mean squared error D and
            c = 0.01 / (C H W); 0 means the plain squared error.
        derivative: how to compute d/dt u: difference (one more evaluation) or exact (forward-mode
            differentiation).
        step: step h of the difference, in t.
        guidance_scale: w of the guided target; 1 with guidance_mix=0 means no guidance.
        guidance_mix: k, weight of the conditional prediction in the guided target; 0.5 in the
            authors' ImageNet recipes.
    """

    equal_fraction: Annotated[float, Field(ge=0, le=1)] = 0.75
    logit_mean: float = -0.4
    logit_std: PositiveFloat = 1.0
    loss_power: NonNegativeFloat = 1.0
    derivative: Literal["difference", "exact"] = "difference"
    step: Annotated[float, Field(gt=0, lt=1)] = 0.01
    guidance_scale: NonNegativeFloat = 1.0
    guidance_mix: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def check_training(self, backbone: Backbone, label_dropout: float, routing: Method) -> None:
        """Raise `ValueError` if the network, the label dropout (the fraction of conditions that
        training drops) or the routing does not fit this loss."""
        guided = (self.guidance_scale, self.guidance_mix) != (1, 0)
        if guided and not (backbone.is_conditional and label_dropout):
            raise ValueError(
                f"objective.guidance_scale={self.guidance_scale}, objective.guidance_mix="
                f"{self.guidance_mix} guide by the prediction without a label, which training "
                "never shows: set training.label_dropout=0.1, or leave them at 1 and 0."
            )
        if routing.splits_loss or routing.chooses_by_state(Stack.of(backbone)):
            raise ValueError(
                f"routing={routing.name} needs one prediction a step, and objective=mean_flow "
                "takes several, which must see the same tokens: use routing=tread or sprint, and a "
                "selector that does not look at the tokens."
            )

    @property
    def initial_std(self) -> float:
        """Standard deviation of the noise that sampling starts from, at t = 1."""
        return 1.0

    def draw(self, shape: Sequence[int], generator: Generator) -> Draw:
        """Return times t and r <= t, [B] each, and noise for a batch of `shape` [B,C,H,W]."""
        images = per_image_generator(generator, shape[0])
        first, second = (
            torch.sigmoid(self.logit_mean + self.logit_std * images.randn()) for _ in range(2)
        )
        t = torch.maximum(first, second)
        r = torch.where(images.rand() < self.equal_fraction, t, torch.minimum(first, second))
        return Draw(noise=images.randn(*shape[1:]), level=t, end=r)

    def loss(self, predict: Predict, x: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss D / (D + c)^p of each image [B], and its mean squared error D [B] as
        `squared_error`. Without `draw.end`, return the flow-matching loss."""
        if draw.end is None:
            return _FLOW.loss(predict, x, draw)
        x_t, t, r = self.noised(x, draw), draw.level, draw.end
        mean = prediction(predict(x_t, t, r=r), x.shape[1])
        with torch.no_grad():
            velocity = self._guided(predict, x_t, t, draw.noise - x)
            target = velocity - self._correction(predict, x_t, t, r, velocity, mean)
        error = (mean - target).square().mean(dim=(1, 2, 3))
        weight = (error.detach() + _C / x[0].numel()) ** -self.loss_power
        return weight * error, {"squared_error": error}

    def _guided(self, predict: Predict, x_t: Tensor, t: Tensor, velocity: Tensor) -> Tensor:
        """Return v~, which is the `velocity` v at x_t and t [B] with guidance."""
        scale, mix = self.guidance_scale, self.guidance_mix
        parts = [scale * velocity] if scale != 1 else [velocity]
        if mix:
            parts.append(mix * prediction(predict(x_t, t), x_t.shape[1]))
        if scale + mix != 1:
            parts.append((1 - scale - mix) * prediction(predict(x_t, t, y=None), x_t.shape[1]))
        return sum(parts[1:], parts[0])

    def _correction(
        self, predict: Predict, x_t: Tensor, t: Tensor, r: Tensor, velocity: Tensor, mean: Tensor
    ) -> Tensor:
        """Return (t - r) d/dt u, to subtract from `velocity`; `mean` is the predicted u(x_t, r, t).
        With `derivative=difference` it is 0 where t - r <= step."""
        if self.derivative == "exact":
            slope = mean_slope(predict, x_t, t, r, velocity)
            return per_image(t - r) * slope
        factor, step = ((t - r - self.step) / self.step).clamp(min=0), self.step
        earlier = torch.maximum(t - step, r)
        before = predict(x_t - per_image(t - earlier) * velocity, earlier, r=r)
        return per_image(factor) * (mean - prediction(before, x_t.shape[1]))

    def dx_dt(self, predict: Predict, x_t: Tensor, level: Tensor) -> Tensor:
        """Return the velocity [B,C,H,W] at `level` = t [B]. If `predict` passes an r to the
        network, return the mean velocity from r to t."""
        return _FLOW.dx_dt(predict, x_t, level)

    def signal(self, level: Tensor) -> Tensor:
        """Return 1 - t, the factor of the clean data."""
        return 1 - level

    def levels(self, num_steps: int, grid: TimeGrid = DEFAULT_GRID) -> Tensor:
        """Return the levels of flow matching: float64 [num_steps + 1]."""
        return _FLOW.levels(num_steps, grid)


def mean_slope(predict: Predict, x_t: Tensor, t: Tensor, r: Tensor, velocity: Tensor) -> Tensor:
    """Return the exact d/dt [B,C,H,W] of the predicted mean velocity u(x_t, r, t) along `velocity`,
    at a fixed r.

    Raises:
        ValueError: an operation has no forward-mode derivative.
    """

    def mean(x_t: Tensor, t: Tensor) -> Tensor:
        return prediction(predict(x_t, t, r=r), x_t.shape[1])

    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward-mode derivative
            slope: Tensor = torch.func.jvp(mean, (x_t, t), (velocity, torch.ones_like(t)))[1]
    except RuntimeError as error:
        if "forward" not in str(error):
            raise
        raise ValueError(
            "objective.derivative=exact needs a forward-mode derivative of every operation, and "
            f"this network has one without ({str(error).splitlines()[0][:120]}): set "
            "objective.derivative=difference, or kernels that are plain torch."
        ) from error
    return slope
