"""Samplers integrate a drift dx/dlevel over a falling grid of levels. They know no network.

With a step h = l' - l < 0 from level l to l', the drift d, and a fresh z ~ N(0, I):

    euler           x' = x + h d(x, l)                                            first order
    heun            x' = x + h/2 (d(x, l) + d(x + h d(x, l), l'))                 second order
    dpmpp_2m        x' = (b'/b) x + (a' - a b'/b) D~,  D~ = D + (D - D_before) k / (2 k_before)
                    with k the step in ln(a / b); second order, one evaluation a step
    edm_stochastic  l^ = (1 + gamma) l,  x^ = x + sqrt(l^^2 - l^2) s_noise z, then heun from l^
    flow_sde        x' = x + h (v - w s / 2) + sqrt(-h w) z,  w = diffusion t,  s the score

x_t = a y + b n has the signal a(l) and the noise b(l); D is the estimate of the clean y behind the
drift. Heun is Algorithm 1 of arXiv 2206.00364, edm_stochastic its Algorithm 2; dpmpp_2m is
Algorithm 2 of arXiv 2211.01095, flow_sde the reverse SDE of SiT (arXiv 2401.08740, eq. 5 and 10)
by Euler and Maruyama.

A step that ends at level 0 is an Euler step: EDM's drift (x - D) / sigma has no value there. Flow
matching's velocity has one, but the same rule holds, for a sampler does not know its objective, and
training draws no t of 0 (logit-normal) or next to none (uniform). One Euler step, of a size that
shrinks with the grid, costs no order: its own error is O(h^2). For the SDE it is the ODE's, which
ends at the estimate D itself and adds no noise to the image.

Dimensions: B batch, C channels, H height, W width, n images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tread_zoo.diffusion.checks import check_num_steps, check_number
from tread_zoo.diffusion.objective import per_sample
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register
from tread_zoo.seeding import make_generator

# (x [B,C,H,W], level [B], float32) -> dx/dlevel [B,C,H,W]
Drift = Callable[[Tensor, Tensor], Tensor]
# step, counted from 0 -> standard normal noise [B,C,H,W], on the device of x
FreshNoise = Callable[[int], Tensor]


class Path(Protocol):
    """What an objective says of its levels, see `Objective`."""

    def signal(self, level: Tensor) -> Tensor: ...

    def noise(self, level: Tensor) -> Tensor: ...

    def estimate(self, x_t: Tensor, drift: Tensor, level: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Problem:
    """What a sampler may ask: the drift, what its levels mean, and noise of its own."""

    drift: Drift
    path: Path
    fresh_noise: FreshNoise

    def slope(self, x: Tensor, level: float) -> Tensor:
        """Return the drift [B,C,H,W] at one level for the whole batch, in float32."""
        return self.drift(x, self.level_of(x, level)).float()

    def estimate(self, x: Tensor, drift: Tensor, level: float) -> Tensor:
        """Return the clean estimate [B,C,H,W] behind `drift` at `level`."""
        return self.path.estimate(x, drift, self.level_of(x, level))

    def coefficients(self, levels: Tensor) -> tuple[list[float], list[float]]:
        """Return signal and noise at each of `levels`, in float64."""
        levels = levels.double()
        return self.path.signal(levels).tolist(), self.path.noise(levels).tolist()

    @staticmethod
    def level_of(x: Tensor, level: float) -> Tensor:
        """Return `level` for each of the batch: float32 [B]."""
        return torch.full(x.shape[:1], level, dtype=torch.float32, device=x.device)


class Sampler(Protocol):
    """A rule, with its options as fields; `objectives` are those that it fits, None for all.

    Called with (problem, x [B,C,H,W] at levels[0], levels [num_steps + 1]) it returns a new float32
    tensor [B,C,H,W] at levels[-1], and leaves `x` as it was.

    Raises:
        ValueError: `levels` is not a falling grid [num_steps + 1].
    """

    name: ClassVar[str]
    objectives: ClassVar[tuple[str, ...] | None]

    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor: ...


@register("sampler", "euler")
@dataclass(frozen=True, kw_only=True)
class Euler:
    """Euler's rule: num_steps evaluations."""

    name: ClassVar[str] = "euler"
    default_num_steps: ClassVar[int] = 25
    objectives: ClassVar[tuple[str, ...] | None] = None

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        x = x.float()
        for level, next_level in _steps(levels):
            x = x + (next_level - level) * problem.slope(x, level)
        return x


