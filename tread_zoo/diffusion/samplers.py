"""Samplers integrate dx/dt over a falling grid of levels t, without knowing the network.

With a step h = t' - t < 0 from level t to t', d(x, t) = dx/dt, and a fresh z ~ N(0, I):

    euler           x' = x + h d(x, t)                                            first order
    mean            x' = x + h u(x, t', t),  u the mean slope      arXiv 2505.13447, eq. 12
    heun            x' = x + h/2 (d(x, t) + d(x + h d(x, t), t'))                 second order
    dpmpp_2m        x' = (b'/b) x + (a' - a b'/b) D~,  D~ = D + (D - D_before) k / (2 k_before)
                    with k the step in ln(a / b); second order, one evaluation a step
    edm_stochastic  t^ = (1 + gamma) t,  x^ = x + sqrt(t^^2 - t^2) s_noise z, then heun from t^
    flow_sde        x' = x + h (d(x, t) - w s / 2) + sqrt(-h w) z,  w = diffusion t,  s the score

In x_t = a y + b n, a(t) is the signal and b(t) the noise, a' and b' are those at t'; D is the
estimate of the clean y that belongs to dx/dt. D_before and k_before are D and k of the step before;
`EDMStochastic` has gamma and s_noise, `FlowSDE` has diffusion. Heun is Algorithm 1 of arXiv
2206.00364, edm_stochastic its Algorithm 2; dpmpp_2m is Algorithm 2 of arXiv 2211.01095, flow_sde
the reverse SDE of SiT (arXiv 2401.08740, eq. 5 and 10) by the Euler-Maruyama rule.

A step that ends at level 0 is an Euler step, because EDM's (x - D) / sigma has no value there and
training rarely sees t = 0. One such step keeps the order: its own error is O(h^2). The SDE's last
step follows the ODE: it ends at the estimate D and adds no noise to the image.

Dimensions: B batch, C channels, H height, W width, n images.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Protocol

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from tread_zoo.diffusion.objective import Objective
from tread_zoo.progress import progress
from tread_zoo.registry import register
from tread_zoo.seeding import make_generator

# (x [B,C,H,W], level [B], float32, the same for all images) -> dx/dt [B,C,H,W]
DxDt = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """What a sampler integrates.

    Args:
        dx_dt: the function that returns the slope dx/dt, including guidance.
        objective: the objective, which defines what a level means.
        fresh_noise: step number (from 0) -> standard normal noise [B,C,H,W] on the device of x.
    """

    dx_dt: DxDt
    objective: Objective
    fresh_noise: Callable[[int], Tensor]

    def slope(self, x: Tensor, level: float) -> Tensor:
        """Return dx/dt [B,C,H,W] in float32, at one level for the whole batch."""
        return self.dx_dt(x, self._expand(level, x)).float()

    def estimate(self, x: Tensor, dx_dt: Tensor, level: float) -> Tensor:
        """Return the clean estimate [B,C,H,W] that belongs to `dx_dt` at `level`."""
        return self.objective.estimate(x, dx_dt, self._expand(level, x))

    def coefficients(self, levels: Tensor) -> tuple[list[float], list[float]]:
        """Return the signal and the noise factors at each of `levels`, computed in float64."""
        levels = levels.double()
        return self.objective.signal(levels).tolist(), self.objective.noise(levels).tolist()

    @staticmethod
    def _expand(level: float, x: Tensor) -> Tensor:
        return torch.full(x.shape[:1], level, dtype=torch.float32, device=x.device)


class Sampler(Protocol):
    """An integration rule, with its options as fields.

    A sampler is called with (problem, x [B,C,H,W] at levels[0], levels [num_steps + 1]) and
    returns a new float32 tensor [B,C,H,W] at levels[-1]. Three class variables are optional:
    `default_num_steps`; `objectives`, the names of supported objectives, by default all; and
    `uses_mean_slope`, whether it needs mean slopes over a step, as from MeanFlow.
    """

    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor: ...


@register("sampler", "euler")
@dataclass(frozen=True, kw_only=True)
class Euler:
    """Euler's rule: num_steps evaluations."""

    default_num_steps: ClassVar[int] = 25

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        x = x.float()
        for level, next_level in _steps(levels):
            x = x + (next_level - level) * problem.slope(x, level)
        return x


