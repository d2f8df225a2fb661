"""The bidirectional WKV equals its formula in output and gradients, near and far."""

import shutil

import pytest
import torch

from tests.kernels.ops import OPS, make_positions, relative_error, run
from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.compiled import COMPILERS

WKV = OPS["bidirectional_wkv"]
make_inputs = WKV.inputs


@pytest.fixture(params=["torch", "compiled"])
def fast_form(request):
    if request.param == "compiled" and not any(map(shutil.which, COMPILERS)):
        pytest.skip("needs a C compiler")
    return WKV.form(request.param)


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(
    ("reach", "keys"),
    [(0, 1), (3, 8), (-3, 7), (1000, 8), (1e6, 1), (0, 25), (-3, 25), (1e6, 25), (-25, 7)],
)
def test_long_decays_and_large_keys_stay_exact(fast_form, reach, keys, subset) -> None:
    """Log-decays that sum to -1000 and more, none at all, and growth by e^25, with keys of ±50."""
    shape, length = (2, 61, 16), 256 if subset else 61  # the last chunk is not full
    positions = make_positions(2, 61, 256) if subset else None
    exact = make_inputs(shape, reach=reach, keys=keys)
    truth = run(bidirectional_wkv_naive, exact, positions, length)
    inputs = make_inputs(shape, torch.float32, reach=reach, keys=keys)
    ours = run(fast_form, inputs, positions, length)
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    for mine, true in zip(ours[1:], truth[1:], strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(
    ("keys", "bonus", "decay"),
    [(1, 0, 2), (0, -1, 2), (0.5, -0.2, -0.3)],
)
def test_channels_of_any_spread_are_exact(fast_form, keys, bonus, decay, subset):
    """Weights of one channel from 1 to e^40, by keys, u and a negative w."""
    shape, length = (2, 40, 6), 90 if subset else 40
    positions = make_positions(2, 40, 90) if subset else None
    exact = [x.detach() for x in make_inputs(shape)]
    share = torch.linspace(0.1, 1, 6, dtype=torch.float64) * 40
    exact[0].uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(3))
    exact[0][:, 3], exact[0][:, 31] = -0.5, 0.5
    exact[0].mul_(keys * share)
    exact[2], exact[3] = decay * share, bonus * share
    inputs = [x.float().requires_grad_() for x in exact]
    truth = run(bidirectional_wkv_naive, [x.requires_grad_() for x in exact], positions, length)
    ours = run(fast_form, inputs, positions, length)
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_gradients_of_any_size_are_exact(fast_form, scale) -> None:
    """A loss may be scaled, and a gradient small."""
    exact = [x.detach() for x in make_inputs((2, 40, 6))]
    exact[0] = torch.linspace(-20, 19.9, 40, dtype=torch.float64).view(1, 40, 1).expand(2, 40, 6)
    exact[3].zero_()
    inputs = [x.float().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    truth = run(lambda *args: scale * bidirectional_wkv_naive(*args), exact, None, 40)
    ours = run(lambda *args: scale * fast_form(*args), inputs, None, 40)
    limit = 1e-5 if fast_form is WKV.form("torch") else 3e-5  # ∂u nearly cancels, by a rounded l
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine / scale, true / scale) <= limit


def test_one_token_gives_its_value(fast_form) -> None:
    inputs = make_inputs((2, 1, 3), torch.float32)
    out, *grads = run(fast_form, inputs, torch.tensor([[4], [0]]), 9)
    torch.testing.assert_close(out, inputs[1].detach())
    assert all(grads[i].abs().max() <= 1e-6 for i in (0, 2, 3))
