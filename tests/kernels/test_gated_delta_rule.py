"""The gated delta rule where a chunked form goes wrong first, and the adapter of its package."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.ops import OPS, assert_close, leaves, make_segments, run, seeded
from tread_zoo.kernels.dispatch import get_example, get_implementation
from tread_zoo.kernels.gated_delta_rule import fused
from tread_zoo.kernels.gated_delta_rule.naive import gated_delta_rule_naive
from tread_zoo.kernels.gated_delta_rule.torch_form import gated_delta_rule_torch
from tread_zoo.kernels.verify import compare

SHAPE = (1, 100, 2, 8, 4)
both_gates = pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])


def check_float32(inputs: list[Tensor], bound: float) -> None:
    truth = run(gated_delta_rule_naive, inputs)
    assert_close(run(gated_delta_rule_torch, leaves(inputs, torch.float32)), truth, bound)


@both_gates
def test_formula_is_the_written_out_product(op) -> None:
    q, k, v, beta, falls = OPS[op].inputs((1, 6, 1, 3, 2))
    out = gated_delta_rule_naive(q, k, v, beta, falls, None, 0.5)
    state = torch.zeros(3, 2, dtype=torch.float64)
    for t in range(6):
        key = k[0, t, 0]
        kept = torch.eye(3) - beta[0, t] * torch.outer(key, key)
        decay = torch.diag(falls[0, t, 0].exp().expand(3))
        state = kept @ decay @ state + beta[0, t] * torch.outer(key, v[0, t, 0])
        torch.testing.assert_close(out[0, t, 0], 0.5 * state.T @ q[0, t, 0])


@both_gates
def test_weak_decays_beside_strong_ones_keep_their_digits(op) -> None:
    inputs = OPS[op].inputs(SHAPE)
    with torch.no_grad():
        falls = inputs[-1].mul_(0.01)
        falls[torch.rand(falls.shape, generator=seeded(1)) < 0.3] = -1000.0
    check_float32(inputs, 1e-6)


@both_gates
def test_keys_that_are_alike_are_exact(op) -> None:
    """Where the powers of a chunk's matrix, up to 1e8, would cancel."""
    inputs = OPS[op].inputs(SHAPE)
    with torch.no_grad():
        inputs[1].copy_(torch.nn.functional.normalize(1 + 0.01 * inputs[1], dim=-1))
        inputs[3].fill_(1.0)
        inputs[4].mul_(1e-4)
    check_float32(inputs, 5e-5)


@both_gates
def test_flops_are_those_of_the_products(op) -> None:
    """4 chunks of 32 steps, the first of which reads no state; an inverse is Q^3."""
    rows, chunks, steps, width, size = 2, 4, 32, 8, 4
    inputs = OPS[op].inputs((1, chunks * steps, rows, width, size), device="meta")
    scores = 4 * steps * steps * width  # of queries and of keys, with keys
    if op == "kda":
        scores = 2 * steps * (steps - 1) * width  # those of a step with itself are sums
    values = 2 * steps * steps * (width + size)
    writes = 2 * (steps + width) * steps * size
    reads = 4 * steps * width * size
    products = rows * (chunks * (scores + values + writes) + (chunks - 1) * reads)
    inverses = rows * chunks * steps**3
    with FlopCounterMode(display=False) as forward:
        out = gated_delta_rule_torch(*inputs)
    assert forward.get_total_flops() == products + inverses
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * products + 3 * inverses  # that of one, a product


def by_steps(q, k, v, g, beta, scale=None) -> tuple[Tensor, None]:
    """The package's functions: the gate ahead of beta, in float32; values in half precision."""
    assert q.dtype == k.dtype == v.dtype != torch.float32
    assert g.dtype == torch.float32
    return gated_delta_rule_naive(q, k, v, beta, g, None, scale), None


@both_gates
def test_adapter_gives_the_rule_and_passes_before_first_use(op, monkeypatch) -> None:
    for function in (fused.CHUNK_GATED_DELTA_RULE, fused.CHUNK_KDA):
        monkeypatch.setattr(function, "function", by_steps)
    form = get_implementation(op, "fla")
    args = get_example(op, torch.device("cpu"), torch.bfloat16)
    assert form.unsuited(*args) is None
    assert (
        max(compare(form.run, gated_delta_rule_torch, args)) <= form.tolerance(torch.bfloat16) / 3
    )
    segments = make_segments(*SHAPE[:2])
    inputs = OPS[op].inputs(SHAPE, torch.bfloat16)
    assert (form.unsuited(*inputs, segments) is None) == (op == "gated_delta_rule")
    assert form.unsuited(*leaves(inputs, torch.float32)) is not None
