"""Mask tokens: what the network sees, behind a route, in the places of the tokens that bypassed it.

    rejoined[i] = the processed token  if i was kept,  m_i  otherwise        m [N, D], learned

as between the encoder and the decoder of MaskDiT (arXiv 2306.09305), which has one vector for all
places and adds fixed positions: m_i is their sum, learned, for architectures of any positions. All
that travels per token is masked alike: every stream, and long skips from before the route's end.

B batch, E extra tokens, N tokens of the grid, D width of a stream.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.routing.fusion import Streams


class MaskTokens(nn.Module):
    """One learned token for each stream and place of the grid, for the end of one route.

    Args:
        tokens: [N, D] of each stream, as they start.
    """

    def __init__(self, tokens: Sequence[Tensor]) -> None:
        super().__init__()
        self.tokens = nn.ParameterList(nn.Parameter(each.clone()) for each in tokens)

    def forward(self, streams: Streams) -> Streams:
        """Return the tokens in the shapes and types of streams [B, E + N, D], extra ones zero."""
        return tuple(
            F.pad(mask.to(stream.dtype), (0, 0, stream.shape[1] - len(mask), 0)).expand_as(stream)
            for mask, stream in zip(self.tokens, streams, strict=True)
        )
