"""Samplers against ODEs and SDEs whose solution is known."""

import math

import pytest
import torch

from tests.small_run import ours
from tread_zoo import create, create_backbone
from tread_zoo.diffusion import (
    EDM,
    DPMSolver2M,
    EDMStochastic,
    Euler,
    FlowMatching,
    FlowSDE,
    Heun,
    Problem,
    SamplingOptions,
    TimeGrid,
    generate,
    initial_noise,
    step_noise,
)

SHAPE = (8, 1, 16, 16)
FITTING = [
    (name, objective)
    for name in ours("sampler")
    for objective in ours("objective")
    if objective in getattr(create("sampler", name), "objectives", (objective,))
]


def _start(problem, shape=SHAPE):
    return problem.objective.initial_std * initial_noise(shape[1:], 0, range(shape[0]))


def _of(problem, dx_dt=None, seed=0, shape=SHAPE):
    """Return a Gaussian problem for samplers, or another dx/dt on its path."""
    predict = problem.predict()

    def exact(x, level):
        return problem.objective.dx_dt(predict, x, level)

    return Problem(
        dx_dt or exact,
        problem.objective,
        lambda step: step_noise(shape[1:], seed, range(shape[0]), step),
    )


def _plain(dx_dt):
    """Return a problem on flow matching's path whose noise is 0."""
    return Problem(dx_dt, FlowMatching(), lambda step: 0.0)


@pytest.mark.parametrize(
    ("objective", "sampler", "order"),
    [
        ("edm", Euler(), 1),
        ("edm", Heun(), 2),
        ("edm", DPMSolver2M(), 2),
        ("flow", Euler(), 1),
        ("flow", Heun(), 2),
    ],
)
def test_order_of_convergence(gaussian, objective, sampler, order):
    problem = gaussian(objective)
    start = _start(problem)
    exact = problem.solution(start.double(), problem.objective.initial_std, 0.0)

    def error(num_steps: int) -> float:
        x = sampler(_of(problem), start, problem.objective.levels(num_steps))
        return (x - exact).square().mean().sqrt().item()

    assert error(32) / error(64) == pytest.approx(2**order, rel=0.2)


def test_order_of_dpmpp_for_flow_matching(gaussian):
    """Second order where ln(a / b) is finite; the ends of the whole grid cost a logarithm."""
    problem, start = gaussian("flow"), _start(gaussian("flow"))

    def error(num_steps: int, first: float, last: float) -> float:
        levels = torch.linspace(first, last, num_steps + 1, dtype=torch.float64)
        exact = problem.solution(start.double(), first, last)
        x = DPMSolver2M()(_of(problem), start, levels)
        return (x - exact).square().mean().sqrt().item()

    assert error(32, 0.9, 0.1) / error(64, 0.9, 0.1) == pytest.approx(4, rel=0.1)
    assert error(64, 1.0, 0.0) / error(128, 1.0, 0.0) > 3.2


@pytest.mark.parametrize(("name", "objective"), FITTING)
def test_evaluations_are_as_many_as_documented_and_none_is_at_level_zero(gaussian, name, objective):
    problem, levels_seen = gaussian(objective), []

    def dx_dt(x, level):
        assert level.shape == x.shape[:1]
        assert level.dtype == x.dtype == torch.float32
        assert not torch.is_grad_enabled()
        levels_seen.append(level[0].item())
        return x

    create("sampler", name)(_of(problem, dx_dt), _start(problem), problem.objective.levels(5))
    assert min(levels_seen) > 0
    assert len(levels_seen) == (9 if name in ("heun", "edm_stochastic") else 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ours("sampler"))
def test_x_is_left_alone_and_the_result_is_float32(name, dtype):
    x = torch.ones(2, 1, 2, 2, dtype=dtype)
    levels = torch.linspace(1, 0, 4)
    result = create("sampler", name)(_plain(lambda x, level: x.bfloat16()), x, levels)
    assert torch.equal(x, torch.ones_like(x))
    assert result.dtype == torch.float32
    assert not result.requires_grad


