"""Gated linear attention: the formula, decays of every strength, and fla's function as adapted."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.ops import OPS, assert_close, by_pairs, leaves, make_segments, run
from tread_zoo.kernels import gated_linear_attention
from tread_zoo.kernels.dispatch import get_example, get_implementation
from tread_zoo.kernels.gated_linear_attention import fused
from tread_zoo.kernels.verify import compare

OP = OPS["gated_linear_attention"]
naive, torch_form = OP.form("naive"), OP.form("torch")


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("form", [naive, torch_form])
def test_the_recurrence_is_the_sum_over_pairs(form, scale) -> None:
    inputs = OP.inputs((2, 41, 2, 4, 3))
    factor = 0.5 if scale is None else scale
    truth = run(lambda *given: factor * by_pairs(*given), inputs)
    assert_close(run(form, inputs, None, scale), truth, 1e-12)


@pytest.mark.parametrize("decays", ["strong", "weak after strong", "none"])
def test_any_decay_is_finite_and_exact(decays) -> None:
    """e^-1000 at every step; 1 - 1e-3 after it, of which a float32 sum would lose the digits."""
    inputs = OP.inputs((2, 100, 2, 3, 4))
    with torch.no_grad():
        if decays == "strong":
            inputs[3].fill_(-1000.0)
        else:
            inputs[3].mul_(1e-3 if decays == "weak after strong" else 0.0)
        if decays == "weak after strong":
            inputs[3][:, ::7, :, :2] = -1000.0
    truth = run(naive, inputs)
    assert_close(run(torch_form, leaves(inputs, torch.float32)), truth, 1e-6)


def chunk_gla(
    q, k, v, g, scale=None, initial_state=None, output_final_state=False
) -> tuple[Tensor, None]:
    """fla's function; it takes float32 or less, its scale is K^-1/2 where none is given."""
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (q, k, v, g))
    return (q.shape[-1] ** -0.5 if scale is None else scale) * by_pairs(q, k, v, g), None


@pytest.mark.parametrize("segments", [False, True])
def test_the_adapter_gives_the_formula(segments, monkeypatch) -> None:
    monkeypatch.setattr(fused.CHUNK_GLA, "function", chunk_gla)
    form = get_implementation(OP.name, "fla")
    ids = make_segments(2, 20) if segments else None
    inputs = OP.inputs((2, 20, 2, 3, 4), torch.float32)
    for scale in (None, 0.3):
        truth = run(naive, inputs, ids, scale)
        assert_close(run(form.run, inputs, ids, scale), truth, 5e-6)
    half = [x.bfloat16() for x in inputs]
    assert form.run(*half, ids).dtype == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        args = get_example(OP.name, torch.device("cpu"), dtype)
        assert max(compare(form.run, torch_form, args)) <= form.tolerance(dtype) / 3


def test_flops_are_those_of_the_matrix_products() -> None:
    """Of 3 chunks of 32 steps: pairs of a step and an earlier one, W v, into states and out."""
    inputs, rows = OP.inputs((2, 70, 5, 3, 4), torch.float32), 10
    pairs, weighted, states = 3 * (32 * 31 // 2) * 2 * 3, 3 * 2 * 32 * 32 * 4, 2 * 2 * 32 * 3 * 4
    forward = rows * (pairs + weighted + 2 * states)
    with FlopCounterMode(display=False) as counter:
        out = gated_linear_attention(*inputs)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * forward


def test_scale_reaches_the_form() -> None:
    inputs = OP.inputs()
    halved = gated_linear_attention(*inputs, scale=0.5)
    torch.testing.assert_close(2 * halved, gated_linear_attention(*inputs, scale=1.0))
