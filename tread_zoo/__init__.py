"""Diffusion backbones under one token-routing interface."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tread_zoo.version import __version__

if TYPE_CHECKING:
    from tread_zoo.registry import (
        available,
        create,
        create_backbone,
        list_backbones,
        register,
        register_backbone,
    )
    from tread_zoo.training.loop import train

__all__ = [
    "__version__",
    "available",
    "create",
    "create_backbone",
    "list_backbones",
    "register",
    "register_backbone",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load names at first use: `import tread_zoo` alone stays light."""
    if name in __all__:
        home = "training.loop" if name == "train" else "registry"
        return getattr(import_module(f"tread_zoo.{home}"), name)
    raise AttributeError(f"module 'tread_zoo' has no attribute {name!r}")
