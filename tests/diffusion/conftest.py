"""Gaussian data: the one distribution whose best network and whose ODE are known in closed form.

With data ~ N(mean, std^2) in every pixel and x = a y + b n (EDM, DDPM: a = 1, b = sigma; flow:
a = 1 - t, b = t), x has variance a^2 std^2 + b^2, and an ODE path keeps its z-score: (x - a mean) /
that root. Everything here follows from that, independently of the code under test.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tread_zoo import create
from tread_zoo.diffusion import DDPM, EDM, FlowMatching, MeanFlow, Predict


@dataclass(frozen=True)
class GaussianProblem:
    """An objective, and data N(mean, std^2)."""

    objective: EDM | FlowMatching | MeanFlow | DDPM
    mean: float = 0.4
    std: float = 0.7

    def _signal(self, level: Tensor) -> Tensor:
        straight = isinstance(self.objective, FlowMatching | MeanFlow)
        return 1 - level if straight else torch.ones_like(level)

    def _std(self, level: Tensor) -> Tensor:
        return ((self._signal(level) * self.std) ** 2 + level**2).sqrt()

    def solution(self, x: Tensor, start: float, end: float) -> Tensor:
        """Carry x along the ODE from level `start` to level `end`."""
        start_level, end_level = torch.tensor([start, end], dtype=torch.float64)
        z = (x - self._signal(start_level) * self.mean) / self._std(start_level)
        return (self._signal(end_level) * self.mean + self._std(end_level) * z).float()

    def posterior_mean(self, x: Tensor, level: Tensor) -> Tensor:
        """E[y | x] at `level`, shaped to broadcast with x."""
        a = self._signal(level)
        gain = a * self.std**2 / self._std(level) ** 2
        return self.mean + gain * (x - a * self.mean)

    def predict(self) -> Predict:
        """The raw prediction whose estimate is the posterior mean."""
        objective = self.objective

        def flow(x: Tensor, t: Tensor) -> Tensor:
            t = t.view(-1, 1, 1, 1)
            return (x - self.posterior_mean(x, t)) / t

        def mean_flow(x: Tensor, t: Tensor, r: Tensor | None = None, y: None = None) -> Tensor:
            if r is None:
                return flow(x, t)
            at_t = flow(x, t)
            t, r = t.view(-1, 1, 1, 1), r.view(-1, 1, 1, 1)
            z = (x - (1 - t) * self.mean) / self._std(t)
            span = torch.where(t == r, 1, t - r)
            mean = (x - (1 - r) * self.mean - self._std(r) * z) / span
            return torch.where(t == r, at_t, mean)

        def edm(scaled: Tensor, c_noise: Tensor) -> Tensor:
            sigma = (4 * c_noise).exp().view(-1, 1, 1, 1)
            total = sigma**2 + objective.sigma_data**2
            x = scaled * total.sqrt()
            skip = objective.sigma_data**2 / total * x
            gap = self.posterior_mean(x, sigma) - skip
            return gap * total.sqrt() / (sigma * objective.sigma_data)

        def ddpm(scaled: Tensor, t: Tensor) -> Tensor:
            beta = torch.linspace(1e-4, 0.02, 1000)
            kept = torch.stack([(1 - beta[: int(k) + 1]).prod() for k in (1000 * t).round()])
            sigma = (1 / kept - 1).sqrt().view(-1, 1, 1, 1)
            x = scaled * (1 + sigma**2).sqrt()
            return (x - self.posterior_mean(x, sigma)) / sigma

        return {FlowMatching: flow, MeanFlow: mean_flow, EDM: edm, DDPM: ddpm}[type(objective)]


def _problem(name: str) -> GaussianProblem:
    return GaussianProblem(create("objective", name))


@pytest.fixture(params=["edm", "flow", "ddpm"])
def problem(request: pytest.FixtureRequest) -> GaussianProblem:
    return _problem(request.param)


@pytest.fixture
def gaussian() -> Callable[[str], GaussianProblem]:
    """Return a function from an objective's name to its Gaussian problem."""
    return _problem
