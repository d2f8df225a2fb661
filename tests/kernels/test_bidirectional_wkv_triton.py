"""The Triton form of the WKV: compiled for a GPU, run on one."""

import re
import subprocess
from importlib.util import find_spec

import pytest
import torch

from tests.kernels.ops import OPS, make_positions, relative_error, run
from tread_zoo.kernels.bidirectional_wkv import triton_form
from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.bidirectional_wkv.triton_form import bidirectional_wkv_triton

make_inputs = OPS["bidirectional_wkv"].inputs

KERNELS = ("summarise", "average", "summarise_grads", "differentiate")
LOADED = ("k_ptr", "v_ptr", "grad_ptr", "out_ptr", "gk_ptr", "gv_ptr")  # of the inputs' dtypes

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no module named 'triton'")
on_a_gpu = pytest.mark.skipif(
    find_spec("triton") is None or not torch.cuda.is_available(),
    reason="the Triton form needs triton and a CUDA device",
)


def test_keeps_inputs_output_and_one_float32_more() -> None:
    kept: dict[int, int] = {}

    def pack(x):
        kept[id(x)] = x.numel() * x.element_size()
        return x

    inputs = [x.detach().to("meta").requires_grad_() for x in make_inputs((2, 9, 4))]
    half = [*(x.bfloat16() for x in inputs[:2]), *(x.float() for x in inputs[2:])]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        bidirectional_wkv_triton(*half, None, 9)
    assert sum(kept.values()) == 2 * 9 * 4 * (2 + 2 + 2 + 4) + 2 * 4 * 4


def compile_for(arch: int, kernel: str, dtype: str, subset: bool, chunk: int):
    """Compile a kernel as `triton_form` launches it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tread_zoo.kernels.bidirectional_wkv import triton_kernels

    function = getattr(triton_kernels, kernel)
    constants = {"CHUNK": chunk, "BLOCK": triton_form.BLOCK}
    if not subset:
        constants["places_ptr"] = None
    signature, attributes = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            wide = "*i64" if name == "places_ptr" else "*fp32"
            signature[name] = f"*{dtype}" if name in LOADED else wide
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "total" else "i32"
    source = ASTSource(function, signature, constants, attributes)
    options = {**triton_form.OPTIONS, "maxnreg": 128}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def tool(name: str) -> str:
    """Return the path of a program that comes with triton, or skip."""
    from triton import knobs

    try:
        return getattr(knobs.nvidia, name).path
    except RuntimeError as error:
        pytest.skip(f"{name}: {error}")


@needs_triton
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_an_h100_or_an_a100(kernel, subset) -> None:
    """With short chunks, which compile in a second; a thread needs no other's values."""
    tool("ptxas")
    arch, dtype = (90, "bf16") if subset else (80, "fp32")
    compiled = compile_for(arch, kernel, dtype, subset, chunk=2)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared == 0
    assert "shfl" not in compiled.asm["ptx"]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fits_the_registers(kernel, subset, tmp_path) -> None:
    tool("ptxas")
    compiled = compile_for(90, kernel, "bf16", subset, chunk=triton_form.CHUNK)
    (tmp_path / "cubin").write_bytes(compiled.asm["cubin"])
    command = [tool("cuobjdump"), "-res-usage", tmp_path / "cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    assert registers <= 128
    assert stack <= 4 * 100, "bytes of a thread's values that had to be put aside"


# What runs on a GPU only. exp is approximate there, to two units in the last place.


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(
    ("shape", "reach", "keys"),
    [
        ((2, 1, 3), 5, 1),
        ((3, 37, 22), 5, 1),
        ((4, 256, 384), 5, 1),
        ((32, 131, 768), 5, 1),
        ((2, 64, 40), 1000, 25),
        ((2, 64, 40), 1e6, 25),
        ((2, 64, 40), -3, 25),
    ],
)
def test_equals_formula_on_a_gpu(shape, reach, keys, subset) -> None:
    length = 3 * shape[1] if subset else shape[1]
    positions = make_positions(*shape[:2], length).cuda() if subset else None
    exact = make_inputs(shape, device="cuda", reach=reach, keys=keys)
    truth = run(bidirectional_wkv_naive, exact, positions, length)
    inputs = make_inputs(shape, torch.float32, device="cuda", reach=reach, keys=keys)
    ours = run(bidirectional_wkv_triton, inputs, positions, length)
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    for mine, true in zip(ours, truth, strict=True):
        assert mine.isfinite().all()
        if shape[1] > 1:  # of one token all gradients but that of v are zero
            assert relative_error(mine, true) <= 1e-5


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 37, 22), (8, 100, 256)])
def test_half_precision_on_a_gpu(shape, dtype) -> None:
    k, v, w, u = make_inputs(shape, torch.float32, device="cuda")
    inputs = [*(x.detach().to(dtype).requires_grad_() for x in (k, v)), w, u]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = run(bidirectional_wkv_naive, exact, None, shape[1])
    ours = run(bidirectional_wkv_triton, inputs, None, shape[1])
    assert [x.dtype for x in ours] == [dtype, *(x.dtype for x in inputs)]
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 2 * torch.finfo(dtype).eps


@pytest.mark.gpu
@on_a_gpu
def test_repeats_to_the_bit_and_compiles_once_for_all_lengths_on_a_gpu() -> None:
    from tread_zoo.kernels.bidirectional_wkv import triton_kernels

    counts = []
    for length in (1, 16, 17, 64, 100):
        inputs = make_inputs((2, length, 64), torch.float32, device="cuda")
        first, second = (run(bidirectional_wkv_triton, inputs, None, 100) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)
        caches = triton_kernels.differentiate.device_caches[torch.cuda.current_device()]
        counts.append(len(caches[0]))
    assert counts == counts[:1] * 5


@pytest.mark.gpu
@on_a_gpu
def test_more_values_than_int32_can_count_on_a_gpu() -> None:
    shape = (2100, 1024, 1024)
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("less than 40 GiB are free")
    k = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    v[-1] = torch.randn(shape[1:], device="cuda")
    w, u = torch.linspace(0, 9, 1024, device="cuda"), torch.zeros(1024, device="cuda")
    out = bidirectional_wkv_triton(k, v, w, u, None, 1024)
    last = bidirectional_wkv_triton(k[-1:], v[-1:], w, u, None, 1024)
    assert torch.equal(out[-1:], last)
    assert not out[:-1].any()
