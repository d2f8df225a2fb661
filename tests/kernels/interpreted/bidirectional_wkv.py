"""The Triton form on a CPU: run by `test_interpreted_triton` with TRITON_INTERPRET=1.

Triton reads that variable when it is imported, and torch imports Triton: so these tests have a
process of their own, and a name that pytest does not collect by itself.
"""

import os

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels.ops import OPS, make_positions, relative_error, run
from tread_zoo.kernels.bidirectional_wkv import triton_form
from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.bidirectional_wkv.triton_form import bidirectional_wkv_triton

make_inputs = OPS["bidirectional_wkv"].inputs

assert os.environ.get("TRITON_INTERPRET") == "1", "run with TRITON_INTERPRET=1"


def check(inputs: list[Tensor], positions: Tensor | None, length: int) -> None:
    """Hold the form in float32 against the formula in float64."""
    truth = run(bidirectional_wkv_naive, inputs, positions, length)
    single = [x.detach().float().requires_grad_() for x in inputs]
    ours = run(bidirectional_wkv_triton, single, positions, length)
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    for mine, true in zip(ours, truth, strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, true) <= 1e-5


@pytest.fixture
def short_chunks(monkeypatch) -> None:
    monkeypatch.setattr(triton_form, "CHUNK", 4)


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        pytest.param((1, 19, 3), None, id="two chunks, the last one not whole"),
        pytest.param((1, 5, 35), 40, id="two blocks of channels"),
    ],
)
def test_equals_formula(shape, length) -> None:
    positions = None if length is None else make_positions(*shape[:2], length)
    check(make_inputs(shape), positions, length or shape[1])


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "subset"), [(1, True), (3, False)])
def test_chunks_do_not_matter(chunk, subset, monkeypatch) -> None:
    monkeypatch.setattr(triton_form, "CHUNK", chunk)
    positions = make_positions(1, 5, 30) if subset else None
    check(make_inputs((1, 5, 3)), positions, 30)


@pytest.mark.parametrize(
    ("reach", "keys", "subset"),
    [
        (1000, 1, True),
        (1000, 25, False),
        pytest.param(-8, 6, False, marks=pytest.mark.slow),
        pytest.param(-1, 25, True, marks=pytest.mark.slow),
    ],
)
def test_long_decays_and_large_keys_stay_exact(reach, keys, subset, short_chunks) -> None:
    """Log-decays that sum to -1000, growth, and keys of ±50."""
    positions = make_positions(1, 9, 40) if subset else None
    check(make_inputs((1, 9, 16), reach=reach, keys=keys), positions, 40 if subset else 9)


@pytest.mark.slow
def test_the_largest_key_may_be_far_away(short_chunks) -> None:
    k = torch.zeros(1, 13, 1)
    k[0, 0] = 300.0
    v = torch.arange(13.0).view(1, 13, 1)
    out = bidirectional_wkv_triton(k, v, torch.full((1,), 1300.0), torch.zeros(1), None, 13)
    torch.testing.assert_close(out[0, 5:-1, 0], torch.arange(5.0, 12.0))


@pytest.mark.slow
def test_one_token_gives_its_value(short_chunks) -> None:
    inputs = make_inputs((2, 1, 3), torch.float32)
    out, gk, gv, gw, gu = run(bidirectional_wkv_triton, inputs, torch.tensor([[4], [0]]), 9)
    torch.testing.assert_close(out, inputs[1])
    assert gv.abs().min() > 0
    for grad in (gk, gw, gu):
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_all_positions_equal_none_to_the_bit(short_chunks) -> None:
    inputs = make_inputs((1, 6, 4), torch.float32)
    listed, unlisted = (
        run(bidirectional_wkv_triton, inputs, places, 6) for places in (torch.arange(6)[None], None)
    )
    for one, other in zip(listed, unlisted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_half_precision_inputs_keep_float32_sums(dtype, short_chunks) -> None:
    k, v, w, u = make_inputs((1, 10, 8), torch.float32, keys=3)
    inputs = [*(x.detach().to(dtype).requires_grad_() for x in (k, v)), w, u]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = run(bidirectional_wkv_naive, exact, None, 10)
    ours = run(bidirectional_wkv_triton, inputs, None, 10)
    assert [x.dtype for x in ours] == [dtype, *(x.dtype for x in inputs)]
    # Two roundings: of the output, which backward reads, and of the gradient. The interpreter cuts
    # float32 to bfloat16 where a GPU rounds.
    bound = 2 * torch.finfo(dtype).eps
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= bound


@pytest.mark.slow
def test_views_are_taken_as_inputs(short_chunks) -> None:
    inputs = [
        x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        for x in make_inputs((2, 6, 4))
    ]
    positions = make_positions(2, 6, 12).t().contiguous().t()
    truth = run(bidirectional_wkv_naive, inputs, positions, 12)
    ours = run(
        lambda *args: bidirectional_wkv_triton(*(x.float() for x in args[:4]), *args[4:]).double(),
        inputs, positions, 12,
    )  # fmt: skip
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.slow
def test_checkpointing_changes_nothing(short_chunks) -> None:
    inputs = make_inputs((1, 6, 4), torch.float32)

    def recomputed(*args) -> Tensor:
        return checkpoint(bidirectional_wkv_triton, *args, use_reentrant=False)

    plain = run(bidirectional_wkv_triton, inputs, None, 6)
    for mine, true in zip(run(recomputed, inputs, None, 6), plain, strict=True):
        assert torch.equal(mine, true)


@pytest.mark.slow
def test_opcheck(monkeypatch) -> None:
    monkeypatch.setattr(triton_form, "CHUNK", 1)
    inputs = make_inputs((1, 2, 4), torch.float32)
    rest = (make_positions(1, 2, 9), 9)
    torch.library.opcheck(torch.ops.tread_zoo.bidirectional_wkv_triton.default, (*inputs, *rest))
    values = [x.detach() for x in inputs]
    out, lse = torch.ops.tread_zoo.bidirectional_wkv_triton(*values, *rest)
    backward = torch.ops.tread_zoo.bidirectional_wkv_triton_backward.default
    torch.library.opcheck(backward, (out, *values, rest[0], out, lse, rest[1]))
