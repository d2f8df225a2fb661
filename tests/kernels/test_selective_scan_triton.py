"""The Triton form of the selective scan: compiled for a GPU, run on one."""

import re
import subprocess
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.ops import OPS, make_segments, relative_error, run
from tread_zoo.kernels.dispatch import choose
from tread_zoo.kernels.selective_scan import triton_form
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive
from tread_zoo.kernels.selective_scan.triton_form import selective_scan_triton

make_inputs = OPS["selective_scan"].inputs

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no module named 'triton'")
on_a_gpu = pytest.mark.skipif(
    find_spec("triton") is None or not torch.cuda.is_available(),
    reason="the Triton form needs triton and a CUDA device",
)


@needs_triton
@pytest.mark.skipif(find_spec("mamba_ssm") is not None, reason="mamba-ssm comes first")
def test_compiled_code_chooses_it_without_a_break() -> None:
    def choice(x):
        inputs = x, x, x[0], x[..., None], x[..., None], None, None
        return x + (choose("selective_scan", torch.device("cuda"), *inputs).name == "triton")

    compiled = torch.compile(choice, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(1, 3, 4)), torch.ones(1, 3, 4))


def test_blocks_fill_the_device_first() -> None:
    def blocks(batch: int, width: int, size: int, groups: int = 1) -> tuple[int, ...]:
        u, B = torch.empty(batch, 1, width), torch.empty(batch, 1, groups, size)
        return triton_form._blocks(u, torch.empty(width, size), B)

    assert blocks(32, 768, 16) == (16, 16, 48, 1536)
    assert blocks(2, 384, 16) == (8, 16, 48, 96)
    assert blocks(64, 768, 5, groups=2) == (32, 8, 12, 1536)
    assert blocks(1, 6, 4, groups=2) == (4, 4, 1, 2)


class Launcher:
    """Compiles a kernel for an H100 where it would be launched, and runs nothing."""

    def __init__(self, kernel, binaries: list) -> None:
        self.kernel, self.binaries = kernel, binaries

    def __getitem__(self, grid: tuple[int, ...]):
        return self.compile

    def compile(self, *args, **options) -> None:
        binary = self.kernel.warmup(*args, grid=(1,), **options)
        if all(binary is not known for known in self.binaries):
            self.binaries.append(binary)


@pytest.fixture
def h100(monkeypatch, tmp_path) -> list:
    """Return the binaries of what the form launches from now on, each once."""
    triton = pytest.importorskip("triton")
    compiler = import_module("triton.backends.compiler")
    try:
        assert triton.knobs.nvidia.ptxas.path
        assert triton.knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        pytest.skip(f"Triton has no NVIDIA tools here: {error}")
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: compiler.GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = spec_from_file_location("kernels_for_an_h100", triton_form._kernels().__file__)
    kernels = module_from_spec(spec)  # anew: the project's own may hold those for a GPU here
    spec.loader.exec_module(kernels)
    binaries: list = []
    launchers = SimpleNamespace(
        forward=Launcher(kernels.forward, binaries), backward=Launcher(kernels.backward, binaries)
    )
    monkeypatch.setattr(triton_form, "_kernels", lambda: launchers)
    return binaries


def resources(binary, path: Path) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    triton = import_module("triton")
    path.write_bytes(binary.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return int(registers), int(spilled)


@needs_triton
def test_compiles_for_a_gpu_once_for_all_lengths_and_keeps_to_registers(h100, tmp_path) -> None:
    for length in (16, 13, 1):
        u, delta, A, B, C, D = make_inputs((32, length, 768, 16, 1), torch.float32)
        cast = [x.detach().bfloat16().requires_grad_() for x in (u, B, C)]
        run(selective_scan_triton, [cast[0], delta, A, cast[1], cast[2], D])
    assert [binary.name for binary in h100] == ["forward", "forward", "backward"]
    for binary in h100:
        registers, spilled = resources(binary, tmp_path / "kernel.cubin")
        assert binary.metadata.shared == 0  # no sum and no store passes through shared memory
        assert registers <= 168  # 12 programs on a multiprocessor
        assert spilled <= (128 if binary.name == "backward" else 0)


# What runs on a GPU only. exp2 is approximate there, to two units in the last place.


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(2, 1, 3, 16, 1), (3, 37, 22, 5, 2), (4, 256, 384, 16, 1), (32, 67, 768, 16, 2)]
    + [(2, 50, 12, size, 1) for size in (1, 4, 8, 33, 64)],
)
def test_equals_formula_on_a_gpu(shape, segments) -> None:
    segment_ids = make_segments(*shape[:2]).cuda() if segments else None
    truth = run(selective_scan_naive, make_inputs(shape, device="cuda"), segment_ids)
    ours = run(selective_scan_triton, make_inputs(shape, torch.float32, "cuda"), segment_ids)
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("shape", [(3, 37, 22, 5, 2), (8, 100, 256, 16, 1)])
def test_half_precision_on_a_gpu(shape) -> None:
    u, delta, A, B, C, D = make_inputs(shape, torch.float32, "cuda")
    half = [x.detach().bfloat16().requires_grad_() for x in (u, B, C)]
    inputs = [half[0], delta, A, half[1], half[2], D]
    truth = run(selective_scan_naive, [x.detach().double().requires_grad_() for x in inputs])
    ours = run(selective_scan_triton, inputs)
    assert [x.dtype for x in ours] == [half[0].dtype, *(x.dtype for x in inputs)]
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 4e-3


@pytest.mark.gpu
@on_a_gpu
def test_a_gpu_gives_the_same_bits_twice() -> None:
    inputs = make_inputs((8, 100, 768, 16, 1), torch.float32, "cuda")
    for mine, again in zip(*(run(selective_scan_triton, inputs) for _ in range(2)), strict=True):
        assert torch.equal(mine, again)


@pytest.mark.gpu
@on_a_gpu
def test_strong_decay_on_a_gpu() -> None:
    inputs = make_inputs((1, 50, 4, 2, 1), device="cuda")
    with torch.no_grad():
        inputs[1].fill_(1.0)
        inputs[2].copy_(-torch.tensor([20.0, 200.0]).expand(4, 2))
    truth = run(selective_scan_naive, inputs)
    ours = run(selective_scan_triton, [x.detach().float().requires_grad_() for x in inputs])
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 1e-5
