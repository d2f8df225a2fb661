"""What both objectives promise."""

import dataclasses

import pytest
import torch

from tread_zoo.diffusion import EDM, Draw, FlowMatching, Objective, build_objective
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


def test_draw_leaves_the_global_generator_alone(problem):
    before = torch.get_rng_state()
    problem.objective.draw(SHAPE, make_generator("test", 1))
    assert torch.equal(before, torch.get_rng_state())


def test_draw_is_float32_frozen_and_shaped(problem):
    draw = problem.objective.draw(SHAPE, make_generator("test", 1))
    assert draw.noise.shape == SHAPE
    assert draw.level.shape == SHAPE[:1]
    assert draw.noise.dtype == draw.level.dtype == torch.float32
    assert draw.to("meta").noise.device.type == draw.to("meta").level.device.type == "meta"
    with pytest.raises(dataclasses.FrozenInstanceError):
        draw.level = draw.noise


def test_loss_is_zero_for_the_perfect_network(problem):
    """Data that is one point (std -> 0) has a posterior mean that is the data itself."""
    point = dataclasses.replace(problem, std=0.0)
    x = torch.full(SHAPE, point.mean)
    draw = problem.objective.draw(SHAPE, make_generator("test", 3))
    loss = problem.objective.loss(point.network(), x, draw)
    assert loss.shape == SHAPE[:1]
    assert loss.max() < 1e-6


def test_posterior_mean_beats_its_neighbours(problem):
    """The loss is least at E[y | x], so scalings, target and noising belong together."""
    shape = (256, 3, 8, 8)
    draw = problem.objective.draw(shape, make_generator("test", 4))
    x = problem.mean + problem.std * torch.randn(shape, generator=make_generator("test", 5))
    best = problem.network()

    def mean_loss(factor: float) -> float:
        scaled = problem.objective.loss(lambda x, t: factor * best(x, t), x, draw)
        return scaled.mean().item()

    assert mean_loss(1.0) < min(mean_loss(0.95), mean_loss(1.05))


def test_drift_and_denoise_agree(problem):
    """For both objectives, drift = (x_t - estimate of x) / level."""
    objective, network = problem.objective, problem.network()
    draw = objective.draw(SHAPE, make_generator("test", 6))
    x_t = objective.noised(torch.randn(SHAPE, generator=make_generator("test", 7)), draw)
    level = draw.level.view(-1, 1, 1, 1)
    denoised = objective.denoise(network, x_t, draw.level)
    torch.testing.assert_close(denoised, problem.posterior_mean(x_t, level), rtol=1e-4, atol=1e-4)
    drift = objective.drift(network, x_t, draw.level)
    torch.testing.assert_close(drift, (x_t - denoised) / level, rtol=1e-4, atol=1e-4)


def test_drift_is_the_slope_of_the_path(problem):
    x, level, step = torch.randn(SHAPE, generator=make_generator("test", 8)), 0.6, 1e-3
    after = problem.solution(x.double(), level, level + step)
    before = problem.solution(x.double(), level, level - step)
    drift = problem.objective.drift(problem.network(), x, torch.full(SHAPE[:1], level))
    torch.testing.assert_close(drift, (after - before) / (2 * step), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("num_steps", [1, 2, 18, 250])
def test_levels_fall_to_exactly_zero(problem, num_steps):
    levels = problem.objective.levels(num_steps)
    assert levels.shape == (num_steps + 1,)
    assert levels.dtype == torch.float64
    assert levels[0].item() == pytest.approx(problem.objective.initial_std)
    assert levels[-1].item() == 0
    assert (levels.diff() < 0).all()


def test_learned_sigma_channels_are_ignored(problem):
    objective, plain = problem.objective, problem.network()

    def learned_sigma(x, t):
        return torch.cat([plain(x, t), torch.full_like(x, torch.nan)], dim=1)

    draw = objective.draw(SHAPE, make_generator("test", 9))
    x = torch.randn(SHAPE, generator=make_generator("test", 10))
    for method in (objective.denoise, objective.drift):
        assert torch.equal(method(learned_sigma, x, draw.level), method(plain, x, draw.level))
    assert torch.equal(objective.loss(learned_sigma, x, draw), objective.loss(plain, x, draw))


def test_all_is_float32_when_the_network_is_not(problem):
    weight = torch.eye(3).requires_grad_()

    def network(x, t):
        return torch.einsum("bchw,cd->bdhw", x, weight)

    draw = problem.objective.draw(SHAPE, make_generator("test", 11))
    x = torch.randn(SHAPE, generator=make_generator("test", 12))
    with torch.autocast("cpu", torch.bfloat16):
        assert network(x, draw.level).dtype == torch.bfloat16
        loss = problem.objective.loss(network, x, draw)
        drift = problem.objective.drift(network, x, draw.level)
        denoised = problem.objective.denoise(network, x, draw.level)
    assert loss.dtype == drift.dtype == denoised.dtype == torch.float32
    loss.mean().backward()
    assert weight.grad.isfinite().all()


def test_wrong_shapes_are_named(problem):
    objective = problem.objective
    generator = make_generator("test", 13)
    draw = objective.draw(SHAPE, generator)
    x = torch.zeros(SHAPE)
    with pytest.raises(
        ValueError, match=r"gave 4 channels for data of 3.*must give 3 channels, or 6"
    ):
        objective.loss(lambda x, t: torch.zeros(5, 4, 4, 4), x, draw)
    with pytest.raises(ValueError, match=r"do not fit x \(1, 3, 4, 4\).*draw\(x.shape"):
        objective.loss(problem.network(), x[:1], draw)
    with pytest.raises(ValueError, match=r"draw.level \(1,\)"):
        objective.loss(problem.network(), x, Draw(draw.noise, draw.level[:1]))
    with pytest.raises(ValueError, match=r"shape=\(3, 4, 4\) must be \(B, C, H, W\)"):
        objective.draw((3, 4, 4), generator)
    with pytest.raises(ValueError, match="num_steps=0 must be at least 1"):
        objective.levels(0)


def test_build_objective():
    objective: Objective = build_objective("edm", sigma_data=1.0)
    assert objective == EDM(sigma_data=1.0)
    assert build_objective("flow") == FlowMatching()
    with pytest.raises(ValueError, match=r"objective='flwo'.*mean 'flow'.*Known: edm, flow"):
        build_objective("flwo")
    with pytest.raises(ValueError, match=r"edm option='sigma_dta'.*mean 'sigma_data'.*rho"):
        build_objective("edm", sigma_dta=1.0)
