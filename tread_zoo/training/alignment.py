"""Alignment: a second loss pulls a block's tokens towards features of a frozen encoder.

    loss = denoising loss + weight * L,    L = - mean over tokens of cos(project(h_i), f_i)

h_i are the tokens after the block, without those that bypass it. f_i are features of the clean
image at the same positions, computed in advance (`tread-zoo encode features=…`) and stored with the
images. The projection is trained with the network. It is not averaged, and sampling does not use
it.

    REPA    an MLP projects each token                                      arXiv 2410.06940
    iREPA   projection=conv, normalize=spatial, mean_share=0.6              arXiv 2512.10794
            with weight=1 for SiT and 0.5 for JiT
    HASTE   stop: drops the term after a fraction of training               arXiv 2505.16792
            HASTE's alignment of attention maps (blocks 4 to 7) is not implemented

With `self_flow`, the averaged network is the encoder, and no features are stored: f_i are the
averaged network's tokens after a later block. If an image has two noise levels
(`objective.second_level_fraction`), the averaged network sees it at the lower one.

Dimensions: B batch, N = h * w tokens, K tokens that run through the block, D width, S channels of
features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from tread_zoo.contract.backbone import Backbone
from tread_zoo.registry import register

_EPS = 1e-6


class Alignment(Protocol):
    """The interface of every registered alignment but `none`.

    Attributes:
        weight: factor of the alignment's loss in the whole loss.
        stop: fraction of training, in (0, 1], after which the alignment's loss is dropped.
        self_taught: optional class variable. If True, the features are tokens of the averaged
            network, which runs without routes. They are taken after its block `teacher_block`, an
            attribute of the module that `build` returns.
    """

    weight: float
    stop: float

    def build(self, backbone: Backbone, feature_size: int) -> nn.Module:
        """Return the module that projects tokens and computes the alignment's loss. Its weights are
        drawn from torch's global generator. `feature_size` is S, the width of features.

        The module's attribute `block` is the index of the block after which tokens are taken. The
        module's forward takes K tokens [B,K,D], their raster positions int64 [B,K] (None: all
        tokens), and features float [B,S,h,w] of any grid. It returns the loss of each image, [B].
        """


@register("alignment", "none")
@dataclass(frozen=True)
class NoAlignment:
    """No alignment: only the loss of the objective."""


@register("alignment", "repa")
@dataclass(frozen=True, kw_only=True)
class REPA:
    """Minus the cosine similarity of projected tokens to stored features of an encoder.

    Args:
        block: index of the block after which tokens are aligned; negative ones count from the end.
            auto is depth // 4, the 8th block of 28.
        weight: factor with which this loss is added to the objective's.
        projection: `mlp` (three linear layers with SiLU, on each token) or `conv` (one 3x3
            convolution over the grid, with zeros for tokens that bypass the block).
        normalize: `spatial` normalises each channel of the features over the image: it subtracts
            `mean_share` of the channel's mean, and divides by the channel's standard deviation.
            `none` leaves the features as they are.
        mean_share: fraction of the mean that `normalize=spatial` subtracts.
        hidden_size: width of the hidden layers of `projection=mlp`.
        stop: fraction of training after which this loss is no longer computed.
    """

    block: Literal["auto"] | int = "auto"
    weight: PositiveFloat = 0.5
    projection: Literal["mlp", "conv"] = "mlp"
    normalize: Literal["none", "spatial"] = "none"
    mean_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    hidden_size: PositiveInt = 2048
    stop: Annotated[float, Field(gt=0, le=1)] = 1.0

    def build(self, backbone: Backbone, feature_size: int) -> "Projector":
        """Return the `Projector` from the backbone's tokens to features of width `feature_size`.

        Raises:
            ValueError: the backbone has no such block.
        """
        depth = backbone.num_blocks
        block = depth // 4 if self.block == "auto" else self.block
        if not -depth <= block < depth:
            raise ValueError(f"alignment.block={block}: blocks are 0 … {depth - 1}.")
        width, hidden = token_width(backbone), self.hidden_size
        layers = nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, feature_size),
        ) if self.projection == "mlp" else nn.Conv2d(width, feature_size, 3, padding=1)  # fmt: skip
        share = self.mean_share if self.normalize == "spatial" else None
        return Projector(layers, block % depth, backbone.grid, share)


@register("alignment", "self_flow")
@dataclass(frozen=True, kw_only=True)
class SelfFlow:
    """Minus the cosine similarity of projected tokens to tokens of the averaged network, as in
    Self-Flow (arXiv 2603.06507). Our projection differs: the authors' has the layers D -> 2D -> D.

    The averaged network runs on all tokens, without gradient. If an image has two noise levels, its
    input has the lower one everywhere. The authors use `objective.second_level_fraction=0.25`,
    layer 8 of 28, and the averaged network's layer 20.

    Args:
        block: index of the block after which tokens are aligned; negative ones count from the end.
            auto is three tenths of the depth.
        teacher_block: block of the averaged network that gives the features; auto is seven tenths
            of the depth.
        weight: factor with which this loss is added to the objective's.
        hidden_size: width of the projection, three linear layers with SiLU.
        stop: fraction of training after which this loss is no longer computed.
    """

    self_taught: ClassVar[bool] = True

    block: Literal["auto"] | int = "auto"
    teacher_block: Literal["auto"] | int = "auto"
    weight: PositiveFloat = 0.5
    hidden_size: PositiveInt = 256
    stop: Annotated[float, Field(gt=0, le=1)] = 1.0

    def build(self, backbone: Backbone, feature_size: int) -> "Projector":
        """Return the `Projector` to the averaged network's tokens of width `feature_size`. Its
        `teacher_block` is the index of the block after which these tokens are taken.

        Raises:
            ValueError: the backbone has no such block.
        """
        depth = backbone.num_blocks
        block = 3 * depth // 10 if self.block == "auto" else self.block
        teacher = 7 * depth // 10 if self.teacher_block == "auto" else self.teacher_block
        if not -depth <= teacher < depth:
            raise ValueError(f"alignment.teacher_block={teacher}: blocks are 0 … {depth - 1}.")
        projector = REPA(block=block, hidden_size=self.hidden_size).build(backbone, feature_size)
        projector.teacher_block = teacher % depth
        return projector


class Projector(nn.Module):
    """A network that projects tokens and compares them with features.

    Args:
        layers: a network on tokens [..., D], or a convolution on [B,D,h,w].
        block: index of the block after which the tokens are taken.
        grid: (h, w) of the backbone.
        mean_share: fraction of a channel's mean over the image that is subtracted from the
            features; they are then divided by the channel's standard deviation. None leaves them as
            they are.

    Attributes:
        teacher_block: index of the block of the averaged network whose tokens are the features, or
            None if features are stored.
    """

    teacher_block: int | None = None

    def __init__(
        self, layers: nn.Module, block: int, grid: tuple[int, int], mean_share: float | None
    ) -> None:
        super().__init__()
        self.layers, self.block, self.grid, self.mean_share = layers, block, grid, mean_share

    def forward(self, tokens: Tensor, ids: Tensor | None, features: Tensor) -> Tensor:
        """Return the loss [B]: minus the mean cosine similarity of the K tokens to the features.

        Args:
            tokens: [B,K,D].
            ids: int64 [B,K], raster positions of the tokens; None: all positions.
            features: [B,S,h,w], of width S on any grid, resized to the backbone's grid.
        """
        target = features.float()
        if target.shape[2:] != self.grid:
            target = F.interpolate(target, self.grid, mode="bilinear", antialias=True)
        if self.mean_share is not None:
            std, mean = torch.std_mean(target, dim=(2, 3), keepdim=True, correction=0)
            target = (target - self.mean_share * mean) / (std + _EPS)
        target = _gather(target.flatten(2).mT, ids)
        similarity = F.cosine_similarity(self._project(tokens, ids).float(), target, dim=-1)
        return -similarity.mean(dim=1)

    def _project(self, tokens: Tensor, ids: Tensor | None) -> Tensor:
        if not isinstance(self.layers, nn.Conv2d):
            out: Tensor = self.layers(tokens)
            return out
        if ids is not None:
            batch, _, width = tokens.shape
            full = tokens.new_zeros(batch, self.grid[0] * self.grid[1], width)
            tokens = full.scatter(1, ids[..., None].expand_as(tokens), tokens)
        maps = self.layers(tokens.mT.unflatten(2, self.grid))
        return _gather(maps.flatten(2).mT, ids)


def _gather(tokens: Tensor, ids: Tensor | None) -> Tensor:
    """Return the K tokens [B,K,D] at the positions `ids` [B,K] of `tokens` [B,N,D]; if `ids` is
    None, all tokens."""
    if ids is None:
        return tokens
    return tokens.gather(1, ids[..., None].expand(-1, -1, tokens.shape[2]))


@torch.no_grad()
def token_width(backbone: Backbone) -> int:
    """Return the width D of the tokens that `Backbone.forward(features=…)` returns."""
    x = torch.zeros(1, backbone.in_channels, *backbone.input_size)
    streams, _ = backbone.embed(x, torch.zeros(1), None)
    return backbone.hidden_state(streams).shape[-1]


def add_parameters(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Add `parameters` to an optimizer as a new group, with the options of its last group."""
    options = {k: v for k, v in optimizer.param_groups[-1].items() if k != "params"}
    optimizer.add_param_group({**options, "params": list(parameters)})
