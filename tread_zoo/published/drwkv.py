"""feizc/Diffusion-RWKV: adaLN-Zero, whose norms have weights, and one more norm before the first
block and after the last.

The project's forward pass divides decay and bonus by the number of tokens T. Ours divides only the
decay, so the import divides the bonus.

The published kernel does not compute the formula of the WKV; ours does. With w' = decay / T, the
kernel weighs a later token j at token t by exp(-w' (j - t)), as if it were one step farther than in
the formula. The kernel also works in chunks of T / 32 tokens. In a chunk that starts at s, it adds
each token j with s < j <= t once more, weighed by (1 - exp(w')) exp(w' (t - j)).
"""

from torch import Tensor

from tread_zoo.published.format import DDPM_NOTE, CheckpointFormat, stack_flat


def _over_tokens(bonus: Tensor, positions: Tensor) -> Tensor:
    return bonus / positions.shape[1]


DRWKV = CheckpointFormat(
    project="feizc/Diffusion-RWKV",
    license="cc-by-nc-4.0",
    backbone="rwkv",
    names={
        "patch_embed": "patch_embed.proj",
        "positions": "pos_embed",
        "time_embed.mlp.0": "time_embed.mlp.0",
        "time_embed.mlp.2": "time_embed.mlp.2",
        "label_embed.table": "label_emb.embedding_table",
        "norm_in": "in_blocks.0.ln0",
        "*.norm1": "*.ln1",
        "*.norm2": "*.ln2",
        "*.modulation": "*.adaLN_modulation.1",
        "*.spatial.own": tuple(f"*.att.spatial_mix_{part}" for part in "rkv"),
        "*.spatial.decay": "*.att.spatial_decay",
        "*.spatial.bonus": ("*.att.spatial_first", "pos_embed"),
        "*.spatial.receptance": "*.att.receptance",
        "*.spatial.key": "*.att.key",
        "*.spatial.value": "*.att.value",
        "*.spatial.output": "*.att.output",
        "*.channel.own": tuple(f"*.ffn.spatial_mix_{part}" for part in "rk"),
        "*.channel.receptance": "*.ffn.receptance",
        "*.channel.key": "*.ffn.key",
        "*.channel.value": "*.ffn.value",
        "*.skip_proj": "*.skip_linear",
        "norm": "norm_f",
        "final.modulation": "final_layer.adaLN_modulation.1",
        "final.linear": "final_layer.linear",
    },
    marks=("in_blocks.0.att.spatial_decay", "in_blocks.0.ffn.key.weight"),
    sizes=lambda theirs: {
        "mlp_ratio": len(theirs["in_blocks.0.ffn.key.weight"]) / theirs["pos_embed"].shape[2]
    },
    note=DDPM_NOTE
    + " The published kernel counts later tokens as one step farther than the WKV's formula "
    "does, ours does not: outputs differ by about 0.3 % of their standard deviation.",
    rules={
        "*.spatial.own": stack_flat,
        "*.spatial.bonus": _over_tokens,
        "*.channel.own": stack_flat,
    },
)
