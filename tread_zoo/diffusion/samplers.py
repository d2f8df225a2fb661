"""Samplers integrate a drift dx/dlevel over a falling grid of levels. They know nothing else.

    Euler   x' = x + h d(x, l)                                    h = l' - l < 0, first order
    Heun    x' = x + h/2 (d(x, l) + d(x + h d(x, l), l'))         second order

Heun is Algorithm 1 of arXiv 2206.00364. A step that ends at level 0 is an Euler step: EDM's drift
(x - D) / sigma has no value there. Flow matching's velocity has one, but the same rule holds, for
a sampler does not know its objective, and training draws no t of 0 (logit-normal) or next to none
(uniform). One Euler step, of a size that shrinks with the grid, costs no order: its own error is
O(h^2). Both are deterministic: the image is a function of its initial noise.

Dimensions: B batch, C channels, H height, W width, n images.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tread_zoo.diffusion.objective import check_num_steps
from tread_zoo.errors import unknown_name
from tread_zoo.seeding import make_generator

# (x [B,C,H,W], level [B], float32) -> dx/dlevel [B,C,H,W]
Drift = Callable[[Tensor, Tensor], Tensor]
# (drift, x [B,C,H,W] at levels[0], levels [num_steps + 1]) -> x [B,C,H,W] at levels[-1]
Sampler = Callable[[Drift, Tensor, Tensor], Tensor]


@torch.no_grad()
def euler(drift: Drift, x: Tensor, levels: Tensor) -> Tensor:
    """Integrate `drift` from x [B,C,H,W] by Euler's rule: num_steps evaluations.

    Returns:
        A new float32 tensor [B,C,H,W]; `x` is left as it was.

    Raises:
        ValueError: `levels` is not a falling grid [num_steps + 1].
    """
    x = x.float()
    for level, next_level in _steps(levels):
        x = x + (next_level - level) * _slope(drift, x, level)
    return x


@torch.no_grad()
def heun(drift: Drift, x: Tensor, levels: Tensor) -> Tensor:
    """Integrate `drift` from x [B,C,H,W] by Heun's rule: 2 num_steps - 1 evaluations to level 0.

    Returns:
        A new float32 tensor [B,C,H,W]; `x` is left as it was.

    Raises:
        ValueError: `levels` is not a falling grid [num_steps + 1].
    """
    x = x.float()
    for level, next_level in _steps(levels):
        step = next_level - level
        slope = _slope(drift, x, level)
        if next_level != 0:
            slope = (slope + _slope(drift, x + step * slope, next_level)) / 2
        x = x + step * slope
    return x


SAMPLERS: dict[str, Sampler] = {"euler": euler, "heun": heun}


def build_sampler(name: str) -> Sampler:
    """Return the sampler of that name.

    Raises:
        ValueError: no sampler has that name.
    """
    if name not in SAMPLERS:
        raise unknown_name("sampler", name, SAMPLERS)
    return SAMPLERS[name]


def num_evaluations(name: str, num_steps: int) -> int:
    """Return how often sampler `name` evaluates its drift in `num_steps` steps down to level 0.

    Counted on a run over one number, so it cannot drift from the code. A guided drift evaluates
    two networks each time, unless its scale is 0 or 1.
    """
    check_num_steps(num_steps)
    count = 0

    def counting(x: Tensor, level: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x

    levels = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    build_sampler(name)(counting, torch.zeros(1, 1, 1, 1), levels)
    return count


def initial_noise(shape: Sequence[int], seed: int, indices: Sequence[int]) -> Tensor:
    """Return standard normal noise [n,C,H,W] for the images `indices`, each of `shape` [C,H,W].

    Image i's noise depends on (seed, i) alone, so image i is the same whatever the batch size,
    the order and the number of processes. Multiply it by the objective's `initial_std`.
    """
    noise = torch.empty(len(indices), *shape)
    for row, index in zip(noise, indices, strict=True):
        torch.randn(*shape, generator=make_generator("sample", seed, index), out=row)
    return noise


def _slope(drift: Drift, x: Tensor, level: float) -> Tensor:
    """Evaluate `drift` at one level for the whole batch, in float32."""
    return drift(x, torch.full(x.shape[:1], level, dtype=torch.float32, device=x.device)).float()


def _steps(levels: Tensor) -> list[tuple[float, float]]:
    """Return the pairs (level, next level) of a falling grid."""
    if levels.ndim != 1 or len(levels) < 2 or not bool((levels.diff() < 0).all()):
        raise ValueError(
            f"levels of shape {tuple(levels.shape)} must be one row of two or more falling "
            "numbers. Use objective.levels(num_steps)."
        )
    return list(pairwise(levels.tolist()))
