"""State-space duals in both directions, the mixer of Mamba-2 (arXiv 2405.21060).

The mixer scans along a curve. The directions share the first and the last projection, and each has
its own parameters between them:

    z, u, step  = Linear(x)                                  u holds the inputs, B and C
    inputs, B, C = SiLU(conv1d(u, in that direction))
    step = softplus(step + bias)
    y    = sum over directions of ssd(inputs, step, -exp(A_log), B, C, D)
    out  = Linear(RMSNorm(y * SiLU(z)))

There are three differences from `selective_scan`. Step, rate and D are one number per head of P
channels, so the scan consists of matrix products and can have many states. Steps, B and C come from
the first projection, not from the convolved inputs. A norm precedes the last projection.

B batch, L = E + K tokens present, D width, I = expand * D inner width, P head size, S state size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.scan import (
    ScanMixer,
    add_bias,
    at_least_float32,
    both_ways,
    convolve_ways,
    init_step_bias,
    init_uniform,
    mark_no_weight_decay,
    project,
    rms_norm,
    scan_ways,
)
from tread_zoo.kernels import ssd
from tread_zoo.routing.scans import Scan


class BidirectionalSSD(ScanMixer):
    """State-space duals over [B, L, D] in both directions, summed.

    Parameters of both directions are stacked along the first axis, forward first. One call of each
    kernel serves both, as two groups of heads, or one per direction if it must heed gaps.

    Args:
        hidden_size: D.
        expand: inner width I divided by D.
        state_size: size of the state, S.
        head_size: channels per head P, a divisor of I.
        conv_width: taps of the causal convolution before the scan.
        scan: `scan_order`, `gaps` and `index`, see `ScanMixer`.
    """

    def __init__(
        self,
        hidden_size: int,
        expand: PositiveInt = 2,
        state_size: PositiveInt = 64,
        head_size: PositiveInt = 64,
        conv_width: PositiveInt = 4,
        **scan: Any,
    ) -> None:
        super().__init__(**scan)
        inner = expand * hidden_size
        if inner % head_size:
            raise ValueError(
                f"head_size={head_size} must divide the inner width, expand * hidden_size = "
                f"{inner}."
            )
        num_heads, mixed = inner // head_size, inner + 2 * state_size
        self.head_size = head_size
        self.parts = [inner, mixed, num_heads]
        self.mixed_parts = [inner, state_size, state_size]
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * mixed, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(2 * mixed))
        self.step_bias = nn.Parameter(torch.empty(2 * num_heads))
        self.A_log = nn.Parameter(torch.empty(2 * num_heads))
        self.D = nn.Parameter(torch.empty(2 * num_heads))
        mark_no_weight_decay(self.step_bias, self.A_log, self.D)
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.fused_rows = {"in_proj.weight": (inner, *self.mixed_parts, num_heads)}

    def forward(self, x: Tensor, scan: Scan) -> Tensor:
        z, u, step = self.in_proj(scan.permute(x)).split(self.parts, dim=-1)
        segments = None if self.gaps == "ignore" else scan.segment_ids()
        u = both_ways(u, scan, dim=-1)
        u = convolve_ways(u, self.conv_weight, self.conv_bias, segments)
        inputs, b, c = u.unflatten(-1, (2, -1)).split(self.mixed_parts, dim=-1)  # [B, L, 2, ...]
        steps = both_ways(step, scan, dim=-1)
        scanned = (
            inputs.reshape(*inputs.shape[:2], -1, self.head_size),
            F.softplus(add_bias(steps, self.step_bias)),
            -torch.exp(at_least_float32(self.A_log)),
            b,
            c,
            at_least_float32(self.D),
        )
        y = scan_ways(ssd, scanned, scan.gaps() if self.gaps == "decay" else None)
        forward, backward = y.flatten(2).chunk(2, dim=-1)
        y = (forward + scan.flip(backward)) * F.silu(z)
        return scan.restore(project(self.out_proj, rms_norm(self.norm, y)))

    def initialize(self, num_blocks: int) -> None:
        """Set the weights, except `in_proj`, which `ScanBackbone` draws as listed. `norm` stays at
        1.

        | parameter | value |
        |---|---|
        | `in_proj` | uniform within ±1 / sqrt(fan in) |
        | `out_proj` | the same, divided by sqrt(number of blocks) |
        | `conv_weight`, `conv_bias` | uniform within ±1 / sqrt(conv_width); 0 |
        | `step_bias` | its softplus log-uniform in 0.001 … 0.1 |
        | `A_log` | its exp uniform in 1 … 16 |
        | `D` | 1 |
        """
        init_uniform(self.out_proj.weight, self.out_proj.in_features * num_blocks)
        init_uniform(self.conv_weight, self.conv_weight.shape[1])
        nn.init.zeros_(self.conv_bias)
        init_step_bias(self.step_bias)
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
        nn.init.ones_(self.D)

    @classmethod
    def options_for_heads(cls, hidden_size: int, num_heads: int) -> dict[str, Any]:
        return {"expand": 1, "head_size": hidden_size // num_heads}
