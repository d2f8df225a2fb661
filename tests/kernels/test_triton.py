"""The Triton forms: interpreted on a CPU, compiled for a GPU, run on one."""

import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.kernels.ops import OPS, assert_close, leaves, run
from tests.processes import run_python
from tread_zoo.kernels.dispatch import choose

ROOT = Path(__file__).parents[2]
WKV, SCAN = OPS["bidirectional_wkv"], OPS["selective_scan"]
both = pytest.mark.parametrize("op", [WKV, SCAN], ids=lambda op: op.name)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no module named 'triton'")


def on_a_gpu(test):
    skipped = find_spec("triton") is None or not torch.cuda.is_available()
    return pytest.mark.gpu(
        pytest.mark.skipif(skipped, reason="needs triton and a CUDA device")(test)
    )


@needs_triton
@pytest.mark.parametrize(
    "which",
    [pytest.param("not slow", marks=pytest.mark.slow),
     pytest.param("slow", marks=pytest.mark.nightly)],
)  # fmt: skip
def test_forms_equal_their_formulas_under_the_interpreter(which) -> None:
    file = ROOT / "tests/kernels/interpreted/triton_forms.py"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run_python("-m", "pytest", "-q", "-m", which, file, cwd=ROOT, env=env, fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ deselected)? in", done.stdout, re.MULTILINE), done.stdout


@needs_triton
def test_compiled_code_chooses_one_without_a_break() -> None:
    def choice(x):
        inputs = x, x, x[0], x[..., None], x[..., None], None, None
        return x + (choose("selective_scan", torch.device("cuda"), *inputs).name == "triton")

    compiled = torch.compile(choice, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(1, 3, 4)), torch.ones(1, 3, 4))


@both
def test_keeps_what_its_backward_pass_reads_and_no_state(op) -> None:
    kept: dict[int, int] = {}

    def pack(x):
        kept[id(x)] = x.numel() * x.element_size()
        return x

    half = op.mixed(device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = op.form("triton")(*half, *op.rest())
    more = out.numel() * (2 + 4) if op is WKV else 0  # the output, and its logarithm in float32
    assert sum(kept.values()) == sum(x.numel() * x.element_size() for x in half) + more


def tools(target: str) -> None:
    """Skip where Triton cannot compile for a target."""
    triton = pytest.importorskip("triton")
    try:
        assert target.startswith("gfx") or triton.knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        pytest.skip(f"Triton has no NVIDIA tools here: {error}")


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize(
    ("op", "shape"), [(WKV, (32, 19, 768)), (SCAN, (32, 16, 768, 16, 1))], ids=["wkv", "scan"]
)
def test_compiles_and_keeps_to_registers(op, shape, target) -> None:
    """A route's variant: the largest. At most 8 bytes are spilled for any of NVIDIA's."""
    tools(target)
    offline = import_module("benchmarks.offline")
    with offline.compiling(target) as variants:
        for length in (shape[1], 13, 1):  # another length compiles nothing anew
            own = (shape[0], length, *shape[2:])
            run(op.form("triton"), op.mixed(own), *op.rest(own, subset=True))
    assert len(variants) == (4 if op is WKV else 3)  # a scan's backward pass runs forward, too
    for variant in variants:
        assert variant.shared == 0, "no sum and no store passes through shared memory"
        if not target.startswith("gfx"):
            assert variant.registers <= (128 if op is WKV else 168)
            assert variant.spilled <= (16 if op is WKV else 128)


# What runs on a GPU only. exp is approximate there, to two units in the last place.


@on_a_gpu
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [
        (WKV, (3, 37, 22), {}),
        (WKV, (32, 131, 768), {}),
        (WKV, (2, 64, 40), {"reach": 1000, "keys": 25}),
        (WKV, (2, 64, 40), {"reach": -3, "keys": 25}),
        (SCAN, (2, 1, 3, 16, 1), {}),
        (SCAN, (4, 256, 384, 16, 1), {}),
        (SCAN, (32, 67, 768, 16, 2), {}),
        *((SCAN, (2, 50, 12, size, 1), {}) for size in (1, 4, 33, 64)),
    ],
)
def test_equals_formula_on_a_gpu(op, shape, options, subset) -> None:
    rest = [x.cuda() if torch.is_tensor(x) else x for x in op.rest(shape, subset)]
    truth = run(op.form("naive"), op.inputs(shape, device="cuda", **options), *rest)
    ours = run(op.form("triton"), op.inputs(shape, torch.float32, "cuda", **options), *rest)
    assert_close(ours, truth, 1e-5)


@on_a_gpu
@both
def test_half_precision_on_a_gpu(op) -> None:
    shape = (8, 100, 256) if op is WKV else (8, 100, 256, 16, 1)
    inputs, rest = op.mixed(shape, device="cuda"), op.rest(shape)
    truth = run(op.form("naive"), leaves(inputs, torch.float64, "cuda"), *rest)
    ours = run(op.form("triton"), inputs, *rest)
    assert [x.dtype for x in ours] == [torch.bfloat16, *(x.dtype for x in inputs)]
    assert_close(ours, truth, 2 * torch.finfo(torch.bfloat16).eps)


@on_a_gpu
@both
def test_a_gpu_gives_the_same_bits_twice(op) -> None:
    shape = (8, 100, 768) if op is WKV else (8, 100, 768, 16, 1)
    inputs = op.inputs(shape, torch.float32, "cuda")
    runs = (run(op.form("triton"), inputs, *op.rest(shape)) for _ in range(2))
    for mine, again in zip(*runs, strict=True):
        assert torch.equal(mine, again)


@on_a_gpu
def test_more_values_than_int32_can_count_on_a_gpu() -> None:
    shape = (2100, 1024, 1024)
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("less than 40 GiB are free")
    k = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    v[-1] = torch.randn(shape[1:], device="cuda")
    w, u = torch.linspace(0, 9, 1024, device="cuda"), torch.zeros(1024, device="cuda")
    out = WKV.form("triton")(k, v, w, u, None, 1024)
    last = WKV.form("triton")(k[-1:], v[-1:], w, u, None, 1024)
    assert torch.equal(out[-1:], last)
    assert not out[:-1].any()
