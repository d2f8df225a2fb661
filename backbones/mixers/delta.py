"""Gated DeltaNet in both directions: a linear attention that decays and overwrites.

The mixer follows arXiv 2412.06464. It scans in both directions along a curve and adds the results.
The directions share queries, keys and values, and each has its own decays a and writing strengths
b. S is the state:

    q, k, v, z = Linear(x),  q, k, v through SiLU,  q and k normalised per head
    b    = sigmoid(Linear(x)),  a = exp(-exp(A_log) softplus(Linear(x) + bias))
    S_t  = (I - b_t k_t k_tᵀ) a_t S_{t-1} + b_t k_t v_tᵀ,  o_t = S_tᵀ q_t / sqrt(K)   each direction
    out  = Linear(RMSNorm(o_forward + o_backward) * SiLU(z))                the norm is per head

With `per_channel`, each key channel has its own decay a, projected through a bottleneck as wide as
a head. Kimi Delta Attention (KDA, arXiv 2510.26692) has such decays, and another gate:

    out  = Linear(RMSNorm(o_forward + o_backward) * sigmoid(Linear(Linear(x)) + bias))

with a bottleneck as wide as a head, too. Both papers put a short convolution before the scan; here
it is the option `short_conv`: q, k and v are then SiLU(conv(Linear(x))), with taps per direction.
With `short_conv` and a single direction, these are flash-linear-attention's layers with values as
wide as keys. Their norm has an epsilon of 1e-5 by default. Here KDA has 1e-5, and Gated DeltaNet
has 1e-6.

Under a route, the state sees only the kept tokens, in the order of the full walk; a token that
bypassed the block does not write, replace or decay. `gaps` says what happens at missing steps.

B batch, L tokens present, D width, H heads, K = D / H width of keys and values.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import check_width
from backbones.mixers.scan import (
    ScanMixer,
    add_bias,
    at_least_float32,
    both_ways,
    decay_over_gaps,
    init_step_bias,
    make_convolution,
    mark_no_weight_decay,
    project,
    rms_norm,
    sum_ways,
)
from tread_zoo.kernels import gated_delta_rule, softplus
from tread_zoo.routing.orders import ScanOrder
from tread_zoo.routing.scans import Gaps, Scan


class BidirectionalDelta(ScanMixer):
    """The gated delta rule over [B, L, D] in both directions, summed.

    Parameters of both directions are stacked along the first axis, forward first. `ScanMixer`
    explains `scan_order`, `gaps` and `index`. `num_projected` maps of x (q, k, v, z) are joined in
    one layer, and `norm_eps` is the epsilon of the output's norm.

    Args:
        hidden_size: D, divisible by H.
        num_heads: number of heads, H.
        per_channel: one decay per channel of the keys, as in KDA, instead of one per head.
        short_conv: apply a causal convolution of 4 taps to queries, keys and values; gaps=reset
            needs it.
    """

    num_projected: ClassVar[int] = 4  # q, k, v, z
    norm_eps: ClassVar[float] = 1e-6

    def __init__(
        self,
        hidden_size: int,
        num_heads: PositiveInt = 6,
        per_channel: bool = False,
        short_conv: bool = False,
        *,
        scan_order: ScanOrder = "raster",
        gaps: Gaps = "ignore",
        index: int = 0,
    ) -> None:
        check_width(hidden_size, num_heads, "num_heads")
        super().__init__(scan_order=scan_order, gaps=gaps, index=index)
        self.num_heads, head_size = num_heads, hidden_size // num_heads
        self.per_channel = per_channel
        self.in_proj = nn.Linear(hidden_size, self.num_projected * hidden_size, bias=False)
        self.conv = make_convolution(3 * hidden_size, short_conv, gaps)
        self.beta_proj = nn.Linear(hidden_size, 2 * num_heads, bias=False)
        num_steps = 2 * (hidden_size if per_channel else num_heads)
        self.step_down = nn.Linear(hidden_size, head_size, bias=False) if per_channel else None
        self.step_proj = nn.Linear(head_size if per_channel else hidden_size, num_steps, bias=False)
        self.step_bias = nn.Parameter(torch.empty(num_steps))
        self.A_log = nn.Parameter(torch.empty(2 * num_heads))
        mark_no_weight_decay(self.step_bias, self.A_log)
        self.norm = nn.RMSNorm(head_size, eps=self.norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.fused_rows = {
            "in_proj.weight": self.num_projected * (hidden_size,),
            "beta_proj.weight": 2 * (num_heads,),
            "step_proj.weight": 2 * (num_steps // 2,),
        }

    def forward(self, x: Tensor, scan: Scan) -> Tensor:
        x = scan.permute(x)
        projected = self.in_proj(x)
        parts = projected.unflatten(-1, (self.num_projected, self.num_heads, -1)).unbind(2)
        if self.conv is None:
            q, k, v = (F.silu(both_ways(part, scan)) for part in parts[:3])  # [2 B, L, H, K]
        else:
            mixed = self.conv(projected[..., : self.conv.weight.shape[0] // 2], scan, self.gaps)
            q, k, v = mixed.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k = (_unit(at_least_float32(part)).to(v.dtype) for part in (q, k))
        beta = self._turn(at_least_float32(self.beta_proj(x)).sigmoid(), scan)
        log_decay = self._turn(self._log_decay(x), scan)
        if self.gaps == "decay":
            log_decay = decay_over_gaps(log_decay, scan)
        out = rms_norm(self.norm, sum_ways(gated_delta_rule(q, k, v, beta, log_decay), scan))
        gated = (out * self._gate(x, parts[-1])).flatten(2)
        return scan.restore(project(self.out_proj, gated))

    def _gate(self, x: Tensor, z: Tensor) -> Tensor:
        return F.silu(z)

    def _log_decay(self, x: Tensor) -> Tensor:
        """Return the log-decays of tokens x [B, L, D] in both directions: one for each of H heads,
        [B, L, 2 H], or with `per_channel` one for each of their K key channels, [B, L, 2 H, K]."""
        down = x if self.step_down is None else self.step_down(x)
        steps = softplus(add_bias(self.step_proj(down), self.step_bias))
        rates = -torch.exp(at_least_float32(self.A_log))
        if self.per_channel:
            steps, rates = steps.unflatten(-1, (2 * self.num_heads, -1)), rates.unsqueeze(-1)
        return rates * steps

    def _turn(self, values: Tensor, scan: Scan) -> Tensor:
        """Return `values` [B, L, 2 H, ..], of H heads in the forward and H in the backward
        direction, as one batch [2 B, L, H, ..], the forward direction first. The backward half is
        reordered for the backward walk."""
        forward, backward = values.chunk(2, dim=2)
        return torch.cat([forward, scan.flip(backward)])

    def initialize(self, num_blocks: int) -> None:
        """Draw `step_bias` such that its softplus is log-uniform in 0.001 … 0.1, and `A_log` such
        that its exp is uniform in 1 … 16. The linear layers stay as the backbone has drawn them."""
        init_step_bias(self.step_bias)
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()


def _unit(x: Tensor) -> Tensor:
    """Return the vectors x [.., K] scaled to norm 1; vectors near 0 stay shorter."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class KimiDelta(BidirectionalDelta):
    """Kimi Delta Attention over [B, L, D] in both directions, summed.

    It has the arguments of `BidirectionalDelta` except `per_channel`, which is always True.
    """

    num_projected: ClassVar[int] = 3  # q, k, v
    norm_eps: ClassVar[float] = 1e-5

    def __init__(
        self,
        hidden_size: int,
        num_heads: PositiveInt = 6,
        short_conv: bool = False,
        *,
        scan_order: ScanOrder = "raster",
        gaps: Gaps = "ignore",
        index: int = 0,
    ) -> None:
        super().__init__(
            hidden_size, num_heads, True, short_conv,
            scan_order=scan_order, gaps=gaps, index=index,
        )  # fmt: skip
        self.gate_down = nn.Linear(hidden_size, hidden_size // num_heads, bias=False)
        self.gate_up = nn.Linear(hidden_size // num_heads, hidden_size)

    def _gate(self, x: Tensor, z: Tensor) -> Tensor:
        gate: Tensor = torch.sigmoid(at_least_float32(self.gate_up(self.gate_down(x))))
        return gate.view(*gate.shape[:-1], self.num_heads, -1)
