"""baofff/U-ViT: label and time are the first two tokens, positions are learned."""

from typing import Any

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
    names_of_halves,
    patch_rules,
    rule,
    sizes_of_ends,
    without_batch,
)

_UVIT_MARKS = (
    "patch_embed.proj.weight",
    "pos_embed",
    "in_blocks.0.attn.qkv.weight",
    "in_blocks.0.mlp.fc1.weight",
    "decoder_pred.weight",
)


def _uvit_keywords(theirs: Tensors, choices: Choices) -> dict[str, Any]:
    patches, head = theirs["patch_embed.proj.weight"], theirs["decoder_pred.weight"]
    num_classes, width = classes_of(theirs, "label_emb.weight", choices), len(patches)
    num_tokens = theirs["pos_embed"].shape[1] - (2 if num_classes else 1)
    return {
        **sizes_of_ends(patches, head, num_tokens),
        "num_classes": num_classes,
        "hidden_size": width,
        "depth": 2 * count_blocks(theirs, "in_blocks"),
        "num_heads": heads_of(width, choices),
        "mlp_ratio": len(theirs["in_blocks.0.mlp.fc1.weight"]) / width,
        "time_mlp": "time_embed.0.weight" in theirs,
        "final_conv": "final_layer.weight" in theirs,
    }


def _uvit_rules(theirs: Tensors, keywords: dict[str, Any]) -> list[Rule]:
    rules = [
        *patch_rules("patch_embed.proj"),
        rule("positions", "pos_embed", layout=without_batch),
        *label_rules("label_emb.weight", theirs, keywords),
        *linear_rules("norm", "norm"),
        *linear_rules("linear", "decoder_pred"),
    ]
    if keywords["time_mlp"]:
        rules += linear_rules("time_embed.mlp.0", "time_embed.0")
        rules += linear_rules("time_embed.mlp.2", "time_embed.2")
    if keywords["final_conv"]:
        rules += linear_rules("conv", "final_layer")
    for i, name in enumerate(names_of_halves(keywords["depth"])):
        rules += [
            *linear_rules(f"blocks.{i}.norm1", f"{name}.norm1"),
            *linear_rules(f"blocks.{i}.qkv", f"{name}.attn.qkv", bias=False),
            *linear_rules(f"blocks.{i}.proj", f"{name}.attn.proj"),
            *linear_rules(f"blocks.{i}.norm2", f"{name}.norm2"),
            *linear_rules(f"blocks.{i}.mlp.fc1", f"{name}.mlp.fc1"),
            *linear_rules(f"blocks.{i}.mlp.fc2", f"{name}.mlp.fc2"),
        ]
        if name.startswith("out_blocks"):
            rules += linear_rules(f"blocks.{i}.skip_proj", f"{name}.skip_linear")
    return rules


UVIT = Format(
    project="baofff/U-ViT",
    backbone="uvit",
    time_scale=1000.0,
    objectives=("ddpm",),
    marks=_UVIT_MARKS,
    keywords=_uvit_keywords,
    rules=_uvit_rules,
    note=DDPM_NOTE,
)
