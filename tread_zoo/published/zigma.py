"""CompVis/zigma: layer i scans along serpentine curve i mod 8, which tensors do not show.

The project's time has data at 1, and the velocity points to the data, as in SiT: see `dit`.
"""

from typing import Any

import torch

from tread_zoo.published.format import CheckpointFormat, Tensors, flatten_taps


def _sizes(theirs: Tensors) -> dict[str, Any]:
    inner, state_size = theirs["blocks.0.mixer.A_log"].shape
    return {
        "expand": inner // len(theirs["x_embedder.proj.weight"]),
        "state_size": state_size,
        "conv_width": theirs["blocks.0.mixer.conv1d.weight"].shape[-1],
    }


ZIGMA = CheckpointFormat(
    project="CompVis/zigma",
    license="apache-2.0",
    backbone="zigma",
    names={
        "patch_embed": "x_embedder.proj",
        "positions": "pos_embed",
        "time_embed.mlp.0": "t_embedder.mlp.0",
        "time_embed.mlp.2": "t_embedder.mlp.2",
        "label_embed.table": "y_embedder.embedding_table",
        "*.norm": "*.norm",
        "*.modulation": "*.adaLN_modulation.1",
        "*.mixer.in_proj": "*.mixer.in_proj",
        "*.mixer.conv_weight": "*.mixer.conv1d.weight",
        "*.mixer.conv_bias": "*.mixer.conv1d.bias",
        "*.mixer.select": "*.mixer.x_proj",
        "*.mixer.step_weight": "*.mixer.dt_proj.weight",
        "*.mixer.step_bias": "*.mixer.dt_proj.bias",
        "*.mixer.A_log": "*.mixer.A_log",
        "*.mixer.D": "*.mixer.D",
        "*.mixer.out_proj": "*.mixer.out_proj",
        "final.norms.0": "norm_f",
        "final.linear": "final_layer.linear",
    },
    marks=("blocks.0.mixer.conv1d.weight", "blocks.0.mixer.A_log"),
    sizes=_sizes,
    reversed_time=True,
    has_null_label=False,
    objectives=("flow",),
    note="scan_type=zigzagN8, a linear path and a velocity are assumed. The time (data at 1) "
    "and the sign of the velocity are converted to ours (noise at 1).",
    rules={
        "*.mixer.conv_weight": flatten_taps,
        "final.linear.weight": torch.neg,
        "final.linear.bias": torch.neg,
    },
    in_halves=False,
)
