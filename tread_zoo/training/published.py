"""The checkpoints that other projects publish: what their tensors are called, and what they mean.

    their tensors -> `recognize`: whose are they? -> `Format.keywords`: sizes from shapes
                  -> `Format.rules`: names and layouts -> tensors of our backbone

A format is a table. Each `Rule` makes one of our tensors from one or more of theirs; what no rule
asks for is unknown, and what a rule asks for in vain is missing. Three layouts recur:

- a convolution that cuts patches, [D, C, p, p], is our linear layer [D, C p p];
- a head's rows are ordered row, column, channel (p, p, C_out) in all of these projects, as ours;
- blocks that they keep as `in_blocks`, `mid_block`, `out_blocks` are one list here.

Time. All feed sinusoids with a time of their own; ours is of order 1 with noise at 1, and
`time_scale` is the factor between. SiT's runs the other way (data at 1) and its velocity points to
the data, so with t ours and v theirs our network must be -v(x, 1 - t). Its sinusoids at 1 - t are
a fixed linear map of those at t, frequency by frequency:

    cos(f (1 - t)) = cos f cos(f t) + sin f sin(f t)
    sin(f (1 - t)) = sin f cos(f t) - cos f sin(f t)

and a linear layer comes next, so its columns absorb the map, exactly; the sign goes into the last
linear layer.

D width, C channels, p patch size, F number of sinusoids.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tread_zoo.errors import unknown_name
from tread_zoo.layers import sincos_2d

Tensors = dict[str, Tensor]

# A head is 64 wide in every published size but the widest, which has 16 heads of 72.
_HEAD_WIDTH = 64
_NUM_HEADS = {1152: 16}
_IMAGENET_CLASSES = 1000


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _flat(tensor: Tensor) -> Tensor:
    """Drop all axes but the first, such as those of a patch: [D, C, p, p] -> [D, C p p]."""
    return tensor.reshape(len(tensor), -1)


def _join(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def _join_flat(*tensors: Tensor) -> Tensor:
    """Join depthwise convolutions [I, 1, taps] to one table [2 I, taps]."""
    return torch.cat([_flat(tensor) for tensor in tensors])


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def _first(tensor: Tensor) -> Tensor:
    """Drop the batch axis of a table: [1, N, D] -> [N, D]."""
    return tensor[0]


def _vector(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


@dataclass(frozen=True)
class Rule:
    """How one of our tensors is made: `layout(*theirs)`."""

    ours: str
    theirs: tuple[str, ...]
    layout: Callable[..., Tensor] = _same


def _rule(ours: str, *theirs: str, layout: Callable[..., Tensor] = _same) -> Rule:
    return Rule(ours, theirs, layout)


def _linear(ours: str, theirs: str, *, bias: bool = True) -> Iterator[Rule]:
    """Yield the rules of a layer with a weight and, mostly, a bias."""
    for part in ("weight", "bias") if bias else ("weight",):
        yield _rule(f"{ours}.{part}", f"{theirs}.{part}")


def _patches(theirs: str) -> Iterator[Rule]:
    """Yield the rules of the convolution that cuts and embeds patches."""
    yield _rule("patch_embed.weight", f"{theirs}.weight", layout=_flat)
    yield _rule("patch_embed.bias", f"{theirs}.bias")


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


# DiT, and SiT and TREAD, which have its tensors ---------------------------------------------------

_DIT_MARKS = (
    "x_embedder.proj.weight",
    "pos_embed",
    "t_embedder.mlp.0.weight",
    "blocks.0.attn.qkv.weight",
    "blocks.0.mlp.fc1.weight",
    "final_layer.linear.weight",
    "final_layer.adaLN_modulation.1.weight",
)


def _dit_keywords(theirs: Tensors, choices: Choices) -> dict[str, Any]:
    patches, head = theirs["x_embedder.proj.weight"], theirs["final_layer.linear.weight"]
    width = len(patches)
    return {
        **_ends(patches, head, num_tokens=theirs["pos_embed"].shape[1]),
        "num_classes": _num_classes(theirs, "y_embedder.embedding_table.weight", choices),
        "hidden_size": width,
        "depth": _count(theirs, "blocks"),
        "num_heads": _num_heads(width, choices),
        "mlp_ratio": len(theirs["blocks.0.mlp.fc1.weight"]) / width,
    }


def _dit_rules(theirs: Tensors, keywords: dict[str, Any]) -> list[Rule]:
    rules = [
        *_patches("x_embedder.proj"),
        *_linear("time_embed.mlp.0", "t_embedder.mlp.0"),
        *_linear("time_embed.mlp.2", "t_embedder.mlp.2"),
        *_labels("y_embedder.embedding_table.weight", theirs, keywords),
        *_linear("final.modulation", "final_layer.adaLN_modulation.1"),
        *_linear("final.linear", "final_layer.linear"),
    ]
    for i in range(keywords["depth"]):
        rules += [
            *_linear(f"blocks.{i}.qkv", f"blocks.{i}.attn.qkv"),
            *_linear(f"blocks.{i}.proj", f"blocks.{i}.attn.proj"),
            *_linear(f"blocks.{i}.mlp.fc1", f"blocks.{i}.mlp.fc1"),
            *_linear(f"blocks.{i}.mlp.fc2", f"blocks.{i}.mlp.fc2"),
            *_linear(f"blocks.{i}.modulation", f"blocks.{i}.adaLN_modulation.1"),
        ]
    return rules


def _dit_fixed(keywords: dict[str, Any]) -> Tensors:
    side = keywords["input_size"] // keywords["patch_size"]
    return {"pos_embed": sincos_2d(keywords["hidden_size"], (side, side))[None]}


def reverse_time(weight: Tensor) -> Tensor:
    """Return the layer [D, 2 F] on the sinusoids of t that equals `weight` on those of 1 - t.

    Cosines come first; frequency i is 10000^(-i / F). See the module's docstring for the map.
    """
    half = weight.shape[1] // 2
    frequency = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half)
    cos, sin = frequency.double().cos(), frequency.double().sin()
    of_cos, of_sin = weight.double().chunk(2, dim=1)
    both = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1)
    return both.to(weight.dtype)


# U-ViT --------------------------------------------------------------------------------------------

_UVIT_MARKS = (
    "patch_embed.proj.weight",
    "pos_embed",
    "in_blocks.0.attn.qkv.weight",
    "in_blocks.0.mlp.fc1.weight",
    "decoder_pred.weight",
)


def _uvit_keywords(theirs: Tensors, choices: Choices) -> dict[str, Any]:
    patches, head = theirs["patch_embed.proj.weight"], theirs["decoder_pred.weight"]
    num_classes, width = _num_classes(theirs, "label_emb.weight", choices), len(patches)
    num_tokens = theirs["pos_embed"].shape[1] - (2 if num_classes else 1)
    return {
        **_ends(patches, head, num_tokens),
        "num_classes": num_classes,
        "hidden_size": width,
        "depth": 2 * _count(theirs, "in_blocks"),
        "num_heads": _num_heads(width, choices),
        "mlp_ratio": len(theirs["in_blocks.0.mlp.fc1.weight"]) / width,
        "time_mlp": "time_embed.0.weight" in theirs,
        "final_conv": "final_layer.weight" in theirs,
    }


def _uvit_rules(theirs: Tensors, keywords: dict[str, Any]) -> list[Rule]:
    rules = [
        *_patches("patch_embed.proj"),
        _rule("positions", "pos_embed", layout=_first),
        *_labels("label_emb.weight", theirs, keywords),
        *_linear("norm", "norm"),
        *_linear("linear", "decoder_pred"),
    ]
    if keywords["time_mlp"]:
        rules += _linear("time_embed.mlp.0", "time_embed.0")
        rules += _linear("time_embed.mlp.2", "time_embed.2")
    if keywords["final_conv"]:
        rules += _linear("conv", "final_layer")
    for i, name in enumerate(_halves(keywords["depth"])):
        rules += [
            *_linear(f"blocks.{i}.norm1", f"{name}.norm1"),
            *_linear(f"blocks.{i}.qkv", f"{name}.attn.qkv", bias=False),
            *_linear(f"blocks.{i}.proj", f"{name}.attn.proj"),
            *_linear(f"blocks.{i}.norm2", f"{name}.norm2"),
            *_linear(f"blocks.{i}.mlp.fc1", f"{name}.mlp.fc1"),
            *_linear(f"blocks.{i}.mlp.fc2", f"{name}.mlp.fc2"),
        ]
        if name.startswith("out_blocks"):
            rules += _linear(f"blocks.{i}.skip_proj", f"{name}.skip_linear")
    return rules


# DiS ----------------------------------------------------------------------------------------------

_DIS_MARKS = (
    "patch_embed.proj.weight",
    "pos_embed",
    "in_blocks.0.mixer.in_proj.weight",
    "in_blocks.0.mixer.conv1d_b.weight",
    "in_blocks.0.mixer.A_b_log",
    "final_layer.linear.weight",
)


def _dis_keywords(theirs: Tensors, choices: Choices) -> dict[str, Any]:
    patches, head = theirs["patch_embed.proj.weight"], theirs["final_layer.linear.weight"]
    num_classes = _num_classes(theirs, "label_emb.embedding_table.weight", choices)
    inner, state_size = theirs["in_blocks.0.mixer.A_b_log"].shape
    num_tokens = theirs["pos_embed"].shape[1] - (2 if num_classes else 1)
    return {
        **_ends(patches, head, num_tokens),
        "num_classes": num_classes,
        "hidden_size": len(patches),
        "depth": 2 * _count(theirs, "in_blocks"),
        "expand": inner // len(patches),
        "state_size": state_size,
        "conv_width": theirs["in_blocks.0.mixer.conv1d_b.weight"].shape[-1],
    }


def _dis_rules(theirs: Tensors, keywords: dict[str, Any]) -> list[Rule]:
    rules = [
        *_patches("patch_embed.proj"),
        _rule("positions", "pos_embed", layout=_first),
        *_linear("time_embed.mlp.0", "time_embed.0"),
        *_linear("time_embed.mlp.2", "time_embed.2"),
        *_labels("label_emb.embedding_table.weight", theirs, keywords),
        _rule("norm.weight", "norm_f.weight"),
        *_linear("final.linear", "final_layer.linear"),
    ]
    if keywords["num_classes"]:
        rules += _linear("final.modulation", "final_layer.adaLN_modulation.1")
    else:  # its head is then not modulated at all: shift 0, scale 0
        rules += [
            _rule("final.modulation.weight", "norm_f.weight", layout=_no_modulation),
            _rule("final.modulation.bias", "norm_f.weight", layout=_no_shift),
        ]
    for i, name in enumerate(_halves(keywords["depth"])):
        rules += [
            _rule(f"blocks.{i}.norm.weight", f"{name}.norm.weight"),
            _rule(f"blocks.{i}.mixer.in_proj.weight", f"{name}.mixer.in_proj.weight"),
            _rule(f"blocks.{i}.mixer.out_proj.weight", f"{name}.mixer.out_proj.weight"),
            *_both_ways(f"blocks.{i}.mixer", f"{name}.mixer"),
        ]
        if name.startswith("out_blocks"):
            rules += _linear(f"blocks.{i}.skip_proj", f"{name}.skip_linear")
    return rules


def _both_ways(ours: str, theirs: str) -> list[Rule]:
    """Return the rules of a mixer's parameters, one set a direction, forward first."""
    pairs = (
        ("conv_weight", "conv1d.weight", "conv1d_b.weight", _join_flat),
        ("conv_bias", "conv1d.bias", "conv1d_b.bias", _join),
        ("select", "x_proj.weight", "x_proj_b.weight", _stack),
        ("step_weight", "dt_proj.weight", "dt_proj_b.weight", _stack),
        ("step_bias", "dt_proj.bias", "dt_proj_b.bias", _join),
        ("A_log", "A_log", "A_b_log", _join),
        ("D", "D", "D_b", _join),
    )
    return [
        _rule(f"{ours}.{name}", f"{theirs}.{forth}", f"{theirs}.{back}", layout=layout)
        for name, forth, back, layout in pairs
    ]


