"""The causal convolution: torch form equals the formula, and torch's own padded convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels import causal_conv1d
from tread_zoo.kernels.causal_conv1d.fused import MODULE, causal_conv1d_fused, unsuited
from tread_zoo.kernels.causal_conv1d.naive import causal_conv1d_naive
from tread_zoo.kernels.causal_conv1d.torch_form import causal_conv1d_torch
from tread_zoo.kernels.dispatch import import_problem

# B, L, D, W
SHAPES = [(2, 9, 6, 4), (1, 1, 3, 4), (3, 2, 4, 4), (2, 5, 4, 1), (2, 17, 8, 2), (1, 6, 2, 7)]


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    batch, length, width, taps = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, length, width), (width, taps), (width,)]
    values = [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(device, dtype).requires_grad_() for x in values]


def make_segments(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(shape[:2], generator=generator) < 0.3).long().cumsum(dim=1)


def run(form, inputs: list[Tensor], *rest) -> list[Tensor]:
    y = form(*inputs, *rest)
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    return [y, *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_form_equals_formula(shape, dtype, segments) -> None:
    ids = make_segments(shape) if segments else None
    truth = run(causal_conv1d_naive, make_inputs(shape), ids)
    ours = run(causal_conv1d_torch, make_inputs(shape, dtype), ids)
    bound = (
        {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    )
    for mine, true in zip(ours, truth, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), true, **bound)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_a_padded_convolution(shape) -> None:
    x, weight, bias = make_inputs(shape)
    padded = F.pad(x.transpose(1, 2), (shape[3] - 1, 0))
    expected = F.conv1d(padded, weight.unsqueeze(1), bias, groups=shape[2]).transpose(1, 2)
    torch.testing.assert_close(causal_conv1d(x, weight, bias), expected)


def test_without_bias_and_gradcheck() -> None:
    inputs = make_inputs((2, 5, 3, 3))
    ids = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]])
    truth, ours = run(causal_conv1d_naive, inputs[:2]), run(causal_conv1d, inputs[:2])
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true)
    assert torch.autograd.gradcheck(lambda *args: causal_conv1d(*args, segment_ids=ids), inputs)


def test_segments_equal_separate_convolutions() -> None:
    x, weight, bias = make_inputs((1, 9, 4, 4))
    ids = torch.tensor([[0] * 4 + [1] * 5])
    parts = [causal_conv1d(x[:, s], weight, bias) for s in (slice(0, 4), slice(4, 9))]
    whole = causal_conv1d(x, weight, bias, segment_ids=ids)
    torch.testing.assert_close(whole, torch.cat(parts, dim=1))


def test_half_precision_sums_in_float32() -> None:
    x, weight, bias = make_inputs((2, 9, 8, 4), torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    truth = run(
        causal_conv1d_naive, [t.detach().double().requires_grad_() for t in (half, weight, bias)]
    )
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(causal_conv1d, [half, weight, bias])
    assert [t.dtype for t in ours] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(ours[0].double(), truth[0], rtol=4e-3, atol=1e-6)
    for mine, true in zip(ours[1:], truth[1:], strict=True):
        assert (mine.double() - true).norm() <= 4e-3 * true.norm()


@pytest.mark.slow
def test_compiles_whole() -> None:
    inputs = make_inputs((2, 9, 8, 4), torch.float32)
    compiled = torch.compile(lambda *args: causal_conv1d(*args).sin(), fullgraph=True)
    expected = run(lambda *args: causal_conv1d(*args).sin(), inputs)
    for mine, true in zip(run(compiled, inputs), expected, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(0, 5, 4)}, r"x has shape \(0, 5, 4\)"),
        ({"weight": torch.zeros(3, 4)}, r"weight has shape \(3, 4\)"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\)"),
        ({"segment_ids": torch.zeros(2, 4, dtype=torch.int64)}, "segment_ids has shape"),
    ],
)
def test_what_does_not_fit_is_refused(change, message) -> None:
    good = dict(zip(("x", "weight", "bias"), make_inputs((2, 5, 4, 4)), strict=True))
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{**good, **change})


def test_fused_says_what_it_does_not_take() -> None:
    assert unsuited(*make_inputs((1, 5, 8, 4), torch.float32), None) is None
    assert "5 taps" in unsuited(*make_inputs((1, 5, 8, 5), torch.float32), None)
    assert "6 channels" in unsuited(*make_inputs((1, 5, 6, 4), torch.float32), None)
    assert unsuited(*make_inputs((1, 5, 8, 4)), None) == "float64"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused form needs a CUDA device")
@pytest.mark.parametrize("segments", [False, True])
def test_fused_equals_torch_form(segments) -> None:
    if (problem := import_problem(MODULE)) is not None:
        pytest.skip(f"causal-conv1d: {problem}")
    shape = (2, 50, 16, 4)
    inputs = make_inputs(shape, torch.float32, "cuda")
    ids = make_segments(shape).cuda() if segments else None
    ours, truth = (run(form, inputs, ids) for form in (causal_conv1d_fused, causal_conv1d_torch))
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)
