"""feizc/DiS: label and time are the first two tokens; the two directions share no parameters."""

from typing import Any

from tread_zoo.published.format import CheckpointFormat, Tensors, flatten_taps, stack


def _sizes(theirs: Tensors) -> dict[str, Any]:
    inner, state_size = theirs["in_blocks.0.mixer.A_b_log"].shape
    return {
        "depth": len(DIS.blocks(theirs)) - 1,  # without the middle block
        "expand": inner // len(theirs["patch_embed.proj.weight"]),
        "state_size": state_size,
        "conv_width": theirs["in_blocks.0.mixer.conv1d_b.weight"].shape[-1],
    }


DIS = CheckpointFormat(
    project="feizc/DiS",
    license="cc-by-nc-4.0",
    backbone="mamba",
    names={
        "patch_embed": "patch_embed.proj",
        "positions": "pos_embed",
        "time_embed.mlp.0": "time_embed.0",
        "time_embed.mlp.2": "time_embed.2",
        "label_embed.table": "label_emb.embedding_table",
        "*.norm": "*.norm",
        "*.mixer.in_proj": "*.mixer.in_proj",
        # forward, then backward
        "*.mixer.conv_weight": ("*.mixer.conv1d.weight", "*.mixer.conv1d_b.weight"),
        "*.mixer.conv_bias": ("*.mixer.conv1d.bias", "*.mixer.conv1d_b.bias"),
        "*.mixer.select": ("*.mixer.x_proj.weight", "*.mixer.x_proj_b.weight"),
        "*.mixer.step_weight": ("*.mixer.dt_proj.weight", "*.mixer.dt_proj_b.weight"),
        "*.mixer.step_bias": ("*.mixer.dt_proj.bias", "*.mixer.dt_proj_b.bias"),
        "*.mixer.A_log": ("*.mixer.A_log", "*.mixer.A_b_log"),
        "*.mixer.D": ("*.mixer.D", "*.mixer.D_b"),
        "*.mixer.out_proj": "*.mixer.out_proj",
        "*.skip_proj": "*.skip_linear",
        "norm": "norm_f",
        "final.modulation": "final_layer.adaLN_modulation.1",
        "final.linear": "final_layer.linear",
    },
    marks=("in_blocks.0.mixer.conv1d_b.weight", "in_blocks.0.mixer.A_b_log"),
    sizes=_sizes,
    rules={
        "*.mixer.conv_weight": flatten_taps,
        "*.mixer.select": stack,
        "*.mixer.step_weight": stack,
    },
    time_token=True,
    zero_without_labels="final.modulation",
)
