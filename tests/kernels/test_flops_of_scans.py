"""What a scan costs, by counting it: its recurrence on numbers that count what is done to them.

The loops are the formulas of the papers, token by token; that they compute the scan and its
gradients is checked against the naive forms in float64. A sum or difference, product, quotient,
maximum and power of two count 1 each. So exp is 2, or 1 where the factor 1 / ln 2 is put into a
rate beforehand, and a sum of n products is 2 n, as in a matrix product.

L length, D channels, N states.
"""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.kernels import bidirectional_wkv, causal_conv1d, selective_scan
from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive

LOG2_E = 1 / math.log(2)


class Counted:
    """A number; `Counted.ops` is how many operations there have been."""

    ops = 0

    def __init__(self, value):
        self.value = float(value)

    def _then(self, other, rule):
        Counted.ops += 1
        return Counted(rule(self.value, other.value if isinstance(other, Counted) else other))

    def __add__(self, other):
        return self._then(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self._then(other, lambda a, b: a - b)

    def __mul__(self, other):
        return self._then(other, lambda a, b: a * b)

    def __truediv__(self, other):
        return self._then(other, lambda a, b: a / b)

    def __neg__(self):
        return self._then(0, lambda a, _: -a)

    def maximum(self, other):
        return self._then(other, max)

    def exp2(self):
        return self._then(0, lambda a, _: 2.0**a)

    def exp(self):
        return (self * LOG2_E).exp2()


def counted(tensor):
    """Return nested lists of `Counted`."""
    if tensor.ndim == 0:
        return Counted(tensor)
    return [counted(part) for part in tensor]


def plain(nested):
    """Return the float64 tensor of nested lists."""
    if isinstance(nested, list):
        return torch.stack([plain(part) for part in nested])
    return torch.tensor(nested.value, dtype=torch.float64)


def zeros(*shape):
    return counted(torch.zeros(shape))


# Selective scan (arXiv 2312.00752) ----------------------------------------------------------------


def scan_states(x, delta, rates, B):
    """h_t = 2^(Δ_t rate) h_{t-1} + x_t B_t, of one channel and state; return (a, h) by step."""
    found, h = [], Counted(0)
    for x_t, delta_t, B_t in zip(x, delta, B, strict=True):
        a = (delta_t * rates).exp2()
        h = a * h + x_t * B_t
        found.append((a, h))
    return found


def scan_forward(x, delta, rates, B, C):
    """Return y [L, D] from x = Δ u, delta [L, D], rates = A / ln 2 [D, N], B and C [L, N]."""
    y = zeros(len(x), len(rates))
    for d, n in [(d, n) for d in range(len(rates)) for n in range(len(B[0]))]:
        column = [[row[d] for row in values] for values in (x, delta)]
        states = scan_states(*column, rates[d][n], [row[n] for row in B])
        for t, (_, h) in enumerate(states):
            y[t][d] = y[t][d] + C[t][n] * h
    return y


def scan_backward(gy, x, delta, rates, A, B, C):
    """Return the gradients of x, of Δ by way of the decays, of A, B and C:

    g_t = C_t ∂y_t + a_{t+1} g_{t+1},  q_t = a_t g_t h_{t-1}  (the gradient of Δ_t A)
    """
    length, num_states = len(x), len(B[0])
    gx, gdelta = zeros(length, len(rates)), zeros(length, len(rates))
    gA, gB, gC = zeros(len(rates), num_states), zeros(length, num_states), zeros(length, num_states)
    for d, n in [(d, n) for d in range(len(rates)) for n in range(num_states)]:
        column = [[row[d] for row in values] for values in (x, delta)]
        states = [
            (None, Counted(0)),
            *scan_states(*column, rates[d][n], [row[n] for row in B]),
            (Counted(0), None),
        ]
        g = Counted(0)
        for t in reversed(range(length)):
            a, h = states[t + 1]
            g = C[t][n] * gy[t][d] + states[t + 2][0] * g
            gx[t][d] = gx[t][d] + B[t][n] * g
            gB[t][n] = gB[t][n] + x[t][d] * g
            gC[t][n] = gC[t][n] + gy[t][d] * h
            q = a * g * states[t][1]
            gA[d][n] = gA[d][n] + delta[t][d] * q
            gdelta[t][d] = gdelta[t][d] + A[d][n] * q
    return gx, gdelta, gA, gB, gC


def test_selective_scan_is_7_and_20_a_token_channel_and_state():
    length, channels, size = 4, 3, 2
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.1

    u, delta, A = draw(length, channels), draw(length, channels), -draw(channels, size)
    B, C, grad = draw(length, size), draw(length, size), draw(length, channels)
    inputs = [v.clone().requires_grad_() for v in (u, delta, A, B, C)]
    full = (*(v[None] for v in inputs[:2]), inputs[2], *(v[None, :, None] for v in inputs[3:]))
    truth = selective_scan_naive(*full)
    truth_grads = torch.autograd.grad(truth, inputs, grad[None])

    numbers = [counted(v) for v in (delta * u, delta, A / math.log(2), B, C)]
    elements = length * channels * size
    Counted.ops = 0
    y = scan_forward(*numbers)
    assert Counted.ops == 7 * elements
    torch.testing.assert_close(plain(y), truth[0].detach())

    x, steps, rates, *rest = numbers
    Counted.ops = 0
    found = scan_backward(counted(grad), x, steps, rates, counted(A), *rest)
    assert Counted.ops == 20 * elements
    gx, gdelta, gA, gB, gC = map(plain, found)
    for mine, true in zip(
        (delta * gx, gdelta + u * gx, gA, gB, gC), truth_grads, strict=True
    ):  # what has no state is left out of the count: x = Δ u on the way in and back
        torch.testing.assert_close(mine, true)

    both = [v.float().detach().requires_grad_() for v in full]
    check_registered(lambda: selective_scan(*both), 7 * elements, 20 * elements)


# Bidirectional WKV (arXiv 2403.02308), as RWKV carries it in log space (arXiv 2305.13048) ---------


def wkv_direction(k, v, s):
    """Return (m, h, a, b) by step for one channel: m and h = (sum of values, of weights) hold what
    lies before it, over exp(m); a and b are what h and the token have in the next one."""
    found, m, h = [], Counted(-1e30), (Counted(0), Counted(0))
    for k_t, v_t in zip(k, v, strict=True):
        later = (m - s).maximum(k_t)
        a, b = (m - s - later).exp(), (k_t - later).exp()
        found.append((m, h, a, b))
        m, h = later, (a * h[0] + b * v_t, a * h[1] + b)
    return found


def wkv_forward(k, v, s, u):
    """Return what backward wants, by step: both directions, c of both, f, 1 / D and N / D."""
    ahead, behind = wkv_direction(k, v, s), wkv_direction(k[::-1], v[::-1], s)[::-1]
    found = []
    for k_t, v_t, *both in zip(k, v, ahead, behind, strict=True):
        r = both[0][0].maximum(both[1][0]).maximum(k_t + u)
        c = [(m - r).exp() for m, *_ in both]
        f = (k_t - r + u).exp()
        values, weights = Counted(0), Counted(0)
        for c_t, (_, h, _, _) in zip(c, both, strict=True):
            values, weights = values + c_t * h[0], weights + c_t * h[1]
        values, weights = values + f * v_t, weights + f
        inverse = Counted(1) / weights
        found.append((both, c, f, inverse, values * inverse))
    return found


def wkv_backward(grad, k, v, s, u):
    """Return ∂k, ∂v, and ∂s and ∂u, from everything of the forward pass again:

    g = (1, -out) ∂out / D,  G_t = c_t g_t + a_t G_{t+1},  in_t = b_t G_{t+1}
    (∂v_t, x_t) = Σ_directions in_t + f_t g_t,  ∂k_t = v_t ∂v_t + x_t
    """
    steps, gs, gu = wkv_forward(k, v, s, u), Counted(0), Counted(0)
    pairs = []
    for grad_t, (_, _, _, inverse, out) in zip(grad, steps, strict=True):
        value = grad_t * inverse
        pairs.append((value, -(value * out)))
    own = [[f * g for g in pair] for (_, _, f, _, _), pair in zip(steps, pairs, strict=True)]
    for v_t, (value, weight) in zip(v, own, strict=True):
        gu = gu + (v_t * value + weight)
    for way in range(2):
        G = [Counted(0), Counted(0)]
        for t in reversed(range(len(k))) if way == 0 else range(len(k)):
            both, c, *_ = steps[t]
            _, h, a, b = both[way]
            gs = gs + (h[0] * G[0] + h[1] * G[1]) * a
            own[t] = [mine + b * later for mine, later in zip(own[t], G, strict=True)]
            G = [c[way] * g + a * later for g, later in zip(pairs[t], G, strict=True)]
    gk = [v_t * value + weight for v_t, (value, weight) in zip(v, own, strict=True)]
    return gk, [value for value, _ in own], gs, gu


def test_bidirectional_wkv_is_54_and_94_a_token_and_channel():
    length = 5
    generator = torch.Generator().manual_seed(0)
    k, v, grad = torch.randn(3, length, generator=generator, dtype=torch.float64)
    w, u = torch.tensor([2.0], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (k, v, w, u)]
    full = [inputs[0][None, :, None], inputs[1][None, :, None], *inputs[2:]]
    truth = bidirectional_wkv_naive(*full, None, length)
    truth_grads = torch.autograd.grad(truth, inputs, grad[None, :, None])

    numbers = [counted(k), counted(v), Counted(w / length), Counted(u)]
    Counted.ops = 0
    out = [step[-1] for step in wkv_forward(*numbers)]
    assert Counted.ops == 54 * length
    torch.testing.assert_close(plain(out), truth[0, :, 0].detach())

    Counted.ops = 0
    gk, gv, gs, gu = map(plain, wkv_backward(counted(grad), *numbers))
    assert Counted.ops == 94 * length
    for mine, true in zip((gk, gv, -gs[None] / length, gu[None]), truth_grads, strict=True):
        torch.testing.assert_close(mine, true)

    both = [x.float().detach().requires_grad_() for x in full]
    check_registered(lambda: bidirectional_wkv(*both), 54 * length, 94 * length)


def check_registered(run, forward, backward):
    """The formula registered with torch says the same of the kernel itself."""
    with FlopCounterMode(display=False) as counter:
        y = run()
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == backward


@pytest.mark.parametrize("taps", [1, 3, 7])
def test_a_convolution_costs_what_torch_says_of_its_own(taps):
    """And backward twice as much; torch's formula for that is wrong for one filter a channel."""
    x, weight = torch.randn(2, 5, 6), torch.randn(6, taps)
    with FlopCounterMode(display=False) as counter:
        padded = torch.nn.functional.pad(x.transpose(1, 2), (taps - 1, 0))
        torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=6)
    assert counter.get_total_flops() == 2 * 2 * 5 * 6 * taps
    x.requires_grad_()
    weight.requires_grad_()
    once = 2 * 2 * 5 * 6 * taps
    check_registered(lambda: causal_conv1d(x, weight), once, 2 * once)
