"""hustvl/LightningDiT with its published options: RMSNorm, SwiGLU, RoPE, modulation with shifts.

Time and velocity are converted as for SiT, see `dit`. Tables of cosines and sines, [N, head size],
are in the file; our network computes them.
"""

from dataclasses import replace
from typing import Any

import torch

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.layers import rotary_2d
from tread_zoo.published.dit import SIT
from tread_zoo.published.format import Tensors

_COS, _SIN = "feat_rope.freqs_cos", "feat_rope.freqs_sin"


def _tables(backbone: Backbone) -> Tensors:
    place = torch.arange(backbone.num_tokens)[None]
    head_size = backbone.config["hidden_size"] // backbone.config["num_heads"]
    side = backbone.grid[1]
    cos, sin = (table[0, 0] for table in rotary_2d(place // side, place % side, head_size))
    sin[:, 0::2] *= -1  # ours includes the sign of a pair's first channel
    return {_COS: cos, _SIN: sin}


def _sizes(theirs: Tensors) -> dict[str, Any]:
    return {
        "num_heads": len(theirs["x_embedder.proj.weight"]) // theirs[_COS].shape[1],
        "qk_norm": "blocks.0.attn.q_norm.weight" in theirs,
    }


LIGHTNING_DIT = replace(
    SIT,
    project="hustvl/LightningDiT",
    license="mit",
    backbone="lightning_dit",
    names={
        **SIT.names,
        "*.norm1": "*.norm1",
        "*.mixer.qkv": "*.attn.qkv",
        "*.mixer.q_norm": "*.attn.q_norm",
        "*.mixer.k_norm": "*.attn.k_norm",
        "*.mixer.proj": "*.attn.proj",
        "*.norm2": "*.norm2",
        "*.mlp.fc1": "*.mlp.w12",
        "*.mlp.fc2": "*.mlp.w3",
        "final.norm": "final_layer.norm_final",
    },
    marks=("blocks.0.attn.qkv.weight", "blocks.0.mlp.w12.weight", _COS, _SIN),
    tables=_tables,
    sizes=_sizes,
    note=SIT.note.replace("SiT's default", "LightningDiT's published setting"),
    has_heads=False,
)