def test_steps_by_hand():
    """dx/dl = x from 2 over 1 to 0.5, which is not 0: Heun corrects the last step too."""
    x, levels = torch.ones(1, 1, 1, 1), torch.tensor([2, 1, 0.5])
    problem = _plain(lambda x, level: x)
    assert Euler()(problem, x, levels).item() == 0
    assert Heun()(problem, x, levels).item() == 0.5 * 0.625


# DPM-Solver++(2M) ---------------------------------------------------------------------------------


def test_two_steps_of_dpmpp_by_the_papers_formula():
    """Algorithm 2 of arXiv 2211.01095 in float64, with a slope whose estimate is 3 l x."""

    def dx_dt(x, level):  # EDM: D = x - l dx/dl
        return (1 - 3 * level.view(-1, 1, 1, 1)) * x / level.view(-1, 1, 1, 1)

    levels = [2.0, 1.2, 0.4]
    x, lambdas, clean = 1.0, [-math.log(s) for s in levels], []
    for i in range(2):
        clean.append(3 * levels[i] * x)
        h, guess = lambdas[i + 1] - lambdas[i], clean[i]
        if i:
            r = (lambdas[i] - lambdas[i - 1]) / h
            guess = (1 + 1 / (2 * r)) * clean[i] - 1 / (2 * r) * clean[i - 1]
        x = levels[i + 1] / levels[i] * x - (math.exp(-h) - 1) * guess
    result = DPMSolver2M()(
        Problem(dx_dt, EDM(), lambda step: 0.0), torch.ones(1, 1, 1, 1), torch.tensor(levels)
    )
    assert result.item() == pytest.approx(x, rel=1e-5)


# Stochastic samplers ------------------------------------------------------------------------------

STOCHASTIC = [
    ("edm", EDMStochastic(s_churn=16.0, s_noise=1.0), 160),
    ("flow", FlowSDE(diffusion=1.0), 400),
    ("flow", FlowSDE(diffusion=4.0), 400),
]


@pytest.mark.parametrize(("objective", "sampler", "num_steps"), STOCHASTIC, ids=repr)
def test_stochastic_samples_have_the_mean_and_variance_of_the_data(
    gaussian, objective, sampler, num_steps
):
    """16384 independent pixels: 4 deviations of the estimators, a little for the steps."""
    problem, shape = gaussian(objective), (4, 1, 64, 64)
    x = sampler(
        _of(problem, shape=shape), _start(problem, shape), problem.objective.levels(num_steps)
    )
    count = x.numel()
    assert x.mean().item() == pytest.approx(problem.mean, abs=4 * problem.std / count**0.5 + 0.01)
    assert x.var().item() == pytest.approx(problem.std**2, rel=4 * (2 / count) ** 0.5 + 0.02)


@pytest.mark.parametrize(
    ("objective", "sampler", "plain"),
    [
        ("edm", EDMStochastic(s_churn=0.0), Heun()),
        ("edm", EDMStochastic(s_churn=9.0, s_min=200.0, s_max=300.0), Heun()),
        ("flow", FlowSDE(diffusion=0.0), Euler()),
    ],
    ids=repr,
)
def test_without_noise_it_is_the_ode_s_rule_to_the_bit(gaussian, objective, sampler, plain):
    problem = gaussian(objective)
    start, levels = _start(problem), problem.objective.levels(9)
    assert torch.equal(sampler(_of(problem), start, levels), plain(_of(problem), start, levels))


