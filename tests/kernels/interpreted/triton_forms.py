"""The Triton forms on a CPU: run by `test_triton` with TRITON_INTERPRET=1.

Triton reads that variable when it is imported, and torch imports Triton: so these tests have a
process of their own, and a name that pytest does not collect by itself.
"""

import os
from importlib import import_module

import pytest
import torch

from tests.kernels.ops import OPS, assert_close, leaves, run

assert os.environ.get("TRITON_INTERPRET") == "1", "run with TRITON_INTERPRET=1"

WKV, SCAN = OPS["bidirectional_wkv"], OPS["selective_scan"]
STEPS = {
    "bidirectional_wkv": ("CHUNK", "GROUP"),
    "selective_scan": ("FORWARD_STEPS", "BACKWARD_STEPS"),
}
both = pytest.mark.parametrize("op", [WKV, SCAN], ids=lambda op: op.name)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture
def set_steps(monkeypatch):
    """Return a function that sets how many steps a chunk has."""

    def change(op, *steps):
        for name, value in zip(STEPS[op.name], (*steps, steps[0])[:2], strict=True):
            module = import_module(f"tread_zoo.kernels.{op.name}.triton_form")
            monkeypatch.setattr(module, name, value)

    return change


def check(op, inputs, rest) -> None:
    """Compare the form in float32 with the formula in float64."""
    truth = run(op.form("naive"), inputs, *rest)
    ours = run(op.form("triton"), leaves(inputs, torch.float32), *rest)
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    assert_close(ours, truth, 1e-5)


@pytest.mark.parametrize(
    ("op", "shape", "subset"),
    [
        (WKV, (1, 19, 3), False),  # two chunks, the last one not whole
        (WKV, (1, 5, 35), True),  # two blocks of channels
        (SCAN, (2, 1, 3, 4, 1), False),  # B, L, D, N, G: one step
        (SCAN, (1, 13, 20, 8, 1), True),  # steps and blocks that are not full
        (SCAN, (1, 9, 10, 5, 2), False),  # N padded, several groups
        (SCAN, (1, 6, 3, 64, 1), True),  # most states
    ],
)
def test_equals_formula(op, shape, subset) -> None:
    check(op, op.inputs(shape), op.rest(shape, subset))


@pytest.mark.parametrize(
    ("op", "steps"),
    [slow(WKV, (1, 1)), slow(WKV, (4, 2)), (WKV, (6, 3)), (SCAN, (1,)), slow(SCAN, (3,))],
)
def test_chunks_do_not_matter(op, steps, set_steps) -> None:
    set_steps(op, *steps)
    shape = (1, 7, 3) if op is WKV else (1, 7, 8, 4, 1)
    check(op, op.inputs(shape), op.rest(shape, subset=True))


@pytest.mark.parametrize(
    ("reach", "keys", "subset"),
    [(1000, 1, True), (1000, 25, False), slow(-8, 6, False), slow(-1, 25, True)],
)
def test_long_decays_growth_and_large_keys_of_a_wkv(reach, keys, subset, set_steps) -> None:
    set_steps(WKV, 4)
    shape = (1, 9, 16)
    check(WKV, WKV.inputs(shape, reach=reach, keys=keys), WKV.rest(shape, subset))


@pytest.mark.slow
def test_strong_decay_of_a_scan() -> None:
    inputs = SCAN.inputs((1, 20, 4, 2, 1))
    with torch.no_grad():
        inputs[1].fill_(1.0)
        inputs[2].copy_(-torch.tensor([50.0, 500.0]).expand(4, 2))  # summed: -1000 and -10000
    check(SCAN, inputs, (None, None))


@both
def test_half_precision_inputs_keep_float32_sums(op, set_steps) -> None:
    set_steps(op, 4)
    shape = (1, 10, 8) if op is WKV else (1, 13, 8, 4, 2)
    inputs, rest = op.mixed(shape), op.rest(shape)
    truth = run(op.form("naive"), leaves(inputs, torch.float64), *rest)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(op.form("triton"), inputs, *rest)
    assert [x.dtype for x in ours] == [torch.bfloat16, *(x.dtype for x in inputs)]
    # The output's rounding, which the WKV's backward pass reads, and the gradient's. The
    # interpreter cuts float32 to bfloat16 where a GPU rounds.
    assert_close(ours, truth, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.slow
@both
def test_views_are_taken_as_inputs(op) -> None:
    shape = (2, 6, 4) if op is WKV else (2, 5, 8, 4, 2)
    strided = [x.detach().transpose(0, -1).contiguous() for x in op.inputs(shape)]
    check(op, [x.transpose(0, -1).requires_grad_() for x in strided], op.rest(shape))


@pytest.mark.slow
@both
def test_opcheck(op, set_steps) -> None:
    set_steps(op, 1)
    shape = (1, 2, 4) if op is WKV else (1, 3, 4, 2, 2)
    inputs, rest = op.inputs(shape, torch.float32), op.rest(shape, subset=True)
    rest = rest[1:] if op is SCAN else rest  # the step bias is added before
    forward = getattr(torch.ops.tread_zoo, f"{op.name}_triton")
    torch.library.opcheck(forward.default, (*inputs, *rest))
    values = [x.detach() for x in inputs]
    made = forward(*values, *rest)
    saved = (*made, *values, *rest) if op is WKV else (*values, *rest)
    backward = getattr(torch.ops.tread_zoo, f"{op.name}_triton_backward").default
    torch.library.opcheck(backward, (made[0] if op is WKV else made, *saved))
