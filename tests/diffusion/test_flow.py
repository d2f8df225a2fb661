"""Flow matching: end points, velocity, times."""

import math
from statistics import NormalDist

import pytest
import torch

from tread_zoo.diffusion import Draw, FlowMatching, Heun, Problem
from tread_zoo.seeding import make_generator

SHAPE = (4, 3, 4, 4)
FLOW = FlowMatching()
SPACES = ("velocity", "x", "noise")


def _data_and_noise():
    generator = make_generator("test", 1)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def test_end_points():
    x, noise = _data_and_noise()
    assert torch.equal(FLOW.noised(x, Draw(noise, torch.zeros(4))), x)
    assert torch.equal(FLOW.noised(x, Draw(noise, torch.ones(4))), noise)


@pytest.mark.parametrize(
    ("options", "quantile"),
    [
        ({}, lambda u: u),
        ({"time_distribution": "cosmap"}, lambda u: 1 - 1 / (math.tan(math.pi * u / 2) + 1)),
        *(({"time_distribution": "logit_normal", "logit_mean": mean, "logit_std": std},
           lambda u, mean=mean, std=std: 1 / (1 + math.exp(-NormalDist(mean, std).inv_cdf(u))))
          for mean, std in ((0.0, 1.0), (0.8, 0.5))),
    ],
)  # fmt: skip
def test_times_have_their_distribution(options, quantile):
    t = FlowMatching(**options).draw((20000, 1, 1, 1), make_generator("test", 2)).level
    assert 0 <= t.min() < t.max() <= 1
    for u in (0.02, 0.1, 0.3, 0.5, 0.8, 0.98):
        assert (t < quantile(u)).double().mean().item() == pytest.approx(u, abs=0.015)


@pytest.mark.parametrize("name", ["uniform", "logit_normal", "cosmap"])
def test_shifted_times(name):
    plain, shifted = (
        FlowMatching(time_distribution=name, shift=shift).draw(SHAPE, make_generator("test", 5))
        for shift in (1.0, 3.0)
    )
    expected = 3 * plain.level / (1 + 2 * plain.level)
    torch.testing.assert_close(shifted.level, expected, rtol=1e-6, atol=0)
    assert torch.equal(shifted.noise, plain.noise)


# What is predicted, and in which space the loss is ------------------------------------------------


def in_space(space, velocity, x_t, t):
    """Write a velocity as a prediction of `space`."""
    return {"velocity": velocity, "x": x_t - t * velocity, "noise": x_t + (1 - t) * velocity}[space]


@pytest.mark.parametrize("loss_space", SPACES)
@pytest.mark.parametrize("predicted", SPACES)
def test_loss_of_every_pair(predicted, loss_space):
    """One error in the velocity, written in each space, against a loop in float64."""
    (x, noise), error = _data_and_noise(), torch.randn(SHAPE, generator=make_generator("test", 6))
    t = torch.tensor([0.06, 0.4, 0.7, 0.94])
    draw, flow = Draw(noise, t), FlowMatching(prediction=predicted, loss_space=loss_space)

    def predict(x_t, level):
        return in_space(predicted, noise - x + error, x_t, level.view(-1, 1, 1, 1))

    loss, _ = flow.loss(predict, x, draw)
    for i in range(len(t)):
        a, b, c = x[i].double(), noise[i].double(), t[i].double()
        x_t = (1 - c) * a + c * b
        pair = (in_space(loss_space, v, x_t, c) for v in (b - a + error[i].double(), b - a))
        expected = sum((p - q) ** 2 for p, q in zip(*map(torch.flatten, pair), strict=True))
        assert loss[i].item() == pytest.approx(expected.item() / x[i].numel(), rel=1e-4)


@pytest.mark.parametrize(
    ("predicted", "loss_space", "t", "factor"),
    [("x", "velocity", 0.01, 1 / 0.05), ("x", "noise", 0.01, 0.99 / 0.05), ("x", "x", 0.01, 1),
     ("noise", "velocity", 1.0, 1 / 0.05), ("noise", "x", 0.99, 0.99 / 0.05),
     ("noise", "velocity", 0.01, 1 / 0.99)],
)  # fmt: skip
def test_no_loss_divides_by_less_than_the_clip(predicted, loss_space, t, factor):
    (x, noise), flow = _data_and_noise(), FlowMatching(prediction=predicted, loss_space=loss_space)
    target = x if predicted == "x" else noise
    loss, _ = flow.loss(lambda *_: target + 0.1, x, Draw(noise, torch.full((4,), t)))
    torch.testing.assert_close(loss, torch.full((4,), (0.1 * factor) ** 2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("predicted", SPACES)
def test_every_prediction_of_the_best_network_gives_the_same_samples(predicted, gaussian):
    problem, flow = gaussian("flow"), FlowMatching(prediction=predicted)
    ideal = problem.predict()

    def predict(x_t, t):
        return in_space(predicted, ideal(x_t, t), x_t, t.view(-1, 1, 1, 1))

    x = torch.randn(SHAPE, generator=make_generator("test", 7))
    for t in (0.01, 0.3, 0.949, *([] if predicted == "noise" else [1.0])):
        slope = flow.dx_dt(predict, x, torch.full((4,), t))
        torch.testing.assert_close(slope, ideal(x, torch.full((4,), t)), rtol=1e-4, atol=1e-4)
    sampled = Heun()(Problem(lambda x_t, t: flow.dx_dt(predict, x_t, t), flow, None), x,
                     flow.levels(50))  # fmt: skip
    expected, off = problem.solution(x.double(), 1.0, 0.0), 0.03 if predicted == "noise" else 0.01
    torch.testing.assert_close(sampled, expected, rtol=0, atol=off)
