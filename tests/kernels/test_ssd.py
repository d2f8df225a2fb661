"""The state-space dual: torch form equals the formula in output and gradients; adapters give it."""

import sys
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.kernels import ssd
from tread_zoo.kernels.dispatch import get_example, get_form, import_problem, list_forms
from tread_zoo.kernels.ssd import fused
from tread_zoo.kernels.ssd.naive import ssd_naive
from tread_zoo.kernels.ssd.torch_form import ssd_torch
from tread_zoo.kernels.verify import TOLERANCE, cast, compare

torch_form = import_module("tread_zoo.kernels.ssd.torch_form")
CHUNK = torch_form.CHUNK

# B, L, H, P, N, G
SHAPES = [
    (2, 1, 2, 3, 4, 1),
    (3, 7, 6, 5, 1, 3),
    (2, CHUNK, 4, 1, 6, 2),
    (1, CHUNK + 1, 4, 4, 5, 4),
    (2, 3 * CHUNK - 5, 6, 4, 3, 2),
]


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    batch, length, heads, width, size, groups = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    x, step = normal(batch, length, heads, width), normal(batch, length, heads)
    vectors = normal(2, batch, length, groups, size)
    values = [x, F.softplus(step - 2), -torch.exp(normal(heads)), *vectors, normal(heads)]
    return [v.to(device, dtype).requires_grad_() for v in values]


def make_segments(batch: int, length: int) -> Tensor:
    """Return ids that change here and there, and come back: 0, 1, 2, 0, …"""
    generator = torch.Generator().manual_seed(1)
    changes = torch.rand(batch, length, generator=generator) < 0.2
    return changes.long().cumsum(dim=1) % 3


def make_gaps(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, 6, (batch, length), generator=generator)


def run(form, inputs: list[Tensor], *tokens: Tensor | None) -> list[Tensor]:
    """Return the output and the gradient of every input for one fixed gradient of the output,
    which is the same in half precision."""
    y = form(*inputs, *tokens)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    return [y, *torch.autograd.grad(y, inputs, grad.to(y))]


def public(*args) -> Tensor:
    """`ssd` with the segment ids and the gaps last, as the forms take them."""
    return ssd(*args[:-2], segment_ids=args[-2], gaps=args[-1])


def copies(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in inputs]


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def assert_close(ours: list[Tensor], truth: list[Tensor], bound: float) -> None:
    for mine, true in zip(ours, truth, strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, true) <= bound


@pytest.mark.parametrize("gapped", [False, True])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_form_equals_formula(shape, segments, gapped) -> None:
    tokens = make_segments(*shape[:2]) if segments else None, make_gaps(*shape[:2])
    tokens = tokens if gapped else (tokens[0], None)
    truth = run(ssd_naive, make_inputs(shape), *tokens)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        ours = run(ssd_torch, make_inputs(shape, dtype), *tokens)
        assert ours[0].dtype == dtype
        assert_close(ours, truth, bound)


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


def test_without_D() -> None:
    inputs = make_inputs((2, 9, 4, 3, 2, 2))[:-1]

    def without(form):
        return lambda *args: form(*args[:-2], None, *args[-2:])

    truth, ours = (run(without(form), inputs, None, None) for form in (ssd_naive, ssd_torch))
    assert_close(ours, truth, 1e-12)


def test_bar_shape_is_exact_and_keeps_little() -> None:
    """What is kept for backward: the inputs and three states, 3.2 MiB."""
    inputs = make_inputs((4, 256, 6, 64, 64, 1))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ours = ssd_torch(*copies(inputs, torch.float32))
    assert ours.requires_grad
    assert sum(kept.values()) <= 3.5 * 2**20
    with torch.no_grad():
        truth = ssd_naive(*inputs)
    assert (ours - truth).abs().max() <= 2e-6 * truth.abs().max()


@pytest.mark.parametrize("tokens", [False, True])
def test_gradcheck(tokens, monkeypatch) -> None:
    monkeypatch.setattr(torch_form, "CHUNK", 3)
    monkeypatch.setattr(torch_form, "BLOCK_VALUES", 8)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 0], [5, 5, 5, 5, 6, 6, 6, 6]]) if tokens else None
    gaps = make_gaps(2, 8) if tokens else None
    inputs = make_inputs((2, 8, 2, 2, 2, 2))
    assert torch.autograd.gradcheck(lambda *args: ssd_torch(*args, ids, gaps), inputs)


