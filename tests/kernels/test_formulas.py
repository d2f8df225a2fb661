"""The naive forms equal their formulas, written out in another way: as sums over pairs of tokens,
or as products of transitions. The scan's gaps follow its formula in every form."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.ops import (
    OPS,
    assert_close,
    by_pairs,
    leaves,
    make_gaps,
    make_segments,
    run,
    same_segment,
)
from tread_zoo.kernels import selective_scan, set_form, softplus

SCAN = OPS["selective_scan"]


def attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask)


def causal_conv1d(x, weight, bias, ids, silu):
    lags = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])  # [L, L]
    taps = F.pad(weight.flip(1), (0, x.shape[1]))[:, lags.clamp(min=0)] * (lags >= 0)  # [D, L, L]
    ids = torch.zeros(x.shape[:2]) if ids is None else ids
    same = (ids[:, :, None] == ids[:, None]).to(x)
    y = torch.einsum("dts,bts,bsd->btd", taps, same, x) + bias
    return y * y.sigmoid() if silu else y


def scan(u, delta, A, B, C, D, bias, ids, gaps=None):
    q, k = (x.repeat_interleave(u.shape[2] // B.shape[2], dim=2) for x in (C, B))
    falls = delta[..., None] * A * (1 if gaps is None else gaps[..., None, None])
    return by_pairs(q, k, (delta * u)[..., None], falls, same_segment(ids))[..., 0] + D * u


def ssd(x, delta, A, B, C, D, ids, gaps):
    q, k = (v.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for v in (C, B))
    falls = (delta * A * (1 if gaps is None else gaps[..., None]))[..., None]
    return by_pairs(q, k, delta[..., None] * x, falls, same_segment(ids)) + D[:, None] * x


def gla(q, k, v, g, ids, scale):
    return scale * by_pairs(q, k, v, g, same_segment(ids))


def dplr(q, k, v, a, b, g, ids, scale):
    transitions = g.exp().diag_embed() + b[..., :, None] * a[..., None, :]  # [B, L, H, K, K]
    state, out = 0 * k[:, 0, :, :, None] * v[:, 0, :, None], []
    for t in range(q.shape[1]):
        stays = 1.0 if t == 0 or ids is None else (ids[:, t] == ids[:, t - 1])[:, None, None, None]
        state = stays * transitions[:, t] @ state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(scale * (q[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(out, dim=1)


def delta_rule(q, k, v, beta, g, ids, scale):
    """(I - β k kᵀ) diag(e^g) = diag(e^g) - β k (k e^g)ᵀ."""
    g = g[..., None].expand_as(k) if g.ndim == 3 else g
    writes = beta[..., None] * k
    return dplr(q, writes, v, -k * g.exp(), writes, g, ids, scale)


def wkv(k, v, w, u, positions, length):
    places = torch.arange(k.shape[1])[None] if positions is None else positions
    steps = (places[:, :, None] - places[:, None]).abs()[..., None] - 1  # [B, L, L, 1]
    weights = (k[:, None] + torch.where(steps < 0, u, -steps * w / length)).exp()
    return torch.einsum("btic,bic->btc", weights, v) / weights.sum(2)


WRITTEN = {
    "attention": attention,
    "causal_conv1d": causal_conv1d,
    "selective_scan": scan,
    "ssd": ssd,
    "gated_linear_attention": gla,
    "gated_delta_rule": delta_rule,
    "kda": delta_rule,
    "dplr_delta_rule": dplr,
    "bidirectional_wkv": wkv,
}


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_the_naive_form_is_the_formula(op, subset) -> None:
    inputs, rest = OPS[op].inputs(), OPS[op].rest(subset=subset)
    truth = run(WRITTEN[op], inputs, *rest)
    assert_close(run(OPS[op].form("naive"), inputs, *rest), truth, 1e-12, OPS[op].floor)


@pytest.fixture(params=["naive", "torch"])
def form(request):
    set_form("selective_scan", request.param)
    yield request.param
    set_form("selective_scan", "auto")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segments", [False, True])
def test_a_scan_decays_over_gaps(form, segments, dtype) -> None:
    """The first gap of a row has no effect; half precision is divided in float32."""
    shape, ids = (2, 20, 6, 3, 2), make_segments(2, 20) if segments else None
    inputs = SCAN.mixed(shape) if dtype == torch.bfloat16 else SCAN.inputs(shape, dtype)
    gaps = make_gaps(2, 20)
    truth = run(lambda *args: scan(*args, None, ids, gaps), leaves(inputs, torch.float64))
    gaps[:, 0] = torch.tensor([0, -7])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = run(lambda *args: selective_scan(*args, segment_ids=ids, gaps=gaps), inputs)
    assert [x.dtype for x in ours] == [dtype, *(x.dtype for x in inputs)]
    assert_close(ours, truth, {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 4e-3))


def test_softplus_and_its_gradient_are_those_of_float64():
    x = torch.linspace(-80, 800, 8801, requires_grad=True)
    y = softplus(x)
    y.sum().backward()
    with torch.no_grad():
        exact = torch.logaddexp(x.double(), torch.zeros((), dtype=torch.float64))
        torch.testing.assert_close(y.double(), exact, rtol=3e-7, atol=1e-35)
        torch.testing.assert_close(x.grad.double(), x.double().sigmoid(), rtol=3e-7, atol=1e-35)
