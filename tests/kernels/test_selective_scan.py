"""The selective scan: torch form equals the formula in output and gradients; fused equals torch."""

from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.kernels import selective_scan
from tread_zoo.kernels.dispatch import import_problem
from tread_zoo.kernels.selective_scan.fused import MODULE, selective_scan_fused, unsuited
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive
from tread_zoo.kernels.selective_scan.torch_form import selective_scan_torch

torch_form = import_module("tread_zoo.kernels.selective_scan.torch_form")
CHUNK = torch_form.CHUNK

# B, L, D, N, G
SHAPES = [
    (2, 1, 4, 3, 1),
    (3, 7, 6, 1, 3),
    (2, CHUNK, 8, 4, 2),
    (1, CHUNK + 1, 8, 4, 1),
    (2, 3 * CHUNK - 5, 4, 5, 2),
    (16, 18, 96, 8, 2),
]


def make_inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    decay: float = 1.0,
) -> list[Tensor]:
    batch, length, width, size, groups = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    u, step = normal(batch, length, width), normal(batch, length, width)
    delta = torch.nn.functional.softplus(step - 2)
    A = -decay * torch.exp(normal(width, size))
    vectors = normal(2, batch, length, groups, size)
    values = [u, delta, A, vectors[0], vectors[1], normal(width)]
    return [x.to(device, dtype).requires_grad_() for x in values]


def make_segments(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(batch, length, generator=generator) < 0.2).long().cumsum(dim=1)


def run(form, inputs: list[Tensor], segment_ids: Tensor | None = None) -> list[Tensor]:
    """Return the output and the gradient of every input for one fixed gradient of the output."""
    y = form(*inputs, segment_ids)
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    return [y, *torch.autograd.grad(y, inputs, grad)]


def public(*args) -> Tensor:
    """`selective_scan` with the segment ids last, as the forms take them."""
    return selective_scan(*args[:-1], segment_ids=args[-1])


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_form_equals_formula(shape, dtype, segments) -> None:
    segment_ids = make_segments(*shape[:2]) if segments else None
    truth = run(selective_scan_naive, make_inputs(shape), segment_ids)
    ours = run(selective_scan_torch, make_inputs(shape, dtype), segment_ids)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert ours[0].dtype == dtype
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= bound


def test_without_D() -> None:
    inputs = make_inputs((2, 9, 4, 3, 2))[:-1]

    def without(form):
        return lambda *args: form(*args[:-1], None, args[-1])

    truth = run(without(selective_scan_naive), inputs)
    ours = run(without(selective_scan_torch), inputs)
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true)


def test_bar_shape_in_float32_is_as_exact_as_promised() -> None:
    shape = (4, 256, 384, 16, 1)
    truth = run(selective_scan_naive, make_inputs(shape))
    ours = run(selective_scan_torch, make_inputs(shape, torch.float32))
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    assert max(map(relative_error, ours[1:], truth[1:])) <= 1e-5


def test_keeps_at_most_5_mib_inputs_included() -> None:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = selective_scan_torch(*make_inputs((4, 256, 384, 16, 1), torch.float32))
    assert y.requires_grad
    assert sum(kept.values()) <= 5 * 2**20


@pytest.mark.parametrize("segments", [False, True])
def test_gradcheck(segments, monkeypatch) -> None:
    monkeypatch.setattr(torch_form, "CHUNK", 3)
    monkeypatch.setattr(torch_form, "STEP_VALUES", 8)
    segment_ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 6, 6, 6]]) if segments else None
    inputs = make_inputs((2, 7, 4, 2, 2))
    assert torch.autograd.gradcheck(lambda *args: selective_scan_torch(*args, segment_ids), inputs)


@pytest.mark.parametrize("step_values", [1, 40, 10**9])
def test_tiles_do_not_matter(step_values, monkeypatch) -> None:
    inputs = make_inputs((5, 2 * CHUNK + 3, 4, 3, 2))
    truth = run(selective_scan_naive, inputs)
    monkeypatch.setattr(torch_form, "STEP_VALUES", step_values)
    for mine, true in zip(run(selective_scan_torch, inputs), truth, strict=True):
        torch.testing.assert_close(mine, true)


def test_strong_decay_is_finite_and_exact() -> None:
    shape = (1, 50, 4, 2, 1)
    inputs = make_inputs(shape)
    with torch.no_grad():
        inputs[1].fill_(1.0)
        inputs[2].copy_(-torch.tensor([20.0, 200.0]).expand(4, 2))  # summed: -1000 and -10000
    truth = run(selective_scan_naive, inputs)
    ours = run(selective_scan_torch, [x.detach().float().requires_grad_() for x in inputs])
    for mine, true in zip(ours, truth, strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, true) <= 1e-5


def test_segments_equal_separate_scans() -> None:
    inputs = make_inputs((1, 10, 4, 3, 2))
    u, delta, A, B, C, D = inputs
    ids = torch.tensor([[3] * 4 + [8] * 6])
    parts = [
        selective_scan(u[:, s], delta[:, s], A, B[:, s], C[:, s], D)
        for s in (slice(0, 4), slice(4, 10))
    ]
    torch.testing.assert_close(selective_scan(*inputs, segment_ids=ids), torch.cat(parts, dim=1))