@register("sampler", "heun")
@dataclass(frozen=True, kw_only=True)
class Heun:
    """Heun's rule: 2 num_steps - 1 evaluations down to level 0."""

    name: ClassVar[str] = "heun"
    default_num_steps: ClassVar[int] = 18
    objectives: ClassVar[tuple[str, ...] | None] = None

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        x = x.float()
        for level, next_level in _steps(levels):
            x = _heun_step(problem, x, level, next_level)
        return x


@register("sampler", "dpmpp_2m")
@dataclass(frozen=True, kw_only=True)
class DPMSolver2M:
    """DPM-Solver++(2M): num_steps evaluations, second order through the estimate of the last step.

    The first step, the step after a level without signal (flow matching's t = 1, where ln(a / b)
    is infinite) and the step to level 0 are of first order, which is an Euler step. There the error
    on flow matching's whole grid is O(h^2 ln 1/h) instead of O(h^2).
    """

    name: ClassVar[str] = "dpmpp_2m"
    default_num_steps: ClassVar[int] = 20
    objectives: ClassVar[tuple[str, ...] | None] = None

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
    """EDM's stochastic sampler: 2 num_steps - 1 evaluations, some noise anew before each step.

    Args:
        s_churn: how much noise anew, over all steps; gamma = min(s_churn / num_steps, sqrt(2) - 1).
        s_min, s_max: only where sigma is in [s_min, s_max].
        s_noise: standard deviation of the new noise; a little above 1 makes up for the detail that
            a denoiser loses.

    Raises:
        ValueError: a negative s_churn or s_min, an s_noise that is not positive, or s_min above
            s_max.
    """

    name: ClassVar[str] = "edm_stochastic"
    default_num_steps: ClassVar[int] = 40
    objectives: ClassVar[tuple[str, ...] | None] = ("edm",)

    s_churn: float = 10.0
    s_min: float = 0.05
    s_max: float = 50.0
    s_noise: float = 1.003

    def __post_init__(self) -> None:
        _check_not_negative(self, "s_churn", "s_min", "s_max")
        check_number("sampler.s_noise", self.s_noise, default=1.003, above=0.0)
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
                spread = self.s_noise * math.sqrt(raised**2 - level**2)
                x, level = x + spread * problem.fresh_noise(i), raised
            x = _heun_step(problem, x, level, next_level)
        return x


@register("sampler", "flow_sde")
@dataclass(frozen=True, kw_only=True)
class FlowSDE:
    """The reverse SDE of flow matching by Euler and Maruyama: num_steps evaluations.

    It has the same distributions at every t as the ODE, whatever the diffusion; noise undoes some
    of the error that earlier steps left.

    Args:
        diffusion: w(t) / t; 1 is SiT's w = sigma, 0 is Euler's rule.

    Raises:
        ValueError: a negative diffusion.
    """

    name: ClassVar[str] = "flow_sde"
    default_num_steps: ClassVar[int] = 100
    objectives: ClassVar[tuple[str, ...] | None] = ("flow",)

    diffusion: float = 1.0

    def __post_init__(self) -> None:
        _check_not_negative(self, "diffusion")

    @torch.no_grad()
    def __call__(self, problem: Problem, x: Tensor, levels: Tensor) -> Tensor:
        x, steps = x.float(), _steps(levels)
        signal, noise = problem.coefficients(levels)
        for i, (level, next_level) in enumerate(steps):
            step, slope = next_level - level, problem.slope(x, level)
            strength = self.diffusion * level
            if next_level == 0 or strength == 0:
                x = x + step * slope
                continue
            clean = problem.estimate(x, slope, level)
            score = (signal[i] * clean - x) / noise[i] ** 2  # E[-n / b | x]
            x = x + step * (slope - strength / 2 * score)
            x = x + math.sqrt(-step * strength) * problem.fresh_noise(i)
        return x


