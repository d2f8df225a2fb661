"""Decay over gaps: the formula, what it means for dropped tokens, and the resets it gives."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.kernels.ops import OPS, make_gaps, make_segments, relative_error, run
from tread_zoo.kernels import selective_scan, set_form
from tread_zoo.kernels.selective_scan.fused import (
    MODULE,
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


def test_formula_by_hand(form) -> None:
    u, delta, A, B, C, D = (x.detach() for x in make_inputs((2, 9, 6, 3, 2)))
    gaps = make_gaps(2, 9)
    y = selective_scan(u, delta, A, B, C, D, gaps=gaps)
    group = torch.arange(6) // 3
    h = torch.zeros(2, 6, 3, dtype=torch.float64)
    for t in range(9):
        step = delta[:, t, :, None]
        driven = step * u[:, t, :, None] * B[:, t, group]
        h = torch.exp(gaps[:, t, None, None] * step * A) * h + driven
        expected = (h * C[:, t, group]).sum(-1) + D * u[:, t]
        torch.testing.assert_close(y[:, t], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_whole_sequence_in_which_the_dropped_add_nothing(form, dtype, segments) -> None:
    """With Δ constant and B u = 0 for the dropped: outputs and gradients of the kept tokens."""
    batch, length, kept = 2, 40, 17
    inputs = make_inputs((batch, length, 6, 3, 2), dtype)
    scores = torch.rand(batch, length, generator=torch.Generator().manual_seed(4))
    ids = scores.argsort(dim=1)[:, :kept].sort(dim=1).values
    is_kept = torch.zeros(batch, length).scatter(1, ids, 1).to(dtype)
    segment_ids = make_segments(batch, length) if segments else None
    with torch.no_grad():
        inputs[1].copy_(inputs[1][:, :1].expand_as(inputs[1]))

    def at(x: Tensor) -> Tensor:
        return x[torch.arange(batch)[:, None], ids]

    def whole(u, delta, A, B, C, D, segment_ids) -> Tensor:
        u = u * is_kept.unsqueeze(-1)
        return at(selective_scan(u, delta, A, B, C, D, segment_ids=segment_ids))

    def part(u, delta, A, B, C, D, segment_ids) -> Tensor:
        here = None if segment_ids is None else at(segment_ids)
        gaps = ids.diff(dim=1, prepend=ids[:, :1] - 1)
        u, delta, B, C = map(at, (u, delta, B, C))
        return selective_scan(u, delta, A, B, C, D, segment_ids=here, gaps=gaps)

    for name, mine, true in zip(
        ("y", "u", "delta", "A", "B", "C", "D"),
        run(part, inputs, segment_ids),
        run(whole, inputs, segment_ids),
        strict=True,
    ):
        if name == "delta":  # a dropped token has its own share of the decay: only the sum is one
            mine, true = mine.sum(1), true.sum(1)
        assert relative_error(mine, true.double()) <= BOUNDS[dtype], name


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


class StandIn(torch.autograd.Function):
    """mamba-ssm's function, its layouts and what matters of its rounding: [B, D, L], [B, G, N, L].

    Its backward pass finds a_t h_{t-1} as h_t - Δ_t B_t u_t, with the product unrounded.
    """

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D):
        given = [x for x in (u, delta, A, B, C, D) if x is not None]
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x in given)
        assert B.shape == C.shape == (len(u), 2, A.shape[1], u.shape[2])
        ctx.save_for_backward(u, delta, A, B, C, D)
        return StandIn.states(u, delta, A, B, C, D)[-1]

    @staticmethod
    def states(u, delta, A, B, C, D):
        B, C = (x.repeat_interleave(u.shape[1] // 2, dim=1) for x in (B, C))
        decays = torch.exp(delta.unsqueeze(2) * A.unsqueeze(-1))
        h, states = torch.zeros_like(decays[..., 0]), []
        for t in range(u.shape[2]):
            h = decays[..., t] * h + (delta * u)[..., None, t] * B[..., t]
            states.append(h)
        h = torch.stack(states, dim=-1)
        y = (h * C).sum(2)
        return B, C, decays, h, y if D is None else y + D.unsqueeze(-1) * u

    @staticmethod
    def backward(ctx, gy):
        u, delta, A, B, C, D = ctx.saved_tensors
        B, C, decays, h, _ = StandIn.states(u, delta, A, B, C, D)
        g = gy.unsqueeze(2) * C
        for t in range(u.shape[2] - 2, -1, -1):
            g[..., t] += decays[..., t + 1] * g[..., t + 1]
        x = (delta * u).unsqueeze(2)
        q = g * (h.double() - x.double() * B.double()).float()
        gx = (g * B).sum(2)
        gB, gC = (each.unflatten(1, (2, -1)).sum(2) for each in (g * x, gy.unsqueeze(2) * h))
        gdelta = (q * A.unsqueeze(-1)).sum(2) + u * gx
        gA = (q * delta.unsqueeze(2)).sum((0, 3))
        if D is None:
            return delta * gx, gdelta, gA, gB, gC, None
        return delta * gx + D.unsqueeze(-1) * gy, gdelta, gA, gB, gC, (gy * u).sum((0, 2))


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_of_mamba_ssm_takes_segments(dtype, segments, monkeypatch) -> None:
    def selective_scan_fn(u, delta, A, B, C, D=None) -> Tensor:
        return StandIn.apply(u, delta, A, B, C, D)

    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(selective_scan_fn=selective_scan_fn))
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
