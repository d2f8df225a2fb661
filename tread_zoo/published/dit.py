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
from dataclasses import replace

import torch
from torch import Tensor

from tread_zoo.published.format import Format


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
    names={
        "patch_embed": "x_embedder.proj",
        "time_embed.mlp.0": "t_embedder.mlp.0",
        "time_embed.mlp.2": "t_embedder.mlp.2",
        "label_embed.table": "y_embedder.embedding_table",
        "*.qkv": "*.attn.qkv",
        "*.proj": "*.attn.proj",
        "*.mlp.fc1": "*.mlp.fc1",
        "*.mlp.fc2": "*.mlp.fc2",
        "*.modulation": "*.adaLN_modulation.1",
        "final.modulation": "final_layer.adaLN_modulation.1",
        "final.linear": "final_layer.linear",
    },
    marks=("blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"),
    sizes=lambda theirs: {
        "mlp_ratio": len(theirs["blocks.0.mlp.fc1.weight"]) / len(theirs["x_embedder.proj.weight"])
    },
    has_heads=True,
    in_halves=False,
)

SIT = replace(
    DIT,
    project="willisma/SiT",
    time_scale=1.0,
    objectives=("flow",),
    note="It is taken for SiT's default, a linear path and a velocity. Its time (data at 1) "
    "and the sign of its velocity are turned into ours (noise at 1), within its first time "
    "layer and its last layer.",
    layouts={
        "time_embed.mlp.0.weight": reverse_time,
        "final.linear.weight": torch.neg,
        "final.linear.bias": torch.neg,
    },
)

TREAD = replace(
    DIT,
    project="CompVis/tread",
    time_scale=1.0,
    objectives=("edm", "flow"),
    note="Time enters its sinusoids as the objective gives it, ln(sigma) / 4 for EDM; the "
    "routes that it was trained with are no part of the file.",
)
