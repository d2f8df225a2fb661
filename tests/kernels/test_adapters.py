"""The adapters of packages compute the formula. Functions with the packages' signatures replace
them, so no package is needed."""

import functools

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.kernels.ops import OPS, assert_close, by_pairs, run
from tread_zoo.kernels.attention.fused import FLASH
from tread_zoo.kernels.attention.naive import attention_naive
from tread_zoo.kernels.causal_conv1d.fused import CONVOLUTION
from tread_zoo.kernels.causal_conv1d.naive import causal_conv1d_naive
from tread_zoo.kernels.dispatch import get_example, get_implementation
from tread_zoo.kernels.dplr_delta_rule.fused import CHUNK_DPLR
from tread_zoo.kernels.dplr_delta_rule.naive import dplr_delta_rule_naive
from tread_zoo.kernels.gated_delta_rule.fused import CHUNK_GATED_DELTA_RULE, CHUNK_KDA
from tread_zoo.kernels.gated_delta_rule.naive import gated_delta_rule_naive
from tread_zoo.kernels.gated_linear_attention.fused import CHUNK_GLA
from tread_zoo.kernels.selective_scan.fused import SCAN
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive
from tread_zoo.kernels.ssd.fused import CHUNK_SCAN, CHUNK_SIMPLE_GLA
from tread_zoo.kernels.verify import compare


def contiguous(function):
    """Refuse strided tensors, which the kernels would misread."""

    @functools.wraps(function)
    def call(*args, **options):
        given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        assert all(x.is_contiguous() for x in given)
        return function(*args, **options)

    return call


def in_float32(*tensors):
    assert all(x is None or x.dtype == torch.float32 for x in tensors)


def flash_attn_func(q, k, v):
    """In its layout, [B, N, H, Dh]; sums in float32."""
    return (
        attention_naive(*(x.float().transpose(1, 2) for x in (q, k, v))).transpose(1, 2).to(q.dtype)
    )


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None):
    assert x.mT.is_contiguous()
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    return causal_conv1d_naive(x.mT, weight, bias, seq_idx).mT


@contiguous
def selective_scan_fn(u, delta, A, B, C, D=None):
    """In its layouts: [B, D, L] and [B, G, N, L]."""
    in_float32(u, delta, A, B, C, D)
    B, C = (x.permute(0, 3, 1, 2) for x in (B, C))
    return selective_scan_naive(u.mT, delta.mT, A, B, C, D).mT


@contiguous
def mamba_chunk_scan(x, dt, A, B, C, chunk_size, D=None, seq_idx=None):
    """Tokens of equal seq_idx see each other."""
    in_float32(x, dt, A, B, C, D)
    assert chunk_size & (chunk_size - 1) == 0
    assert seq_idx is None or seq_idx.dtype == torch.int32
    same = None if seq_idx is None else seq_idx[:, :, None] == seq_idx[:, None]
    q, k = (v.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for v in (C, B))
    y = by_pairs(q, k, dt[..., None] * x, (dt * A)[..., None], same)
    return y if D is None else y + D[:, None] * x


@contiguous
def chunk_gla(q, k, v, g, scale=None):
    """The default scale is K^-½, as in all of fla's functions."""
    in_float32(q, k, v, g)
    g = g[..., None] if g.ndim == 3 else g
    return by_pairs(q, k, v, g) * (q.shape[-1] ** -0.5 if scale is None else scale), None


@contiguous
def chunk_delta_rule(q, k, v, g, beta, scale=None):
    in_float32(g)
    assert q.dtype == k.dtype == v.dtype
    return gated_delta_rule_naive(q, k, v, beta, g, None, scale), None


@contiguous
def chunk_dplr(q, k, v, a, b, gk, scale=None):
    in_float32(gk)
    assert q.dtype == k.dtype == v.dtype == a.dtype == b.dtype
    return dplr_delta_rule_naive(q, k, v, a, b, gk, None, scale or q.shape[-1] ** -0.5), None


STAND_INS = {
    ("attention", "flash-attn"): (FLASH, flash_attn_func),
    ("causal_conv1d", "causal-conv1d"): (CONVOLUTION, causal_conv1d_fn),
    ("selective_scan", "mamba-ssm"): (SCAN, selective_scan_fn),
    ("ssd", "mamba-ssm"): (CHUNK_SCAN, mamba_chunk_scan),
    ("ssd", "fla"): (CHUNK_SIMPLE_GLA, chunk_gla),
    ("gated_linear_attention", "fla"): (CHUNK_GLA, chunk_gla),
    ("gated_delta_rule", "fla"): (CHUNK_GATED_DELTA_RULE, chunk_delta_rule),
    ("kda", "fla"): (CHUNK_KDA, chunk_delta_rule),
    ("dplr_delta_rule", "fla"): (CHUNK_DPLR, chunk_dplr),
}


WHOLE = ("attention", "kda")  # whose packages take no subset


@pytest.fixture(params=STAND_INS, ids="-".join)
def adapter(request, monkeypatch):
    """Return an operation and its form; a stand-in replaces the package's function."""
    function, stand_in = STAND_INS[request.param]
    monkeypatch.setattr(function, "function", stand_in)
    return OPS[request.param[0]], get_implementation(*request.param)


def call_of(op, dtype, subset):
    shape = (2, 20, 4, *op.shapes[0][3:])
    inputs, rest = op.inputs(shape, dtype), op.rest(shape, subset)
    if op.name in WHOLE and subset:
        pytest.skip("its package takes no mask, or no segments")
    return inputs, rest


@pytest.mark.parametrize("subset", [False, True])
def test_an_adapter_gives_the_formula(adapter, subset) -> None:
    op, form = adapter
    inputs, rest = call_of(op, torch.float32, subset)
    truth = run(op.form("naive"), call_of(op, torch.float64, subset)[0], *rest)
    assert_close(run(form.run, inputs, *rest), truth, 1e-5, floor=0.1)
    half = [x.bfloat16() for x in inputs]
    assert form.run(*half, *rest).dtype == torch.bfloat16
    if op.name in ("selective_scan", "ssd", "causal_conv1d"):
        plain = (None, *rest)
        torch.testing.assert_close(
            form.run(*inputs[:-1], *plain), op.form("naive")(*inputs[:-1], *plain)
        )


def test_a_right_kernel_passes_the_comparison_before_its_first_use(adapter) -> None:
    op, form = adapter
    refused = []
    for dtype in (torch.float32, torch.bfloat16):
        args = get_example(op.name, torch.device("cpu"), dtype)
        refused.append(form.refuses(*args))
        if refused[-1] is None:
            assert max(compare(form.run, op.form("torch"), args)) <= form.tolerance(dtype) / 3
    assert refused[1] is None
    assert (refused[0] is None) == (op.name not in ("attention", "gated_delta_rule", "kda"))
    assert form.refuses(*op.inputs(), *op.rest()) == "float64"


@pytest.mark.nightly
def test_a_package_does_not_break_the_graph(adapter) -> None:
    torch.compiler.reset()
    op, form = adapter
    inputs, rest = call_of(op, torch.float32, subset=op.name not in WHOLE)
    torch.compile(form.run, backend="eager", fullgraph=True)(*inputs, *rest)
