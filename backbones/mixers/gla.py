"""Gated linear attention in both directions (arXiv 2312.06635; for diffusion, DiG: 2405.18428).

Linear attention whose state decays: each token sets a rate for each row of the state. The mixer
scans in both directions along a curve and adds the results. The directions share queries, keys and
values, and each has its own decays:

    q, k, v, z = Linear(x)                                   keys are half as wide as values
    a    = sigmoid(Linear(Linear(x)))^(1/16)                 through 16 channels
    S_t  = diag(a_t) S_{t-1} + k_t v_tᵀ,  o_t = S_tᵀ q_t / sqrt(K)       in each direction
    out  = Linear(RMSNorm(o_forward + o_backward) * SiLU(z))             the norm is per head

DiG has one direction per layer, which changes from layer to layer, and a depthwise convolution;
here every layer has two directions. With `short_conv`, q, k and v are SiLU(conv(Linear(x))), with a
causal convolution per direction, as in flash-linear-attention.

Under a route, the state sees only the kept tokens, in the order of the full walk; a token that
bypassed the block neither writes nor decays. `gaps` says what happens at the missing steps.

B batch, L tokens present, D width, H heads, K = D / 2H width of a key.
"""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import check_width
from backbones.mixers.scan import (
    ScanMixer,
    at_least_float32,
    both_ways,
    decay_over_gaps,
    make_convolution,
    project,
    rms_norm,
    sum_ways,
)
from tread_zoo.kernels import gated_linear_attention
from tread_zoo.routing.scans import Gaps, Scan

DECAY_CHANNELS = 16
DECAY_ROOT = 16  # with a sigmoid of 1/2, the state halves in 16 steps


class BidirectionalGLA(ScanMixer):
    """Gated linear attention over [B, L, D] in both directions, summed.

    Args:
        hidden_size: D, divisible by 2 H.
        num_heads: number of heads, H.
        short_conv: apply a causal convolution of 4 taps to queries, keys and values; gaps=reset
            needs it.
        scan: `scan_order` and `index`; `ScanMixer` explains them, and `gaps`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: PositiveInt = 6,
        short_conv: bool = False,
        *,
        gaps: Gaps = "ignore",
        **scan: Any,
    ) -> None:
        check_width(hidden_size, 2 * num_heads, "2 * num_heads: keys are half as wide")
        super().__init__(gaps=gaps, **scan)
        keys = hidden_size // 2
        self.parts = [keys, keys, hidden_size, hidden_size]
        self.num_heads = num_heads
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=False)
        self.conv = make_convolution(sum(self.parts[:3]), short_conv, gaps)
        self.forget_in = nn.Linear(hidden_size, DECAY_CHANNELS, bias=False)
        self.forget_out = nn.Linear(DECAY_CHANNELS, 2 * keys)  # the forward direction's first
        self.norm = nn.RMSNorm(hidden_size // num_heads, eps=1e-6)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.fused_rows = {"in_proj.weight": tuple(self.parts), "forget_out.weight": (keys, keys)}

    def forward(self, x: Tensor, scan: Scan) -> Tensor:
        x = scan.permute(x)
        mixed, z = self.in_proj(x).split([sum(self.parts[:3]), self.parts[3]], dim=-1)
        both = both_ways(mixed, scan) if self.conv is None else self.conv(mixed, scan, self.gaps)
        gates = at_least_float32(self.forget_out(self.forget_in(x))).chunk(2, dim=-1)
        forward, backward = (F.logsigmoid(gate) / DECAY_ROOT for gate in gates)
        log_decay = torch.cat([forward, scan.flip(backward)])
        if self.gaps == "decay":
            log_decay = decay_over_gaps(log_decay, scan)
        ways = (*both.split(self.parts[:3], dim=-1), log_decay)  # one batch
        out = sum_ways(gated_linear_attention(*map(self._heads, ways)), scan)
        gated = rms_norm(self.norm, out).flatten(2) * F.silu(z)
        return scan.restore(project(self.out_proj, gated))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))