def test_churn_by_hand():
    """A constant slope: the new noise has the deviation sqrt(l^^2 - l^2) s_noise, then Heun."""
    drawn = []

    def fresh(step):
        drawn.append(step)
        return torch.ones(1, 1, 1, 1)

    def dx_dt(x, level):
        return torch.full_like(x, 0.5)

    sampler = EDMStochastic(s_churn=0.9, s_min=0.5, s_max=3.0, s_noise=1.1)
    levels = torch.tensor([4.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    result = sampler(Problem(dx_dt, EDM(), fresh), torch.zeros(1, 1, 1, 1), levels)
    gamma = 0.9 / 3
    expected = 0.5 * (2 - 4)  # l = 4 is above s_max
    for level, after in ((2.0, 1.0), (1.0, 0.0)):
        raised = level * (1 + gamma)
        expected += 1.1 * (raised**2 - level**2) ** 0.5 + 0.5 * (after - raised)
    assert drawn == [1, 2]
    assert result.item() == pytest.approx(expected, rel=1e-5)


def test_a_step_of_the_sde_by_the_papers_formula():
    """SiT, eq. 5: the score is -(x + (1 - t) v) / t, and the last step adds no noise."""

    def dx_dt(x, level):
        return 2 * x + level.view(-1, 1, 1, 1)

    start, x = torch.full((1, 1, 1, 1), 0.7), 0.7
    problem = Problem(dx_dt, FlowMatching(), lambda step: torch.full((1, 1, 1, 1), 0.3 + step))
    for i, (t, after) in enumerate([(0.9, 0.5), (0.5, 0.2)]):
        velocity, w = 2 * x + t, 1.5 * t
        score = -(x + (1 - t) * velocity) / t
        step = t - after
        x = x - step * (velocity - w / 2 * score) + (w * step) ** 0.5 * (0.3 + i)
    x -= 0.2 * (2 * x + 0.2)
    levels = torch.tensor([0.9, 0.5, 0.2, 0.0], dtype=torch.float64)
    assert FlowSDE(diffusion=1.5)(problem, start, levels).item() == pytest.approx(x, rel=1e-5)


def test_the_released_sampler_of_sit_by_its_equations():
    """Theirs has data at 1 and D = sigma: drift v + D s, noise sqrt(2 D), num_steps - 1 equal steps
    up to 1 - 0.04, and a last one by the drift alone."""

    def velocity(x, t):  # theirs, from noise to data, at their time
        return 3 - 2 * x + t

    def dx_dt(x, level):
        return -velocity(x, 1 - level.view(-1, 1, 1, 1))

    x, steps = 0.7, 6
    for i in range(steps):
        t, step = i * 0.96 / (steps - 1), 0.96 / (steps - 1) if i < steps - 1 else 0.04
        sigma = 1 - t
        score = (t * velocity(x, t) - x) / sigma
        x = x + step * (velocity(x, t) + sigma * score)
        if i < steps - 1:
            x += (2 * sigma * step) ** 0.5 * 0.3
    problem = Problem(dx_dt, FlowMatching(), lambda step: torch.full((1, 1, 1, 1), 0.3))
    sampler = FlowSDE(diffusion=2.0, last_step=0.04)
    found = sampler(problem, torch.full((1, 1, 1, 1), 0.7), problem.objective.levels(steps))
    assert found.item() == pytest.approx(x, rel=1e-5)
    start, levels = torch.full((1, 1, 1, 1), 0.7), problem.objective.levels(1)
    single = sampler(problem, start, levels)
    torch.testing.assert_close(single, FlowSDE(diffusion=0.0)(problem, start, levels))


# Options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [[0.0, 1.0], [1.0, 1.0, 0.0]])
@pytest.mark.parametrize("name", ours("sampler"))
def test_levels_that_do_not_fall_are_refused(name, levels):
    with pytest.raises(ValueError):
        create("sampler", name)(
            _plain(lambda x, _: x), torch.ones(1, 1, 1, 1), torch.tensor(levels)
        )


@pytest.mark.parametrize("name", ours("sampler"))
@pytest.mark.parametrize("objective", ours("objective"))
def test_a_sampler_that_does_not_fit_the_objective_is_refused(name, objective):
    options = SamplingOptions(create("sampler", name), 4)
    if (name, objective) in FITTING:
        assert len(options.levels(create("objective", objective))) == 5
    else:
        with pytest.raises(ValueError, match=f"sampler={name} is for objective=.*{objective}"):
            options.levels(create("objective", objective))


# Grids --------------------------------------------------------------------------------------------


def test_grids_by_formula():
    flow, edm = FlowMatching(), EDM(sigma_min=0.01, sigma_max=10.0)
    assert flow.levels(4, TimeGrid(grid="quadratic")).tolist() == [1, 0.5625, 0.25, 0.0625, 0]
    normal = flow.levels(8, TimeGrid(grid="logit_normal"))
    logits = normal[1:-1].logit()
    below = 0.5 * (1 + torch.erf(logits / 2**0.5))  # of a standard normal
    torch.testing.assert_close(below, torch.linspace(7 / 8, 1 / 8, 7, dtype=torch.float64))
    even = torch.linspace(1, 0, 9, dtype=torch.float64)
    shifted = flow.levels(8, TimeGrid(shift=3.0))
    torch.testing.assert_close(shifted, 3 * even / (1 + 2 * even))
    ratios = edm.levels(5, TimeGrid(grid="log"))[:-1].log().diff()
    torch.testing.assert_close(ratios, ratios.mean().expand(4))
    assert torch.equal(edm.levels(5, TimeGrid(rho=3.0)), EDM(
        sigma_min=0.01, sigma_max=10.0, rho=3.0
    ).levels(5))  # fmt: skip


@pytest.mark.parametrize("num_steps", [1, 18])
@pytest.mark.parametrize(
    ("objective", "grid"),
    [
        *((FlowMatching(), TimeGrid(grid=grid, shift=shift))
          for grid in ("uniform", "quadratic", "logit_normal") for shift in (0.1, 0.3, 1.0, 6.0)),
        (EDM(), TimeGrid(grid="log")),
        (EDM(), TimeGrid(rho=1)),
        *((create("objective", name), TimeGrid()) for name in ours("objective")),
    ],
    ids=repr,
)  # fmt: skip
def test_every_grid_falls_to_exactly_zero(objective, grid, num_steps):
    levels = objective.levels(num_steps, grid)
    assert (levels.shape, levels.dtype) == ((num_steps + 1,), torch.float64)
    assert levels[0].item() == pytest.approx(objective.initial_std, rel=1e-4)
    assert levels[-1].item() == 0
    assert (levels.diff() < 0).all()
    assert levels[0] <= 1 or not isinstance(objective, FlowMatching), "its signal is negative"


@pytest.mark.parametrize(
    ("objective", "field", "grid"),
    [
        (EDM(), "grid", {"grid": "uniform"}),
        (FlowMatching(), "grid", {"grid": "rho"}),
        (EDM(), "shift", {"shift": 3.0}),
        (FlowMatching(), "rho", {"rho": 7.0}),
        (EDM(), "rho", {"grid": "log", "rho": 7.0}),
    ],
)
def test_grids_of_another_objective_are_refused(objective, field, grid):
    with pytest.raises(ValueError, match=f"sampler.{field}="):
        objective.levels(4, TimeGrid(**grid))


# Noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [initial_noise, lambda *given: step_noise(*given, 2)])
def test_noise_is_a_function_of_seed_index_and_step(draw):
    whole = draw((3, 4, 4), 7, range(6))
    parts = [draw((3, 4, 4), 7, indices) for indices in ([0, 1, 2, 3], [4, 5])]
    assert torch.equal(whole, torch.cat(parts))
    ranks = [draw((3, 4, 4), 7, range(rank, 6, 2)) for rank in (0, 1)]
    assert torch.equal(whole, torch.stack(ranks, dim=1).flatten(0, 1))
    for other in (draw((3, 4, 4), 8, range(6)), step_noise((3, 4, 4), 7, range(6), 3)):
        assert not torch.isclose(whole, other).any()
    assert draw((3, 4, 4), 7, []).shape == (0, 3, 4, 4)


@pytest.mark.parametrize("objective", [FlowMatching(), EDM()])
def test_who_watches_sees_the_noise_and_each_step_and_changes_nothing(objective):
    torch.manual_seed(0)
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 0, "hidden_size": 16, "depth": 4}
    network, frames = create_backbone("dit_tiny", num_heads=2, **sizes).eval(), []
    given = {"indices": range(3), "labels": None, "seed": 5, "batch_size": 3}
    options = SamplingOptions(Heun(), 4)
    plain = generate(network, objective, options, **given)
    assert torch.equal(generate(network, objective, options, **given, watch=frames.append), plain)
    assert len(frames) == 7
    torch.testing.assert_close(frames[0], initial_noise((1, 8, 8), 5, range(3)))
