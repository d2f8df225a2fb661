"""RWKV-7: a generalised delta rule, both ways, in place of attention (arXiv 2503.14456).

The time mix and the channel mix begin with a q-shift (`mixers.q_shift`). Every projection gets its
own blend of the token and the shifted channels, blend = x * own + shifted * (1 - own).

This is the time mix; kk, S_t, GroupNorm and the product r . rho k are per head. sigma is the
logistic function. LoRA is two thin matrices; its index names the activation between them, if any.
xi, alpha and rho are learned vectors. Biases are left out.

    r, k, v = Linear(blend_r), Linear(blend_k), Linear(blend_v)
    v    = v + sigma(LoRA(blend_v)) (v_1 - v)            from the second block on
    w    = exp(-exp(-1/2) sigma(LoRA_tanh(blend_w)))     decay of each channel, above 0.54
    a    = sigma(LoRA(blend_a))                          in-context learning rate
    kk   = k * xi / |k * xi|                             what is looked up and removed
    k    = k (1 + alpha (a - 1))                         what is written in its place
    S_t  = (diag(w_t) - (a_t kk_t) kk_t^T) S_{t-1} + k_t v_t^T
    y    = GroupNorm(sum over directions of S_t^T r_t) + (r . rho k) v
    out  = Linear(y * LoRA_sigma(blend_g))

The channel mix is Linear(relu(Linear(blend))^2). Both directions scan along a curve and differ only
in the bias of their decays. v_1 are the values of the first block. They travel beside the tokens
from block to block, so each token has its own v_1 under a route.

B batch, K tokens present, D width, H heads of P channels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import check_width
from backbones.mixers.q_shift import GridWalk, ShiftingMixer, shift_and_blend
from backbones.mixers.scan import (
    add_bias,
    at_least_float32,
    both_ways,
    decay_over_gaps,
    project,
    sum_ways,
)
from tread_zoo.kernels import dplr_delta_rule
from tread_zoo.routing.scans import Scan

STEEPEST = math.exp(-0.5)  # log-decays of a step lie between 0 and minus this
SLOWEST, FASTEST = -6.0, -1.0  # initial decay bias of the first and last channel, before sigma


class TimeMix(ShiftingMixer):
    """RWKV-7's generalised delta rule over tokens [B, K, D] in both directions, summed.

    Six projections (r, k, v, w, a and g) each get a blend of the tokens and their neighbours. The
    parameter `own` [6, D] is the token's own fraction in each blend. `decay_bias` [2, D] has a row
    per direction, forward first.

    Args:
        hidden_size: D, divisible by 4 and by P.
        head_size: channels per head, P.
        low_rank: rank of the LoRAs for decay and in-context learning rate. The LoRA that mixes in
            the first block's values v_1 has half this rank, and the gate's has twice this rank.
        index: index of the block; block 0 sets v_1.
        shift: `scan_order` and `gaps`, see `ShiftingMixer`.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: PositiveInt = 64,
        low_rank: PositiveInt = 32,
        *,
        index: int = 0,
        **shift: Any,
    ) -> None:
        super().__init__(hidden_size, index=index, **shift)
        check_width(hidden_size, head_size, "head_size")
        self.value_size, self.num_heads = hidden_size, hidden_size // head_size

        def low(rank: int, activation: nn.Module | None = None) -> nn.Sequential:
            layers = [nn.Linear(hidden_size, rank, bias=False), activation or nn.Identity()]
            return nn.Sequential(*layers, nn.Linear(rank, hidden_size, bias=False))

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(hidden_size))

        self.own = nn.Parameter(torch.empty(6, hidden_size))
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.decay = low(low_rank, nn.Tanh())
        self.decay_bias = nn.Parameter(torch.empty(2, hidden_size))
        self.rate, self.rate_bias = low(low_rank), vector()
        self.is_first = index == 0
        if not self.is_first:
            self.mix, self.mix_bias = low(max(1, low_rank // 2)), vector()
        self.gate = low(2 * low_rank, nn.Sigmoid())
        self.removed, self.replaced, self.bonus = vector(), vector(), vector()  # xi, alpha, rho
        self.norm = nn.GroupNorm(self.num_heads, hidden_size, eps=1e-5 * head_size)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self, x: Tensor, walk: GridWalk, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        scan, blends = walk.scan, shift_and_blend(x, walk, self.own)
        r_blend, k_blend, v_blend, decay_blend, rate_blend, gate_blend = blends
        r, k, value = self.receptance(r_blend), self.key(k_blend), self.value(v_blend)
        v = value
        if not self.is_first:
            assert first_value is not None, "the shell has a stream for it"
            mix = torch.sigmoid(add_bias(self.mix(v_blend), self.mix_bias))
            v = v + mix.to(v.dtype) * (first_value.to(v.dtype) - v)
        rate = torch.sigmoid(add_bias(self.rate(rate_blend), self.rate_bias))
        removed = at_least_float32(k) * at_least_float32(self.removed)
        removed = F.normalize(self._heads(removed), dim=-1).flatten(2)
        k = at_least_float32(k) * (1 + at_least_float32(self.replaced) * (rate - 1))
        r2, k2, v2, a2, b2 = (
            self._heads(both_ways(scan.permute(each), scan))
            for each in (r, k, v, -removed, rate * removed)
        )
        falls = self._falls(at_least_float32(self.decay(decay_blend)), scan)
        mixed = dplr_delta_rule(r2, k2, v2, a2, b2, self._heads(falls))
        y = scan.restore(sum_ways(mixed.flatten(2), scan))
        weight, bias = at_least_float32(self.norm.weight), at_least_float32(self.norm.bias)
        y = F.group_norm(y.flatten(0, 1), self.num_heads, weight, bias, self.norm.eps)
        bonus = self._heads(at_least_float32(r) * at_least_float32(self.bonus) * k)
        bonus = bonus.sum(-1, keepdim=True) * self._heads(at_least_float32(v))
        gated = (y.view_as(x) + bonus.flatten(2)) * self.gate(gate_blend)
        return project(self.output, gated), value if self.is_first else None

    def _falls(self, decay: Tensor, scan: Scan) -> Tensor:
        """Return the log-decays [2 B, K, D] of both directions, the forward direction first, from
        `decay` [B, K, D], the output of the decay's LoRA."""
        first, second = at_least_float32(self.decay_bias).unbind()
        decay = scan.permute(decay)
        both = torch.cat([decay + first, scan.flip(decay + second)])
        falls = -STEEPEST * torch.sigmoid(both)
        return decay_over_gaps(falls, scan) if self.gaps == "decay" else falls

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1)

    def initialize(self, num_blocks: int) -> None:
        """Set these parameters; the other linear layers stay as the backbone has drawn them.

        | parameter | value |
        |---|---|
        | `own` | 0.5: a blend is half the token, half its neighbours |
        | last matrix of the LoRAs `decay`, `rate`, `mix` | 0 |
        | `decay_bias` | evenly spaced over the channels, -6 … -1 |
        | `rate_bias` | 0: the in-context learning rate is 0.5 |
        | `mix_bias` | 0: values are halfway to those of the first block |
        | `removed`, `replaced` | 1 |
        | `bonus` | 0 |
        """
        nn.init.constant_(self.own, 0.5)
        nn.init.ones_(self.removed)
        nn.init.ones_(self.replaced)
        nn.init.zeros_(self.bonus)
        nn.init.zeros_(self.rate_bias)
        with torch.no_grad():
            self.decay_bias.copy_(torch.linspace(SLOWEST, FASTEST, self.value_size))
        nn.init.zeros_(self.decay.get_parameter("2.weight"))
        nn.init.zeros_(self.rate.get_parameter("2.weight"))
        if not self.is_first:
            nn.init.zeros_(self.mix_bias)
            nn.init.zeros_(self.mix.get_parameter("2.weight"))

    @classmethod
    def options_for_heads(cls, hidden_size: int, num_heads: int) -> dict[str, Any]:
        return {"head_size": hidden_size // num_heads, "low_rank": hidden_size // 12}


class ChannelMix(nn.Module):
    """Blend each token with its neighbours, then mix its channels: [B, K, D] -> [B, K, D]. The
    parameter `own` [1, D] is the token's own fraction in the blend.

    Args:
        hidden_size: D, divisible by 4.
        mlp_ratio: inner width divided by D.
    """

    def __init__(self, hidden_size: int, mlp_ratio: PositiveFloat = 4.0) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(1, hidden_size))
        self.key = nn.Linear(hidden_size, int(hidden_size * mlp_ratio), bias=False)
        self.value = nn.Linear(int(hidden_size * mlp_ratio), hidden_size, bias=False)

    def forward(self, x: Tensor, walk: GridWalk) -> Tensor:
        (blend,) = shift_and_blend(x, walk, self.own)
        return self.value(F.relu(self.key(blend)).square())

    def initialize(self, num_blocks: int) -> None:
        """Set `own` to 0.5: at first a blend is half the token, half its neighbours."""
        nn.init.constant_(self.own, 0.5)
