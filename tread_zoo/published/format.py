"""What a format is: a table of names, and what the shapes say about sizes.

    names: our layer or tensor -> theirs

    "patch_embed": "x_embedder.proj"     a layer: its weight, and its bias if ours has one
    "*.qkv": "*.attn.qkv"                `*` is a block, ours or theirs
    "*.mixer.D": ("*.mixer.D", "*.mixer.D_b")    several make one

Tensors are joined along the first axis, one is taken as it is, unless `layouts` has a function for
it. The same table leads back, where `_INVERSES` has the inverses of these functions.

D width, C channels, p patch size, N tokens.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.layers import sincos_2d
from tread_zoo.registry import complete

Tensors = dict[str, Tensor]

DDPM_NOTE = (
    "It predicts the noise of DDPM. It is sampled without noise on the way: sampler=euler is DDIM."
)


def join(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def flatten_patches(weight: Tensor) -> Tensor:
    """Return the convolution that cuts patches as a linear layer: [D, C, p, p] -> [D, C p p]."""
    return weight.flatten(1)


def flatten_taps(*weights: Tensor) -> Tensor:
    """Join depthwise convolutions: [I, 1, W], … -> [n I, W]."""
    return torch.cat(weights).squeeze(1)


def stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def stack_flat(*tensors: Tensor) -> Tensor:
    """Stack vectors, whatever axes of 1 they have: [1, 1, D], … -> [n, D]."""
    return torch.stack(tensors).flatten(1)


def first(table: Tensor) -> Tensor:
    """Drop the batch axis of a table: [1, N, D] -> [N, D]."""
    return table[0]


Layout = Callable[..., Tensor]
_SHARED_LAYOUTS: dict[str, Layout] = {"patch_embed.weight": flatten_patches, "positions": first}
# layout -> (our tensor, number of theirs, patch size) -> theirs
_INVERSES: dict[Layout, Callable[[Tensor, int, int], Sequence[Tensor]]] = {
    join: lambda ours, count, p: ours.chunk(count),
    flatten_patches: lambda ours, count, p: [ours.unflatten(1, (-1, p, p))],
    flatten_taps: lambda ours, count, p: ours.unsqueeze(1).chunk(count),
    first: lambda ours, count, p: [ours[None]],
    torch.neg: lambda ours, count, p: [-ours],
}


@dataclass(frozen=True)
class Format:
    """The checkpoints of one project.

    Args:
        project: on GitHub.
        license: of its weights, as the hub names it: the project's, where it names no other.
        backbone: our architecture.
        names: our layers and tensors -> theirs; see the module's docstring. Positions that it
            does not name are the fixed sines.
        marks: tensors of theirs that, with both ends, tell it from the others.
        sizes: their tensors -> keywords of our constructor beside those that all have.
        tables: our network -> tensors of theirs that ours computes, beside the fixed sines.
        time_scale: from our time, of order 1, to theirs.
        reversed_time: its time is 1 - ours.
        has_null_label: its label table ends with a row for no label.
        objectives: what its networks are trained for, the usual one first.
        objective_options: our network -> options of the usual one, beside the defaults.
        note: what to know about its time and its output.
        layouts: our tensors -> how they are made of theirs.
        head: our name of the last linear layer.
        has_heads: our constructor takes `num_heads`, which no tensor shows.
        in_halves: blocks are `in_blocks`, `mid_block` and `out_blocks`, else `blocks`.
        time_token: time, and the label where there is one, are the first tokens.
        zero_without_labels: our layer that does nothing in a network without labels.
    """

    project: str
    license: str
    backbone: str
    names: Mapping[str, str | tuple[str, ...]]
    marks: tuple[str, ...]
    sizes: Callable[[Tensors], dict[str, Any]]
    tables: Callable[[Backbone], Tensors] = lambda backbone: {}
    time_scale: float = 1000.0
    reversed_time: bool = False
    has_null_label: bool = True
    objectives: tuple[str, ...] = ("ddpm",)
    objective_options: Callable[[Backbone], dict[str, Any]] = lambda backbone: {}
    note: str = DDPM_NOTE
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    head: str = "final.linear"
    has_heads: bool = False
    in_halves: bool = True
    time_token: bool = False
    zero_without_labels: str | None = None

    def objective(self, backbone: Backbone, name: str) -> dict[str, Any]:
        """Return one of its objectives, by its name, with every option."""
        options = self.objective_options(backbone) if name == self.objectives[0] else {}
        return complete("objective", {"name": name, **options})

    def fixed(self, backbone: Backbone) -> Tensors:
        """Return the tensors of theirs that ours computes."""
        if "positions" in self.names:
            return self.tables(backbone)
        sines = sincos_2d(backbone.config["hidden_size"], backbone.grid)
        return {"pos_embed": sines[None], **self.tables(backbone)}

    def missing_marks(self, theirs: Tensors) -> list[str]:
        """Return which of the tensors that mark a file of this format are not in `theirs`."""
        ends = (f"{self.names['patch_embed']}.weight", f"{self.names[self.head]}.weight")
        return [key for key in (*ends, "pos_embed", *self.marks) if key not in theirs]

    def blocks(self, theirs: Tensors) -> list[str]:
        """Return their names of the blocks, in order."""
        stem = "in_blocks" if self.in_halves else "blocks"
        matches = (re.match(rf"{stem}\.(\d+)\.", key) for key in theirs)
        count = 1 + max(int(match[1]) for match in matches if match)
        return self.block_names(2 * count + 1 if self.in_halves else count)

    def block_names(self, num_blocks: int) -> list[str]:
        """Return their names of the blocks of a network with so many, in order."""
        if not self.in_halves:
            return [f"blocks.{i}" for i in range(num_blocks)]
        halves = [
            [f"{half}.{i}" for i in range(num_blocks // 2)] for half in ("in_blocks", "out_blocks")
        ]
        return [*halves[0], "mid_block", *halves[1]]

    def keywords(
        self, theirs: Tensors, num_heads: int | None = None, num_classes: int | None = None
    ) -> dict[str, Any]:
        """Return the keywords of our constructor for a network of the same sizes.

        Where numbers do not fit each other, shapes of the two networks will differ.
        """
        width, channels, patch_size, _ = theirs[f"{self.names['patch_embed']}.weight"].shape
        if num_classes is None:  # the last row is the null label, but ImageNet may be without one
            rows = len(theirs.get(f"{self.names['label_embed.table']}.weight", ()))
            whole = rows == 1000 or not self.has_null_label
            num_classes = rows if whole else max(0, rows - 1)
        num_tokens = theirs["pos_embed"].shape[1]
        if self.time_token:
            num_tokens -= 2 if num_classes else 1
        out_values = len(theirs[f"{self.names[self.head]}.weight"])
        keywords = {
            "input_size": math.isqrt(num_tokens) * patch_size,
            "in_channels": channels,
            "patch_size": patch_size,
            "learn_sigma": out_values > channels * patch_size**2,
            "num_classes": num_classes,
            "hidden_size": width,
            "depth": len(self.blocks(theirs)),
            "time_scale": self.time_scale,
            **self.sizes(theirs),
        }
        if self.reversed_time:
            keywords["reversed_time"] = True
        if self.has_heads:  # of 64 in every published size but the widest, which has 16 of 72
            published = 16 if width == 1152 else max(1, width // 64)
            keywords["num_heads"] = num_heads or published
        return keywords

    def rule(self, ours: str, blocks: list[str]) -> tuple[tuple[str, ...], Layout]:
        """Return what our tensor `ours` is made of, by their names, and how.

        Args:
            ours: its name in our state dict.
            blocks: their names of the blocks, in order.
        """
        block = re.match(r"blocks\.(\d+)\.", ours)
        pattern = f"*.{ours[block.end() :]}" if block else ours
        layer, _, parameter = pattern.rpartition(".")
        given = self.names.get(pattern) or f"{self.names[layer]}.{parameter}"
        names = (given,) if isinstance(given, str) else given
        if block:
            names = tuple(name.replace("*", blocks[int(block[1])]) for name in names)
        return names, {**_SHARED_LAYOUTS, **self.layouts}.get(pattern, join)

    def take_apart(
        self, ours: str, tensor: Tensor, blocks: list[str], patch_size: int
    ) -> dict[str, Tensor]:
        """Return their tensors that make our tensor `ours`, by name: `rule` the other way.

        Raises:
            KeyError: the format has no place for it, or no way back.
        """
        names, layout = self.rule(ours, blocks)
        return dict(zip(names, _INVERSES[layout](tensor, len(names), patch_size), strict=True))
