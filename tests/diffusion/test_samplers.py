"""Samplers against ODEs whose solution is known."""

import pytest
import torch

from tread_zoo.diffusion import (
    SAMPLERS,
    build_sampler,
    euler,
    heun,
    initial_noise,
    num_evaluations,
)

SHAPE = (8, 1, 16, 16)


def _start(problem):
    return problem.objective.initial_std * initial_noise(SHAPE[1:], 0, range(SHAPE[0]))


def _drift(problem):
    network = problem.network()
    return lambda x, level: problem.objective.drift(network, x, level)


@pytest.mark.parametrize(("name", "num_steps"), [("euler", 400), ("heun", 40)])
def test_samples_have_the_mean_and_std_of_the_data(problem, name, num_steps):
    x = build_sampler(name)(_drift(problem), _start(problem), problem.objective.levels(num_steps))
    assert x.mean().item() == pytest.approx(problem.mean, abs=0.05)
    assert x.std().item() == pytest.approx(problem.std, rel=0.04)


@pytest.mark.parametrize(
    ("name", "num_steps", "tolerance"), [("euler", 400, 0.06), ("heun", 80, 0.01)]
)
def test_each_sample_ends_where_its_path_does(problem, name, num_steps, tolerance):
    start = _start(problem)
    x = build_sampler(name)(_drift(problem), start, problem.objective.levels(num_steps))
    exact = problem.solution(start.double(), problem.objective.initial_std, 0.0)
    torch.testing.assert_close(x, exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("name", "ratio"), [("euler", 2), ("heun", 4)])
def test_order_of_convergence(problem, name, ratio):
    start = _start(problem)
    exact = problem.solution(start.double(), problem.objective.initial_std, 0.0)

    def error(num_steps: int) -> float:
        x = SAMPLERS[name](_drift(problem), start, problem.objective.levels(num_steps))
        return (x - exact).square().mean().sqrt().item()

    assert error(32) / error(64) == pytest.approx(ratio, rel=0.2)


@pytest.mark.parametrize(("name", "evaluations"), [("euler", [1, 2, 25]), ("heun", [1, 3, 49])])
def test_num_evaluations(name, evaluations):
    assert [num_evaluations(name, num_steps) for num_steps in (1, 2, 25)] == evaluations


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_drift_is_asked_for_at_level_zero(name, problem):
    seen = []

    def drift(x, level):
        assert level.shape == x.shape[:1]
        assert level.dtype == x.dtype == torch.float32
        assert not torch.is_grad_enabled()
        seen.append(level[0].item())
        return x

    SAMPLERS[name](drift, _start(problem), problem.objective.levels(5))
    assert min(seen) > 0
    assert len(seen) == num_evaluations(name, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAMPLERS)
def test_x_is_left_alone_and_the_result_is_float32(name, dtype):
    x = torch.ones(2, 1, 2, 2, dtype=dtype)
    levels = torch.linspace(1, 0, 4)
    result = SAMPLERS[name](lambda x, level: x.bfloat16(), x, levels)
    assert torch.equal(x, torch.ones_like(x))
    assert result.dtype == torch.float32
    assert not result.requires_grad


def test_steps_by_hand():
    """dx/dl = x from 2 over 1 to 0.5, which is not 0: Heun corrects the last step too."""
    x, levels = torch.ones(1, 1, 1, 1), torch.tensor([2, 1, 0.5])
    assert euler(lambda x, level: x, x, levels).item() == 0
    assert heun(lambda x, level: x, x, levels).item() == 0.5 * 0.625


@pytest.mark.parametrize("levels", [[1.0], [0.0, 1.0], [1.0, 1.0, 0.0], [[1.0, 0.0]]])
@pytest.mark.parametrize("name", SAMPLERS)
def test_wrong_levels_are_named(name, levels):
    with pytest.raises(ValueError, match=r"levels of shape.*Use objective.levels"):
        SAMPLERS[name](lambda x, level: x, torch.ones(1, 1, 1, 1), torch.tensor(levels))


def test_unknown_sampler():
    with pytest.raises(ValueError, match=r"sampler='huen'.*mean 'heun'.*Known: euler, heun"):
        build_sampler("huen")
    with pytest.raises(ValueError, match="num_steps=0 must be at least 1"):
        num_evaluations("heun", 0)


def test_initial_noise_is_a_function_of_seed_and_index():
    whole = initial_noise((3, 4, 4), 7, range(6))
    parts = [initial_noise((3, 4, 4), 7, indices) for indices in ([0, 1, 2, 3], [4, 5])]
    assert torch.equal(whole, torch.cat(parts))
    ranks = [initial_noise((3, 4, 4), 7, range(rank, 6, 2)) for rank in (0, 1)]
    assert torch.equal(whole, torch.stack(ranks, dim=1).flatten(0, 1))
    assert not torch.equal(whole, initial_noise((3, 4, 4), 8, range(6)))
    assert initial_noise((3, 4, 4), 7, []).shape == (0, 3, 4, 4)


def test_initial_noise_is_standard_normal():
    noise = initial_noise((3, 16, 16), 0, range(32))
    assert noise.dtype == torch.float32
    assert noise.mean().item() == pytest.approx(0, abs=0.02)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    assert noise.flatten(1).unique(dim=0).shape[0] == 32
