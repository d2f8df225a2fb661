"""Backbones with a loop or blocks of their own, as another package may write them, and faults that
can be planted in them one at a time. Without a fault they keep the contract.

B batch, E extra tokens, N tokens, K kept tokens, L = E + K.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import UViT
from tread_zoo.contract.backbone import Backbone, Features, Layout
from tread_zoo.contract.checks import check_inputs
from tread_zoo.contract.crossing import check_crossings
from tread_zoo.contract.layers import LabelEmbedder, TimestepEmbedder, patchify, unpatchify
from tread_zoo.routing import Select, Skip


class OwnLoop(UViT):
    """U-ViT with a plain block loop for routes and blocks that are left out, in its own words."""

    def forward(self, x, t, y=None, *, routes=(), features=None):
        check_inputs(self, x, t, y)
        routes = check_crossings(routes, self.num_blocks)
        if any(isinstance(route, Select) and len(route.ids) != len(x) for route in routes):
            raise ValueError("ids of another batch")
        collected = {}
        streams, condition = self.embed(x, t, y)
        now, skips = streams[0], {}
        for index in range(self.num_blocks):
            route = next((r for r in routes if self.is_inside(r, index)), None)
            if isinstance(route, Skip):
                skips[index] = now
                continue
            rows = self.rows(now, route)
            wide = rows[:, :, None].expand(-1, -1, now.shape[2])
            ids = None if route is None else route.ids
            extra, own = self.num_extra_tokens, self.context_length
            layout = Layout(self.grid, extra, ids, len(x), x.device, num_context=own)
            skip = self.take_skip(skips, index, wide) if index in self.skips else None
            (after,) = self.run_block(index, (now.gather(1, wide),), condition, layout, skip)
            skips[index] = self.make_skip(now, wide, after)
            if features is not None and index in features:
                collected[index] = Features(after[:, self.num_extra_tokens :], ids)
            now = self.rejoin(now, wide, after, route)
        out = self.head((now,), condition)
        return out if features is None else (out, collected)

    def is_inside(self, route, index):
        return route.start <= index < route.end

    def rows(self, now, route):
        if route is None:
            return torch.arange(now.shape[1], device=now.device).expand(len(now), -1)
        extra = torch.arange(self.num_extra_tokens, device=now.device).expand(len(now), -1)
        return torch.cat([extra, route.ids + self.num_extra_tokens], dim=1)

    def make_skip(self, now, wide, after):
        return now.scatter(1, wide, after)

    def take_skip(self, skips, index, wide):
        return skips[self.skips[index]].gather(1, wide)

    def rejoin(self, now, wide, after, route):
        return now.scatter(1, wide, after)


class IgnoresRoutes(OwnLoop):
    def is_inside(self, route, index):
        return False


class EndIsInclusive(OwnLoop):
    def is_inside(self, route, index):
        return route.start <= index <= route.end


class RoutesExtraTokens(OwnLoop):
    def rows(self, now, route):
        return super().rows(now, None) if route is None else route.ids


class OneSetOfIdsForAll(OwnLoop):
    def rows(self, now, route):
        return super().rows(now, route)[:1].expand(len(now), -1)


class ZeroesTheBypassed(OwnLoop):
    def rejoin(self, now, wide, after, route):
        return super().rejoin(torch.zeros_like(now), wide, after, route)


class SkipByIndex(OwnLoop):
    """A consumer of K tokens takes the first K of its skip."""

    def take_skip(self, skips, index, wide):
        return skips[self.skips[index]][:, : wide.shape[1]]


class SwallowsKeywords(OwnLoop):
    def forward(self, x, t, y=None, *, routes=(), features=None, **keywords):
        return super().forward(x, t, y, routes=routes, features=features)


class RunsDroppedBlocks(OwnLoop):
    def is_inside(self, route, index):
        return isinstance(route, Select) and super().is_inside(route, index)


class MixingBlock(nn.Module):
    """x = x + Linear(mix(LN(x)));  x = x + SiLU(Linear(x + c)), with the network's own `mix`."""

    def __init__(self, hidden_size, index, mix):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.linear = nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Linear(hidden_size, hidden_size)
        self.index, self.mix = index, mix

    def forward(self, x, condition, layout):
        x = x + self.linear(self.mix(self.norm(x), layout, self.index))
        return x + F.silu(self.mlp(x + condition[:, None]))


