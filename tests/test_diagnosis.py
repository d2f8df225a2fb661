"""The doctor tells the truth about what is there, what is wrong and what to do."""

import pytest
import torch

from tests.processes import run_python
from tests.scripts.test_command_line import call
from tread_zoo import diagnosis
from tread_zoo.kernels import dispatch, get_forms, set_forms

CPU = torch.device("cpu")


def test_every_operation_and_small_backbone_is_tested_and_fine():
    checks = diagnosis.check_kernels(CPU) + diagnosis.check_backbones(CPU)
    assert all(check.fine for check in checks), checks
    names = " ".join(check.name for check in checks)
    for name in (*get_forms(), "dit_tiny", "mamba_tiny", "uvit_tiny", "rwkv_tiny"):
        assert name in names


def test_a_form_that_computes_wrongly_fails(monkeypatch):
    right = dispatch.get_form("attention", "torch").run
    forms = (
        dispatch.Form("torch", lambda *a: 1.1 * right(*a)),
        dispatch.get_form("attention", "naive"),
    )
    monkeypatch.setitem(dispatch._FORMS, "attention", forms)
    (check,) = [c for c in diagnosis.check_kernels(CPU) if c.name.startswith("attention")]
    assert not check.fine
    assert "1e-01" in check.words


def test_a_package_that_is_there_but_broken_says_its_error(monkeypatch):
    monkeypatch.setattr(diagnosis, "_version", lambda package: "1.0")
    monkeypatch.setattr(
        diagnosis,
        "import_problem",
        lambda module: (
            "its import failed, OSError: undefined symbol" if "mamba" in module else None
        ),
    )
    (line,) = [line for line in diagnosis.describe_packages() if line.startswith("mamba-ssm")]
    assert "1.0, but its import failed, OSError: undefined symbol" in line


@pytest.mark.parametrize("missing", [["triton", "fla"], ["causal_conv1d"], []])
def test_what_is_missing_on_a_gpu_comes_with_its_command(monkeypatch, missing):
    monkeypatch.setattr(
        diagnosis, "import_problem", lambda module: "no module" if module in missing else None
    )
    lines = diagnosis.suggest(torch.device("cuda"))
    packages = {p.module: p for p in diagnosis.KERNEL_PACKAGES}
    if not missing:
        assert lines == ["nothing: every package that helps is here"]
    for module in missing:
        assert any(packages[module].install in line and module[:3] in line for line in lines)


def test_a_gpu_that_torch_does_not_see_is_told(monkeypatch):
    monkeypatch.setattr(diagnosis, "_has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "pytorch.org" in diagnosis.suggest(CPU)[0]
    monkeypatch.setattr(diagnosis, "_has_nvidia_gpu", lambda: False)
    assert "nothing to install" in diagnosis.suggest(CPU)[0]


def test_the_script_says_all_of_it(tmp_path):
    said = call("doctor.py", "device=cpu", "kernels.selective_scan=naive", cwd=tmp_path)
    for words in (
        torch.__version__, "CPU, ", "triton", "mamba-ssm", "selective_scan: naive (set by hand)",
        "Self-test, ", "nothing to install",
    ):  # fmt: skip
        assert words in said
    assert "FAILED" not in said
    assert not list(tmp_path.iterdir())


def test_everything_imports_and_runs_without_triton_and_the_other_packages():
    code = """
import sys
for package in ("triton", "mamba_ssm", "causal_conv1d", "flash_attn", "fla"):
    sys.modules[package] = None
import torch
from tread_zoo import diagnosis
device = torch.device("cpu")
assert all(c.fine for c in diagnosis.check_kernels(device) + diagnosis.check_backbones(device))
print("fine")
"""
    done = run_python("-c", code, fresh=True)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_self_test_is_fine_on_a_gpu():
    set_forms({})
    device = torch.device("cuda")
    checks = diagnosis.check_kernels(device) + diagnosis.check_backbones(device)
    assert all(check.fine for check in checks), checks
