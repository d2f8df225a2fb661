"""The forms in C: built where there is a compiler, equal to the formula, and optional."""

import os
import shutil
import stat
import time
from pathlib import Path

import pytest
import torch

from tests.kernels.ops import OPS, assert_close, leaves, run
from tests.processes import run_python
from tread_zoo.kernels import compiled
from tread_zoo.kernels.compiled import COMPILERS, CompiledSource
from tread_zoo.kernels.dispatch import choose, list_forms
from tread_zoo.kernels.selective_scan.compiled_form import SCAN_C

ROOT = Path(__file__).parents[2]
SCAN, CPU = OPS["selective_scan"], torch.device("cpu")
COMPILED = [op for op in OPS.values() if "compiled" in list_forms(op.name)]
SHAPES = {  # several blocks of channels or columns, several chunks of steps
    "selective_scan": [(2, 35, 300, 3, 2), (1, 70, 16, 17, 1)],
    "causal_conv1d": [(2, 35, 150, 4), (3, 70, 64, 4), (1, 40, 20, 3), (2, 5, 20, 8)],
    "bidirectional_wkv": [(2, 35, 150), (3, 2, 5), (1, 70, 64)],
}
HEADS = [(2, 35, 2, 16, 16), (1, 33, 3, 17, 70), (1, 65, 2, 48, 48), (2, 32, 2, 8, 128),
         (1, 20, 1, 130, 5), (2, 64, 2, 64, 64)]  # fmt: skip
RECURRENCES = {  # their inputs as the one operator takes them: q, k, v, a, b, beta, log-decay
    "gated_linear_attention": lambda q, k, v, g: (q, k, v, None, None, None, g),
    "gated_delta_rule": lambda q, k, v, beta, g: (q, k, v, None, None, beta, g),
    "kda": lambda q, k, v, beta, g: (q, k, v, None, None, beta, g),
    "dplr_delta_rule": lambda q, k, v, a, b, g: (q, k, v, a, b, None, g),
}
ONE = "long long one(const void *given, long long begin, long long end) { return 0; }\n"
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="needs a C compiler"
)
all_compiled = pytest.mark.parametrize("op", COMPILED, ids=lambda op: op.name)


@needs_compiler
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        pytest.param(op, shape, id=f"{op.name}-{shape}")
        for op in COMPILED
        for shape in (*op.shapes, *SHAPES.get(op.name, HEADS))
    ],
)
@pytest.mark.parametrize("subset", [False, True])
def test_it_equals_the_formula(op, shape, subset) -> None:
    rest = op.rest(shape, subset)
    truth = run(op.form("naive"), op.inputs(shape), *rest)
    ours = run(op.form("compiled"), op.inputs(shape, torch.float32), *rest)
    assert_close(ours, truth, 2e-6, op.floor)


@needs_compiler
@pytest.mark.parametrize("shape", SCAN.shapes)
def test_a_scan_without_what_is_added(shape) -> None:
    rest = (None, *SCAN.rest(shape))
    truth = run(SCAN.form("naive"), SCAN.inputs(shape)[:-1], *rest)
    assert_close(
        run(SCAN.form("compiled"), SCAN.inputs(shape, torch.float32)[:-1], *rest), truth, 2e-6
    )


@needs_compiler
@all_compiled
def test_half_precision_inputs_keep_float32_sums(op) -> None:
    shape = op.shapes[-1]
    inputs, rest = op.mixed(shape), op.rest(shape)
    truth = run(op.form("naive"), leaves(inputs, torch.float64), *rest)
    with torch.autocast("cpu", torch.bfloat16):
        assert choose(op.name, CPU, *inputs, *rest).name == "compiled"
        ours = run(op.public, inputs, *rest)
    assert [x.dtype for x in ours] == [torch.bfloat16, *(x.dtype for x in inputs)]
    assert_close(ours, truth, 4e-3, op.floor)


@needs_compiler
@pytest.mark.parametrize("rate", [-1e9, -300.0, -90.0, -1.0, 0.0, 0.5])
def test_any_decay_of_a_scan_is_exact(rate) -> None:
    """From nothing that is left to growth by e^0.5 a step, beside channels that decay slowly."""
    inputs = SCAN.inputs((2, 70, 20, 3, 1))
    with torch.no_grad():
        inputs[1][:] = 1.0
        inputs[2][::2] = rate
    truth = run(SCAN.form("naive"), inputs, *SCAN.rest())
    ours = run(SCAN.form("compiled"), leaves(inputs, torch.float32), *SCAN.rest())
    assert_close(ours, truth, 1e-5)


@needs_compiler
@all_compiled
def test_what_is_not_finite_stays_so(op) -> None:
    for index, _ in enumerate(op.inputs()):
        inputs = [x.detach() for x in op.inputs(dtype=torch.float32)]
        inputs[index].view(-1)[-1] = float("nan")  # the first step reads no state
        y, truth = (op.form(f)(*inputs, *op.rest()) for f in ("compiled", "naive"))
        assert truth.isnan().any()
        assert y[truth.isnan()].isnan().all()


