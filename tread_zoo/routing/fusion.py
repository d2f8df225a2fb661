"""Fusion: a learned map of a stream before a route and of what the route added.

    dense  = the stream at the start of the route, all tokens
    update = the stream at its end - dense      of a kept token; 0 of a bypassed one
    fused  = W cat(dense, update) + b           W [D, 2D], at first [I, I]; b at first 0

Initially fused = dense + update, which is TREAD's rejoining (arXiv 2501.04765). SPRINT (2510.21986)
maps cat(dense, sparse), where `sparse` is the route's output with a mask token for bypassed tokens.
With the dense value as mask token, sparse = dense + update, and W' cat(dense, sparse) is the same
map: W = [W'_dense + W'_sparse, W'_sparse]. Here zero means that nothing was added, for a bypassed
token as for a dropped path.

SPRINT's mask token is zero, and so it is with `bypassed="zero"`, where the map is W' itself:

    fused = W' cat(dense, sparse) + b           sparse is 0 for bypassed tokens and for a dropped
                                                path; W' at first [I, I] / 2

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
    """One linear map 2D -> D per stream, at the end of one range of blocks.

    Extra tokens are fused as well: the map may change the basis of the streams, and later blocks
    mix all tokens.

    Args:
        widths: D of each stream.
        bypassed: input for a token that did not run: its dense value, or zero.
    """

    def __init__(self, widths: Sequence[int], bypassed: Bypassed = "dense") -> None:
        super().__init__()
        self.bypassed, scale = bypassed, 0.5 if bypassed == "zero" else 1.0
        self.weights = nn.ParameterList(scale * torch.eye(width).repeat(1, 2) for width in widths)
        self.biases = nn.ParameterList(torch.zeros(width) for width in widths)

    def absent(self, streams: Streams) -> Streams:
        """Return the input for tokens that did not run."""
        return tuple(map(torch.zeros_like, streams)) if self.bypassed == "zero" else streams

    def forward(self, dense: Streams, output: Streams) -> Streams:
        """Return the fused streams [B, E + N, D], in the precision of `dense`.

        Args:
            dense: the streams at the start of the route.
            output: the streams at its end, with bypassed tokens as of `absent`.
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
