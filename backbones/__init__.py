"""The zoo: one file an architecture. Importing this package registers them all."""

from backbones import dit, mamba, mamba2, rwkv, uvit, zigma

__distribution__ = "tread-zoo"  # tells the registry that this `backbones` is ours

__all__ = ["dit", "mamba", "mamba2", "rwkv", "uvit", "zigma"]
