"""The delta rule with a diagonal-plus-low-rank transition: any decay, like keys, long sequences;
its adapter gives the formula."""

import pytest
import torch

from tests.kernels.ops import OPS, assert_close, leaves, make_segments, run
from tread_zoo.kernels.dispatch import get_example, get_implementation
from tread_zoo.kernels.dplr_delta_rule import fused
from tread_zoo.kernels.dplr_delta_rule.naive import dplr_delta_rule_naive
from tread_zoo.kernels.dplr_delta_rule.torch_form import dplr_delta_rule_torch
from tread_zoo.kernels.verify import compare

make_inputs = OPS["dplr_delta_rule"].inputs


def test_formula_is_a_product_of_transitions() -> None:
    q, k, v, a, b, g = (x.detach()[0, :, 0] for x in make_inputs((1, 5, 1, 3, 2)))
    state = torch.zeros(3, 2, dtype=q.dtype)
    for t in range(5):
        state = (g[t].exp().diag() + torch.outer(b[t], a[t])) @ state + torch.outer(k[t], v[t])
    y = dplr_delta_rule_naive(*make_inputs((1, 5, 1, 3, 2)), None, 0.5)
    torch.testing.assert_close(y[0, -1, 0], 0.5 * state.T @ q[-1])


@pytest.mark.parametrize("low", [-1e3, -20.0, -0.6])
def test_any_decay_is_exact(low) -> None:
    """Strong ones here and there, weak ones between them, which must keep their digits."""
    inputs = make_inputs((1, 100, 2, 8, 4))
    strong = torch.rand(inputs[5].shape, generator=torch.Generator().manual_seed(0)) < 0.3
    with torch.no_grad():
        inputs[5].masked_fill_(strong, low)
    truth = run(dplr_delta_rule_naive, inputs)
    assert_close(run(dplr_delta_rule_torch, leaves(inputs, torch.float32)), truth, 1e-6)


def test_keys_that_are_alike_do_not_cancel() -> None:
    """As on a plain background: the powers of the triangular matrix would grow like binomials."""
    q, k, v, a, _, g = make_inputs((1, 64, 1, 8, 4))
    a = a.detach()[:, :1].expand_as(a)
    inputs = leaves([q, k, v, a, -a, 1e-3 * g], torch.float64)
    truth = run(dplr_delta_rule_naive, inputs)
    assert_close(run(dplr_delta_rule_torch, leaves(inputs, torch.float32)), truth, 1e-5)


def stand_in(q, k, v, a, b, gk, scale=None, **rest):
    """fla's function; its scale is K^-½ where none is given, and it has no segments."""
    assert q.dtype == k.dtype == v.dtype == a.dtype == b.dtype
    assert gk.dtype == torch.float32
    assert all(x.is_contiguous() for x in (q, k, v, a, b, gk))
    return dplr_delta_rule_naive(q, k, v, a, b, gk, None, scale or q.shape[-1] ** -0.5), None


@pytest.fixture
def fla(monkeypatch):
    monkeypatch.setattr(fused.CHUNK_DPLR, "function", stand_in)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.usefixtures("fla")
def test_the_adapter_gives_the_formula(segments) -> None:
    shape = (2, 20, 2, 4, 3)
    ids = make_segments(*shape[:2]) if segments else None
    truth = run(dplr_delta_rule_naive, make_inputs(shape), ids, 0.7)
    ours = run(fused.dplr_delta_rule_fla, make_inputs(shape, torch.float32), ids, 0.7)
    assert_close(ours, truth, 1e-6, floor=0.1)
    form = get_implementation("dplr_delta_rule", "fla")
    for dtype in (torch.float32, torch.bfloat16):
        args = get_example("dplr_delta_rule", torch.device("cpu"), dtype)
        assert max(compare(form.run, dplr_delta_rule_torch, args)) <= form.tolerance(dtype) / 3
