"""The zoo: one file an architecture. Importing this package registers them all."""

from backbones import (
    dit,
    gated_deltanet,
    gla,
    hybrid,
    lightning_dit,
    mamba,
    mamba2,
    rwkv,
    rwkv7,
    uvit,
    zigma,
)

__distribution__ = "tread-zoo"  # tells the registry that this `backbones` is ours

__all__ = [
    "dit",
    "gated_deltanet",
    "gla",
    "hybrid",
    "lightning_dit",
    "mamba",
    "mamba2",
    "rwkv",
    "rwkv7",
    "uvit",
    "zigma",
]
