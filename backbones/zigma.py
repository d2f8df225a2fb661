"""ZigMa: Mamba along one serpentine per layer, conditioned by adaLN-Zero (arXiv 2403.13802).

    n = RMSNorm(x)
    shift, scale, gate = Linear(SiLU(embed(t) + embed(y)))
    x = x + n + gate * Mixer(n * (1 + scale) + shift)
    out = Linear(LayerNorm(RMSNorm(x)))                  after the last block

There are no MLPs and no skips; positions are learned; n itself stays in the sum, as in the authors'
code. Each layer scans in one direction, along one of eight serpentines (`serpentine8`). Half of
them run along columns, so the default selector is `blocks`: it keeps squares of neighbours.

B batch, K tokens present, D width.
"""

from typing import Any

from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.base import Mixer
from backbones.mixers.selective_scan import OneWayScan
from backbones.shells import AdaLNBackbone
from tread_zoo.contract.backbone import Layout, Streams
from tread_zoo.contract.layers import add_gated, modulate
from tread_zoo.routing.scans import Scan


class ZigMaBlock(nn.Module):
    """Norm and mixer, modulated and gated by the condition: [B, K, D] -> [B, K, D]."""

    def __init__(self, hidden_size: int, mixer: Mixer) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.mixer = mixer
        self.modulation = nn.Linear(hidden_size, 3 * hidden_size)
        self.fused_rows = {"modulation.weight": 3 * (hidden_size,)}

    def prepare(self, layout: Layout) -> Scan:
        return self.mixer.prepare(layout)

    def forward(self, streams: Streams, condition: Tensor, scan: Scan) -> Streams:
        (x,) = streams
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        normed = self.norm(x)
        return (add_gated(x + normed, gate, self.mixer(modulate(normed, shift, scale), scan)),)


class ZigMaHead(nn.Module):
    """Two norms and a linear map, without a condition, from tokens [B, N, D] to patches of side p
    and C_out channels [B, N, p * p * C_out]."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.norms = nn.Sequential(
            nn.RMSNorm(hidden_size, eps=1e-5),
            nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False),
        )
        self.linear = nn.Linear(hidden_size, patch_size**2 * out_channels)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        return self.linear(self.norms(tokens))

    def zero(self) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)


class ZigMa(AdaLNBackbone):
    """ZigMa (arXiv 2403.13802): Mamba, in each layer along one of eight serpentine curves."""

    mixer, mlp = OneWayScan, None
    learned_positions = True

    def __init__(self, *, depth: PositiveInt = 24, **options: Any) -> None:
        super().__init__(depth=depth, **options)
        self.final = ZigMaHead(self.hidden_size, self.patch_size, self.out_channels)

    def make_block(self, index: int, depth: int) -> ZigMaBlock:
        return ZigMaBlock(self.hidden_size, self.make_part(OneWayScan, index))
