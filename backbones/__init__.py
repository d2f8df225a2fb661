"""The zoo's backbones; `architectures` has their sizes. Importing this registers them all."""

from backbones.architectures import (
    GLA,
    KDA,
    RWKV7,
    DiT,
    GatedDeltaNet,
    LightningDiT,
    LinearDiT,
    Mamba,
    Mamba2,
)
from backbones.diffusers import Diffusers
from backbones.hybrid import Hybrid
from backbones.rwkv import RWKV
from backbones.uvit import UViT
from backbones.zigma import ZigMa

__distribution__ = "tread-zoo"  # tells the registry that this `backbones` is ours

__all__ = [
    "GLA",
    "KDA",
    "RWKV",
    "RWKV7",
    "DiT",
    "Diffusers",
    "GatedDeltaNet",
    "Hybrid",
    "LightningDiT",
    "LinearDiT",
    "Mamba",
    "Mamba2",
    "UViT",
    "ZigMa",
]
