"""The two mixes of Diffusion-RWKV (arXiv 2404.04478): of tokens, and of channels.

Both begin with a q-shift (`mixers.q_shift`). Every projection gets its own blend of the token and
the shifted channels, blend = x * own + shifted * (1 - own) with a number `own` per channel:

    SpatialMix: r, k, v = Linear(blend_r), Linear(blend_k), Linear(blend_v)
                Linear(sigmoid(r) * WKV(k, v, w, u))
    ChannelMix: sigmoid(Linear(blend_r)) * Linear(relu(Linear(blend_k))^2)

WKV averages v in both directions, with weights exp(k) that fall with distance at rate w; a token
weighs its own v by exp(u + k). By default (`gaps="decay"`), tokens keep their positions on the grid
under a route: a missing neighbour is zero, and the WKV takes distances along the full curve, as
fractions of its length.

B batch, K tokens present, N = h * w tokens of the full grid, D width.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor, nn

from backbones.mixers.q_shift import GridWalk, ShiftingMixer, shift_and_blend
from tread_zoo.kernels import bidirectional_wkv

SLOWEST, FASTEST = 0.3, 30.0  # initial decay over the whole image, of the first and last channel


class SpatialMix(ShiftingMixer):
    """Mix tokens by a mean that decays with distance, the WKV: [B, K, D] -> [B, K, D].

    Receptance, keys and values each come from a blend of the tokens and their neighbours. The
    parameter `own` [3, D] is the token's own fraction in each blend.

    Args:
        hidden_size: D, divisible by 4.
        shift: `scan_order`, `gaps` and `index`, see `ShiftingMixer`. With gaps=decay, missing
            tokens count in the distances of the WKV; otherwise only the tokens present count.
    """

    def __init__(self, hidden_size: int, **shift: Any) -> None:
        super().__init__(hidden_size, **shift)
        self.depends_on = ("order", "ids", "grid")
        self.own = nn.Parameter(torch.empty(3, hidden_size))
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.decay = nn.Parameter(torch.empty(hidden_size))
        self.bonus = nn.Parameter(torch.empty(hidden_size))
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, walk: GridWalk) -> Tensor:
        scan, blends = walk.scan, shift_and_blend(x, walk, self.own)
        layers = (self.receptance, self.key, self.value)
        r, k, v = (layer(blend) for layer, blend in zip(layers, blends, strict=True))
        mean = self._mean(scan.permute(k), scan.permute(v), walk)
        return self.output(torch.sigmoid(r) * scan.restore(mean))

    def _mean(self, k: Tensor, v: Tensor, walk: GridWalk) -> Tensor:
        """Return the WKV, a mean of the values v weighted by the keys k and by distance. All are
        [B, L, D] in the order of `walk`, context tokens first. A mirrored copy of the context is
        appended, so that the image's last token is as near to a context as its first token."""
        places = walk.scan.places if self.gaps == "decay" else None
        length, num_context = walk.num_tokens, walk.scan.num_context
        if num_context:
            k, v = (torch.cat([x, x[:, :num_context].flip(1)], dim=1) for x in (k, v))
            if places is not None:
                ahead = torch.arange(num_context, device=k.device).expand(len(k), -1)
                behind = ahead + num_context + length
                places = torch.cat([ahead, places + num_context, behind], dim=1)
            length += 2 * num_context
        mean = bidirectional_wkv(k, v, self.decay, self.bonus, positions=places, length=length)
        return mean[:, : mean.shape[1] - num_context]

    def initialize(self, num_blocks: int) -> None:
        """Set these parameters; the linear layers stay as the backbone has drawn them.

        | parameter | value |
        |---|---|
        | `own` | 0.5: a blend is half the token, half its neighbours |
        | `decay` | log-spaced over the channels, 0.3 … 30 |
        | `bonus` | 0: with equal keys, a token weighs itself as much as its neighbour |
        """
        nn.init.constant_(self.own, 0.5)
        nn.init.zeros_(self.bonus)
        with torch.no_grad():
            spaced = torch.linspace(math.log(SLOWEST), math.log(FASTEST), len(self.decay))
            self.decay.copy_(spaced.exp())


class ChannelMix(nn.Module):
    """Make two blends of each token and its neighbours, and mix their channels: [B, K, D] ->
    [B, K, D]. The parameter `own` [2, D] is the token's own fraction in each blend.

    Args:
        hidden_size: D, divisible by 4.
        mlp_ratio: inner width divided by D.
    """

    def __init__(self, hidden_size: int, mlp_ratio: PositiveFloat = 4.0) -> None:
        super().__init__()
        inner = int(hidden_size * mlp_ratio)
        self.own = nn.Parameter(torch.empty(2, hidden_size))
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, inner, bias=False)
        self.value = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: Tensor, walk: GridWalk) -> Tensor:
        r, k = shift_and_blend(x, walk, self.own)
        keys = F.relu(self.key(k)).square()
        return torch.sigmoid(self.receptance(r)) * self.value(keys)

    def initialize(self, num_blocks: int) -> None:
        """Set `own` to 0.5: at first a blend is half the token, half its neighbours."""
        nn.init.constant_(self.own, 0.5)