class MixingNet(Backbone):
    """Blocks that average over the sequence with weights given by where tokens are."""

    dependence = ("order", "ids", "grid")

    def __init__(
        self, *, input_size: int | tuple[int, int], in_channels: int, num_classes: int
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=2,
            depends_on=self.dependence,
        )
        width = 16
        self.patch_embed = nn.Linear(in_channels * 4, width)
        self.time_embed = TimestepEmbedder(
            width, frequency_size=16, mlp_size=width, time_scale=1000.0
        )
        self.label_embed = LabelEmbedder(num_classes, width) if num_classes else None
        mix = type(self).mix.__get__(self)
        self.blocks = nn.ModuleList(MixingBlock(width, index, mix) for index in range(4))
        self.last = nn.Linear(width, 4 * self.out_channels)

    def embed(self, x, t, y):
        condition = self.time_embed(t)
        if self.label_embed is not None:
            condition = condition + self.label_embed(y, len(x))
        return (self.patch_embed(patchify(x, self.patch_size)),), condition

    def run_block(self, index, streams, condition, layout, skip):
        return (self.blocks[index](streams[0], condition, layout),)

    def mix(self, x: Tensor, layout: Layout, index: int) -> Tensor:
        """Return [B, K, D] from [B, K, D]."""
        return self.weights(x, layout).to(x.dtype) @ x

    def weights(self, x: Tensor, layout: Layout) -> Tensor:
        raise NotImplementedError

    def head(self, streams, condition):
        return unpatchify(self.last(streams[0]), self.patch_size, self.grid)


class Decays(MixingNet):
    """Weights exp(-8 |i - j| / T) of raster distances over the full length T."""

    def weights(self, x, layout):
        at = self.places(x, layout)
        far = (at[:, :, None] - at[:, None]).abs() / self.length(x, layout)
        return torch.exp(-8 * far) / 4

    def places(self, x, layout):
        return layout.positions()

    def length(self, x, layout):
        return layout.grid[0] * layout.grid[1]


class DecaysByOwnLength(Decays):
    def length(self, x, layout):
        return self.num_tokens


class DecaysByKept(Decays):
    def length(self, x, layout):
        return x.shape[1]


class DecaysByIndex(Decays):
    """Counts the kept tokens as if no gap lay between them."""

    def places(self, x, layout):
        return torch.arange(x.shape[1], device=x.device).expand(len(x), -1)


class ScansOverGaps(DecaysByIndex):
    """The same fault, declared: a scan in both directions that runs over gaps."""

    dependence = ("order",)

    def length(self, x, layout):
        return 24


class Rotates(MixingNet):
    """Attention with rotary positions along the raster."""

    dependence = ("order", "ids")

    def weights(self, x, layout):
        far = self.places(x, layout)
        far = far[:, :, None] - far[:, None]
        return torch.softmax(torch.cos(far) + torch.cos(far / 3), dim=-1)

    def places(self, x, layout):
        return layout.positions()


class RotatesByIndex(Rotates):
    """Positions by index in the routed sequence, declared as a scan that runs over gaps."""

    dependence = ("order",)
    places = DecaysByIndex.places


class Serpentine(MixingNet):
    """One scan: columns from the left, every second column upwards. It runs over gaps, and
    backwards in every second block."""

    dependence = ("order", "ids")

    def __init__(self, *, input_size: int | tuple[int, int], in_channels: int, num_classes: int):
        super().__init__(input_size=input_size, in_channels=in_channels, num_classes=num_classes)
        height, width = self.grid
        path = torch.arange(height * width).view(height, width).T.contiguous()
        path[1::2] = path[1::2].flip(1)
        self.register_buffer("rank", path.flatten().argsort(), persistent=False)

    def mix(self, x, layout, index):
        order = self.order(self.rank[layout.positions()], layout)
        steps = torch.arange(x.shape[1], device=x.device)
        behind = self.behind(steps[:, None] - steps, index)
        weights = torch.where(behind >= 0, torch.exp(-0.2 * behind), 0.0).to(x.dtype)
        scanned = weights @ x.gather(1, order[:, :, None].expand_as(x))
        return scanned.gather(1, order.argsort(dim=1)[:, :, None].expand_as(scanned)) / 4

    def behind(self, steps, index):
        return -steps if index % 2 else steps

    def order(self, rank, layout):
        return rank.argsort(dim=1)


class ScansUnsorted(Serpentine):
    """Confuses each token's position on the path with the path."""

    def order(self, rank, layout):
        return rank.argsort(dim=1).argsort(dim=1)


class ScansBothWays(Serpentine):
    def behind(self, steps, index):
        return steps.abs()


class ScansUnsortedWhenRouted(ScansBothWays):
    """Sorts if all tokens are present, and otherwise walks over the kept tokens in random order."""

    def order(self, rank, layout):
        if rank.shape[1] == self.num_tokens:
            return super().order(rank, layout)
        return (layout.ids * 7919 % 31).argsort(dim=1)


class ScansOneWay(Serpentine):
    """Declares alternating directions, but scans forwards in every block."""

    def behind(self, steps, index):
        return steps
