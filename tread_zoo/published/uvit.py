"""baofff/U-ViT: label and time are the first two tokens, positions are learned."""

from typing import Any

from tread_zoo.published.format import DDPM_NOTE, CheckpointFormat, Tensors


def _sizes(theirs: Tensors) -> dict[str, Any]:
    hidden, width = theirs["in_blocks.0.mlp.fc1.weight"].shape
    return {
        "depth": len(UVIT.blocks(theirs)) - 1,  # without the middle block
        "mlp_ratio": hidden / width,
        "time_mlp": "time_embed.0.weight" in theirs,
        "final_conv": "final_layer.weight" in theirs,
    }


UVIT = CheckpointFormat(
    project="baofff/U-ViT",
    license="mit",
    backbone="uvit",
    names={
        "patch_embed": "patch_embed.proj",
        "positions": "pos_embed",
        "time_embed.mlp.0": "time_embed.0",
        "time_embed.mlp.2": "time_embed.2",
        "label_embed.table": "label_emb",
        "*.norm1": "*.norm1",
        "*.qkv": "*.attn.qkv",
        "*.proj": "*.attn.proj",
        "*.norm2": "*.norm2",
        "*.mlp.fc1": "*.mlp.fc1",
        "*.mlp.fc2": "*.mlp.fc2",
        "*.skip_proj": "*.skip_linear",
        "norm": "norm",
        "linear": "decoder_pred",
        "conv": "final_layer",
    },
    marks=("in_blocks.0.attn.qkv.weight", "in_blocks.0.mlp.fc1.weight"),
    sizes=_sizes,
    objective_options=lambda backbone: {
        "schedule": "linear" if backbone.in_channels == 3 else "scaled_linear",
        "first_step": 1,
    },
    note=DDPM_NOTE + " The pixel models were trained in continuous time; the linear schedule "
    "deviates from it by at most 3 steps of 1000.",
    head="linear",
    has_heads=True,
    time_token=True,
)
