"""What every objective promises, and the errors for wrong options of objective, sampler and
guidance."""

import dataclasses

import pytest
import torch

from tread_zoo import create
from tread_zoo.diffusion import Draw, build_sampling
from tread_zoo.seeding import make_generator

SHAPE = (5, 3, 4, 4)


def test_draw_depends_on_the_generator_alone(problem):
    first = problem.objective.draw(SHAPE, make_generator("test", 1))
    again = problem.objective.draw(SHAPE, make_generator("test", 1))
    other = problem.objective.draw(SHAPE, make_generator("test", 2))
    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first.level, again.level)
    assert not torch.equal(first.noise, other.noise)
    assert not torch.equal(first.level, other.level)


def test_loss_is_zero_for_the_perfect_network(problem):
    """Data that is one point (std -> 0) has a posterior mean that is the data itself."""
    point = dataclasses.replace(problem, std=0.0)
    x = torch.full(SHAPE, point.mean)
    draw = problem.objective.draw(SHAPE, make_generator("test", 3))
    loss, _ = problem.objective.loss(point.predict(), x, draw)
    assert loss.shape == SHAPE[:1]
    assert loss.max() < 1e-6


def test_posterior_mean_beats_its_neighbours(problem):
    """The loss is least at E[y | x], so scalings, target and noising belong together."""
    shape = (256, 3, 8, 8)
    draw = problem.objective.draw(shape, make_generator("test", 4))
    x = problem.mean + problem.std * torch.randn(shape, generator=make_generator("test", 5))
    best = problem.predict()

    def mean_loss(factor: float) -> float:
        scaled, _ = problem.objective.loss(lambda x, t: factor * best(x, t), x, draw)
        return scaled.mean().item()

    assert mean_loss(1.0) < min(mean_loss(0.95), mean_loss(1.05))


def test_slope_and_estimate_agree(problem):
    """For every objective, dx/dt = (x_t - estimate of x) / level."""
    objective, predict = problem.objective, problem.predict()
    draw = objective.draw(SHAPE, make_generator("test", 6))
    x_t = objective.noised(torch.randn(SHAPE, generator=make_generator("test", 7)), draw)
    level = draw.level.view(-1, 1, 1, 1)
    slope = objective.dx_dt(predict, x_t, draw.level)
    estimate = objective.estimate(x_t, slope, draw.level)
    torch.testing.assert_close(estimate, problem.posterior_mean(x_t, level), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(slope, (x_t - estimate) / level, rtol=1e-4, atol=1e-4)


def test_dx_dt_is_the_slope_of_the_path(problem):
    x, step = torch.randn(SHAPE, generator=make_generator("test", 8)), 1e-3
    level = problem.objective.levels(1000)[790].item()  # DDPM knows its steps alone
    after = problem.solution(x.double(), level, level + step)
    before = problem.solution(x.double(), level, level - step)
    slope = problem.objective.dx_dt(problem.predict(), x, torch.full(SHAPE[:1], level))
    torch.testing.assert_close(slope, (after - before) / (2 * step), rtol=2e-3, atol=2e-3)


def test_learned_sigma_channels_are_ignored(problem):
    objective, plain = problem.objective, problem.predict()

    def learned_sigma(x, t):
        return torch.cat([plain(x, t), torch.full_like(x, torch.nan)], dim=1)

    draw = objective.draw(SHAPE, make_generator("test", 9))
    x = torch.randn(SHAPE, generator=make_generator("test", 10))
    slopes = [objective.dx_dt(given, x, draw.level) for given in (learned_sigma, plain)]
    losses = [objective.loss(given, x, draw)[0] for given in (learned_sigma, plain)]
    assert torch.equal(*slopes)
    assert torch.equal(*losses)


def test_all_is_float32_when_the_network_is_not(problem):
    weight = torch.eye(3).requires_grad_()

    def predict(x, t):
        return torch.einsum("bchw,cd->bdhw", x, weight)

    draw = problem.objective.draw(SHAPE, make_generator("test", 11))
    x = torch.randn(SHAPE, generator=make_generator("test", 12))
    with torch.autocast("cpu", torch.bfloat16):
        assert predict(x, draw.level).dtype == torch.bfloat16
        loss, _ = problem.objective.loss(predict, x, draw)
        slope = problem.objective.dx_dt(predict, x, draw.level)
    assert loss.dtype == slope.dtype == torch.float32
    loss.mean().backward()
    assert weight.grad.isfinite().all()


def test_what_broadcasting_would_hide_is_refused(problem):
    objective = problem.objective
    draw, x = objective.draw(SHAPE, make_generator("test", 13)), torch.zeros(SHAPE)
    for wrong_x, wrong_draw in (
        (x[:1], draw),
        (x, Draw(draw.noise, draw.level[:1])),
        (x, Draw(draw.noise[:1], draw.level)),
    ):
        with pytest.raises(ValueError):
            objective.loss(problem.predict(), wrong_x, wrong_draw)
    with pytest.raises(ValueError):
        objective.loss(lambda x, t: torch.zeros(5, 4, 4, 4), x, draw)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("objective", "edm", {"sigma_dta": 1.0}),
        ("objective", "edm", {"sigma_min": 2.0, "sigma_max": 1.0}),
        ("objective", "flow", {"time_distribution": "logit-normal"}),
        ("objective", "flow", {"time_distribution": "logit_normal", "logit_std": 0}),
        ("objective", "flow", {"time_distribution": "cosmap", "logit_std": 0.5}),
        ("objective", "ddpm", {"schedule": "sqrt"}),
        ("sampler", "huen", {"heun": None}),
        ("sampler", "edm_stochastic", {"s_churn": -1.0}),
        ("guidance", "spars", {"sparse": 1}),
        ("guidance", "cfg", {"weak_rate": 0.5}),
        ("guidance", "cfg", {"scale": -0.1}),
        ("guidance", "sparse", {"strong_rate": 0.7}),
        ("guidance", "sparse", {"selector": {"name": "blocks", "size": 0}}),
        ("guidance", "auto", {"weak_checkpoint": None}),
        ("guidance", "custom", {"weak_rate": ["cosine", 0.6, 1.0]}),
        ("guidance", "custom", {"drop_label": ["interval", 0.2, 20]}),
    ],
)
def test_wrong_options_are_named(kind, name, options):
    with pytest.raises(ValueError, match=list(options)[-1]):
        create(kind, name, **options)


@pytest.mark.parametrize(("option", "value"), [("num_steps", 0), ("grid", "unifrom")])
def test_wrong_steps_are_named(option, value):
    with pytest.raises(ValueError, match=option):
        build_sampling({"name": "euler", option: value})
