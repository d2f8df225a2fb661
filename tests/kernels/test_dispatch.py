"""The choice of a form: automatic, by hand, and its explanation."""

import dataclasses
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.kernels.ops import OPS
from tread_zoo.kernels import describe, dispatch, get_forms, packages, set_form, set_forms
from tread_zoo.kernels.attention.fused import CPU_HALF_TOKENS
from tread_zoo.kernels.launch import TRITON
from tread_zoo.kernels.packages import LibraryFunction
from tread_zoo.kernels.selective_scan.fused import SCAN

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Give every test the choices of a new process, and treat packages as correct on a GPU."""
    for name, operation in dispatch.OPERATIONS.items():
        places = itertools.product(
            [("cuda", torch.float32)], (each.name for each in operation.implementations)
        )
        fresh = dataclasses.replace(
            operation, choice="auto", refused=dict.fromkeys(places), logged=set()
        )
        monkeypatch.setitem(dispatch.OPERATIONS, name, fresh)
    packages.load_module.cache_clear()


def call(op: str) -> Tensor:
    return OPS[op].public(*OPS[op].inputs(dtype=torch.float32), *OPS[op].rest())


def test_a_package_that_is_not_installed_is_taken_as_built_on_the_hub(monkeypatch) -> None:
    fetched = []

    def get_kernel(repository, version):
        fetched.append((repository, version))
        return SimpleNamespace(causal_conv1d_fn=len)

    hub = SimpleNamespace(get_kernel=get_kernel, __spec__="there")
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    function = LibraryFunction("causal_conv1d", "causal_conv1d_fn", "pip install kernels")
    assert function.problem() is None
    assert function("abc") == 3
    assert fetched == [("kernels-community/causal-conv1d", 1)]


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="'selective_scan'"):
        set_form("selective_scn", "auto")
    with pytest.raises(ValueError, match="'naive'"):
        set_form("attention", "naiv")
    with pytest.raises(ValueError, match="'attention'"):
        set_forms({"atention": "naive"})
    set_forms({"attention": "naive"})
    assert get_forms()["attention"] == "naive"
    set_forms({})
    assert set(get_forms().values()) == {"auto"}


def test_a_form_set_by_hand_is_not_replaced(monkeypatch) -> None:
    if SCAN.problem() is not None:
        with pytest.raises(ValueError, match="`pip install "):
            set_form("selective_scan", "mamba-ssm")
        assert get_forms()["selective_scan"] == "auto"
    monkeypatch.setattr(SCAN, "function", len)
    set_form("selective_scan", "mamba-ssm")
    with pytest.raises(ValueError, match=r"no CUDA device.*kernels\.selective_scan=auto"):
        call("selective_scan")


def test_describe_gives_reasons(monkeypatch) -> None:
    (line,) = describe(CPU, ["ssd"])
    assert line.startswith("ssd: torch (mamba-ssm not used: no CUDA device")
    monkeypatch.setattr(SCAN, "function", len)
    monkeypatch.setattr(TRITON, "function", len)
    (line,) = describe(CUDA, ["selective_scan"])
    assert line.endswith("triton up to 64 states, else mamba-ssm up to 256 states, else torch")
    set_form("attention", "naive")
    assert "set by hand" in describe(CPU, ["attention"])[0]


def test_what_a_form_does_not_take_is_said() -> None:
    def reason(op, form, shape, dtype=torch.float32):
        inputs = OPS[op].inputs(shape, dtype)
        rest = OPS[op].rest(inputs[0].shape)
        return dispatch.get_implementation(op, form).refuses(*inputs, *rest)

    for op, form, shape in (
        ("selective_scan", "mamba-ssm", (1, 2, 4, 256, 1)),
        ("selective_scan", "triton", (1, 2, 4, 64, 1)),
        ("causal_conv1d", "causal-conv1d", (1, 5, 8, 4)),
        ("bidirectional_wkv", "triton", (1, 2, 4)),
        ("ssd", "mamba-ssm", (1, 2, 4, 3, 2, 1)),
        ("ssd", "fla", (1, 2, 4, 3, 2, 1)),
    ):
        assert reason(op, form, shape) is None
        assert reason(op, form, shape, torch.float64) == "float64"
    assert reason("selective_scan", "mamba-ssm", (1, 2, 4, 257, 1)).startswith("257 states")
    assert reason("selective_scan", "triton", (1, 2, 4, 65, 1)).startswith("65 states")
    assert "5 taps" in reason("causal_conv1d", "causal-conv1d", (1, 5, 8, 5))
    assert "6 channels" in reason("causal_conv1d", "causal-conv1d", (1, 5, 6, 4))
    for op in ("gated_linear_attention", "dplr_delta_rule"):
        assert reason(op, "fla", (1, 5, 2, 16, 16)) is None
        assert "narrower than 16" in reason(op, "fla", (1, 5, 2, 16, 8))


def test_cudnn_whose_gradient_may_be_nan_is_not_among_the_kernels_of_attention() -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_by_hand_where_sdpa_is_slow_on_a_cpu() -> None:
    short = OPS["attention"].inputs((1, 1, 4, 2), torch.float32)
    long = [torch.empty(1, 1, CPU_HALF_TOKENS + 1, 2, dtype=torch.bfloat16)] * 3
    half = [x.bfloat16() for x in short]
    names = [dispatch.choose("attention", CPU, *inputs).name for inputs in (short, long, half)]
    assert names == ["sdpa", "sdpa", "torch"]
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.choose("attention", CPU, *short).name == "torch"
    set_form("attention", "sdpa")
    assert dispatch.choose("attention", CPU, *half).name == "sdpa"
    for form in ("naive", "torch", "sdpa"):
        large = [100 * x for x in short]
        assert dispatch.get_implementation("attention", form).run(*large).isfinite().all()


@pytest.mark.parametrize("op", sorted(OPS))
def test_an_example_can_be_had_whatever_the_default_device_is(op) -> None:
    with torch.device("meta"):
        assert dispatch.get_example(op, CPU)[0].device == CPU


def test_a_broken_package_is_a_reason_not_a_crash(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_extension.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    problem = LibraryFunction("broken_extension", "run", "pip install it").problem()
    assert problem == "its import failed, OSError: undefined symbol"


def test_auto_says_once_why_it_left_a_fused_form(monkeypatch, caplog) -> None:
    monkeypatch.setattr(TRITON, "function", len)
    inputs = OPS["selective_scan"].inputs((1, 2, 4, 65, 1), torch.float32)
    with caplog.at_level("INFO"):
        names = [dispatch.choose("selective_scan", CUDA, *inputs, None).name for _ in range(2)]
    assert "triton" not in names
    assert [record.message for record in caplog.records if "triton" in record.message] == [
        "selective_scan: triton not used: 65 states, more than 64"
    ]