@register("sampler", "mean")
@dataclass(frozen=True, kw_only=True)
class Mean(Euler):
    """Euler's rule with each step's mean slope, which `objective=mean_flow` learns: num_steps
    evaluations, by default one."""

    default_num_steps: ClassVar[int] = 1
    objectives: ClassVar[tuple[str, ...]] = ("mean_flow",)
    uses_mean_slope: ClassVar[bool] = True


@register("sampler", "heun")
@dataclass(frozen=True, kw_only=True)
class Heun:
    """Heun's rule: 2 num_steps - 1 evaluations down to level 0."""

    default_num_steps: ClassVar[int] = 18

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        x = x.float()
        for level, next_level in _steps(levels):
            x = _heun_step(problem, x, level, next_level)
        return x


@register("sampler", "dpmpp_2m")
@dataclass(frozen=True, kw_only=True)
class DPMSolver2M:
    """DPM-Solver++(2M): num_steps evaluations; the previous step's estimate makes it second order.

    Euler steps are the first step, the step after a level without signal (flow matching's t = 1,
    where ln(a / b) is infinite) and the step to level 0. Over flow matching's whole grid the error
    is O(h^2 ln 1/h).
    """

    default_num_steps: ClassVar[int] = 20

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        x, steps = x.float(), _steps(levels)
        signal, noise = problem.coefficients(levels)
        log_ratio = [_log_ratio(a, b) for a, b in zip(signal, noise, strict=True)]
        before: Tensor | None = None
        for i, (level, _) in enumerate(steps):
            estimate = problem.estimate(x, problem.slope(x, level), level)
            guess = estimate
            if before is not None:
                length, length_before = (log_ratio[k + 1] - log_ratio[k] for k in (i, i - 1))
                if math.isfinite(length) and math.isfinite(length_before):
                    guess = estimate + length / (2 * length_before) * (estimate - before)
            shrink = noise[i + 1] / noise[i]
            x = shrink * x + (signal[i + 1] - signal[i] * shrink) * guess
            before = estimate
        return x


@register("sampler", "edm_stochastic")
@dataclass(frozen=True, kw_only=True)
class EDMStochastic:
    """EDM's stochastic sampler: 2 num_steps - 1 evaluations, with fresh noise before each step.

    Args:
        s_churn: total amount of noise: a step raises sigma by the fraction gamma =
            min(s_churn / num_steps, sqrt(2) - 1).
        s_min, s_max: noise is added only where sigma is in [s_min, s_max].
        s_noise: standard deviation of the noise; a bit above 1 restores detail that denoisers lose.

    Raises:
        ValueError: s_min is above s_max.
    """

    default_num_steps: ClassVar[int] = 40
    objectives: ClassVar[tuple[str, ...]] = ("edm",)

    s_churn: NonNegativeFloat = 10.0
    s_min: NonNegativeFloat = 0.05
    s_max: NonNegativeFloat = 50.0
    s_noise: PositiveFloat = 1.003

    def __post_init__(self) -> None:
        if self.s_min > self.s_max:
            raise ValueError(
                f"sampler.s_min={self.s_min} is above sampler.s_max={self.s_max}: noise is added "
                "where s_min <= sigma <= s_max; s_churn=0 adds none."
            )

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        x, steps = x.float(), _steps(levels)
        churn = min(self.s_churn / len(steps), math.sqrt(2) - 1)
        for i, (level, next_level) in enumerate(steps):
            if churn and self.s_min <= level <= self.s_max:
                raised = (1 + churn) * level
                std = self.s_noise * math.sqrt(raised**2 - level**2)
                x, level = x + std * problem.fresh_noise(i), raised
            x = _heun_step(problem, x, level, next_level)
        return x


