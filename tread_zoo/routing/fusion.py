"""Fusion at rejoining, after SPRINT (arXiv 2510.21986): what came and what the route added, mapped.

    dense  = the stream when the route started, all tokens
    update = the stream when the route ends - dense     for a kept token; 0 for a bypassed one
    fused  = W cat(dense, update) + b                   W [D, 2D], at first [I, I]; b at first 0

With the first weights fused = dense + update: the kept tokens as processed, the bypassed ones as
they left, which is TREAD's rejoining (arXiv 2501.04765). SPRINT projects cat(dense, sparse), where
`sparse` is the route's output with a mask token at the places that bypassed it. With the token's
own dense value for a mask token, sparse = dense + update, and W' cat(dense, sparse) is the map
above in other coordinates: W = [W'_dense + W'_sparse, W'_sparse]. In ours, zero means that nothing
was added: alike for a bypassed token, a dropped path, and blocks that leave the stream as it is.

SPRINT's mask token is zero. With `bypassed="zero"` so is ours, and the map is W' itself:

    fused = W' cat(dense, sparse) + b      sparse: the route's output; 0 for a bypassed token, and
                                           for all tokens of a dropped path; W' at first [I, I] / 2

B batch, E extra tokens, N tokens of the grid, D width of a stream.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Streams = tuple[Tensor, ...]
Bypassed = Literal["dense", "zero"]


class Fusion(nn.Module):
    """One linear map 2D -> D for each stream that travels, at the end of one range of blocks.

    The extra tokens (time, label) are fused like those of the image, of which they differ only in
    that they are always kept. The later blocks mix them all, and the map may turn the basis of the
    streams: left alone, extra tokens would go on in another basis than the image's.

    Args:
        widths: D of each stream.
        bypassed: what stands for a token that did not run: its dense value, or zero.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        widths: Sequence[int],
        bypassed: Bypassed = "dense",
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.bypassed = bypassed
        self.weights = nn.ParameterList(
            torch.empty(width, 2 * width, device=device, dtype=dtype) for width in widths
        )
        self.biases = nn.ParameterList(
            torch.empty(width, device=device, dtype=dtype) for width in widths
        )
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Set every weight, drawing nothing: weights [I, I], with zeros for what bypassed half of
        it, biases 0."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            weight.copy_(torch.eye(len(weight), device=weight.device).repeat(1, 2))
            weight.div_(2 if self.bypassed == "zero" else 1)
            bias.zero_()

    def absent(self, streams: Streams) -> Streams:
        """Return what stands for tokens that did not run."""
        return tuple(map(torch.zeros_like, streams)) if self.bypassed == "zero" else streams

    def forward(self, dense: Streams, output: Streams) -> Streams:
        """Return the fused streams, each [B, E + N, D] and of the type of its dense one.

        Args:
            dense: the streams when the route started.
            output: the streams at its end, at full length, bypassed tokens as of `absent`.
        """
        whole = self.bypassed == "zero"
        return tuple(
            F.linear(
                torch.cat([before, after if whole else after - before], dim=-1), weight, bias
            ).to(before.dtype)
            for before, after, weight, bias in zip(
                dense, output, self.weights, self.biases, strict=True
            )
        )