@needs_compiler
@all_compiled
def test_rows_are_independent_wherever_they_lie_in_memory(op) -> None:
    shape = (5, *SHAPES.get(op.name, HEADS)[0][1:])
    inputs, rest = op.inputs(shape, torch.float32), op.rest(shape, subset=True)
    whole = run(op.form("compiled"), inputs, *rest)
    for row in range(5):
        args = [
            torch.cat([x.new_zeros(1), x[row].flatten()])[1:].view(1, *x.shape[1:])
            if torch.is_tensor(x) and len(x) == 5
            else x
            for x in (*(x.detach() for x in inputs), *rest)
        ]  # not where an allocation begins
        assert torch.equal(op.form("compiled")(*args)[0], whole[0][row])
    threads = torch.get_num_threads()
    try:
        for num in (3, threads):
            torch.set_num_threads(num)
            assert all(map(torch.equal, run(op.form("compiled"), inputs, *rest), whole)), num
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@needs_compiler
@all_compiled
def test_opcheck(op) -> None:
    inputs, rest = op.inputs(dtype=torch.float32), op.rest(subset=True)
    if op is SCAN:
        rest = (torch.randn(inputs[0].shape[2], requires_grad=True), *rest[1:])  # its step bias
    name = f"{op.name}_compiled"
    if op.name in RECURRENCES:
        name, inputs = "recurrence", RECURRENCES[op.name](*inputs)
    forward = getattr(torch.ops.tread_zoo, name)
    torch.library.opcheck(forward.default, (*inputs, *rest))
    values = [x if x is None else x.detach() for x in inputs]
    backward = getattr(torch.ops.tread_zoo, f"{name}_backward").default
    made = forward(*values, *rest)
    made = made if isinstance(made, tuple) else (made,)
    kept = made if op.name == "bidirectional_wkv" else made[1:]  # only this one needs the output
    torch.library.opcheck(backward, (made[0], *kept, *values, *rest))


@pytest.mark.slow
def test_without_a_compiler_and_optional_packages_the_torch_form_runs(tmp_path) -> None:
    code = """
import sys
for package in ("mamba_ssm", "causal_conv1d", "fla", "triton"):
    sys.modules[package] = None
import tread_zoo.kernels
assert "torch._dynamo" not in sys.modules
import torch
from tests.kernels.ops import OPS
from tread_zoo.kernels import describe
for op in OPS.values():
    assert op.public(*op.inputs(dtype=torch.float32), *op.rest()).isfinite().all()
print(*describe(torch.device("cpu")), sep="\\n")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = run_python("-c", code, cwd=ROOT, env=env, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch (compiled not used: no C compiler") == len(COMPILED)


@pytest.fixture
def cc(tmp_path, monkeypatch):
    """Return a function that makes a shell script the only compiler."""

    def write(script: bytes) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "cc").write_bytes(b"#!/bin/sh\n" + script)
        (tmp_path / "bin" / "cc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write


@pytest.fixture
def source(tmp_path):
    """Return a small C file that compiles fast."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.c").write_text(ONE)
    return tmp_path / "source" / "one.c"


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.so"))


@pytest.mark.parametrize("message", [b"no such option", b"no such option \351\377", b""])
def test_a_compiler_that_fails_is_a_reason(tmp_path, cc, message) -> None:
    cc(b"echo '" + message + b"' >&2\nexit 1\n")
    assert message[:14].decode() in CompiledSource(SCAN_C.source).problem()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "half made"


@pytest.mark.slow
def test_a_compiler_that_hangs_is_stopped_and_remembered(tmp_path, cc, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "TIMEOUT", 0.3)
    cc(f"echo x >>{tmp_path}/calls\n/bin/sleep 60 & echo $! >{tmp_path}/child\nwait\n".encode())
    assert "took more than" in CompiledSource(SCAN_C.source).problem()
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "cmdline")
    assert not child.exists() or not child.read_bytes(), "what the compiler started is left"
    assert "hung" in CompiledSource(SCAN_C.source).problem()
    assert (tmp_path / "calls").read_text() == "x\n", "another process does not wait again"
    (note,) = (tmp_path / "cache").rglob("*.hung")
    os.utime(note, (time.time() - 2 * compiled.RETRY,) * 2)
    assert "took more than" in CompiledSource(SCAN_C.source).problem(), "later it is tried again"


@needs_compiler
def test_more_taps_than_there_is_room_for_take_another_form() -> None:
    op = OPS["causal_conv1d"]
    inputs, rest = op.inputs((2, 12, 16, 9), torch.float32), op.rest((2, 12, 16, 9), False)
    truth = op.form("naive")(*inputs, *rest)
    torch.testing.assert_close(op.public(*inputs, *rest), truth, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="8 taps"):
        op.form("compiled")(*inputs, *rest)