# All formats --------------------------------------------------------------------------------------

_DDPM_NOTE = (
    "It predicts the noise of DDPM in its first C channels, and counts time in 1000 steps: give "
    "t = step / 1000. No objective here samples such a network, so scripts/sample.py refuses it; "
    "use it from Python."
)

FORMATS: dict[str, Format] = {
    "dit": Format(
        project="facebookresearch/DiT",
        backbone="dit",
        time_scale=1000.0,
        objectives=("ddpm",),
        marks=_DIT_MARKS,
        keywords=_dit_keywords,
        rules=_dit_rules,
        fixed=_dit_fixed,
        note=_DDPM_NOTE,
    ),
    "sit": Format(
        project="willisma/SiT",
        backbone="dit",
        time_scale=1.0,
        objectives=("flow",),
        marks=_DIT_MARKS,
        keywords=_dit_keywords,
        rules=_dit_rules,
        fixed=_dit_fixed,
        folded={
            "time_embed.mlp.0.weight": reverse_time,
            "final.linear.weight": torch.neg,
            "final.linear.bias": torch.neg,
        },
        note="It is taken for SiT's default, a linear path and a velocity. Its time (data at 1) "
        "and the sign of its velocity are turned into ours (noise at 1), within its first time "
        "layer and its last layer.",
    ),
    "tread": Format(
        project="CompVis/tread",
        backbone="dit",
        time_scale=1.0,
        objectives=("edm", "flow"),
        marks=_DIT_MARKS,
        keywords=_dit_keywords,
        rules=_dit_rules,
        fixed=_dit_fixed,
        note="Time enters its sinusoids as the objective gives it, ln(sigma) / 4 for EDM; the "
        "routes that it was trained with are no part of the file.",
    ),
    "uvit": Format(
        project="baofff/U-ViT",
        backbone="uvit",
        time_scale=1000.0,
        objectives=("ddpm",),
        marks=_UVIT_MARKS,
        keywords=_uvit_keywords,
        rules=_uvit_rules,
        note=_DDPM_NOTE,
    ),
    "dis": Format(
        project="feizc/DiS",
        backbone="mamba",
        time_scale=1000.0,
        objectives=("ddpm",),
        marks=_DIS_MARKS,
        keywords=_dis_keywords,
        rules=_dis_rules,
        note=_DDPM_NOTE,
    ),
}


