"""The state-space dual: torch form equals the formula in output and gradients; adapters give it."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from tests.kernels.ops import OPS, assert_close, by_pairs, leaves, make_gaps, make_segments, run
from tread_zoo.kernels.dispatch import get_example, get_implementation
from tread_zoo.kernels.ssd import fused
from tread_zoo.kernels.ssd.naive import ssd_naive
from tread_zoo.kernels.ssd.torch_form import ssd_torch
from tread_zoo.kernels.verify import compare

torch_form = import_module("tread_zoo.kernels.ssd.torch_form")
CHUNK = torch_form.CHUNK

make_inputs = OPS["ssd"].inputs


def test_formula_is_the_written_out_sum() -> None:
    """y_i = Σ_j (C_i · B_j) exp(A Σ_{j < k <= i} gaps_k Δ_k) Δ_j x_j + D x_i, within a segment."""
    x, delta, A, B, C, D = make_inputs((1, 6, 4, 3, 2, 2))
    ids, gaps = torch.tensor([[4, 4, 4, 7, 7, 4]]), torch.tensor([[1, 2, 1, 3, 1, 1]])
    y = ssd_naive(x, delta, A, B, C, D, ids, gaps)
    for head in range(4):
        for i in range(6):
            expected = D[head] * x[0, i, head]
            for j in range(i + 1):
                if (ids[0, j : i + 1] == ids[0, i]).all():
                    passed = sum(gaps[0, k] * delta[0, k, head] for k in range(j + 1, i + 1))
                    weight = C[0, i, head // 2] @ B[0, j, head // 2] * torch.exp(A[head] * passed)
                    expected = expected + weight * delta[0, j, head] * x[0, j, head]
            torch.testing.assert_close(y[0, i, head], expected)


def test_weak_decays_after_a_strong_one_keep_their_digits() -> None:
    """A float32 sum of about -1000 moves in steps of 6e-5, and so would its differences. And the
    rounding of many gradients, times the Δ of the strong step, must not be its gradient of A."""
    inputs = make_inputs((2, CHUNK, 2, 4, 3, 1))
    with torch.no_grad():
        inputs[1].copy_(0.01 * torch.rand(2, CHUNK, 2, dtype=torch.float64) + 0.001)
        inputs[1][:, ::16] = 300.0
        inputs[2].fill_(-1.0)
    truth = run(ssd_naive, inputs, None, None)
    assert_close(run(ssd_torch, leaves(inputs, torch.float32), None, None), truth, 1e-6)


def mamba_by_pairs(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None
) -> Tensor:
    """mamba-ssm's function as its kernels compute it: tokens of equal seq_idx see each other."""
    assert x.dtype == dt.dtype == A.dtype == B.dtype == C.dtype == torch.float32
    assert all(v.is_contiguous() for v in (x, dt, A, B, C))
    assert chunk_size & (chunk_size - 1) == 0
    assert D is None or D.dtype == torch.float32
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    same = None if seq_idx is None else seq_idx[:, :, None] == seq_idx[:, None]
    q, k = (v.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for v in (C, B))
    y = by_pairs(q, k, dt[..., None] * x, (dt * A)[..., None], same)
    return y if D is None else y + D[:, None] * x


def gla_by_pairs(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False
) -> tuple[Tensor, None]:
    """fla's function; its scale is K^-½ where none is given."""
    assert q.dtype == k.dtype == v.dtype == g.dtype == torch.float32
    assert q.shape == k.shape
    assert q.shape[:3] == v.shape[:3] == g.shape
    return by_pairs(q, k, v, g[..., None]) * (q.shape[-1] ** -0.5 if scale is None else scale), None


@pytest.fixture
def stand_ins(monkeypatch):
    """Put functions of the packages' signatures where the packages would be."""
    monkeypatch.setattr(fused.CHUNK_SCAN, "function", mamba_by_pairs)
    monkeypatch.setattr(fused.CHUNK_SIMPLE_GLA, "function", gla_by_pairs)


@pytest.mark.parametrize("gapped", [False, True])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("form", [fused.ssd_mamba, fused.ssd_fla])
@pytest.mark.usefixtures("stand_ins")
def test_adapters_give_the_formula(form, segments, gapped) -> None:
    shape = (2, 20, 4, 3, 5, 2)
    tokens = make_segments(*shape[:2]) if segments else None, make_gaps(*shape[:2])
    tokens = tokens if gapped else (tokens[0], None)
    inputs = make_inputs(shape, torch.float32)
    truth = run(ssd_naive, make_inputs(shape), *tokens)
    assert_close(run(form, inputs, *tokens), truth, 5e-6)
    y = form(*inputs[:-1], None, *tokens)
    torch.testing.assert_close(y, ssd_naive(*inputs[:-1], None, *tokens))
    half = [x.bfloat16() for x in inputs]
    assert form(*half, *tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mamba-ssm", "fla"])
@pytest.mark.usefixtures("stand_ins")
def test_a_right_kernel_passes_the_comparison_before_its_first_use(name, dtype) -> None:
    form = get_implementation("ssd", name)
    args = get_example("ssd", torch.device("cpu"), dtype)
    assert max(compare(form.run, ssd_torch, args)) <= form.tolerance(dtype) / 3
