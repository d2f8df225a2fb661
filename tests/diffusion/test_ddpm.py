"""DDPM: its schedules, its loss, and DDIM as Euler's rule."""

import math

import pytest
import torch

from tread_zoo.diffusion import DDPM, Draw, Euler, Problem, TimeGrid
from tread_zoo.seeding import make_generator

SHAPE = (4, 1, 4, 4)


def kept(schedule):
    """The products abar_0 … abar_999, written out from the papers."""
    products, product = [], 1.0
    for k in range(1000):
        if schedule == "linear":
            beta = 1e-4 + (0.02 - 1e-4) * k / 999
        elif schedule == "cosine":
            now, after = (math.cos((i / 1000 + 0.008) / 1.008 * math.pi / 2) for i in (k, k + 1))
            beta = min(1 - after**2 / now**2, 0.999)
        else:
            low, high = math.sqrt(0.00085), math.sqrt(0.012)
            beta = (low + (high - low) * k / 999) ** 2
        product *= 1 - beta
        products.append(product)
    return products


@pytest.mark.parametrize("schedule", ["linear", "cosine", "scaled_linear"])
@pytest.mark.parametrize("first_step", [0, 1])
def test_the_network_sees_steps_and_the_loss_is_of_the_noise(schedule, first_step):
    objective, abar = DDPM(schedule=schedule, first_step=first_step), kept(schedule)
    x, noise = (torch.randn(SHAPE, generator=make_generator("test", i)) for i in (1, 2))
    steps = [0, 1, 730, 999]
    levels = objective.levels(1000)[:-1].flip(0)
    torch.testing.assert_close(levels, torch.tensor([(1 / a - 1) ** 0.5 for a in abar]).double(),
                               rtol=1e-6, atol=0)  # fmt: skip
    seen = {}

    def predict(x_k, t):
        seen.update(x_k=x_k, t=t)
        return noise + 0.5

    loss, _ = objective.loss(predict, x, Draw(noise, levels[steps].float()))
    torch.testing.assert_close(loss, torch.full((4,), 0.25))
    assert (1000 * seen["t"]).tolist() == pytest.approx([k + first_step for k in steps], abs=1e-3)
    for i, k in enumerate(steps):
        x_k = math.sqrt(abar[k]) * x[i] + math.sqrt(1 - abar[k]) * noise[i]
        torch.testing.assert_close(seen["x_k"][i], x_k, rtol=1e-3, atol=1e-3)


def test_draws_are_of_all_steps_alike():
    objective = DDPM(schedule="cosine")
    steps = objective.step(objective.draw((20000, 1, 1, 1), make_generator("test", 3)).level)
    counts = torch.histc(steps.float(), bins=10, min=0, max=1000)
    assert (counts - 2000).abs().max() < 200


@pytest.mark.parametrize("schedule", ["linear", "cosine", "scaled_linear"])
def test_euler_is_ddim(schedule):
    """arXiv 2010.02502, eq. 12 without noise, in 20 steps, for a network of no meaning."""
    objective, abar = DDPM(schedule=schedule), kept(schedule)

    def predict(x_k, t):
        return torch.sin(3 * x_k + 5 * t.to(x_k.dtype).view(-1, 1, 1, 1))

    start = torch.randn(SHAPE, generator=make_generator("test", 4))
    steps = [round(999 - 999 * i / 19) for i in range(20)]
    x = start.double()
    for k, later in zip(steps, [*steps[1:], None], strict=True):
        now, then = abar[k], 1.0 if later is None else abar[later]
        noise = predict(x, torch.full((4,), k / 1000))
        clean = (x - math.sqrt(1 - now) * noise) / math.sqrt(now)
        x = math.sqrt(then) * clean + math.sqrt(1 - then) * noise
    problem = Problem(lambda x, level: objective.dx_dt(predict, x, level), objective, None)
    ours = Euler()(problem, start * objective.initial_std, objective.levels(20))
    assert x.std() > 0.5
    torch.testing.assert_close(ours.double(), x, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("num_steps", "grid", "word"),
    [(1001, {}, "num_steps"), (9, {"shift": 2.0}, "shift"), (9, {"rho": 7.0}, "rho"),
     (9, {"grid": "log"}, "grid")],
)  # fmt: skip
def test_levels_that_it_does_not_have_are_refused(num_steps, grid, word):
    with pytest.raises(ValueError, match=f"sampler.{word}="):
        DDPM().levels(num_steps, TimeGrid(**grid))
