"""hustvl/LightningDiT, in its published options: RMSNorm, SwiGLU, RoPE, modulation with shifts.

Time and velocity are turned as SiT's, see `dit`. Its tables of cosines and sines are what ours
computes; their width is that of a head.
"""

from dataclasses import replace
from typing import Any

import torch

from tread_zoo.layers import rotary_2d
from tread_zoo.published.dit import SIT
from tread_zoo.published.format import Tensors
from tread_zoo.training.checkpoints import CheckpointError

_COS, _SIN = "feat_rope.freqs_cos", "feat_rope.freqs_sin"
_TOLERANCE = 4e-3  # of bfloat16


def _sizes(theirs: Tensors) -> dict[str, Any]:
    num_tokens, head_size = theirs[_COS].shape
    side = round(num_tokens**0.5)
    place = torch.arange(num_tokens)[None]
    cos, sin = (table[0, 0] for table in rotary_2d(place // side, place % side, head_size))
    sin[:, 0::2] *= -1  # the first of a pair has the sign in it
    for name, own in ((_COS, cos), (_SIN, sin)):
        gap = float((theirs[name].float() - own).abs().max())
        if gap > _TOLERANCE:
            raise CheckpointError(
                f"{name} is not the table that this backbone computes: they differ by {gap:.2g}. "
                "This network was trained otherwise."
            )
    return {
        "num_heads": len(theirs["x_embedder.proj.weight"]) // head_size,
        "qk_norm": "blocks.0.attn.q_norm.weight" in theirs,
    }


LIGHTNING_DIT = replace(
    SIT,
    project="hustvl/LightningDiT",
    backbone="lightning_dit",
    names={
        "patch_embed": "x_embedder.proj",
        "time_embed.mlp.0": "t_embedder.mlp.0",
        "time_embed.mlp.2": "t_embedder.mlp.2",
        "label_embed.table": "y_embedder.embedding_table",
        "*.norm1": "*.norm1",
        "*.mixer.qkv": "*.attn.qkv",
        "*.mixer.q_norm": "*.attn.q_norm",
        "*.mixer.k_norm": "*.attn.k_norm",
        "*.mixer.proj": "*.attn.proj",
        "*.norm2": "*.norm2",
        "*.mlp.fc1": "*.mlp.w12",
        "*.mlp.fc2": "*.mlp.w3",
        "*.modulation": "*.adaLN_modulation.1",
        "final.norm": "final_layer.norm_final",
        "final.modulation": "final_layer.adaLN_modulation.1",
        "final.linear": "final_layer.linear",
    },
    marks=("blocks.0.attn.qkv.weight", "blocks.0.mlp.w12.weight", _COS, _SIN),
    computed=(_COS, _SIN),
    sizes=_sizes,
    note=SIT.note.replace("SiT's default", "its published setting"),
    has_heads=False,
)
