"""MLPs of the shells. B batch, K tokens present, D width."""

from typing import Any

import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor, nn

from tread_zoo.contract.layers import Mlp, gelu_tanh


class GeluMLP(Mlp):
    """Linear(GELU(Linear(x))), [B, K, D] -> [B, K, D].

    Args:
        hidden_size: D.
        mlp_ratio: inner width divided by D.
    """

    def __init__(self, hidden_size: int, mlp_ratio: PositiveFloat = 4.0) -> None:
        super().__init__(hidden_size, int(hidden_size * mlp_ratio), gelu_tanh)

    def forward(self, x: Tensor, layout: Any = None) -> Tensor:
        return super().forward(x)


class SwiGLU(nn.Module):
    """Linear(SiLU(Linear(x)) * Linear(x)), [B, K, D] -> [B, K, D] (arXiv 2002.05202).

    Args:
        hidden_size: D.
        mlp_ratio: inner width of an MLP without a gate, divided by D. The inner width here is 2/3
            of that MLP's, for equally many parameters.
    """

    def __init__(self, hidden_size: int, mlp_ratio: PositiveFloat = 4.0) -> None:
        super().__init__()
        inner = int(2 / 3 * int(hidden_size * mlp_ratio))
        self.fc1 = nn.Linear(hidden_size, 2 * inner)
        self.fc2 = nn.Linear(inner, hidden_size)
        self.fused_rows = {"fc1.weight": (inner, inner)}

    def forward(self, x: Tensor, layout: Any) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)
