"""The forms in C: built where there is a compiler, equal to the formula, and missed by nobody."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.kernels.ops import OPS, assert_close, leaves, run
from tests.processes import run_python
from tread_zoo.kernels.compiled import COMPILERS, CompiledSource
from tread_zoo.kernels.dispatch import choose
from tread_zoo.kernels.selective_scan.compiled_form import SCAN_C

ROOT = Path(__file__).parents[2]
SCAN, CPU = OPS["selective_scan"], torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="needs a C compiler"
)
SHAPES = [*SCAN.shapes, (2, 35, 300, 3, 2), (1, 70, 16, 17, 1)]  # more than a block; 3 chunks


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("subset", [False, True])
def test_it_equals_the_formula(shape, subset) -> None:
    rest = SCAN.rest(shape, subset)
    truth = run(SCAN.form("naive"), SCAN.inputs(shape), *rest)
    ours = run(SCAN.form("compiled"), SCAN.inputs(shape, torch.float32), *rest)
    assert_close(ours, truth, 2e-6)
    without = [run(SCAN.form(f), x[:-1], None, *rest) for f, x in (
        ("naive", SCAN.inputs(shape)), ("compiled", SCAN.inputs(shape, torch.float32))
    )]  # fmt: skip
    assert_close(without[1], without[0], 2e-6)


@needs_compiler
def test_half_precision_inputs_keep_float32_sums() -> None:
    shape = SCAN.shapes[-1]
    inputs, rest = SCAN.mixed(shape), SCAN.rest(shape)
    truth = run(SCAN.form("naive"), leaves(inputs, torch.float64), *rest)
    with torch.autocast("cpu", torch.bfloat16):
        assert choose("selective_scan", CPU, *inputs, *rest).name == "compiled"
        ours = run(SCAN.public, inputs, *rest)
    assert [x.dtype for x in ours] == [torch.bfloat16, *(x.dtype for x in inputs)]
    assert_close(ours, truth, 4e-3)


@needs_compiler
@pytest.mark.parametrize("rate", [-1e9, -300.0, -90.0, -1.0, 0.0, 0.5])
def test_any_decay_is_exact(rate) -> None:
    """From nothing that is left to growth by e^0.5 a step, beside channels that decay slowly."""
    inputs = SCAN.inputs((2, 70, 20, 3, 1))
    with torch.no_grad():
        inputs[1][:] = 1.0
        inputs[2][::2] = rate
    truth = run(SCAN.form("naive"), inputs, *SCAN.rest())
    ours = run(SCAN.form("compiled"), leaves(inputs, torch.float32), *SCAN.rest())
    assert_close(ours, truth, 1e-5)


@needs_compiler
@pytest.mark.parametrize("index", range(6))
def test_what_is_not_finite_stays_so(index) -> None:
    inputs = [x.detach() for x in SCAN.inputs(dtype=torch.float32)]
    inputs[index].view(-1)[0] = float("nan")
    y, truth = (SCAN.form(f)(*inputs, None) for f in ("compiled", "torch"))
    assert truth.isnan().any()
    assert y[truth.isnan()].isnan().all()


@needs_compiler
def test_rows_are_independent_wherever_they_lie_in_memory() -> None:
    shape = (5, 35, 300, 3, 2)
    inputs, ids = SCAN.inputs(shape, torch.float32), SCAN.rest(shape, subset=True)[0]
    whole = run(SCAN.form("compiled"), inputs, ids)
    for row in range(5):
        u, delta, B, C = (  # not where an allocation begins
            torch.cat([x.new_zeros(1), x[row].flatten()])[1:].view(1, *x.shape[1:])
            for x in (inputs[i].detach() for i in (0, 1, 3, 4))
        )
        args = (u, delta, inputs[2], B, C, inputs[5], ids[row : row + 1])
        assert torch.equal(SCAN.form("compiled")(*args)[0], whole[0][row])
    assert all(map(torch.equal, run(SCAN.form("compiled"), inputs, ids), whole))


@needs_compiler
def test_opcheck() -> None:
    inputs, rest = SCAN.inputs(dtype=torch.float32), SCAN.rest(subset=True)
    forward = torch.ops.tread_zoo.selective_scan_compiled
    torch.library.opcheck(forward.default, (*inputs, *rest))
    values = [x.detach() for x in inputs]
    backward = torch.ops.tread_zoo.selective_scan_compiled_backward.default
    torch.library.opcheck(backward, (*forward(*values, *rest), *values, *rest))


def test_without_a_compiler_the_torch_form_runs(tmp_path) -> None:
    code = """
import torch
from tests.kernels.ops import OPS
from tread_zoo.kernels import describe
op = OPS["selective_scan"]
assert op.public(*op.inputs(dtype=torch.float32), *op.rest()).isfinite().all()
print(*describe(torch.device("cpu"), ["selective_scan"]))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = run_python("-c", code, cwd=ROOT, env=env, fresh=True)
    assert done.returncode == 0, done.stderr
    assert "torch (compiled not used: no C compiler" in done.stdout


def test_a_compiler_that_fails_is_a_reason(tmp_path, monkeypatch) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "no such option" in CompiledSource(SCAN_C.source).problem()
    assert not list((tmp_path / "cache").glob("*/*")), "nothing half made is left"


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert CompiledSource(SCAN_C.source).problem() is not None


@needs_compiler
def test_it_is_built_once_and_then_needs_no_compiler(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CompiledSource(SCAN_C.source).problem() is None
    (library,) = (tmp_path / "tread_zoo").iterdir()
    assert library.suffix == ".so"
    monkeypatch.setenv("PATH", "")
    assert CompiledSource(SCAN_C.source).problem() is None