@needs_compiler
def test_without_openmp_threads_of_python_share_the_jobs(cc, tmp_path, monkeypatch) -> None:
    found = next(filter(None, map(shutil.which, COMPILERS)))
    path = os.environ["PATH"]
    cc(f"case $* in *-fopenmp*) exit 1;; esac\nPATH={path} exec {found} $*\n".encode())
    file = tmp_path / "two.c"
    file.write_text(
        "long long two(float *const *x, long long begin, long long end) "
        "{ for (; begin < end; begin++) x[0][begin] = begin + 1; return end == 5; }"
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    source, x = CompiledSource(file), torch.zeros(5)
    source.share("two", x, jobs=4)
    assert x.tolist() == [1, 2, 3, 4, 0]
    with pytest.raises(MemoryError):
        source.share("two", x, jobs=5)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_not_needed(
    tmp_path, monkeypatch, caplog, source
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    CompiledSource(source).share("one", jobs=1)
    assert "temporary folder" in caplog.text


@needs_compiler
def test_it_is_built_once_and_then_needs_no_compiler(tmp_path, monkeypatch, source) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert CompiledSource(source).problem() is None
    (library,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert library.suffix == ".so"
    monkeypatch.setenv("PATH", "")
    assert CompiledSource(source).problem() is None


@needs_compiler
def test_machines_that_share_a_home_do_not_share_a_library(tmp_path, monkeypatch, source) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiled, "CPU_INFO", cpu)
    for number, (model, flags, speed) in enumerate(
        [("A", "avx2", 1), ("A", "avx2 avx512f", 1), ("B", "avx2", 1), ("B", "avx2", 2)], 1
    ):
        cpu.write_text(f"model name\t: {model}\nflags\t: {flags}\ncpu MHz\t: {speed}\n\nflags:\n")
        CompiledSource(source).share("one", jobs=1)
        assert len(libraries(tmp_path / "cache")) == min(number, 3), "a clock rate is no CPU"
    cpu.write_text("nothing known")  # then the machine's name identifies it
    for name in ("left", "right"):
        monkeypatch.setattr(compiled.platform, "node", lambda name=name: name)
        CompiledSource(source).share("one", jobs=1)
    assert len(libraries(tmp_path / "cache")) == 5


@pytest.mark.slow
@needs_compiler
def test_a_library_cut_short_is_built_again(tmp_path, monkeypatch, source) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert CompiledSource(source).problem() is None
    (library,) = libraries(tmp_path / "cache")
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    code = f"""
from pathlib import Path
from tread_zoo.kernels.compiled import CompiledSource
assert CompiledSource(Path({str(source)!r})).problem() is None
"""
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done
    monkeypatch.setenv("PATH", "")  # and the new one lies there whole
    assert CompiledSource(source).problem() is None


EVIL = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void run(void) { fclose(fopen(getenv("MARK"), "w")); }
long long one(const void *given, long long begin, long long end) { return 0; }
"""


def _to_other(path: Path) -> None:
    if os.geteuid():
        pytest.skip("a file of another user: only root can make one")
    os.chown(path, 12345, 12345)


def _behind_link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


@needs_compiler
@pytest.mark.parametrize("which", ["file", "folder"])
@pytest.mark.parametrize(
    "spoil",
    [
        None,
        _to_other,
        lambda path: path.chmod(0o777),
        lambda path: path.chmod(0o770),
        _behind_link,
    ],
    ids=["own", "other user", "world", "group", "link"],
)
def test_code_that_another_user_could_plant_is_not_run(
    tmp_path, monkeypatch, caplog, cc, source, spoil, which
) -> None:
    """The planted library has the right name and checksum; another user's compiler made it."""
    real, mark = next(filter(None, map(shutil.which, COMPILERS))), tmp_path / "mark"
    monkeypatch.setenv("MARK", str(mark))
    path = os.environ["PATH"]
    (tmp_path / "evil.c").write_text(EVIL)
    cc(f'PATH="{path}" exec {real} -shared -fPIC -o "$7" {tmp_path}/evil.c\n'.encode())
    CompiledSource(source).share("one", jobs=1)
    assert mark.exists(), "the compiler of this test makes what it is to make"
    mark.unlink()
    monkeypatch.setenv("PATH", path)
    # a copy: what this process has loaded already would not be run again
    shutil.copytree(tmp_path / "cache", tmp_path / "planted")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "planted"))
    (library,) = libraries(tmp_path / "planted")
    if spoil is not None:
        spoil(library if which == "file" else library.parent)
    CompiledSource(source).share("one", jobs=1)
    assert mark.exists() == (spoil is None)
    assert ("temporary folder" in caplog.text) == (spoil is not None and which == "folder")


@needs_compiler
def test_a_relative_cache_folder_is_ignored(tmp_path, monkeypatch, source) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    CompiledSource(source).share("one", jobs=1)
    assert not (tmp_path / "here").exists()
    (library,) = libraries(tmp_path / "home" / ".cache")
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
