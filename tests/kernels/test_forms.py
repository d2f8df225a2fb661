"""Every operation: the torch form equals the naive one in output and gradients, in every dtype."""

import shutil
from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.ops import OPS, Op, assert_close, leaves, make_gaps, relative_error, run
from tread_zoo.kernels import attention, dispatch, selective_scan
from tread_zoo.kernels.compiled import COMPILERS

CUSTOM = (  # custom operators of torch
    "selective_scan", "ssd", "bidirectional_wkv", "gated_linear_attention",
)  # fmt: skip
SCANS = (*CUSTOM, "gated_delta_rule", "kda", "dplr_delta_rule")
SCANS_WITH_DECAYS = tuple(name for name in SCANS if name != "bidirectional_wkv")
COUNTED = ("causal_conv1d", *SCANS)
OPTIONAL = ("causal_conv1d", "selective_scan", "ssd")  # the last input may be None


@pytest.fixture(params=OPS)
def op(request) -> Op:
    return OPS[request.param]


def of(names):
    return pytest.mark.parametrize("op", names, indirect=True)


def fast_forms_of(names):
    """Each operation with its torch form, and with the one in C."""
    no_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")
    marks = {"torch": (), "compiled": no_compiler}
    cases = [
        pytest.param(name, form, marks=marks[form])
        for name in names
        for form in marks
        if form in dispatch.list_forms(name)
    ]
    return pytest.mark.parametrize(("op", "form"), cases, indirect=["op"])


def test_every_operation_is_tested() -> None:
    assert OPS.keys() == dispatch.get_forms().keys()


@pytest.mark.parametrize(
    ("op", "shape", "subset"),
    [
        (op.name, shape, subset)
        for op in OPS.values()
        for shape in op.shapes
        for subset in (False, True)[: 1 + bool(op.tokens)]
    ],
    indirect=["op"],
)
def test_torch_form_equals_formula(op, shape, subset) -> None:
    rest = op.rest(shape, subset)
    truth = run(op.form("naive"), op.inputs(shape), *rest)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, op.bound)):
        for form in (op.form("torch"), op.public):
            ours = run(form, op.inputs(shape, dtype), *rest)
            assert {x.dtype for x in ours} == {dtype}
            assert_close(ours, truth, bound, op.floor)


@of(OPTIONAL)
def test_the_last_input_may_be_left_out(op) -> None:
    rest = (None, *op.rest())
    truth, ours = (run(form, op.inputs()[:-1], *rest) for form in map(op.form, ("naive", "torch")))
    assert_close(ours, truth, 1e-12)


@fast_forms_of(["selective_scan"])
@pytest.mark.parametrize("gaps", [False, True])
def test_step_sizes_of_a_scan_are_the_softplus_of_what_is_given(op, form, gaps) -> None:
    """From 1e-26 to 50, against torch's softplus in float64."""
    shape = op.shapes[-1]
    inputs, rest = op.inputs(shape), op.rest(shape, subset=not gaps)
    apart = make_gaps(*shape[:2]).double() if gaps else None
    with torch.no_grad():
        inputs[1].copy_(torch.linspace(-60, 40, inputs[1].numel()).view(inputs[1].shape).cos() * 50)
        inputs[1][:, ::2] = inputs[1][:, ::2] / 20
    bias = torch.linspace(-10, 3, shape[2], dtype=torch.float64, requires_grad=True)

    def naive(u, delta, *others):
        *others, bias = others
        steps = torch.nn.functional.softplus(delta + bias)
        return selective_scan(u, steps, *others, segment_ids=rest[-1], gaps=apart)

    def ours(*given):
        return selective_scan(*given, segment_ids=rest[-1], gaps=apart)

    dispatch.set_form(op.name, "naive")
    try:
        truth = run(naive, [*inputs, bias])
        dispatch.set_form(op.name, form)
        found = run(ours, leaves([*inputs, bias], torch.float32))
    finally:
        dispatch.set_form(op.name, "auto")
    assert_close(found, truth, 1e-5)


