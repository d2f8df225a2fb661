"""facebookresearch/DiT, and willisma/SiT and CompVis/tread, which have the same tensors.

DiT counts time 0 … 999, TREAD gives ln(sigma) / 4 to its sinusoids as it is, SiT a time in [0, 1].
SiT's runs the other way (data at 1) and its velocity points to the data, so with t ours, v theirs
our network is -v(x, 1 - t): it embeds 1 - t, and its last linear layer has the opposite sign.
"""

from dataclasses import replace

import torch

from tread_zoo.published.format import Format

DIT = Format(
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
    note="It is taken for SiT's default, a linear path and a velocity. Its time (data at 1) "
    "and the sign of its velocity are turned into ours (noise at 1).",
    layouts={"final.linear.weight": torch.neg, "final.linear.bias": torch.neg},
)

TREAD = replace(
    DIT,
    project="CompVis/tread",
    license="cc-by-nc-sa-4.0",
    time_scale=1.0,
    objectives=("edm", "flow"),
    note="Time enters its sinusoids as the objective gives it, ln(sigma) / 4 for EDM; the "
    "routes that it was trained with are no part of the file.",
)
