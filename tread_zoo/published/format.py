"""Another project's checkpoint format: a table of names, and how sizes follow from shapes.

"Their" tensors are those in the project's file, "our" tensors those of our network. The table
`names` maps our names to theirs:

    "patch_embed": "x_embedder.proj"     a layer: its weight, and its bias if ours has one
    "*.qkv": "*.attn.qkv"                `*` is the name of a block, ours or theirs
    "*.mixer.D": ("*.mixer.D", "*.mixer.D_b")    ours is made from several of theirs

Their tensors are concatenated along the first axis, unless `rules` has a function for our tensor.
Export uses the same table with the functions' inverses, `_INVERSES`.

D width, C channels, p patch size, N tokens, I inner channels, W taps, n tensors.
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
    "The network predicts the noise of DDPM. sampler=euler is DDIM: no noise is added on the way."
)


def join(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def flatten_patches(weight: Tensor) -> Tensor:
    """Return the weight of a convolution over p x p patches as that of a linear layer: [D, C, p, p]
    -> [D, C p p]."""
    return weight.flatten(1)


def flatten_taps(*weights: Tensor) -> Tensor:
    """Return the weights of n depthwise convolutions of I channels and W taps, concatenated: [I, 1,
    W], … -> [n I, W]."""
    return torch.cat(weights).squeeze(1)


def stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def stack_flat(*tensors: Tensor) -> Tensor:
    """Return n vectors as the rows of a matrix; axes of length 1 go: [1, 1, D], … -> [n, D]."""
    return torch.stack(tensors).flatten(1)


def first(table: Tensor) -> Tensor:
    """Return a table without its batch axis: [1, N, D] -> [N, D]."""
    return table[0]


TensorRule = Callable[..., Tensor]
_SHARED_RULES: dict[str, TensorRule] = {"patch_embed.weight": flatten_patches, "positions": first}
# rule -> (our tensor, number of theirs, patch size) -> theirs
_INVERSES: dict[TensorRule, Callable[[Tensor, int, int], Sequence[Tensor]]] = {
    join: lambda ours, count, p: ours.chunk(count),
    flatten_patches: lambda ours, count, p: [ours.unflatten(1, (-1, p, p))],
    flatten_taps: lambda ours, count, p: ours.unsqueeze(1).chunk(count),
    first: lambda ours, count, p: [ours[None]],
    torch.neg: lambda ours, count, p: [-ours],
}


@dataclass(frozen=True)
class CheckpointFormat:
    """The checkpoint format of one project. "Their" tensors are those in the project's file, "our"
    tensors those of our network.

    Args:
        project: owner/name on GitHub.
        license: license of the weights, or of the project if they have none, as the Hub names it.
        backbone: our architecture.
        names: our names of layers and tensors -> theirs. Without an entry for `positions`,
            positions are fixed sines and cosines.
        marks: tensors that identify the format, in addition to the first and last layer.
        sizes: function from their tensors to keywords that only some constructors have.
        tables: function from our network to tensors that their file stores and our network
            computes; positions need not be among them.
        time_scale: their time divided by ours, which is of order 1.
        reversed_time: their time is 1 - ours.
        has_null_label: the label table ends with a row for the null label.
        objectives: training objectives, the usual one first.
        objective_options: function from our network to the options of the usual objective that
            differ from the defaults.
        note: a note to the user about time and output.
        rules: names of our tensors -> the function that makes them from theirs.
        head: our name of the last linear layer.
        has_heads: our constructor takes `num_heads`, which tensors do not show.
        in_halves: blocks are named `in_blocks`, `mid_block` and `out_blocks`, not `blocks`.
        time_token: the time, and the label if there is one, are the first tokens.
        zero_without_labels: our layer whose weights are zero in a network without labels.
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
    rules: Mapping[str, TensorRule] = field(default_factory=dict)
    head: str = "final.linear"
    has_heads: bool = False
    in_halves: bool = True
    time_token: bool = False
    zero_without_labels: str | None = None

    def objective(self, backbone: Backbone, name: str) -> dict[str, Any]:
        """Return the training objective `name` for our network `backbone`: a mapping with its name
        and all options."""
        options = self.objective_options(backbone) if name == self.objectives[0] else {}
        return complete("objective", {"name": name, **options})

    def fixed(self, backbone: Backbone) -> Tensors:
        """Return by name the tensors that a file of this format stores and our network computes
        instead."""
        if "positions" in self.names:
            return self.tables(backbone)
        sines = sincos_2d(backbone.config["hidden_size"], backbone.grid)
        return {"pos_embed": sines[None], **self.tables(backbone)}

    def missing_marks(self, theirs: Tensors) -> list[str]:
        """Return the names that identify this format and do not occur in `theirs`, a file's
        tensors."""
        ends = (f"{self.names['patch_embed']}.weight", f"{self.names[self.head]}.weight")
        return [key for key in (*ends, "pos_embed", *self.marks) if key not in theirs]

    def blocks(self, theirs: Tensors) -> list[str]:
        """Return the names of the blocks in a file, in order; `theirs` are its tensors."""
        stem = "in_blocks" if self.in_halves else "blocks"
        matches = (re.match(rf"{stem}\.(\d+)\.", key) for key in theirs)
        count = 1 + max(int(match[1]) for match in matches if match)
        return self.block_names(2 * count + 1 if self.in_halves else count)

    def block_names(self, num_blocks: int) -> list[str]:
        """Return the format's names of `num_blocks` blocks, in order."""
        if not self.in_halves:
            return [f"blocks.{i}" for i in range(num_blocks)]
        halves = [
            [f"{half}.{i}" for i in range(num_blocks // 2)] for half in ("in_blocks", "out_blocks")
        ]
        return [*halves[0], "mid_block", *halves[1]]

    def keywords(
        self, theirs: Tensors, num_heads: int | None = None, num_classes: int | None = None
    ) -> dict[str, Any]:
        """Return our constructor's keywords for a network with the sizes of `theirs`, a file's
        tensors. Tensors whose sizes contradict each other are not noticed here.

        Args:
            theirs: the tensors by name.
            num_heads: number of attention heads; None: as in the published sizes.
            num_classes: number of classes; None: as in the label table.
        """
        width, channels, patch_size, _ = theirs[f"{self.names['patch_embed']}.weight"].shape
        if num_classes is None:  # the last row is the null label; ImageNet's may be missing
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
        if self.has_heads:  # 64 wide, except in the widest published size: 16 of 72
            published = 16 if width == 1152 else max(1, width // 64)
            keywords["num_heads"] = num_heads or published
        return keywords

    def rule(self, ours: str, blocks: list[str]) -> tuple[tuple[str, ...], TensorRule]:
        """Return the names of the tensors in a file from which our tensor `ours` is made, and the
        function that makes it.

        Args:
            ours: a name in our state dict.
            blocks: the file's names of all blocks, in order.
        """
        block = re.match(r"blocks\.(\d+)\.", ours)
        pattern = f"*.{ours[block.end() :]}" if block else ours
        layer, _, parameter = pattern.rpartition(".")
        name = self.names.get(pattern) or f"{self.names[layer]}.{parameter}"
        names = (name,) if isinstance(name, str) else name
        if block:
            names = tuple(name.replace("*", blocks[int(block[1])]) for name in names)
        return names, {**_SHARED_RULES, **self.rules}.get(pattern, join)

    def export_tensor(
        self, ours: str, tensor: Tensor, blocks: list[str], patch_size: int
    ) -> dict[str, Tensor]:
        """Return by name the tensors that a file has in place of our tensor: the inverse of `rule`.
        Raises KeyError if the format has no such tensor or the rule has no inverse.

        Args:
            ours: name of our tensor.
            tensor: its value.
            blocks: the file's names of all blocks, in order.
            patch_size: side of a patch.
        """
        names, rule = self.rule(ours, blocks)
        return dict(zip(names, _INVERSES[rule](tensor, len(names), patch_size), strict=True))