@of(SCANS)
def test_a_shape_of_training_is_exact_and_keeps_little(op) -> None:
    shape, mebibytes = op.bar
    kept: dict[int, int] = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = op.inputs(shape)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ours = op.public(*leaves(inputs, torch.float32), *op.rest(shape))
    assert ours.requires_grad
    assert sum(kept.values()) <= mebibytes * 2**20
    with torch.no_grad():
        truth = op.form("naive")(*inputs, *op.rest(shape))
    exact = op.name in ("ssd", "gated_linear_attention")
    bound = 2e-6 * truth.abs().max() if exact else 2e-5
    assert (ours - truth).abs().max() <= bound


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_precision_inputs_keep_float32_sums(op, device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape = op.shapes[-1]
    inputs, rest = op.mixed(shape, device=device), op.rest(shape)
    truth = run(op.form("naive"), leaves(inputs, torch.float64, device), *rest)
    with torch.autocast(device, torch.bfloat16):
        ours = run(op.form("torch"), inputs, *rest)
    assert [x.dtype for x in ours] == [torch.bfloat16, *(x.dtype for x in inputs)]
    # One rounding to bfloat16; attention rounds its weights, too.
    assert_close(ours, truth, 3e-2 if op.name == "attention" else 4e-3, op.floor)


@pytest.mark.slow
@of(("gated_linear_attention", "gated_delta_rule", "kda", "dplr_delta_rule"))
def test_4096_tokens_are_exact(op) -> None:
    shape = (1, 4096, 1, 8, 8)
    truth = run(op.form("naive"), op.inputs(shape), *op.rest(shape))
    for form in {"torch", "compiled"}.intersection(dispatch.list_forms(op.name)):
        if form == "torch" or any(map(shutil.which, COMPILERS)):
            ours = run(op.form(form), op.inputs(shape, torch.float32), *op.rest(shape))
            assert_close(ours, truth, 2e-6)


@of(SCANS)
def test_autocast_changes_nothing_in_float32(op) -> None:
    inputs, rest = op.inputs(dtype=torch.float32), op.rest()
    plain = run(op.public, inputs, *rest)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(op.public, inputs, *rest)
    assert all(torch.equal(*pair) for pair in zip(cast, plain, strict=True))


def test_views_are_taken_as_inputs(op) -> None:
    inputs, rest = op.inputs(), op.rest(subset=True)
    strided = [
        x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in inputs
    ]
    places = [v.mT.contiguous().mT if torch.is_tensor(v) else v for v in rest]
    truth = run(op.form("naive"), inputs, *rest)
    assert_close(run(op.public, strided, *places), truth, 1e-12)


@pytest.mark.parametrize(
    ("op", "constants"),
    [
        ("selective_scan", {"STEP_VALUES": 1}),
        ("selective_scan", {"STEP_VALUES": 40, "CHUNK": 3}),
        ("ssd", {"BLOCK_VALUES": 1}),
        ("ssd", {"BLOCK_VALUES": 1500, "CHUNK": 3}),
        ("bidirectional_wkv", {"BLOCK_VALUES": 1}),
        ("bidirectional_wkv", {"BLOCK_VALUES": 100}),
        ("gated_linear_attention", {"CHUNK": 1}),
        ("gated_linear_attention", {"CHUNK": 4, "BLOCK_VALUES": 400}),
        ("dplr_delta_rule", {"CHUNK": 1}),
        ("dplr_delta_rule", {"CHUNK": 12}),
    ],
    indirect=["op"],
)
def test_blocks_and_chunks_do_not_matter(op, constants, monkeypatch) -> None:
    shape = op.shapes[-1]
    inputs, rest = op.inputs(shape), op.rest(shape, subset=True)
    truth = run(op.form("naive"), inputs, *rest)
    module = import_module(f"tread_zoo.kernels.{op.name}.torch_form")
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    assert_close(run(op.form("torch"), inputs, *rest), truth, 1e-12)


@pytest.mark.parametrize("decays", ["strong", "weak beside strong", "none"])
@fast_forms_of(SCANS_WITH_DECAYS)
def test_any_decay_is_exact(op, form, decays) -> None:
    """e^-1000 at each step or at some, 1 - 1e-3 between, of which a float32 sum would lose the
    digits; rounding of many gradients, times a large Δ, must not be the gradient of A."""
    inputs = op.inputs((2, 100, 4, *op.shapes[0][3:]))
    strong = torch.rand(inputs[-1].shape if inputs[-1].ndim > 2 else inputs[1].shape) < 0.3
    with torch.no_grad():
        if op.name in ("selective_scan", "ssd"):
            inputs[2].copy_(-inputs[2].abs().clamp(0.5, 2))
            falls, low = inputs[1], 1000.0
        else:
            falls, low = inputs[-1], -1000.0
        falls.mul_(0 if decays == "none" else 0.01)
        falls[strong if decays != "strong" else ...] = low if decays != "none" else 0.0
    truth = run(op.form("naive"), inputs, *op.rest())
    bound = 1e-5 if op.name == "selective_scan" else 2e-6
    assert_close(run(op.form(form), leaves(inputs, torch.float32), *op.rest()), truth, bound)


@fast_forms_of(("gated_delta_rule", "kda", "dplr_delta_rule"))
def test_keys_that_are_alike_do_not_cancel(op, form) -> None:
    """As on a plain background: the powers of the triangular matrix would grow like binomials."""
    inputs = op.inputs((1, 100, 2, 8, 4))
    with torch.no_grad():
        inputs[-1].mul_(1e-4)
        if op.name == "dplr_delta_rule":
            inputs[3].copy_(inputs[3][:, :1].expand_as(inputs[3]))
            inputs[4].copy_(-inputs[3])
        else:
            inputs[1].copy_(torch.nn.functional.normalize(1 + 0.01 * inputs[1], dim=-1))
            inputs[3].fill_(1.0)
    truth = run(op.form("naive"), inputs, *op.rest())
    assert_close(run(op.form(form), leaves(inputs, torch.float32), *op.rest()), truth, 5e-5)


def test_tensors_that_would_broadcast_are_refused(op) -> None:
    """Of each tensor each dimension at length 1; a free one gives an output of another shape."""
    shape = (2, 5, 4, *op.shapes[0][3:]) if op.name != "attention" else None
    given = [*op.inputs(shape), *op.rest(shape, subset=True)]
    full = op.public(*given).shape
    for index, value in enumerate(given):
        for dim in range(value.ndim if torch.is_tensor(value) else 0):
            if value.shape[dim] == 1 or (op.name, index, dim) == ("causal_conv1d", 1, 1):  # taps
                continue
            try:
                out = op.public(*given[:index], value.narrow(dim, 0, 1), *given[index + 1 :])
            except ValueError:
                continue
            assert out.shape != full, (index, dim)


@pytest.mark.parametrize(
    ("op", "index", "value"),
    [
        ("ssd", 7, torch.zeros(2, 5)),  # no gap is 0
        ("ssd", 7, torch.ones(2, 5, requires_grad=True)),
        ("bidirectional_wkv", 4, torch.zeros(2, 5)),
        ("bidirectional_wkv", 4, torch.tensor([[0, 1, 2, 2, 3]] * 2)),
        ("bidirectional_wkv", 4, torch.tensor([[0, 1, 2, 3, 5]] * 2)),
        ("bidirectional_wkv", 4, torch.tensor([[-1, 1, 2, 3, 4]] * 2)),
        ("bidirectional_wkv", 5, 4),
    ],
    indirect=["op"],
)
def test_places_that_would_be_wrong_are_refused(op, index, value) -> None:
    shape = (2, 5, 4, *op.shapes[0][3:])
    given = [*op.inputs(shape), *op.rest(shape)]
    given[index] = value
    with pytest.raises(ValueError):
        op.public(*given)


@pytest.mark.slow
@of(CUSTOM)
def test_opcheck(op) -> None:
    inputs, rest = op.inputs(dtype=torch.float32), op.rest(subset=True)
    rest = rest[1:] if op.name == "selective_scan" else rest  # the step bias is added before
    forward = getattr(torch.ops.tread_zoo, op.name)
    torch.library.opcheck(forward.default, (*inputs, *rest))
    values = [x.detach() for x in inputs]
    made = forward(*values, *rest)
    made = made if isinstance(made, tuple) else (made,)
    backward = getattr(torch.ops.tread_zoo, f"{op.name}_backward").default
    torch.library.opcheck(backward, (*made, *values, *rest))


@pytest.mark.nightly  # test_contract.py compiles a network with one of them
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiles_whole(op, device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.compiler.reset()  # the operations share a lambda, which may be compiled 8 times
    inputs = op.inputs(dtype=torch.float32, device=device)
    rest = [v.to(device) if torch.is_tensor(v) else v for v in op.rest(subset=True)]
    compiled = torch.compile(lambda *args: op.public(*args).sin(), fullgraph=True)
    expected = run(lambda *args: op.public(*args).sin(), inputs, *rest)
    for mine, true in zip(run(compiled, inputs, *rest), expected, strict=True):
        torch.testing.assert_close(mine, true)


def test_a_forward_mode_derivative_is_right_or_refused(op) -> None:
    """Of an operator that has none, torch would take the tangents for zero."""
    inputs, rest = [x.detach() for x in op.inputs(dtype=torch.float32)], op.rest(subset=True)
    ways = [torch.cos(x) for x in inputs]

    def slope():
        return torch.func.jvp(lambda *args: op.public(*args, *rest), tuple(inputs), tuple(ways))[1]

    if op.name not in ("gated_delta_rule", "kda"):
        with pytest.raises(RuntimeError, match="forward"):
            slope()
        return
    before, after = (
        op.form("naive")(*(x.double() + step * w for x, w in zip(inputs, ways, strict=True)), *rest)
        for step in (-1e-5, 1e-5)
    )
    assert relative_error(slope(), (after - before) / 2e-5) <= 1e-5


def count_flops(op: Op, shape, device: str, form=None) -> list[int]:
    """Return the FLOPs of the forward and of the backward pass."""
    inputs = op.inputs(shape, torch.float32, device)
    with FlopCounterMode(display=False) as forward:
        y = (form or op.public)(*inputs, *op.rest(shape))
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return [forward.get_total_flops(), backward.get_total_flops()]


@of(COUNTED)
def test_flops_are_the_same_without_data_and_linear_in_the_batch(op) -> None:
    shape = op.shapes[-1]
    once, meta = (count_flops(op, shape, device) for device in ("cpu", "meta"))
    assert once == meta
    assert count_flops(op, (3 * shape[0], *shape[1:]), "meta") == [3 * n for n in once]
    for form in {"triton", "compiled"}.intersection(dispatch.list_forms(op.name)):
        for each in op.shapes:
            plain, fused = (count_flops(op, each, "meta", op.form(f)) for f in ("torch", form))
            assert plain == fused


@of(("causal_conv1d", *CUSTOM))
def test_flops_are_linear_in_the_length(op) -> None:
    rest = op.shapes[0][2:]
    short, long = (count_flops(op, (1, n, *rest), "meta") for n in (2048, 4096))
    assert all(2 <= b / a <= 2.05 or b == 2 * a for a, b in zip(short, long, strict=True))


@of(("gated_linear_attention", "gated_delta_rule", "kda"))
def test_flops_are_those_of_the_products(op) -> None:
    """2 heads, 4 chunks of Q = 32 steps, of which the first reads no state; an inverse is Q^3."""
    chunks, Q, K, V = 4, 32, 8, 4
    pairs, inverse, state = 2 * (Q * (Q - 1) // 2) * K, Q**3, 2 * Q * K * V
    if op.name == "gated_linear_attention":
        within, inverse = pairs + 2 * Q * Q * V, 0
    else:  # queries and keys with keys; the inverse with keys and values; the values' into both
        within = 2 * pairs if op.name == "kda" else 4 * Q * Q * K
        within += 2 * Q * Q * (K + V) + 2 * Q * Q * V + state
    reads = 2 * state  # into the state and out of it; of keys and of queries
    products = 2 * (chunks * within + (chunks - 1) * reads)
    inverses = 2 * chunks * inverse
    counted = count_flops(op, (1, chunks * Q, 2, K, V), "meta", op.form("torch"))
    assert counted == [products + inverses, 2 * products + 3 * inverses]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("subset", [False, True])
def test_every_form_equals_the_torch_form_on_a_gpu(op, subset) -> None:
    shape = {"attention": (2, 3, 64, 32), "causal_conv1d": (2, 50, 16, 4),
             "selective_scan": (2, 100, 16, 8, 2), "ssd": (2, 200, 4, 64, 32, 2),
             "gated_linear_attention": (2, 200, 4, 32, 64),
             "dplr_delta_rule": (2, 200, 4, 32, 64)}.get(
                 op.name, op.shapes[-1])  # fmt: skip
    rest = [v.cuda() if torch.is_tensor(v) else v for v in op.rest(shape, subset)]
    inputs = op.inputs(shape, torch.float32, "cuda")
    truth = run(op.form("torch"), inputs, *rest)
    exact = run(op.form("naive"), op.inputs(shape, device="cuda"), *rest)
    assert_close(truth, exact, 1e-4 if op.name == "attention" else 1e-5, op.floor)
    bounds = {
        "attention": 2e-3,
        "ssd": 5e-3,
        "gated_linear_attention": 5e-3,
        "dplr_delta_rule": 5e-3,
        "gated_delta_rule": 5e-3,
        "kda": 5e-3,
    }  # kernels that multiply in TF32
    for name in dispatch.list_forms(op.name):
        form = dispatch.get_implementation(op.name, name)
        if dispatch.unusable(op.name, form, torch.device("cuda")) is None:
            for mine, true in zip(run(op.form(name), inputs, *rest), truth, strict=True):
                assert relative_error(mine, true, op.floor) <= bounds.get(op.name, 1e-4), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_queries_that_all_keys_repel_are_finite(masked) -> None:
    """On 64 tokens cuDNN's are NaN."""
    q, k, v = (torch.randn(2, 2, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * 32**0.5
    q.requires_grad_()
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device="cuda") if masked else None
    attention(q, k, v, mask).square().sum().backward()
    assert q.grad.isfinite().all()
