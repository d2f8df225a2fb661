"""The zoo: `rows` has its rows and their sizes. Importing this package registers them all."""

from backbones.rows import (
    GLA,
    RWKV,
    RWKV7,
    DiT,
    GatedDeltaNet,
    Hybrid,
    LightningDiT,
    Mamba,
    Mamba2,
    UViT,
    ZigMa,
)

__distribution__ = "tread-zoo"  # tells the registry that this `backbones` is ours

__all__ = [
    "GLA",
    "RWKV",
    "RWKV7",
    "DiT",
    "GatedDeltaNet",
    "Hybrid",
    "LightningDiT",
    "Mamba",
    "Mamba2",
    "UViT",
    "ZigMa",
]
