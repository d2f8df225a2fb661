"""Layers that backbones share: patches, positions, time and labels, modulation, skips, attention.

B batch, N tokens, K kept tokens, D width, C channels, p patch size, h x w grid of patches.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.kernels import attention


def patchify(x: Tensor, patch_size: int) -> Tensor:
    """Cut images [B, C, H, W] into patches of side p = `patch_size`, in raster order:
    [B, N, C * p * p]."""
    p = patch_size
    x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(tokens: Tensor, patch_size: int, grid: tuple[int, int]) -> Tensor:
    """Join patches [B, N, p * p * C] of side p = `patch_size` into images [B, C, h * p, w * p].
    `grid` is (h, w), the number of patches in each direction."""
    x = tokens.unflatten(2, (patch_size, patch_size, -1)).unflatten(1, grid)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def sincos_2d(width: int, grid: tuple[int, int]) -> Tensor:
    """Return fixed sine-cosine positions of width D = `width` on a grid (h, w), float32 [h * w, D].

    The first half of the channels encodes the column, the second the row, each as sines then
    cosines of `position / 10000^(2i / (D/2))`, i = 0 … D/4 - 1 (as in DiT, arXiv 2212.09748).

    Raises:
        ValueError: `width` is not divisible by 4.
    """
    if width % 4:
        raise ValueError(f"hidden_size={width} must be divisible by 4 for 2-D sine positions.")
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    rows = torch.arange(grid[0], dtype=torch.float64).repeat_interleave(grid[1])
    cols = torch.arange(grid[1], dtype=torch.float64).repeat(grid[0])
    parts = [f(axis[:, None] * frequency) for axis in (cols, rows) for f in (torch.sin, torch.cos)]
    return torch.cat(parts, dim=1).float()


def rotary_2d(
    rows: Tensor, cols: Tensor, head_size: int, num_extra: int = 0
) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of rotary positions, float32 [B, 1, E + K, Dh], for `rotate`.

    Channels 2i and 2i + 1 are a pair. The first half of the pairs rotates with the row, the second
    with the column, by `position * 10000^(-i / (Dh/4))`, i = 0 … Dh/4 - 1 (RoFormer, arXiv
    2104.09864, in two dimensions).

    Args:
        rows, cols: rows and columns, on the full grid, of the K tokens present, int64 [B, K].
        head_size: Dh, divisible by 4.
        num_extra: E, the number of tokens that come first and are not rotated.
    """
    pairs = torch.arange(head_size // 4, device=rows.device, dtype=torch.float32)
    frequency = 1 / 10000.0 ** (pairs / (head_size // 4))  # rounded as in LightningDiT
    angles = torch.cat([axis[..., None] * frequency for axis in (rows, cols)], dim=-1)
    angles = F.pad(angles, (0, 0, num_extra, 0)).unsqueeze(1)
    sin = torch.stack([-angles.sin(), angles.sin()], dim=-1)
    return angles.cos().repeat_interleave(2, dim=-1), sin.flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, heads, E + K, Dh], queries or keys, with each pair of channels rotated by `cos`
    and `sin` from `rotary_2d`."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)


def time_sinusoids(t: Tensor, size: int, time_scale: float) -> Tensor:
    """Return cosines, then sines, of `time_scale * t * 10000^(-2i / size)`, i = 0 … size/2 - 1.

    Let s be these sinusoids. A complex t + i (t - r), given to networks that predict a mean over
    the times r to t, becomes s(t) + s(t - r) - s(0); at r = t that is s(t). The result is
    [.., size], float32, or float64 if t is.

    Args:
        t: noise labels [..] of order 1, real or complex.
        size: number of sinusoids, even.
        time_scale: factor on t; 1000 spreads labels of order 1 over the wavelengths.
    """
    if t.is_complex():
        level, span = (time_sinusoids(part, size, time_scale) for part in (t.real, t.imag))
        return level + (span - time_sinusoids(torch.zeros_like(t.imag), size, time_scale))
    half = size // 2
    # Multiply before dividing, as published networks do: the other order rounds differently, which
    # shows in the fifth digit at 1000 wavelengths.
    exponent = -math.log(10000.0) * torch.arange(half, device=t.device, dtype=torch.float32) / half
    t = t if t.dtype == torch.float64 else t.float()
    angle = (time_scale * t)[..., None] * torch.exp(exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class TimestepEmbedder(nn.Module):
    """Embed noise labels t [..] of order 1 into [.., D]: sinusoids, then a two-layer MLP with SiLU.

    Args:
        hidden_size: D.
        frequency_size: number of sinusoids, even: cosines, then sines.
        mlp_size: width between the two layers.
        time_scale: factor on t, see `time_sinusoids`.
    """

    def __init__(
        self, hidden_size: int, *, frequency_size: int, mlp_size: int, time_scale: float
    ) -> None:
        super().__init__()
        self.time_scale = time_scale
        self.frequency_size = frequency_size
        self.mlp = nn.Sequential(
            nn.Linear(frequency_size, mlp_size), nn.SiLU(), nn.Linear(mlp_size, hidden_size)
        )

    def forward(self, t: Tensor) -> Tensor:
        sinusoids = time_sinusoids(t, self.frequency_size, self.time_scale)
        # Angles need float32; the weights may have another dtype.
        return self.mlp(sinusoids.to(next(self.mlp.parameters()).dtype))


class LabelEmbedder(nn.Module):
    """Embed labels y [B] into [B, D]. Label `num_classes` is the null label; `y=None` means the
    null label for the whole batch."""

    def __init__(self, num_classes: int, hidden_size: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.table = nn.Embedding(num_classes + 1, hidden_size)

    def forward(self, y: Tensor | None, batch: int) -> Tensor:
        if y is None:
            return self.table.weight[-1].repeat(batch, 1)
        return self.table(y)


def per_token(condition: Tensor) -> Tensor:
    """Return a condition that broadcasts over tokens: [B, D] becomes [B, 1, D], [B, N, D] stays."""
    return condition if condition.ndim == 3 else condition.unsqueeze(1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x * (1 + scale) + shift for tokens [B, N, D]; shift and scale [B, D] or [B, N, D]."""
    return torch.addcmul(per_token(shift), x, 1 + per_token(scale))


def add_gated(x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    """Return x + gate * update for tokens [B, N, D] and a gate [B, D] or [B, N, D]."""
    return torch.addcmul(x, per_token(gate), update)


def join_skip(x: Tensor, skip: Tensor | None, linear: nn.Module | None) -> Tensor:
    """Return linear(cat(x, skip)): tokens x [B, N, D] joined with a long skip [B, N, D]. The result
    has the dtype of x, also under autocast. If `linear` is None, return x."""
    if linear is None:
        return x
    assert skip is not None, "the block loop gives a skip to each block in `skips`"
    return linear(torch.cat([x, skip], dim=-1)).to(x.dtype)


def self_attention(x: Tensor, qkv: nn.Module, proj: nn.Module, num_heads: int) -> Tensor:
    """Return the self-attention of tokens [B, N, D]; qkv maps D -> 3 D, proj maps D -> D."""
    batch, length, width = x.shape
    split = qkv(x).view(batch, length, 3, num_heads, width // num_heads)
    q, k, v = split.permute(2, 0, 3, 1, 4)
    return proj(attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """Two linear layers [.., D] -> [.., D] with an activation between them."""

    def __init__(
        self, hidden_size: int, mlp_size: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_size)
        self.fc2 = nn.Linear(mlp_size, hidden_size)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU, as in DiT."""
    return F.gelu(x, approximate="tanh")


class AdaLNHead(nn.Module):
    """Maps tokens [B, N, D] to patches of side p, [B, N, p * p * C_out]: a norm that the condition
    modulates, then a linear layer. The caller applies SiLU to the condition, [B, D] or [B, N, D].
    """

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(hidden_size, 2 * hidden_size)
        self.linear = nn.Linear(hidden_size, patch_size**2 * out_channels)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        return self.linear(modulate(self.norm(tokens), shift, scale))

    def zero(self) -> None:
        """Set all weights to zero, so that the untrained network predicts exactly 0."""
        for layer in (self.modulation, self.linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
