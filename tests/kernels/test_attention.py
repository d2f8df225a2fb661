"""Attention: every form equals the formula in output and gradients."""

import pytest
import torch
from torch import Tensor

from tread_zoo.kernels import attention, set_form
from tread_zoo.kernels.attention.fused import CPU_HALF_TOKENS, attention_sdpa, sdpa_unsuited
from tread_zoo.kernels.attention.naive import attention_naive
from tread_zoo.kernels.attention.torch_form import attention_torch


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return [x.to(device, dtype).requires_grad_() for x in values]


def run(form, inputs: list[Tensor]) -> list[Tensor]:
    y = form(*inputs)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    return [y, *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("shape", [(2, 3, 16, 8), (1, 2, 7, 5), (2, 1, 1, 4), (1, 1, 300, 16)])
@pytest.mark.parametrize("form", [attention_torch, attention_sdpa, attention])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forms_equal_formula(shape, form, dtype) -> None:
    inputs = make_inputs(shape, dtype)
    truth = run(attention_naive, [x.detach().double().requires_grad_() for x in inputs])
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for mine, true in zip(run(form, inputs), truth, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= bound * true.norm() + bound * 1e-3


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(attention_torch, make_inputs((1, 2, 4, 3)))


def test_large_scores_stay_finite() -> None:
    inputs = [100 * x.detach() for x in make_inputs((1, 1, 8, 4), torch.float32)]
    for form in (attention_naive, attention_torch, attention_sdpa):
        assert form(*inputs).isfinite().all()


def test_rule_on_a_cpu() -> None:
    short = make_inputs((1, 1, 4, 2), torch.float32)
    long = [torch.empty(1, 1, CPU_HALF_TOKENS + 1, 2, dtype=torch.bfloat16)] * 3
    assert sdpa_unsuited(*short) is None
    assert "half precision" in sdpa_unsuited(*(x.bfloat16() for x in short))
    assert sdpa_unsuited(*long) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert "half precision" in sdpa_unsuited(*short)


def test_a_form_set_by_hand_takes_what_auto_would_not() -> None:
    inputs = make_inputs((1, 2, 8, 4), torch.bfloat16)
    set_form("attention", "sdpa")
    try:
        assert torch.equal(attention(*inputs), attention_sdpa(*inputs))
    finally:
        set_form("attention", "auto")


def test_shapes_that_differ_are_refused() -> None:
    q, k, v = make_inputs((1, 2, 4, 3))
    with pytest.raises(ValueError, match="one shape"):
        attention(q, k[:, :, :2], v)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the kernels of a CUDA device")
def test_sdpa_equals_torch_form_on_cuda() -> None:
    inputs = make_inputs((2, 3, 64, 32), torch.float32, "cuda")
    ours, truth = (run(form, inputs) for form in (attention_sdpa, attention_torch))
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true, rtol=2e-3, atol=2e-3)