def test_groups_are_major_over_channels() -> None:
    u, delta, A, B, C, D = make_inputs((2, 5, 6, 3, 2))
    halves = [
        selective_scan(u[..., s], delta[..., s], A[s], B[:, :, g : g + 1], C[:, :, g : g + 1], D[s])
        for g, s in enumerate((slice(0, 3), slice(3, 6)))
    ]
    whole = selective_scan(u, delta, A, B, C, D)
    torch.testing.assert_close(whole, torch.cat(halves, dim=-1))


def test_half_precision_inputs_keep_a_float32_state() -> None:
    shape = (2, 2 * CHUNK, 8, 4, 2)
    u, delta, A, B, C, D = make_inputs(shape, torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in (u, B, C)]
    inputs = [half[0], delta, A, half[1], half[2], D]
    truth = run(selective_scan_naive, [x.detach().double().requires_grad_() for x in inputs])
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(selective_scan_torch, inputs)
    assert ours[0].dtype == torch.bfloat16
    assert [g.dtype for g in ours[1:]] == [x.dtype for x in inputs]
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 4e-3  # one rounding to bfloat16


def test_autocast_changes_nothing_in_float32() -> None:
    inputs = make_inputs((2, 9, 4, 3, 2), torch.float32)
    plain = run(public, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(public, inputs)
    for mine, true in zip(cast, plain, strict=True):
        assert torch.equal(mine, true)


def test_views_are_taken_as_inputs() -> None:
    inputs = make_inputs((2, 9, 4, 3, 2))
    strided = [
        x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in inputs
    ]
    for mine, true in zip(run(public, strided), run(selective_scan_naive, inputs), strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(0, 5, 4)}, r"u has shape \(0, 5, 4\)"),
        ({"u": torch.zeros(2, 0, 4)}, r"u has shape \(2, 0, 4\)"),
        ({"delta": torch.zeros(2, 5, 3)}, "delta has shape"),
        ({"A": torch.zeros(3, 4)}, r"A has shape \(3, 4\)"),
        ({"B": torch.zeros(2, 5, 3, 3)}, "G a divisor of 4"),
        ({"C": torch.zeros(2, 5, 1, 3)}, "C has shape"),
        ({"D": torch.zeros(1)}, "D has shape"),
        ({"segment_ids": torch.zeros(2, 4, dtype=torch.int64)}, "segment_ids has shape"),
        ({"segment_ids": torch.zeros(2, 5)}, "segment_ids has dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change, message) -> None:
    names = ("u", "delta", "A", "B", "C", "D")
    good = dict(zip(names, make_inputs((2, 5, 4, 3, 2)), strict=True))
    with pytest.raises(ValueError, match=message):
        selective_scan(**{**good, **change})


@pytest.mark.parametrize("segments", [False, True])
def test_opcheck(segments) -> None:
    shape = (2, CHUNK + 1, 4, 2, 2)
    inputs = make_inputs(shape, torch.float32)
    segment_ids = make_segments(*shape[:2]) if segments else None
    torch.library.opcheck(torch.ops.tread_zoo.selective_scan.default, (*inputs, segment_ids))
    values = [x.detach() for x in inputs]
    y, states = torch.ops.tread_zoo.selective_scan(*values, segment_ids)
    assert states.shape == (1, 2, 2, 2, 2)
    backward = torch.ops.tread_zoo.selective_scan_backward.default
    torch.library.opcheck(backward, (y, states, *values, segment_ids))


@pytest.mark.slow
def test_compiles_whole() -> None:
    inputs = make_inputs((2, CHUNK + 1, 4, 2, 2), torch.float32)
    compiled = torch.compile(lambda *args: public(*args).sin(), fullgraph=True)
    expected = run(lambda *args: public(*args).sin(), inputs)
    for mine, true in zip(run(compiled, inputs), expected, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_are_counted_once(device) -> None:
    batch, length, width, size, groups = 2, 5, 8, 4, 2
    inputs = [
        x.detach().to(device).requires_grad_()
        for x in make_inputs((batch, length, width, size, groups), torch.float32)
    ]
    elements = batch * length * width * size
    with FlopCounterMode(display=False) as counter:
        y = selective_scan(*inputs)
    assert counter.get_total_flops() == 7 * elements
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 20 * elements


def test_fused_says_what_it_does_not_take() -> None:
    inputs = make_inputs((1, 2, 4, 3, 1), torch.float32)
    assert unsuited(*inputs, None) is None
    assert unsuited(*inputs, torch.zeros(1, 2, dtype=torch.int64)) is None
    assert unsuited(*make_inputs((1, 2, 4, 3, 1)), None) == "float64"
    assert unsuited(*make_inputs((1, 2, 4, 257, 1), torch.float32), None).startswith("257 states")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused form needs a CUDA device")
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_torch_form(dtype, segments) -> None:
    if (problem := import_problem(MODULE)) is not None:
        pytest.skip(f"mamba-ssm: {problem}")
    inputs = make_inputs((2, 100, 16, 8, 2), torch.float32, "cuda")
    inputs[0] = inputs[0].detach().to(dtype).requires_grad_()
    segment_ids = make_segments(2, 100).cuda() if segments else None
    ours, truth = (
        run(lambda *args, f=form: f(*args).float(), inputs, segment_ids)
        for form in (selective_scan_fused, selective_scan_torch)
    )
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true.double()) <= (1e-4 if dtype == torch.float32 else 1e-2)
