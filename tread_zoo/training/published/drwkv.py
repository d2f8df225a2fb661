"""feizc/Diffusion-RWKV: adaLN-Zero on affine norms, one more norm at each end of the stack.

The decay is taken as it is, of any sign, over the number of tokens T; so is the bonus, where ours
is not divided, so T goes into it here. The published kernel departs from the formula of the WKV
between its chunks of T / 32 tokens, where it counts distances as one more.

D width, N = T tokens.
"""

from functools import partial
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
    label_rules,
    linear_rules,
    names_of_halves,
    patch_rules,
    rule,
    sizes_of_ends,
    stack_flat,
    without_batch,
)

_DRWKV_MARKS = (
    "patch_embed.proj.weight",
    "pos_embed",
    "in_blocks.0.att.spatial_decay",
    "in_blocks.0.ffn.key.weight",
    "final_layer.linear.weight",
)


def _drwkv_keywords(theirs: Tensors, choices: Choices) -> dict[str, Any]:
    patches, head = theirs["patch_embed.proj.weight"], theirs["final_layer.linear.weight"]
    return {
        **sizes_of_ends(patches, head, num_tokens=theirs["pos_embed"].shape[1]),
        "num_classes": classes_of(theirs, "label_emb.embedding_table.weight", choices),
        "hidden_size": len(patches),
        "depth": 2 * count_blocks(theirs, "in_blocks") + 1,
        "mlp_ratio": len(theirs["in_blocks.0.ffn.key.weight"]) / len(patches),
    }


def _drwkv_rules(theirs: Tensors, keywords: dict[str, Any]) -> list[Rule]:
    rules = [
        *patch_rules("patch_embed.proj"),
        rule("positions", "pos_embed", layout=without_batch),
        *linear_rules("time_embed.mlp.0", "time_embed.mlp.0"),
        *linear_rules("time_embed.mlp.2", "time_embed.mlp.2"),
        *label_rules("label_emb.embedding_table.weight", theirs, keywords),
        *linear_rules("norm_in", "in_blocks.0.ln0"),
        *linear_rules("norm", "norm_f"),
        *linear_rules("final.modulation", "final_layer.adaLN_modulation.1"),
        *linear_rules("final.linear", "final_layer.linear"),
    ]
    over_tokens = partial(_divided, by=theirs["pos_embed"].shape[1])
    for i, name in enumerate(names_of_halves(keywords["depth"])):
        spatial, channel = f"blocks.{i}.spatial", f"blocks.{i}.channel"
        rules += [
            *linear_rules(f"blocks.{i}.norm1", f"{name}.ln1"),
            *linear_rules(f"blocks.{i}.norm2", f"{name}.ln2"),
            *linear_rules(f"blocks.{i}.modulation", f"{name}.adaLN_modulation.1"),
            rule(
                f"{spatial}.own",
                *(f"{name}.att.spatial_mix_{part}" for part in "rkv"),
                layout=stack_flat,
            ),
            rule(f"{spatial}.decay", f"{name}.att.spatial_decay"),
            rule(f"{spatial}.bonus", f"{name}.att.spatial_first", layout=over_tokens),
            rule(
                f"{channel}.own",
                *(f"{name}.ffn.spatial_mix_{part}" for part in "rk"),
                layout=stack_flat,
            ),
        ]
        for layer in ("receptance", "key", "value", "output"):
            rules += linear_rules(f"{spatial}.{layer}", f"{name}.att.{layer}", bias=False)
        for layer in ("receptance", "key", "value"):
            rules += linear_rules(f"{channel}.{layer}", f"{name}.ffn.{layer}", bias=False)
        if name.startswith("out_blocks"):
            rules += linear_rules(f"blocks.{i}.skip_proj", f"{name}.skip_linear")
    return rules


def _divided(tensor: Tensor, *, by: int) -> Tensor:
    return tensor / by


DRWKV = Format(
    project="feizc/Diffusion-RWKV",
    backbone="rwkv",
    time_scale=1000.0,
    objectives=("ddpm",),
    marks=_DRWKV_MARKS,
    keywords=_drwkv_keywords,
    rules=_drwkv_rules,
    note=DDPM_NOTE
    + " The kernel that it was trained with departs from the WKV's formula between its "
    "chunks of tokens; ours does not, and outputs differ by about 0.3 % of their spread.",
)
