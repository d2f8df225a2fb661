"""feizc/DiS: label and time are the first two tokens; each direction has parameters of its own."""

from typing import Any

from torch import Tensor

from tread_zoo.training.published.rules import (
    DDPM_NOTE,
    Choices,
    Format,
    Rule,
    Tensors,
    classes_of,
    count_blocks,
    join,
    join_flat,
    label_rules,
    linear_rules,
    names_of_halves,
    patch_rules,
    rule,
    sizes_of_ends,
    stack,
    without_batch,
)

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
    num_classes = classes_of(theirs, "label_emb.embedding_table.weight", choices)
    inner, state_size = theirs["in_blocks.0.mixer.A_b_log"].shape
    num_tokens = theirs["pos_embed"].shape[1] - (2 if num_classes else 1)
    return {
        **sizes_of_ends(patches, head, num_tokens),
        "num_classes": num_classes,
        "hidden_size": len(patches),
        "depth": 2 * count_blocks(theirs, "in_blocks"),
        "expand": inner // len(patches),
        "state_size": state_size,
        "conv_width": theirs["in_blocks.0.mixer.conv1d_b.weight"].shape[-1],
    }


def _dis_rules(theirs: Tensors, keywords: dict[str, Any]) -> list[Rule]:
    rules = [
        *patch_rules("patch_embed.proj"),
        rule("positions", "pos_embed", layout=without_batch),
        *linear_rules("time_embed.mlp.0", "time_embed.0"),
        *linear_rules("time_embed.mlp.2", "time_embed.2"),
        *label_rules("label_emb.embedding_table.weight", theirs, keywords),
        rule("norm.weight", "norm_f.weight"),
        *linear_rules("final.linear", "final_layer.linear"),
    ]
    if keywords["num_classes"]:
        rules += linear_rules("final.modulation", "final_layer.adaLN_modulation.1")
    else:  # its head is then not modulated at all: shift 0, scale 0
        rules += [
            rule("final.modulation.weight", "norm_f.weight", layout=_no_modulation),
            rule("final.modulation.bias", "norm_f.weight", layout=_no_shift),
        ]
    for i, name in enumerate(names_of_halves(keywords["depth"])):
        rules += [
            rule(f"blocks.{i}.norm.weight", f"{name}.norm.weight"),
            rule(f"blocks.{i}.mixer.in_proj.weight", f"{name}.mixer.in_proj.weight"),
            rule(f"blocks.{i}.mixer.out_proj.weight", f"{name}.mixer.out_proj.weight"),
            *_both_ways(f"blocks.{i}.mixer", f"{name}.mixer"),
        ]
        if name.startswith("out_blocks"):
            rules += linear_rules(f"blocks.{i}.skip_proj", f"{name}.skip_linear")
    return rules


def _both_ways(ours: str, theirs: str) -> list[Rule]:
    """Return the rules of a mixer's parameters, one set a direction, forward first."""
    pairs = (
        ("conv_weight", "conv1d.weight", "conv1d_b.weight", join_flat),
        ("conv_bias", "conv1d.bias", "conv1d_b.bias", join),
        ("select", "x_proj.weight", "x_proj_b.weight", stack),
        ("step_weight", "dt_proj.weight", "dt_proj_b.weight", stack),
        ("step_bias", "dt_proj.bias", "dt_proj_b.bias", join),
        ("A_log", "A_log", "A_b_log", join),
        ("D", "D", "D_b", join),
    )
    return [
        rule(f"{ours}.{name}", f"{theirs}.{forth}", f"{theirs}.{back}", layout=layout)
        for name, forth, back, layout in pairs
    ]


def _no_modulation(norm: Tensor) -> Tensor:
    return norm.new_zeros(2 * len(norm), len(norm))


def _no_shift(norm: Tensor) -> Tensor:
    return norm.new_zeros(2 * len(norm))


DIS = Format(
    project="feizc/DiS",
    backbone="mamba",
    time_scale=1000.0,
    objectives=("ddpm",),
    marks=_DIS_MARKS,
    keywords=_dis_keywords,
    rules=_dis_rules,
    note=DDPM_NOTE,
)
