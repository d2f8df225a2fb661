"""A gated MLP-mixer: tokens are mixed by a learned matrix over positions, [N, N].

    value, gate = Linear(x);   Mix(x) = Linear(M[ids, ids] value * SiLU(gate))

A route leaves tokens out, so a block takes the rows and columns of the positions that are there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mixers.base import Mixer
from backbones.shells import AdaLNBackbone
from tread_zoo import register_backbone
from tread_zoo.contract.backbone import Layout


class PositionMixer(Mixer):
    default_selector = "blocks"
    depends_on = ("order", "ids", "grid")

    def __init__(self, hidden_size: int, grid: tuple[int, int], gated: bool = True) -> None:
        super().__init__()
        num_tokens, self.gated = grid[0] * grid[1], gated
        self.value_gate = nn.Linear(hidden_size, 2 * hidden_size)
        self.matrix = nn.Parameter(torch.randn(num_tokens, num_tokens) / num_tokens)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.fused_rows = {"value_gate.weight": 2 * (hidden_size,)}

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        value, gate = self.value_gate(x).chunk(2, dim=-1)
        ids = layout.positions()
        matrix = self.matrix[ids[:, :, None], ids[:, None]]  # [B, K, K]
        mixed = matrix @ value
        return self.out(mixed * F.silu(gate) if self.gated else mixed + gate)


@register_backbone("mixer_tiny", learning_rate=6e-3, hidden_size=80, depth=8)
class MLPMixer(AdaLNBackbone):
    mixer, takes_contexts = PositionMixer, False  # its matrix knows only positions of the grid