def get_format(name: str) -> Format:
    """Return the format of that name.

    Raises:
        ValueError: an unknown name; the nearest is suggested.
    """
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    return FORMATS[name]


def recognize(keys: Collection[str]) -> list[str]:
    """Return the formats whose characteristic keys are all there; DiT, SiT and TREAD share theirs."""
    return [name for name, form in FORMATS.items() if set(form.marks) <= set(keys)]


# What sizes follow from which shapes --------------------------------------------------------------


def _ends(patches: Tensor, head: Tensor, num_tokens: int) -> dict[str, Any]:
    """Return sizes from the patch convolution [D, C, p, p], the head [p p C_out, D] and N."""
    _, channels, patch_size, _ = patches.shape
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens:
        raise ValueError(f"its {num_tokens} positions form no square, as published ones do.")
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


def _count(theirs: Collection[str], name: str) -> int:
    """Return how many blocks `name.0`, `name.1`, … there are, up to the last one."""
    found = (re.match(rf"{re.escape(name)}\.(\d+)\.", key) for key in theirs)
    return 1 + max(int(match[1]) for match in found if match)


def _halves(depth: int) -> Sequence[str]:
    """Return their names of a first half, a middle block and a second half, in order."""
    half = range(depth // 2)
    return [*(f"in_blocks.{i}" for i in half), "mid_block", *(f"out_blocks.{i}" for i in half)]


def _num_heads(width: int, choices: Choices) -> int:
    """Return the number of heads, which no shape shows."""
    heads = choices.num_heads or _NUM_HEADS.get(width, width // _HEAD_WIDTH)
    if not heads or width % heads:
        raise ValueError(
            f"num_heads={choices.num_heads}: the number of heads cannot be read off the tensors, "
            f"and {heads} do not divide the width {width}. Give num_heads=…"
        )
    return heads


def _num_classes(theirs: Tensors, table: str, choices: Choices) -> int:
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


def _labels(table: str, theirs: Tensors, keywords: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rule of the label table; one without a null row gets the mean of its rows."""
    classes = keywords["num_classes"]
    if classes:
        full = len(theirs[table]) > classes
        yield _rule("label_embed.table.weight", table, layout=_same if full else _with_mean)


def _no_modulation(norm: Tensor) -> Tensor:
    return norm.new_zeros(2 * len(norm), len(norm))


def _no_shift(norm: Tensor) -> Tensor:
    return norm.new_zeros(2 * len(norm))


def _with_mean(table: Tensor) -> Tensor:
    return torch.cat([table, table.mean(dim=0, keepdim=True)])
