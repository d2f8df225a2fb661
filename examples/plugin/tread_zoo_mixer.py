"""A gated MLP-mixer: tokens are mixed by a learned matrix over positions, [N, N].

    value, gate = Linear(x);   Mix(x) = Linear(M[ids, ids] value * SiLU(gate))

A route leaves tokens out, so a block takes the rows and columns of the positions that are there.
"""

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.adaln_shell import AdaLNBackbone, AdaLNBlock
from tread_zoo import register_backbone
from tread_zoo.backbone import Layout


class MixerBlock(AdaLNBlock):
    def __init__(self, hidden_size: int, num_tokens: int) -> None:
        super().__init__(hidden_size, mlp_ratio=4.0)
        self.value_gate = nn.Linear(hidden_size, 2 * hidden_size)
        self.matrix = nn.Parameter(torch.randn(num_tokens, num_tokens) / num_tokens)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.fused_rows["value_gate.weight"] = 2 * (hidden_size,)

    def mix(self, x: Tensor, layout: Layout) -> Tensor:
        value, gate = self.value_gate(x).chunk(2, dim=-1)
        ids = layout.positions()
        matrix = self.matrix[ids[:, :, None], ids[:, None]]  # [B, K, K]
        return self.out(matrix @ value * F.silu(gate))


@register_backbone("mixer_tiny", learning_rate=6e-3, hidden_size=80, depth=8)
class Mixer(AdaLNBackbone):
    default_selector = "blocks"
    takes_contexts = False  # its matrix knows the places of the grid alone

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 384,
        depth: PositiveInt = 12,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=("order", "ids", "grid"),
            hidden_size=hidden_size,
            depth=depth,
            make_block=lambda index: MixerBlock(hidden_size, self.num_tokens),
        )
        self.initialize()
