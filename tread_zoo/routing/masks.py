"""Mask tokens: after a route, learned tokens replace those that bypassed it.

    rejoined[i] = the processed token  if i was kept,  m_i  otherwise        m [N, D], learned

as between the encoder and the decoder of MaskDiT (arXiv 2306.09305), which adds one learned vector
to fixed positions; here their sum m_i is learned, so that it suits any architecture. Every stream
and every long skip from before the route's end is masked.

B batch, E extra tokens, N tokens of the grid, D width of a stream.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.routing.fusion import Streams


class MaskTokens(nn.Module):
    """One learned token per stream and place of the grid, for the end of one route.

    Args:
        tokens: initial tokens [N, D] of each stream.
    """

    def __init__(self, tokens: Sequence[Tensor]) -> None:
        super().__init__()
        self.tokens = nn.ParameterList(nn.Parameter(each.clone()) for each in tokens)

    def forward(self, streams: Streams) -> Streams:
        """Return the tokens in the shape and type of streams [B, E + N, D]; extra tokens are 0."""
        return tuple(
            F.pad(mask.to(stream.dtype), (0, 0, stream.shape[1] - len(mask), 0)).expand_as(stream)
            for mask, stream in zip(self.tokens, streams, strict=True)
        )