@pytest.mark.parametrize("block_values", [1, 1500, 10**9])
def test_blocks_do_not_matter(block_values, monkeypatch) -> None:
    shape = (5, CHUNK + 3, 4, 3, 2, 2)
    inputs, tokens = make_inputs(shape), (make_segments(*shape[:2]), make_gaps(*shape[:2]))
    truth = run(ssd_naive, inputs, *tokens)
    monkeypatch.setattr(torch_form, "BLOCK_VALUES", block_values)
    assert_close(run(ssd_torch, inputs, *tokens), truth, 1e-12)


def test_strong_decay_is_finite_and_exact() -> None:
    inputs = make_inputs((1, CHUNK + 36, 4, 2, 3, 1))
    with torch.no_grad():
        inputs[1].fill_(1.0)
        inputs[2].copy_(-torch.tensor([10.0, 20.0, 200.0, 1e-4]))  # summed: from -1000 to -20000
    truth = run(ssd_naive, inputs, None, None)
    assert_close(run(ssd_torch, copies(inputs, torch.float32), None, None), truth, 1e-6)


def test_weak_decays_after_a_strong_one_keep_their_digits() -> None:
    """A float32 sum of about -1000 moves in steps of 6e-5, and so would its differences. And the
    rounding of many gradients, times the Δ of the strong step, must not be its gradient of A."""
    inputs = make_inputs((2, CHUNK, 2, 4, 3, 1))
    with torch.no_grad():
        inputs[1].copy_(0.01 * torch.rand(2, CHUNK, 2, dtype=torch.float64) + 0.001)
        inputs[1][:, ::16] = 300.0
        inputs[2].fill_(-1.0)
    truth = run(ssd_naive, inputs, None, None)
    assert_close(run(ssd_torch, copies(inputs, torch.float32), None, None), truth, 1e-6)


@pytest.mark.parametrize("form", [ssd_naive, ssd_torch])
def test_segments_equal_separate_scans(form) -> None:
    x, delta, A, B, C, D = make_inputs((1, CHUNK + 20, 4, 3, 2, 2))
    cuts = [0, 30, CHUNK - 2, CHUNK + 5, CHUNK + 20]
    parts = [slice(*pair) for pair in pairwise(cuts)]
    ids = torch.zeros(1, CHUNK + 20, dtype=torch.int32)
    for part, name in zip(parts, (3, 8, 3, -1), strict=True):
        ids[:, part] = name
    alone = [form(x[:, s], delta[:, s], A, B[:, s], C[:, s], D, None, None) for s in parts]
    torch.testing.assert_close(form(x, delta, A, B, C, D, ids, None), torch.cat(alone, dim=1))


@pytest.mark.parametrize("form", [ssd_naive, ssd_torch])
def test_gaps_equal_steps_without_input(form) -> None:
    """A gap of g is g steps with the token's own Δ, of which all but the last bring nothing."""
    x, delta, A, B, C, D = make_inputs((2, 9, 4, 3, 2, 2))
    gaps = torch.tensor([1, 1, 4, 1, 2, 1, 1, 3, 1])
    places = gaps.cumsum(0) - 1
    steps = delta.repeat_interleave(gaps, dim=1)
    spread = torch.zeros(2, len(steps[0]), 4, 3, dtype=x.dtype).index_copy(1, places, x)
    ins, outs = (v.repeat_interleave(gaps, dim=1) for v in (B, C))
    full = form(spread, steps, A, ins, outs, D, None, None)[:, places]
    torch.testing.assert_close(form(x, delta, A, B, C, D, None, gaps.expand(2, -1)), full)


def test_groups_are_major_over_heads() -> None:
    x, delta, A, B, C, D = make_inputs((2, 5, 6, 3, 2, 2))
    halves = [
        ssd(x[:, :, s], delta[..., s], A[s], B[:, :, g : g + 1], C[:, :, g : g + 1], D[s])
        for g, s in enumerate((slice(0, 3), slice(3, 6)))
    ]
    torch.testing.assert_close(ssd(x, delta, A, B, C, D), torch.cat(halves, dim=2))


def check_half_precision(device: str, form=ssd_torch, bound: float = 4e-3) -> None:
    x, delta, A, B, C, D = make_inputs((2, 2 * CHUNK, 4, 8, 4, 2), torch.float32, device)
    half = [v.detach().bfloat16().requires_grad_() for v in (x, B, C)]
    inputs = [half[0], delta, A, half[1], half[2], D]
    truth = run(ssd_naive, copies(inputs, torch.float64), None, None)
    with torch.autocast(device, torch.bfloat16):
        ours = run(form, inputs, None, None)
    assert ours[0].dtype == torch.bfloat16
    assert [g.dtype for g in ours[1:]] == [v.dtype for v in inputs]
    assert_close(ours, truth, bound)


