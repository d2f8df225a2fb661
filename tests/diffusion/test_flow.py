"""Flow matching: end points, velocity, times."""

import math

import pytest
import torch

from tread_zoo.diffusion import Draw, FlowMatching
from tread_zoo.seeding import make_generator

SHAPE = (4, 3, 4, 4)
FLOW = FlowMatching()


def _data_and_noise():
    generator = make_generator("test", 1)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def test_end_points():
    x, noise = _data_and_noise()
    assert torch.equal(FLOW.noised(x, Draw(noise, torch.zeros(4))), x)
    assert torch.equal(FLOW.noised(x, Draw(noise, torch.ones(4))), noise)


def test_velocity_points_from_data_to_noise():
    x, noise = _data_and_noise()
    draw = Draw(noise, torch.tensor([0.1, 0.4, 0.7, 1.0]))
    x_t = FLOW.noised(x, draw)
    loss, _ = FLOW.loss(lambda *_: noise - x, x, draw)
    assert torch.equal(loss, torch.zeros(4))
    velocity = FLOW.dx_dt(lambda *_: noise - x, x_t, draw.level)
    estimate = FLOW.estimate(x_t, velocity, draw.level)
    torch.testing.assert_close(estimate, x, rtol=1e-5, atol=1e-5)


def test_uniform_times():
    t = FLOW.draw((20000, 1, 1, 1), make_generator("test", 2)).level
    assert 0 <= t.min() < 0.001
    assert 0.999 < t.max() < 1
    assert t.mean().item() == pytest.approx(0.5, abs=0.01)
    assert t.std().item() == pytest.approx(12**-0.5, abs=0.01)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.5)])
def test_logit_normal_times(mean, std):
    flow = FlowMatching(time_distribution="logit_normal", logit_mean=mean, logit_std=std)
    t = flow.draw((20000, 1, 1, 1), make_generator("test", 3)).level
    assert t.median().item() == pytest.approx(1 / (1 + math.exp(-mean)), abs=0.01)
    assert t.logit().std().item() == pytest.approx(std, rel=0.03)
