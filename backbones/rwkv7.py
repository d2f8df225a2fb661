"""RWKV-7: a generalised delta rule, both ways, in place of attention (arXiv 2503.14456).

`lightning_shell` has the shell. Both mixes begin with the q-shift of `rwkv`: each quarter of the
channels comes from one neighbour on the grid, and every projection takes its own blend of the token
and of what was shifted in. The time mix, by head, with sigma the logistic function and LoRA two
thin matrices with an activation between them:

    r, k, v = Linear(blend_r), Linear(blend_k), Linear(blend_v)
    v    = v + sigma(LoRA(blend_v)) (v_1 - v)            from the second block on
    w    = exp(-exp(-1/2) sigma(LoRA_tanh(blend_w)))     decay of each channel, above 0.54
    a    = sigma(LoRA(blend_a))                          in-context learning rate
    kk   = k * xi / |k * xi|                             what is looked up and removed
    k    = k (1 + alpha (a - 1))                         what is written in its place
    S_t  = (diag(w_t) - (a_t kk_t) kk_t^T) S_{t-1} + k_t v_t^T
    y    = GroupNorm(sum over directions of S_t^T r_t) + (r . rho k) v
    out  = Linear(y * LoRA_sigma(blend_g))

and the channel mix is Linear(relu(Linear(blend))^2). Tokens are scanned in raster order or along
another curve; the directions have all in common but the bias of their decays.

v_1, the values of the first block, are a stream of their own, so that a route takes a token's first
value along with the token. A token that bypasses a route is in no state and no shift within it:
`gaps` says whether states decay by its steps of the curve all the same, and what is shifted in.

B batch, K tokens present, D width, H heads of P channels.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.lightning_shell import LightningBackbone, Mixer
from backbones.q_shift import shift_and_blend
from backbones.scan_shell import both_ways, decay_over_gaps, full, sum_ways
from tread_zoo.backbone import Layout
from tread_zoo.kernels import dplr_delta_rule
from tread_zoo.registry import register_backbone
from tread_zoo.routing.scans import Gaps, Scan, check_scan, make_scan

STEEPEST = math.exp(-0.5)  # log-decays of a step lie between 0 and minus this
SLOWEST, FASTEST = -6.0, -1.0  # initial decay bias of the first and last channel, before sigma


class TimeMix(Mixer):
    """The delta rule over tokens [B, K, D] in both directions, summed.

    `own` holds how much of the token itself is in the blends of r, k, v, w, a and g, [6, D];
    `decay_bias` has a row for each direction, forward first.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        low_rank: int,
        scan_order: str = "raster",
        index: int = 0,
        gaps: Gaps = "decay",
    ) -> None:
        super().__init__()
        self.value_size, self.num_heads = hidden_size, hidden_size // head_size
        self.scan_order, self.index, self.gaps = scan_order, index, gaps

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
        self, x: Tensor, layout: Layout, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        blends = shift_and_blend(x, layout, self.own, over_gaps=self.gaps == "ignore")
        of_r, of_k, of_v, of_decay, of_rate, of_gate = blends
        r, k, own_value = self.receptance(of_r), self.key(of_k), self.value(of_v)
        v = own_value
        if not self.is_first:
            assert first_value is not None, "the shell has a stream for it"
            mix = torch.sigmoid(full(self.mix(of_v)) + full(self.mix_bias))
            v = v + mix.to(v.dtype) * (first_value.to(v.dtype) - v)
        rate = torch.sigmoid(full(self.rate(of_rate)) + full(self.rate_bias))
        removed = F.normalize(self._heads(full(k) * full(self.removed)), dim=-1).flatten(2)
        k = full(k) * (1 + full(self.replaced) * (rate - 1))
        scan = make_scan(layout, self.scan_order, self.index)
        r2, k2, v2, a2, b2 = (
            self._heads(both_ways(scan.permute(each), scan))
            for each in (r, k, v, -removed, rate * removed)
        )
        falls = self._falls(full(self.decay(of_decay)), scan)
        mixed = dplr_delta_rule(r2, k2, v2, a2, b2, self._heads(falls))
        y = scan.restore(sum_ways(mixed.flatten(2), scan))
        norm = self.norm
        y = F.group_norm(
            y.flatten(0, 1), self.num_heads, full(norm.weight), full(norm.bias), norm.eps
        )
        weights = self._heads(full(r) * full(self.bonus) * k).sum(-1, keepdim=True)
        y = y.view_as(x) + (weights * self._heads(full(v))).flatten(2)
        gated = y * self.gate(of_gate)
        # Weights may be stored in half precision; under autocast both are float32 here.
        out: Tensor = self.output(gated.to(self.output.weight.dtype))
        return out, own_value if self.is_first else None

    def _falls(self, decay: Tensor, scan: Scan) -> Tensor:
        """Return the log-decays [2 B, K, D] of both directions."""
        first, second = full(self.decay_bias).unbind()
        decay = scan.permute(decay)
        both = torch.cat([decay + first, scan.flip(decay + second)])
        falls = -STEEPEST * torch.sigmoid(both)
        return decay_over_gaps(falls, scan) if self.gaps == "decay" else falls

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1)

    def initialize(self) -> None:
        """Set what differs from the shell:

        | parameter | value |
        |---|---|
        | `own` | 0.5: half the token, half what is shifted in |
        | last matrix of the LoRAs, but the gate's | 0 |
        | `decay_bias` | evenly spaced over the channels, -6 … -1 |
        | `rate_bias`, `mix_bias` | 0: rate 0.5, the mean of both values |
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


class ChannelMix(nn.Module):
    """Mix channels, [B, K, D] -> [B, K, D]; `own` is the share of the token itself, [1, D]."""

    def __init__(self, hidden_size: int, mlp_ratio: float, gaps: Gaps) -> None:
        super().__init__()
        self.gaps = gaps
        self.own = nn.Parameter(torch.empty(1, hidden_size))
        self.key = nn.Linear(hidden_size, int(hidden_size * mlp_ratio), bias=False)
        self.value = nn.Linear(int(hidden_size * mlp_ratio), hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        (blend,) = shift_and_blend(x, layout, self.own, over_gaps=self.gaps == "ignore")
        out: Tensor = self.value(F.relu(self.key(blend)).square())
        return out

    def initialize(self) -> None:
        """Start with half the token, half what is shifted in."""
        nn.init.constant_(self.own, 0.5)


class RWKV7(LightningBackbone):
    """A stack of RWKV-7's time and channel mixes.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, divisible by 4.
        depth: number of blocks.
        head_size: P, a divisor of D.
        low_rank: of the LoRAs of decay and rate; that of v_1 has half of it, the gate's twice.
        mlp_ratio: inner width of the channel mix over D.
        scan_order: of the states, a name in `tread_zoo.routing.ORDERS`; the shift is on the grid.
        gaps: what a route's gaps are to it. `decay`: states decay by the steps of the full curve,
            and the shift brings in zeros for what is not there. `reset`: so it does, and states
            run over gaps. `ignore`: so they do, and the shift brings in the nearest token present
            in its direction.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown scan_order.
    """

    default_selector: ClassVar[str] = "blocks"

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 384,
        depth: PositiveInt = 12,
        head_size: PositiveInt = 64,
        low_rank: PositiveInt = 32,
        mlp_ratio: PositiveFloat = 4.0,
        scan_order: str = "raster",
        gaps: Gaps = "decay",
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
    ) -> None:
        if hidden_size % 4 or hidden_size % head_size:
            raise ValueError(
                f"hidden_size={hidden_size} must be divisible by 4, a quarter of the channels "
                f"coming from each neighbour, and by head_size={head_size}."
            )
        check_scan(scan_order, gaps)
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=("order", "ids") if scan_order == "raster" else ("order", "ids", "grid"),
            hidden_size=hidden_size,
            depth=depth,
            make_mixer=lambda index: TimeMix(
                hidden_size, head_size, low_rank, scan_order, index, gaps
            ),
            make_mlp=lambda index: ChannelMix(hidden_size, mlp_ratio, gaps),
            learn_sigma=learn_sigma,
            time_scale=time_scale,
        )
        self.initialize()


# Sizes for comparisons; nobody has published diffusion networks of this kind.
register_backbone(
    "rwkv7_tiny",
    learning_rate=1.2e-2,
    patch_size=2,
    hidden_size=64,
    depth=12,
    head_size=32,
    low_rank=8,
)(RWKV7)
register_backbone("rwkv7_matched_s", learning_rate=3e-4, patch_size=2, hidden_size=384, depth=12)(
    RWKV7
)
register_backbone("rwkv7_matched_b", patch_size=2, hidden_size=768, depth=12, low_rank=64)(RWKV7)
