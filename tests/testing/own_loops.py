"""Backbones with a loop or blocks of their own, as another package may write them, and faults that
can be planted in them one at a time. Without a fault they keep the contract.

B batch, E extra tokens, N tokens, K kept tokens, L = E + K.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.uvit import UViT
from tread_zoo.backbone import Backbone, Layout
from tread_zoo.layers import LabelEmbedder, TimestepEmbedder, patchify, unpatchify
from tread_zoo.routing import PathDrop, Route


class OwnLoop(UViT):
    """U-ViT with a plain block loop for routes, dropped paths and fusions in its own words."""

    def forward(self, x, t, y=None, *, routes=()):
        routes = self._check(x, t, y, routes)
        streams, condition = self.embed(x, t, y)
        now, skips, dense = streams[0], {}, None
        for index in range(self.num_blocks):
            if any(index == start for start, _ in self.fused_ranges):
                dense = now
            route = next((r for r in routes if self.is_inside(r, index)), None)
            if isinstance(route, PathDrop):
                skips[index] = self.dropped_skip(now)
            else:
                rows = self.rows(now, route)
                wide = rows[:, :, None].expand(-1, -1, now.shape[2])
                ids = None if route is None else route.ids
                layout = Layout(self.grid, self.num_extra_tokens, ids)
                skip = self.take_skip(skips, index, wide) if index in self.skips else None
                (after,) = self.run_block(index, (now.gather(1, wide),), condition, layout, skip)
                skips[index] = self.make_skip(now, wide, after)
                now = self.rejoin(now, wide, after, route)
            for start, end in self.fused_ranges:
                if index == end - 1:
                    now = self.fuse(self.fusions[f"{start}_{end}"], dense, now, route)
        return self.head((now,), condition)

    def is_inside(self, route, index):
        return route.start <= index < route.end

    def rows(self, now, route):
        if route is None:
            return torch.arange(now.shape[1]).expand(len(now), -1)
        extra = torch.arange(self.num_extra_tokens).expand(len(now), -1)
        return torch.cat([extra, route.ids + self.num_extra_tokens], dim=1)

    def make_skip(self, now, wide, after):
        return now.scatter(1, wide, after)

    def take_skip(self, skips, index, wide):
        return skips[self.skips[index]].gather(1, wide)

    def rejoin(self, now, wide, after, route):
        return now.scatter(1, wide, after)

    def dropped_skip(self, now):
        return now

    def fuse(self, fusion, dense, now, route):
        (weight,), (bias,) = fusion.weights, fusion.biases
        keep, add = weight.chunk(2, dim=1)
        return dense @ keep.T + self.update(dense, now) @ add.T + bias

    def update(self, dense, now):
        return now - dense


class IgnoresRoutes(OwnLoop):
    def is_inside(self, route, index):
        return False


class EndIsInclusive(OwnLoop):
    def is_inside(self, route, index):
        return route.start <= index <= route.end


class RoutesExtraTokens(OwnLoop):
    def rows(self, now, route):
        return super().rows(now, None) if route is None else route.ids


class CountsExtraTokensAsImage(OwnLoop):
    """Keeps the extra tokens, and besides them the rows `ids`, which are theirs in part."""

    def rows(self, now, route):
        rows = super().rows(now, route)
        if route is not None:
            rows = rows.clone()
            rows[:, self.num_extra_tokens :] -= 1
        return rows


class OneSetOfIdsForAll(OwnLoop):
    def rows(self, now, route):
        return super().rows(now, route)[:1].expand(len(now), -1)


class ZeroesTheBypassed(OwnLoop):
    def rejoin(self, now, wide, after, route):
        return super().rejoin(torch.zeros_like(now), wide, after, route)


class DetachesTheBypassed(OwnLoop):
    def rejoin(self, now, wide, after, route):
        return super().rejoin(now if route is None else now.detach(), wide, after, route)


class SkipInZeros(OwnLoop):
    """What bypassed the producer is zero in its skip."""

    def make_skip(self, now, wide, after):
        return super().make_skip(torch.zeros_like(now), wide, after)


class SkipByIndex(OwnLoop):
    """A consumer of K tokens takes the first K of its skip."""

    def take_skip(self, skips, index, wide):
        return skips[self.skips[index]][:, : wide.shape[1]]


class DetachesSkips(OwnLoop):
    def make_skip(self, now, wide, after):
        return super().make_skip(now, wide, after).detach()


class KeepsTheLength(OwnLoop):
    """Runs every block on all tokens."""

    def rows(self, now, route):
        return super().rows(now, None)


class SwallowsKeywords(OwnLoop):
    def forward(self, x, t, y=None, *, routes=(), **keywords):
        return super().forward(x, t, y, routes=routes)


class FusesOutputs(OwnLoop):
    """Projects cat(dense, output) where cat(dense, update) is meant."""

    def update(self, dense, now):
        return now


class FusesRoutesAlone(OwnLoop):
    """Leaves the fusion out where no route runs, as if it were an aid of training."""

    def fuse(self, fusion, dense, now, route):
        return now if route is None else super().fuse(fusion, dense, now, route)


class FusesKeptTokensAlone(OwnLoop):
    def fuse(self, fusion, dense, now, route):
        fused = super().fuse(fusion, dense, now, route)
        if not isinstance(route, Route):
            return fused
        rows = self.rows(now, route)[:, :, None].expand(-1, -1, now.shape[2])
        return now.scatter(1, rows, fused.gather(1, rows))


class FusesTwiceUnderARoute(OwnLoop):
    def fuse(self, fusion, dense, now, route):
        fused = super().fuse(fusion, dense, now, route)
        return fused if route is None else super().fuse(fusion, dense, fused, route)


class DetachesTheDense(OwnLoop):
    def fuse(self, fusion, dense, now, route):
        return super().fuse(fusion, dense.detach(), now, route)


class FreezesFusions(OwnLoop):
    def fuse(self, fusion, dense, now, route):
        (weight,), (bias,) = fusion.weights, fusion.biases
        frozen = SimpleNamespace(weights=[weight.detach()], biases=[bias])
        return super().fuse(frozen, dense, now, route)


class RunsDroppedBlocks(OwnLoop):
    def is_inside(self, route, index):
        return isinstance(route, Route) and super().is_inside(route, index)


class SkipOfADroppedPathInZeros(OwnLoop):
    def dropped_skip(self, now):
        return torch.zeros_like(now)


class ForgetsFusionsWhenRecomputing(OwnLoop):
    def fuse(self, fusion, dense, now, route):
        return now if self.checkpoint_blocks else super().fuse(fusion, dense, now, route)


class MixingNet(Backbone):
    """Blocks that average over the sequence with weights given by where tokens are.

    x = x + Linear(weights @ LN(x));  x = x + MLP(LN(x + c))
    """

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int = 2,
        hidden_size: int = 16,
        depth: int = 4,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
        )
        self.patch_embed = nn.Linear(in_channels * patch_size**2, hidden_size)
        self.time_embed = TimestepEmbedder(
            hidden_size, frequency_size=16, mlp_size=hidden_size, time_scale=1000.0
        )
        self.label_embed = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(hidden_size),
                    "mix": nn.Linear(hidden_size, hidden_size),
                    "mlp": nn.Linear(hidden_size, hidden_size),
                }
            )
            for _ in range(depth)
        )
        self.last = nn.Linear(hidden_size, patch_size**2 * self.out_channels)

    def embed(self, x, t, y):
        condition = self.time_embed(t)
        if self.label_embed is not None:
            condition = condition + self.label_embed(y, len(x))
        return (self.patch_embed(patchify(x, self.patch_size)),), condition

    def run_block(self, index, streams, condition, layout, skip):
        block, (x,) = self.blocks[index], streams
        x = x + block["mix"](self.mix(block["norm"](x), layout))
        return (x + F.silu(block["mlp"](x + condition[:, None])),)

    def mix(self, x: Tensor, layout: Layout) -> Tensor:
        """Return [B, K, D] from [B, K, D]."""
        return self.weights(x, layout).to(x.dtype) @ x

    def weights(self, x: Tensor, layout: Layout) -> Tensor:
        raise NotImplementedError

    def head(self, streams, condition):
        return unpatchify(self.last(streams[0]), self.patch_size, self.grid)

    def ids(self, x, layout):
        if layout.ids is not None:
            return layout.ids
        return torch.arange(self.num_tokens, device=x.device).expand(len(x), -1)


class Decays(MixingNet):
    """Weights exp(-8 |i - j| / T) of raster distances over the full length T."""

    def __init__(self, *, input_size: int | tuple[int, int], in_channels: int, num_classes: int):
        super().__init__(input_size=input_size, in_channels=in_channels, num_classes=num_classes)
        self.block_knows = ("order", "ids", "grid")

    def weights(self, x, layout):
        at = self.positions(x, layout)
        far = (at[:, :, None] - at[:, None]).abs() / self.length(x, layout)
        return torch.exp(-8 * far) / 4

    def positions(self, x, layout):
        return self.ids(x, layout)

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

    def positions(self, x, layout):
        return torch.arange(x.shape[1]).expand(len(x), -1)


class Undeclared(DecaysByKept):
    """Positions by index, and nothing said about it."""

    def __init__(self, *, input_size: int | tuple[int, int], in_channels: int, num_classes: int):
        super().__init__(input_size=input_size, in_channels=in_channels, num_classes=num_classes)
        self.block_knows = None

    positions = DecaysByIndex.positions


class Serpentine(MixingNet):
    """One scan: columns from the left, each second one upwards; run over gaps."""

    def __init__(self, *, input_size: int | tuple[int, int], in_channels: int, num_classes: int):
        super().__init__(input_size=input_size, in_channels=in_channels, num_classes=num_classes)
        self.block_knows = ("order", "ids")
        height, width = self.grid
        path = torch.arange(height * width).view(height, width).T.contiguous()
        path[1::2] = path[1::2].flip(1)
        self.register_buffer("rank", path.flatten().argsort(), persistent=False)

    def mix(self, x, layout):
        order = self.order(self.rank[self.ids(x, layout)])
        steps = torch.arange(x.shape[1], device=x.device)
        behind = steps[:, None] - steps
        weights = torch.where(behind >= 0, torch.exp(-0.2 * behind), 0.0).to(x.dtype)
        scanned = weights @ x.gather(1, order[:, :, None].expand_as(x))
        return self.undo(scanned, order, layout) / 4

    def order(self, rank):
        return rank.argsort(dim=1)

    def undo(self, scanned, order, layout):
        return scanned.gather(1, order.argsort(dim=1)[:, :, None].expand_as(scanned))


class ScansUnsorted(Serpentine):
    """Takes each token's place on the path for the path."""

    def order(self, rank):
        return rank.argsort(dim=1).argsort(dim=1)


class LeavesTokensPermuted(Serpentine):
    def run_block(self, index, streams, condition, layout, skip):
        (x,) = super().run_block(index, streams, condition, layout, skip)
        if layout.ids is None:
            return (x,)
        order = self.order(self.rank[layout.ids])
        return (x.gather(1, order[:, :, None].expand_as(x)),)
