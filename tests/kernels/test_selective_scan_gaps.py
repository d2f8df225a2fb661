"""Decay over gaps: the formula, what it means for dropped tokens, and the resets it gives."""

import pytest
import torch
from torch import Tensor

from tests.kernels.ops import OPS, assert_close, make_gaps, make_segments, relative_error, run
from tread_zoo.kernels import selective_scan, set_form
from tread_zoo.kernels.selective_scan.fused import (
    SCAN,
    selective_scan_fused,
    unsuited,
)
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive

make_inputs = OPS["selective_scan"].inputs

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(params=["naive", "torch"])
def form(request):
    set_form("selective_scan", request.param)
    yield request.param
    set_form("selective_scan", "auto")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("segments", [False, True])
def test_formula_by_hand(form, segments, dtype) -> None:
    """Output and gradients; a token that begins a segment forgets what came before it."""
    gaps, ids = make_gaps(2, 9), make_segments(2, 9) if segments else torch.zeros(2, 9)
    group = torch.arange(6) // 3

    def by_hand(u, delta, A, B, C, D) -> Tensor:
        h, out = torch.zeros(2, 6, 3, dtype=u.dtype), []
        for t in range(9):
            step, stays = delta[:, t, :, None], (ids[:, t] == ids[:, t - 1])[:, None, None]
            driven = step * u[:, t, :, None] * B[:, t, group]
            h = stays * torch.exp(gaps[:, t, None, None] * step * A) * h + driven
            out.append((h * C[:, t, group]).sum(-1) + D * u[:, t])
        return torch.stack(out, 1)

    def ours(*inputs) -> Tensor:
        return selective_scan(*inputs, segment_ids=ids.long() if segments else None, gaps=gaps)

    shape = (2, 9, 6, 3, 2)
    truth = run(by_hand, make_inputs(shape))
    assert_close(run(ours, make_inputs(shape, dtype)), truth, BOUNDS[dtype])


def test_gaps_of_one_change_nothing_and_the_first_gap_never(form) -> None:
    inputs = make_inputs((3, 9, 4, 3, 1))
    ones = torch.ones(3, 9)
    torch.testing.assert_close(selective_scan(*inputs, gaps=ones), selective_scan(*inputs))
    gaps = make_gaps(3, 9)
    other = gaps.clone()
    other[:, 0] = torch.tensor([0, -7, 10**9])
    results = [run(lambda *args, g=g: selective_scan(*args, gaps=g), inputs) for g in (gaps, other)]
    for mine, true in zip(*results, strict=True):
        assert torch.equal(mine, true)


def test_half_precision_inputs_are_divided_in_float32(form) -> None:
    u, delta, A, B, C, D = make_inputs((2, 20, 8, 4, 2), torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in (u, B, C)]
    inputs, gaps = [half[0], delta, A, half[1], half[2], D], make_gaps(2, 20)

    def spaced(*args) -> Tensor:
        return selective_scan(*args, gaps=gaps)

    truth = run(spaced, [x.detach().double().requires_grad_() for x in inputs])
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(spaced, inputs)
    assert [x.dtype for x in ours] == [torch.bfloat16, *(x.dtype for x in inputs)]
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 4e-3  # one rounding to bfloat16


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_of_mamba_ssm_takes_segments(dtype, segments, monkeypatch) -> None:
    def selective_scan_fn(u, delta, A, B, C, D=None) -> Tensor:
        """mamba-ssm's function, in its layouts: [B, D, L] and [B, G, N, L]."""
        given = [x for x in (u, delta, A, B, C, D) if x is not None]
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x in given)
        B, C = (x.permute(0, 3, 1, 2) for x in (B, C))
        return selective_scan_naive(u.mT, delta.mT, A, B, C, D).mT

    monkeypatch.setattr(SCAN, "function", selective_scan_fn)
    shape = (2, 60, 8, 4, 2)
    inputs = make_inputs(shape, torch.float32)
    inputs[0] = inputs[0].detach().to(dtype).requires_grad_()
    segment_ids = make_segments(*shape[:2]) if segments else None
    assert unsuited(*inputs, segment_ids) is None
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = run(selective_scan_naive, exact, segment_ids)
    ours = run(selective_scan_fused, inputs, segment_ids)
    assert [x.dtype for x in ours] == [dtype, *(x.dtype for x in inputs)]
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= (1e-5 if dtype == torch.float32 else 4e-3)
