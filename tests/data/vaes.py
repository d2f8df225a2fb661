"""Autoencoders of a few thousand weights, made from diffusers' configurations."""

import pytest
import torch

SIZES = {
    "AutoencoderKL": {
        "block_out_channels": (4, 4), "latent_channels": 2, "norm_num_groups": 2,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "mid_block_add_attention": False,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "scaling_factor": 0.5, "shift_factor": 0.25,
    },
    "AutoencoderTiny": {
        "encoder_block_out_channels": (4, 4), "decoder_block_out_channels": (4, 4),
        "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1), "latent_channels": 2,
    },
    "AutoencoderDC": {
        "latent_channels": 4, "attention_head_dim": 4,
        "encoder_block_out_channels": (4, 4), "decoder_block_out_channels": (4, 4),
        "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ()),
    },
}  # fmt: skip


def save_vaes(folder, *kinds):
    """Save one of each class (of all, if none is named) into `folder`; return paths by class."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    paths = {kind: str(folder / kind) for kind in kinds or SIZES}
    for kind, path in paths.items():
        getattr(diffusers, kind)(**SIZES[kind]).save_pretrained(path)
    return paths
