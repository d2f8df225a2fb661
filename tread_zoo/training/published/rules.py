"""What every format is made of: rules, layouts, and sizes read off shapes.

D width, C channels, p patch size, N tokens.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

# A head is 64 wide in every published size but the widest, which has 16 heads of 72.
_HEAD_WIDTH = 64
_NUM_HEADS = {1152: 16}
_IMAGENET_CLASSES = 1000


def same(tensor: Tensor) -> Tensor:
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """Drop all axes but the first, such as those of a patch: [D, C, p, p] -> [D, C p p]."""
    return tensor.reshape(len(tensor), -1)


def join(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def join_flat(*tensors: Tensor) -> Tensor:
    """Join depthwise convolutions [I, 1, taps] to one table [2 I, taps]."""
    return torch.cat([flat(tensor) for tensor in tensors])


def stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def without_batch(tensor: Tensor) -> Tensor:
    """Drop the batch axis of a table: [1, N, D] -> [N, D]."""
    return tensor[0]


def stack_flat(*tensors: Tensor) -> Tensor:
    """Stack vectors, whatever axes of 1 they have: [1, 1, D], [1, 1, D] -> [2, D]."""
    return torch.stack([tensor.reshape(-1) for tensor in tensors])


@dataclass(frozen=True)
class Rule:
    """How one of our tensors is made: `layout(*theirs)`."""

    ours: str
    theirs: tuple[str, ...]
    layout: Callable[..., Tensor] = same


def rule(ours: str, *theirs: str, layout: Callable[..., Tensor] = same) -> Rule:
    return Rule(ours, theirs, layout)


def linear_rules(ours: str, theirs: str, *, bias: bool = True) -> Iterator[Rule]:
    """Yield the rules of a layer with a weight and, mostly, a bias."""
    for part in ("weight", "bias") if bias else ("weight",):
        yield rule(f"{ours}.{part}", f"{theirs}.{part}")


def patch_rules(theirs: str) -> Iterator[Rule]:
    """Yield the rules of the convolution that cuts and embeds patches."""
    yield rule("patch_embed.weight", f"{theirs}.weight", layout=flat)
    yield rule("patch_embed.bias", f"{theirs}.bias")


@dataclass(frozen=True)
class Choices:
    """What the tensors cannot say; None takes what the published checkpoints have."""

    num_heads: int | None = None
    num_classes: int | None = None


@dataclass(frozen=True)
class Format:
    """The checkpoints of one project.

    Args:
        project: on GitHub.
        backbone: our architecture.
        time_scale: from our time, of order 1, to theirs.
        objectives: what its networks are trained for, the usual one first; "ddpm" is one that
            nothing here samples with.
        marks: keys that tell it from the others; sizes are read off these.
        keywords: (their tensors, choices) -> keywords of our constructor for the same sizes.
        rules: (their tensors, keywords) -> how each tensor of ours is made.
        fixed: keywords -> tensors of theirs that ours computes: compared, not stored.
        folded: what is done to tensors of ours afterwards, to turn a convention into ours.
        note: what to know about its time and its output.
    """

    project: str
    backbone: str
    time_scale: float
    objectives: tuple[str, ...]
    marks: tuple[str, ...]
    keywords: Callable[[Tensors, Choices], dict[str, Any]]
    rules: Callable[[Tensors, dict[str, Any]], list[Rule]]
    note: str
    fixed: Callable[[dict[str, Any]], Tensors] = lambda keywords: {}
    folded: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


DDPM_NOTE = (
    "It predicts the noise of DDPM in its first C channels, and counts time in 1000 steps: give "
    "t = step / 1000. No objective here samples such a network, so scripts/sample.py refuses it; "
    "use it from Python."
)


# What sizes follow from which shapes --------------------------------------------------------------


def sizes_of_ends(patches: Tensor, head: Tensor, num_tokens: int) -> dict[str, Any]:
    """Return sizes from the patch convolution [D, C, p, p], the head [p p C_out, D] and N."""
    if patches.ndim != 4 or head.ndim != 2:
        raise ValueError(
            f"the patch embedding {list(patches.shape)} and the head {list(head.shape)} must be "
            "[D, C, p, p] and [p p C_out, D]: this network was built otherwise."
        )
    _, channels, patch_size, _ = patches.shape
    side = math.isqrt(max(0, num_tokens))
    if side < 1 or side**2 != num_tokens:
        raise ValueError(
            f"pos_embed has positions for {num_tokens} patches, which form no square; only square "
            "inputs can be imported."
        )
    out_channels = len(head) // patch_size**2
    if out_channels not in (channels, 2 * channels):
        raise ValueError(
            f"its head gives {len(head)} values a patch; {channels} channels in patches of "
            f"{patch_size} need {channels * patch_size**2}, or twice that with a learned sigma."
        )
    return {
        "input_size": side * patch_size,
        "in_channels": channels,
        "patch_size": patch_size,
        "learn_sigma": out_channels == 2 * channels,
    }


def count_blocks(theirs: Collection[str], name: str) -> int:
    """Return how many blocks `name.0`, `name.1`, … there are, up to the last one."""
    found = (re.match(rf"{re.escape(name)}\.(\d+)\.", key) for key in theirs)
    return 1 + max(int(match[1]) for match in found if match)


def names_of_halves(depth: int) -> Sequence[str]:
    """Return their names of a first half, a middle block and a second half, in order."""
    half = range(depth // 2)
    return [*(f"in_blocks.{i}" for i in half), "mid_block", *(f"out_blocks.{i}" for i in half)]


def heads_of(width: int, choices: Choices) -> int:
    """Return the number of heads, which no shape shows."""
    heads = choices.num_heads or _NUM_HEADS.get(width, width // _HEAD_WIDTH)
    if not heads or width % heads:
        raise ValueError(
            f"num_heads={choices.num_heads}: the number of heads cannot be read off the tensors, "
            f"and {heads} do not divide the width {width}. Give num_heads=…"
        )
    return heads


def classes_of(theirs: Tensors, table: str, choices: Choices) -> int:
    """Return the number of classes of a label table, whose last row is the null label.

    A table of 1000 rows is ImageNet's without one.
    """
    rows = len(theirs[table]) if table in theirs else 0
    expected = rows if rows == _IMAGENET_CLASSES else max(0, rows - 1)
    classes = expected if choices.num_classes is None else choices.num_classes
    if classes not in ((rows - 1, rows) if rows else (0,)):
        raise ValueError(
            f"num_classes={classes} does not fit its label table of {rows} rows; it may be "
            + (f"{rows - 1}, or {rows} if no row is the null label." if rows else "0.")
        )
    return classes


def label_rules(table: str, theirs: Tensors, keywords: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rule of the label table, if there is one."""
    classes = keywords["num_classes"]
    if classes:
        full = len(theirs[table]) > classes
        yield rule("label_embed.table.weight", table, layout=same if full else add_null_row)


def add_null_row(table: Tensor) -> Tensor:
    """Give a label table [classes, D] the row for no label that it lacks: the mean of its rows."""
    return torch.cat([table, table.mean(dim=0, keepdim=True)])
