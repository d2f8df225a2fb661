"""EDM against numbers worked out by hand."""

import pytest
import torch

from tread_zoo.diffusion import EDM, Draw
from tread_zoo.seeding import make_generator


@pytest.mark.parametrize(
    ("sigma", "c_skip", "c_out", "c_in", "c_noise"),
    [  # with sigma_data = 0.5, by a pocket calculator
        (0.5, 0.5, 0.3535534, 1.4142136, -0.1732868),
        (1.2, 0.1479290, 0.4615385, 0.7692308, 0.0455804),
        (0.002, 0.9999840, 0.0019999840, 1.9999840, -1.5536520),
        (80.0, 3.9060974e-5, 0.4999902, 0.01249976, 1.0955066),
    ],
)
def test_preconditioning(sigma, c_skip, c_out, c_in, c_noise):
    scalings = EDM().preconditioning(torch.tensor([sigma]))
    assert [value.item() for value in scalings] == pytest.approx(
        [c_skip, c_out, c_in, c_noise], rel=1e-5
    )


def test_loss_is_the_error_of_the_raw_network():
    """As lambda c_out^2 = 1, a raw output off by 0.3 costs 0.09 at each level."""
    edm, x = EDM(), torch.zeros(4, 2, 3, 3)
    draw = Draw(torch.zeros_like(x), torch.tensor([0.01, 0.5, 3.0, 80.0]))
    loss, _ = edm.loss(lambda x, c_noise: torch.full_like(x, 0.3), x, draw)
    assert loss.tolist() == pytest.approx([0.09] * 4)


def test_draws_are_log_normal():
    draw = EDM(p_mean=-0.7, p_std=1.5).draw((20000, 1, 1, 1), make_generator("test", 3))
    log_sigma = draw.level.log()
    assert log_sigma.mean().item() == pytest.approx(-0.7, abs=0.05)
    assert log_sigma.std().item() == pytest.approx(1.5, abs=0.05)
    assert log_sigma.median().item() == pytest.approx(-0.7, abs=0.05)
    assert draw.noise.std().item() == pytest.approx(1, abs=0.03)
    correlation = torch.corrcoef(torch.stack([log_sigma, draw.noise.flatten()]))[0, 1]
    assert abs(correlation.item()) < 0.03


def test_levels_follow_equation_5():
    levels = EDM().levels(18)
    assert levels[0].item() == pytest.approx(80)
    assert levels[-2].item() == pytest.approx(0.002)
    assert levels[5].item() == pytest.approx(
        (80 ** (1 / 7) + 5 / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    )
    even = EDM(rho=1, sigma_min=1, sigma_max=5).levels(5)
    assert even.tolist() == pytest.approx([5, 4, 3, 2, 1, 0])
