"""The Triton form on a CPU: run by `test_interpreted_triton` with TRITON_INTERPRET=1.

Triton reads that variable when it is imported, and torch imports Triton: so these tests have a
process of their own, and a name that pytest does not collect by itself.
"""

import os

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels.ops import OPS, make_segments, relative_error, run
from tread_zoo.kernels.selective_scan import triton_form
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive
from tread_zoo.kernels.selective_scan.triton_form import selective_scan_triton

make_inputs = OPS["selective_scan"].inputs

assert os.environ.get("TRITON_INTERPRET") == "1", "run with TRITON_INTERPRET=1"


def check(inputs: list[Tensor], segment_ids: Tensor | None = None) -> None:
    """Hold the form in float32 against the formula in float64."""
    truth = run(selective_scan_naive, inputs, segment_ids)
    ours = run(
        selective_scan_triton, [x.detach().float().requires_grad_() for x in inputs], segment_ids
    )
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    for mine, true in zip(ours, truth, strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.parametrize(
    ("shape", "segments"),  # B, L, D, N, G
    [
        pytest.param((2, 1, 3, 4, 1), False, id="one step"),
        pytest.param((1, 13, 20, 8, 1), True, id="no whole number of steps or blocks"),
        pytest.param((1, 9, 10, 5, 2), False, id="N padded, several groups"),
        pytest.param((1, 6, 3, 64, 1), True, id="most states"),
    ],
)
def test_equals_formula(shape, segments) -> None:
    check(make_inputs(shape), make_segments(*shape[:2]) if segments else None)


@pytest.mark.slow
@pytest.mark.parametrize("states", [16, 256])
def test_blocks_do_not_matter(states, monkeypatch) -> None:
    monkeypatch.setattr(triton_form, "PROGRAM_STATES", states)
    monkeypatch.setattr(triton_form, "MIN_PROGRAMS", 0)
    inputs = make_inputs((1, 5, 18, 8, 1))
    assert triton_form._blocks(inputs[0], inputs[2], inputs[3]).channels == states // 8
    check(inputs)


@pytest.mark.parametrize("steps", [1, 3])
def test_chunks_do_not_matter(steps, monkeypatch) -> None:
    monkeypatch.setattr(triton_form, "FORWARD_STEPS", steps)
    monkeypatch.setattr(triton_form, "BACKWARD_STEPS", steps)
    check(make_inputs((1, 7, 8, 4, 1)), torch.tensor([[0, 0, 0, 1, 2, 2, 2]]))


@pytest.mark.slow
def test_without_D() -> None:
    inputs = make_inputs((1, 5, 8, 4, 2))[:-1]
    truth = run(selective_scan_naive, inputs, None)
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    ours = run(selective_scan_triton, inputs, None)
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.slow
def test_strong_decay_is_finite_and_exact() -> None:
    inputs = make_inputs((1, 20, 4, 2, 1))
    with torch.no_grad():
        inputs[1].fill_(1.0)
        inputs[2].copy_(-torch.tensor([50.0, 500.0]).expand(4, 2))  # summed: -1000 and -10000
    check(inputs)


def test_half_precision_inputs_keep_a_float32_state() -> None:
    u, delta, A, B, C, D = make_inputs((1, 13, 8, 4, 2), torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in (u, B, C)]
    inputs = [half[0], delta, A, half[1], half[2], D]
    truth = run(selective_scan_naive, [x.detach().double().requires_grad_() for x in inputs])
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(selective_scan_triton, inputs)
    assert ours[0].dtype == torch.bfloat16
    assert [g.dtype for g in ours[1:]] == [x.dtype for x in inputs]
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 4e-3  # one rounding to bfloat16


@pytest.mark.slow
def test_views_are_taken_as_inputs() -> None:
    inputs = make_inputs((2, 5, 8, 4, 2))
    strided = [x.detach().transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    assert not any(x.is_contiguous() for x in strided[:5])
    check([x.requires_grad_() for x in strided])


@pytest.mark.slow
def test_keeps_its_inputs_alone_and_can_be_computed_again() -> None:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = make_inputs((1, 9, 8, 4, 1), torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = selective_scan_triton(*inputs)
    assert sum(kept.values()) == sum(x.nbytes for x in inputs)
    again = checkpoint(selective_scan_triton, *inputs, use_reentrant=False)
    truth = selective_scan_naive(*inputs)
    results = [torch.autograd.grad(each.sum(), inputs) for each in (y, again, truth)]
    for mine, twice, true in zip(*results, strict=True):
        assert torch.equal(mine, twice)
        assert relative_error(mine, true.double()) <= 1e-5


@pytest.mark.slow
def test_opcheck() -> None:
    inputs, segment_ids = make_inputs((1, 3, 4, 2, 2), torch.float32), torch.tensor([[0, 0, 1]])
    torch.library.opcheck(torch.ops.tread_zoo.selective_scan_triton.default, (*inputs, segment_ids))
    values = [x.detach() for x in inputs]
    backward = torch.ops.tread_zoo.selective_scan_triton_backward.default
    torch.library.opcheck(backward, (values[0], *values, segment_ids))
