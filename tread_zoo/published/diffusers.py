"""Our `dit` as huggingface/diffusers has it: a `DiTTransformer2DModel` of the same function.

    ours(x, t, y) = theirs(x, timestep=time_scale t, class_labels=y).sample

with 1 - t in place of t where `reversed_time` is set, as in SiT. Each of their blocks has
embeddings of time and label of its own; they are copies of our one.
"""

import functools
from dataclasses import replace
from typing import Any

from diffusers import DiTTransformer2DModel
from diffusers import ModelMixin as ModelMixin  # pipelines look for it where a part's class is
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.published.dit import DIT
from tread_zoo.registry import get_entry

_EMBEDDINGS = "transformer_blocks.0.norm1.emb."
_FORM = replace(
    DIT,
    project="huggingface/diffusers",
    names={
        "patch_embed": "pos_embed.proj",
        "time_embed.mlp.0": f"{_EMBEDDINGS}timestep_embedder.linear_1",
        "time_embed.mlp.2": f"{_EMBEDDINGS}timestep_embedder.linear_2",
        "label_embed.table": f"{_EMBEDDINGS}class_embedder.embedding_table",
        **{
            f"*.qkv.{kind}": tuple(f"*.attn1.to_{part}.{kind}" for part in "qkv")
            for kind in ("weight", "bias")
        },
        "*.proj": "*.attn1.to_out.0",
        "*.mlp.fc1": "*.ff.net.0.proj",
        "*.mlp.fc2": "*.ff.net.2",
        "*.modulation": "*.norm1.linear",
        "final.modulation": "proj_out_1",
        "final.linear": "proj_out_2",
    },
)


class DiTTransformer(DiTTransformer2DModel):  # type: ignore[misc]
    """diffusers' DiT with the frequencies of the paper's, and ours: 10000^(-i / 128).

    diffusers' own class has 10000^(-i / 127) there. A folder that this class saved is to be loaded
    by this class; diffusers' own would compute something else.
    """

    @functools.wraps(DiTTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        for block in self.transformer_blocks:
            block.norm1.emb.time_proj.downscale_freq_shift = 0


def to_diffusers(backbone: Backbone) -> DiTTransformer:
    """Return a DiTTransformer2DModel that computes what `backbone` does, in eval mode.

    Args:
        backbone: a `dit` or `sit` with labels, a square input and mlp_ratio=4, without fusions.

    Raises:
        ValueError: diffusers has no such network.
    """
    config = backbone.config
    if type(backbone) is not get_entry("backbone", "dit_tiny").target:
        raise ValueError(f"backbone={backbone.name}: diffusers has dit alone.")
    needs = {
        "labels": backbone.num_classes > 0,
        "square images": backbone.input_size[0] == backbone.input_size[1],
        "mlp_ratio=4": config["mlp_ratio"] == 4,
        "no fusions": not backbone.fused_ranges,
        "no registers": backbone.registers is None,
    }
    if not all(needs.values()):
        lacking = ", ".join(name for name, has in needs.items() if not has)
        raise ValueError(f"diffusers' DiT needs {lacking}; this network is another.")
    theirs = DiTTransformer(
        num_attention_heads=config["num_heads"],
        attention_head_dim=config["hidden_size"] // config["num_heads"],
        in_channels=backbone.in_channels,
        out_channels=backbone.out_channels,
        num_layers=backbone.num_blocks,
        sample_size=backbone.input_size[0],
        patch_size=backbone.patch_size,
        num_embeds_ada_norm=backbone.num_classes,
        norm_eps=1e-6,
    )
    blocks = [f"transformer_blocks.{i}" for i in range(backbone.num_blocks)]
    tensors: dict[str, Tensor] = {}
    for key, tensor in backbone.state_dict().items():
        for name, part in _FORM.take_apart(key, tensor, blocks, backbone.patch_size).items():
            copies = blocks if name.startswith(_EMBEDDINGS) else blocks[:1]
            tensors |= {name.replace(blocks[0], block, 1): part for block in copies}
    theirs.load_state_dict(tensors)
    out: DiTTransformer = theirs.to(next(backbone.parameters()).device).eval()
    return out
