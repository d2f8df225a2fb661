"""The choice of a form: what is chosen, what is set by hand, and what is said about it."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tread_zoo.kernels import (
    attention,
    bidirectional_wkv,
    causal_conv1d,
    describe,
    dispatch,
    get_forms,
    selective_scan,
    set_form,
    ssd,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPS = ("attention", "bidirectional_wkv", "causal_conv1d", "selective_scan", "ssd")
OPTIONAL = {
    "selective_scan": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
    "bidirectional_wkv": "triton",
    "ssd": "mamba-ssm",
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Give every test the choices and the import results of a new process."""
    monkeypatch.setattr(dispatch, "_CHOICE", dict.fromkeys(dispatch._FORMS, "auto"))
    monkeypatch.setattr(dispatch, "_PROBLEMS", {})
    monkeypatch.setattr(dispatch, "_TOLD", set())
    monkeypatch.setattr(dispatch, "_difference_to_torch", lambda *args: None)
    monkeypatch.setattr(dispatch, "_REFUSED", {})


def call(op: str) -> Tensor:
    x = torch.ones(1, 3, 4)
    if op == "attention":
        return attention(*[torch.ones(1, 1, 3, 4)] * 3)
    if op == "bidirectional_wkv":
        return bidirectional_wkv(x, 2 * x, torch.ones(4), torch.zeros(4))
    if op == "causal_conv1d":
        return causal_conv1d(x, torch.ones(4, 2))
    vector = torch.ones(1, 3, 1, 2)
    if op == "ssd":
        return ssd(x.unsqueeze(-1), x, -torch.ones(4), vector, vector)
    return selective_scan(x, x, -torch.ones(4, 2), vector, vector)


def test_plain_forms_hold_for_a_while() -> None:
    """Where a form set by hand cannot run they do, and it is set again after an error, too."""
    dispatch._CHOICE["selective_scan"] = "mamba-ssm"
    with pytest.raises(ValueError, match="cannot run"):
        call("selective_scan")
    with dispatch.plain_forms():
        assert get_forms() == dict.fromkeys(OPS, "torch")
        call("selective_scan")
    with pytest.raises(ValueError, match="must be"), dispatch.plain_forms():
        selective_scan(*[torch.ones(1)] * 5)
    assert get_forms() == {**dict.fromkeys(OPS, "auto"), "selective_scan": "mamba-ssm"}


def test_auto_is_the_default_of_every_op() -> None:
    assert get_forms() == dict.fromkeys(OPS, "auto")


@pytest.mark.parametrize("op", OPS)
def test_forms_agree_through_the_public_function(op) -> None:
    results = []
    for form in ("auto", "naive", "torch"):
        set_form(op, form)
        assert get_forms()[op] == form
        results.append(call(op))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'selective_scan'"):
        set_form("selective_scn", "auto")
    with pytest.raises(ValueError, match=r"Did you mean 'naive'.*Known: auto, .*torch"):
        set_form("attention", "naiv")
    with pytest.raises(ValueError, match="Known: attention"):
        dispatch.list_forms("scan")
    assert dispatch.list_forms("selective_scan") == ("mamba-ssm", "triton", "torch", "naive")


@pytest.mark.parametrize(("op", "form"), OPTIONAL.items())
def test_a_form_whose_package_is_missing_says_what_to_install(op, form, monkeypatch) -> None:
    module = next(each.module for each in dispatch._FORMS[op] if each.name == form)
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    with pytest.raises(ImportError, match=f"pip install {form}"):
        set_form(op, form)
    assert get_forms()[op] == "auto"


def test_a_form_set_by_hand_is_not_replaced(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "import_problem", lambda module: None)
    set_form("selective_scan", "mamba-ssm")
    with pytest.raises(
        ValueError, match=r"'mamba-ssm' was set but cannot run: no CUDA device.*kernels\.\w+=auto"
    ):
        call("selective_scan")


def test_describe_gives_reasons(monkeypatch) -> None:
    lines = describe(CPU)
    reasons = "mamba-ssm not used: no CUDA device; triton not used: no CUDA device"
    assert f"selective_scan: torch ({reasons})" in lines
    assert len(lines) == len(get_forms())
    monkeypatch.setattr(dispatch, "import_problem", lambda module: f"no module named {module!r}")
    assert "attention: sdpa" in describe(CUDA)
    assert any("causal-conv1d not used: no module named" in line for line in describe(CUDA))
    monkeypatch.setattr(dispatch, "import_problem", lambda module: None)
    expected = "mamba-ssm up to 256 states, else triton up to 64 states, else torch"
    assert f"selective_scan: {expected}" in describe(CUDA)
    set_form("attention", "naive")
    assert "attention: naive (set by hand)" in describe(CPU)


def test_a_broken_package_is_a_reason_not_a_crash(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_extension.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    problem = dispatch.import_problem("broken_extension")
    assert problem == "its import failed, OSError: undefined symbol"


def test_auto_says_once_why_it_left_a_fused_form(monkeypatch, caplog) -> None:
    fused = dispatch.Form("fast", call, module="fast", unsuited=lambda *args: "too long")
    plain = dispatch.Form("plain", call)
    monkeypatch.setitem(dispatch._FORMS, "op", (fused, plain))
    monkeypatch.setitem(dispatch._CHOICE, "op", "auto")
    monkeypatch.setattr(dispatch, "import_problem", lambda module: None)
    with caplog.at_level("INFO"):
        assert dispatch.choose("op", CUDA) is plain
        assert dispatch.choose("op", CUDA) is plain
    assert [record.message for record in caplog.records] == ["op: fast not used: too long"]


def test_importing_the_kernels_imports_no_optional_package(tmp_path) -> None:
    for package in ("mamba_ssm", "causal_conv1d", "fla"):
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('imported too early')")
    code = "import tread_zoo.kernels, sys; assert 'torch._dynamo' not in sys.modules"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