@register("sampler", "flow_sde")
@dataclass(frozen=True, kw_only=True)
class FlowSDE:
    """The reverse SDE of flow matching by the Euler-Maruyama rule: num_steps evaluations.

    The drift is v - w s / 2 and the noise sqrt(w), with velocity v, score s and w = diffusion t.
    For any diffusion, x has the same distribution at every t as with the ODE; fresh noise corrects
    some of the error of earlier steps.

    SiT's paper has w = t, which is `diffusion=1`. The released samplers of SiT, REPA and SPRINT
    have w = 2 t, which is `diffusion=2`. They take 249 equal steps from t = 1 to 0.04, and a last
    step to 0 with the same drift but no noise: `num_steps=250`, `last_step=0.04`.

    Args:
        diffusion: strength of the fresh noise: at t its variance grows by diffusion * t per unit of
            time; 0 is Euler's rule.
        last_step: size of a last step with the SDE's drift and no noise; earlier steps are scaled
            to fit. 0, or a single step: keep the grid's last step, which follows the ODE.
    """

    default_num_steps: ClassVar[int] = 100
    objectives: ClassVar[tuple[str, ...]] = ("flow",)

    diffusion: NonNegativeFloat = 1.0
    last_step: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        last_step = self.last_step if len(levels) > 2 else 0.0
        if last_step:
            shrink = (levels[0] - last_step) / (levels[0] - levels[-2])
            levels = torch.cat([levels[0] - (levels[0] - levels[:-1]) * shrink, levels[-1:]])
        x, steps = x.float(), _steps(levels)
        signal, noise = problem.coefficients(levels)
        for i, (level, next_level) in enumerate(steps):
            step, slope = next_level - level, problem.slope(x, level)
            strength = self.diffusion * level
            if strength == 0 or (next_level == 0 and not last_step):
                x = x + step * slope
                continue
            clean = problem.estimate(x, slope, level)
            score = (signal[i] * clean - x) / noise[i] ** 2  # E[-n / b | x]
            x = x + step * (slope - strength / 2 * score)
            if next_level == 0:
                continue
            x = x + math.sqrt(-step * strength) * problem.fresh_noise(i)
        return x


def initial_noise(shape: Sequence[int], seed: int, indices: Sequence[int]) -> Tensor:
    """Return standard normal noise [n,C,H,W] for the images `indices`, each of `shape` [C,H,W].

    The noise of image i depends only on (seed, i), not on batch size, order or number of processes.
    Multiply it by the objective's `initial_std`.
    """
    return _noise_of("sample", shape, indices, seed)


def step_noise(shape: Sequence[int], seed: int, indices: Sequence[int], step: int) -> Tensor:
    """Return standard normal noise [n,C,H,W] for the images `indices`, each of `shape` [C,H,W]. A
    stochastic sampler scales it and adds it in step number `step`; that of image i depends only on
    (seed, i, step)."""
    return _noise_of("sample step", shape, indices, seed, step)


def _noise_of(
    purpose: str, shape: Sequence[int], indices: Sequence[int], seed: int, *step: int
) -> Tensor:
    noise = torch.empty(len(indices), *shape)
    for row, index in zip(noise, indices, strict=True):
        torch.randn(*shape, generator=make_generator(purpose, seed, index, *step), out=row)
    return noise


def _heun_step(problem: Problem, x: Tensor, level: float, next_level: float) -> Tensor:
    step = next_level - level
    slope = problem.slope(x, level)
    if next_level != 0:
        slope = (slope + problem.slope(x + step * slope, next_level)) / 2
    return x + step * slope


def _log_ratio(signal: float, noise: float) -> float:
    """Return ln(signal / noise), infinite where either is 0."""
    if signal == 0:
        return -math.inf
    return math.inf if noise == 0 else math.log(signal / noise)


def _steps(levels: Tensor) -> Collection[tuple[float, float]]:
    """Return the pairs (level, next level) of a falling grid; iteration shows a progress bar."""
    if levels.ndim != 1 or len(levels) < 2 or not bool((levels.diff() < 0).all()):
        raise ValueError(
            f"levels of shape {tuple(levels.shape)} must be two or more falling numbers. Use "
            "objective.levels(num_steps)."
        )
    pairs: Collection[tuple[float, float]] = progress(
        "sampling", list(pairwise(levels.tolist())), " steps"
    )
    return pairs