SAMPLERS: dict[str, type[Sampler]] = {
    kind.name: kind for kind in (Euler, Heun, DPMSolver2M, EDMStochastic, FlowSDE)
}


def build_sampler(name: str, **options: Any) -> Sampler:
    """Return the sampler of that name, with its own keywords.

    Raises:
        ValueError: an unknown name or option (the nearest is suggested), or a wrong value.
    """
    if name not in SAMPLERS:
        raise unknown_name("sampler", name, SAMPLERS)
    known = sampler_options(name)
    for option in options:
        if option not in known:
            raise unknown_name(f"{name} option", option, known)
    return SAMPLERS[name](**options)


def sampler_options(name: str) -> tuple[str, ...]:
    """Return the keywords that sampler `name` takes."""
    return tuple(field.name for field in fields(SAMPLERS[name]))  # type: ignore[arg-type]


def num_evaluations(name: str, num_steps: int) -> int:
    """Return how often sampler `name` evaluates its drift in `num_steps` steps down to level 0.

    Counted on a run over one number, so it cannot drift from the code. A guided drift may evaluate
    two networks each time; `tread_zoo.evaluation.flops.count_sampling` counts those.
    """
    check_num_steps(num_steps)
    count = 0

    def counting(x: Tensor, level: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x

    x, levels = torch.zeros(1, 1, 1, 1), torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    build_sampler(name)(Problem(counting, _StraightPath(), lambda step: x), x, levels)
    return count


def initial_noise(shape: Sequence[int], seed: int, indices: Sequence[int]) -> Tensor:
    """Return standard normal noise [n,C,H,W] for the images `indices`, each of `shape` [C,H,W].

    Image i's noise depends on (seed, i) alone, so image i is the same whatever the batch size,
    the order and the number of processes. Multiply it by the objective's `initial_std`.
    """
    return _noise_of("sample", shape, indices, seed)


def step_noise(shape: Sequence[int], seed: int, indices: Sequence[int], step: int) -> Tensor:
    """Return the noise [n,C,H,W] of a stochastic sampler's `step`, as `initial_noise` does.

    Image i's depends on (seed, i, step) alone.
    """
    return _noise_of("sample step", shape, indices, seed, step)


def _noise_of(
    purpose: str, shape: Sequence[int], indices: Sequence[int], seed: int, *step: int
) -> Tensor:
    noise = torch.empty(len(indices), *shape)
    for row, index in zip(noise, indices, strict=True):
        torch.randn(*shape, generator=make_generator(purpose, seed, index, *step), out=row)
    return noise


class _StraightPath:
    """A path to count on: signal 1 - level, noise level."""

    def signal(self, level: Tensor) -> Tensor:
        return 1 - level

    def noise(self, level: Tensor) -> Tensor:
        return level

    def estimate(self, x_t: Tensor, drift: Tensor, level: Tensor) -> Tensor:
        return x_t - per_sample(level) * drift


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


def _check_not_negative(sampler: object, *names: str) -> None:
    """Raise `ValueError` unless these fields of `sampler` are finite numbers of at least 0."""
    for name in names:
        value = getattr(sampler, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise ValueError(
                f"sampler.{name}={value!r} must be a finite number of at least 0; the default is "
                f"{getattr(type(sampler), name)}."
            )


def _steps(levels: Tensor) -> list[tuple[float, float]]:
    """Return the pairs (level, next level) of a falling grid."""
    if levels.ndim != 1 or len(levels) < 2 or not bool((levels.diff() < 0).all()):
        raise ValueError(
            f"levels of shape {tuple(levels.shape)} must be one row of two or more falling "
            "numbers. Use objective.levels(num_steps)."
        )
    return list(pairwise(levels.tolist()))
