"""facebookresearch/DiT, and willisma/SiT and CompVis/tread, which have the same tensors.

DiT embeds times 0 … 999, TREAD ln(sigma) / 4, SiT a time in [0, 1] with data at 1. SiT's velocity v
points to the data, so with our time t our network is -v(x, 1 - t): it embeds 1 - t, and its last
linear layer has the opposite sign.
"""

from dataclasses import replace

import torch

from tread_zoo.published.format import CheckpointFormat

DIT = CheckpointFormat(
    project="facebookresearch/DiT",
    license="cc-by-nc-4.0",
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
    license="mit",
    backbone="sit",
    time_scale=1.0,
    objectives=("flow",),
    reversed_time=True,
    note="SiT's default is assumed, a linear path and a velocity. The time (data at 1) "
    "and the sign of the velocity are converted to ours (noise at 1).",
    rules={"final.linear.weight": torch.neg, "final.linear.bias": torch.neg},
)

TREAD = replace(
    DIT,
    project="CompVis/tread",
    license="cc-by-nc-sa-4.0",
    time_scale=1.0,
    objectives=("edm", "flow"),
    note="The time embedding takes what the objective gives, ln(sigma) / 4 for EDM. The file "
    "does not contain the routes of the training.",
)