def test_half_precision_inputs_keep_a_float32_state() -> None:
    check_half_precision("cpu")  # the bound is one rounding to bfloat16


def test_autocast_changes_nothing_in_float32() -> None:
    inputs = make_inputs((2, CHUNK + 1, 4, 3, 2, 2), torch.float32)
    plain = run(public, inputs, None, None)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(public, inputs, None, None)
    for mine, true in zip(cast, plain, strict=True):
        assert torch.equal(mine, true)


def test_views_are_taken_as_inputs() -> None:
    inputs = make_inputs((2, 9, 4, 3, 2, 2))
    strided = [
        x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in inputs
    ]
    truth = run(ssd_naive, inputs, None, None)
    assert_close(run(public, strided, None, None), truth, 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(0, 5, 4, 3)}, r"x has shape \(0, 5, 4, 3\)"),
        ({"x": torch.zeros(2, 5, 12)}, r"x has shape \(2, 5, 12\)"),
        ({"delta": torch.zeros(2, 5, 3)}, "delta has shape"),
        ({"A": torch.zeros(4, 2)}, r"A has shape \(4, 2\); it must be \(4,\)"),
        ({"B": torch.zeros(2, 5, 3, 2)}, "G a divisor of 4"),
        ({"B": torch.zeros(2, 5, 2, 0)}, "N at least 1"),
        ({"C": torch.zeros(2, 5, 1, 2)}, "C has shape"),
        ({"D": torch.zeros(1)}, "D has shape"),
        ({"segment_ids": torch.zeros(2, 4, dtype=torch.int64)}, "segment_ids has shape"),
        ({"segment_ids": torch.zeros(2, 5)}, "segment_ids has dtype"),
        ({"gaps": torch.ones(5)}, "gaps has shape"),
        ({"gaps": torch.ones(2, 5).bool()}, "gaps has dtype"),
        ({"gaps": torch.zeros(2, 5)}, "gaps must be positive"),
        ({"gaps": torch.ones(2, 5, requires_grad=True)}, "gaps require a gradient"),
    ],
)
def test_what_does_not_fit_is_refused(change, message) -> None:
    names = ("x", "delta", "A", "B", "C", "D")
    good = dict(zip(names, make_inputs((2, 5, 4, 3, 2, 2)), strict=True))
    with pytest.raises(ValueError, match=message):
        ssd(**{**good, **change})


@pytest.mark.parametrize("tokens", [False, True])
def test_opcheck(tokens) -> None:
    shape = (2, CHUNK + 1, 4, 2, 3, 2)
    inputs = make_inputs(shape, torch.float32)
    rest = (make_segments(*shape[:2]), make_gaps(*shape[:2])) if tokens else (None, None)
    torch.library.opcheck(torch.ops.tread_zoo.ssd.default, (*inputs, *rest))
    values = [x.detach() for x in inputs]
    y, states = torch.ops.tread_zoo.ssd(*values, *rest)
    assert states.shape == (1, 2, 2, 3, 4)
    backward = torch.ops.tread_zoo.ssd_backward.default
    torch.library.opcheck(backward, (y, states, *values, *rest))


