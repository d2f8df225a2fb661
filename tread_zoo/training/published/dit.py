"""facebookresearch/DiT, and willisma/SiT and CompVis/tread, which have the same tensors.

DiT counts time 0 … 999, TREAD gives ln(sigma) / 4 to its sinusoids as it is, SiT a time in [0, 1].
SiT's runs the other way (data at 1) and its velocity points to the data, so with t ours, v theirs
our network must be -v(x, 1 - t). Its sinusoids at 1 - t are a fixed linear map of those at t,
frequency by frequency:

    cos(f (1 - t)) = cos f cos(f t) + sin f sin(f t)
    sin(f (1 - t)) = sin f cos(f t) - cos f sin(f t)

and a linear layer comes next, so its columns absorb the map, exactly; the sign goes into the last
linear layer.

D width, F number of sinusoids.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tread_zoo.layers import sincos_2d
from tread_zoo.training.published.rules import (
    DDPM_NOTE,
    Choices,
    Format,
    Rule,
    Tensors,
    classes_of,
    count_blocks,
    heads_of,
    label_rules,
    linear_rules,
    patch_rules,
    sizes_of_ends,
)

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
        **sizes_of_ends(patches, head, num_tokens=theirs["pos_embed"].shape[1]),
        "num_classes": classes_of(theirs, "y_embedder.embedding_table.weight", choices),
        "hidden_size": width,
        "depth": count_blocks(theirs, "blocks"),
        "num_heads": heads_of(width, choices),
        "mlp_ratio": len(theirs["blocks.0.mlp.fc1.weight"]) / width,
    }


def _dit_rules(theirs: Tensors, keywords: dict[str, Any]) -> list[Rule]:
    rules = [
        *patch_rules("x_embedder.proj"),
        *linear_rules("time_embed.mlp.0", "t_embedder.mlp.0"),
        *linear_rules("time_embed.mlp.2", "t_embedder.mlp.2"),
        *label_rules("y_embedder.embedding_table.weight", theirs, keywords),
        *linear_rules("final.modulation", "final_layer.adaLN_modulation.1"),
        *linear_rules("final.linear", "final_layer.linear"),
    ]
    for i in range(keywords["depth"]):
        rules += [
            *linear_rules(f"blocks.{i}.qkv", f"blocks.{i}.attn.qkv"),
            *linear_rules(f"blocks.{i}.proj", f"blocks.{i}.attn.proj"),
            *linear_rules(f"blocks.{i}.mlp.fc1", f"blocks.{i}.mlp.fc1"),
            *linear_rules(f"blocks.{i}.mlp.fc2", f"blocks.{i}.mlp.fc2"),
            *linear_rules(f"blocks.{i}.modulation", f"blocks.{i}.adaLN_modulation.1"),
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


DIT = Format(
    project="facebookresearch/DiT",
    backbone="dit",
    time_scale=1000.0,
    objectives=("ddpm",),
    marks=_DIT_MARKS,
    keywords=_dit_keywords,
    rules=_dit_rules,
    fixed=_dit_fixed,
    note=DDPM_NOTE,
)

SIT = Format(
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
)

TREAD = Format(
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
)