def check_compiles(device: str) -> None:
    inputs = make_inputs((2, CHUNK + 1, 4, 2, 3, 2), torch.float32, device)
    compiled = torch.compile(lambda *args: public(*args).sin(), fullgraph=True)
    expected = run(lambda *args: public(*args).sin(), inputs, None, None)
    for mine, true in zip(run(compiled, inputs, None, None), expected, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.slow
def test_compiles_whole() -> None:
    check_compiles("cpu")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("length", [5, 3 * CHUNK - 5])
def test_flops_are_those_of_the_matrix_products(length, device) -> None:
    inputs = make_inputs((2, length, 4, 3, 5, 2), torch.float32)
    with torch.no_grad():
        with FlopCounterMode(display=False) as forward:
            chunks = torch_form._prepare(*inputs, None, None, slice(None))
            states = torch_form._scan(chunks)
            y = torch_form._outputs(chunks, states)
        with FlopCounterMode(display=False) as backward:
            torch_form._gradients(chunks, states, y)
    moved = [x.detach().to(device).requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as counter:
        y = ssd(*moved)
    assert counter.get_total_flops() == forward.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == backward.get_total_flops()


def test_cost_is_linear_in_the_length() -> None:
    def count(length: int) -> int:
        inputs = [x.detach().to("meta") for x in make_inputs((1, length, 2, 4, 4, 1))]
        with FlopCounterMode(display=False) as counter:
            ssd(*inputs)
        return counter.get_total_flops()

    assert count(64 * CHUNK) <= 2.05 * count(32 * CHUNK)


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
    y = by_pairs(q, k, dt[..., None] * x, dt * A, same)
    return y if D is None else y + D[:, None] * x


def gla_by_pairs(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False
) -> tuple[Tensor, None]:
    """fla's function; its scale is K^-½ where none is given."""
    assert q.dtype == k.dtype == v.dtype == g.dtype == torch.float32
    assert q.shape == k.shape
    assert q.shape[:3] == v.shape[:3] == g.shape
    return by_pairs(q, k, v, g) * (q.shape[-1] ** -0.5 if scale is None else scale), None


def by_pairs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, same: Tensor | None = None) -> Tensor:
    """Σ_{j <= i} (q_i · k_j) exp(g_{j+1} + … + g_i) v_j, heads in the third place."""
    length = q.shape[1]
    below = torch.ones(length, length, dtype=torch.bool).tril()
    sums = g.double().cumsum(1)
    falls = (sums[:, :, None] - sums[:, None]).masked_fill(~below[..., None], -torch.inf)
    weights = torch.einsum("bihn,bjhn->bijh", q, k) * falls.exp().float()
    if same is not None:
        weights = weights * same[..., None]
    return torch.einsum("bijh,bjhp->bihp", weights, v)


@pytest.fixture
def stand_ins(monkeypatch):
    """Put functions of the packages' signatures where the packages would be."""
    mamba = SimpleNamespace(mamba_chunk_scan_combined=mamba_by_pairs)
    monkeypatch.setitem(sys.modules, fused.MAMBA_MODULE, mamba)
    gla = SimpleNamespace(chunk_simple_gla=gla_by_pairs)
    monkeypatch.setitem(sys.modules, fused.FLA_MODULE, gla)


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


@pytest.mark.parametrize("name", ["mamba-ssm", "fla"])
@pytest.mark.usefixtures("stand_ins")
def test_a_right_kernel_passes_the_comparison_before_its_first_use(name) -> None:
    form = get_form("ssd", name)
    args = cast(get_example("ssd", torch.device("cpu")), form.check_dtype)
    assert max(compare(form.run, ssd_torch, args)) <= TOLERANCE[form.check_dtype] / 3


def test_adapters_say_what_they_do_not_take() -> None:
    assert list_forms("ssd") == ("mamba-ssm", "fla", "torch", "naive")
    inputs = make_inputs((1, 2, 4, 3, 2, 1), torch.float32)
    assert fused.unsuited(*inputs, None, None) is None
    assert fused.unsuited(*make_inputs((1, 2, 4, 3, 2, 1)), None, None) == "float64"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_torch_form_on_a_gpu() -> None:
    shape = (2, 3 * CHUNK - 5, 6, 16, 8, 2)
    tokens = [v.cuda() for v in (make_segments(*shape[:2]), make_gaps(*shape[:2]))]
    truth = run(ssd_naive, make_inputs(shape, device="cuda"), *tokens)
    ours = run(ssd_torch, make_inputs(shape, torch.float32, "cuda"), *tokens)
    assert_close(ours, truth, 1e-5)
    check_half_precision("cuda")
    check_compiles("cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("form", "module"),
    [(fused.ssd_mamba, fused.MAMBA_MODULE), (fused.ssd_fla, fused.FLA_MODULE)],
)
def test_fused_equals_torch_form(form, module, special) -> None:
    if (problem := import_problem(module)) is not None:
        pytest.skip(f"{module}: {problem}")
    shape = (2, 200, 4, 64, 32, 2)
    tokens = make_segments(*shape[:2]).cuda(), make_gaps(*shape[:2]).cuda()
    inputs = make_inputs(shape, torch.float32, "cuda")
    ours, truth = (
        run(each, inputs, *(tokens if special else (None, None))) for each in (form, ssd_torch)
    )
    assert_close(ours, [v.double() for v in truth], 5e-3)  # the kernels multiply in TF32
    check_half_precision("cuda", form, bound=1e-2)
