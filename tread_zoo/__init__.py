"""Diffusion backbones under one token-routing interface."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tread_zoo.registry import (
        available,
        create,
        create_backbone,
        list_backbones,
        register,
        register_backbone,
    )

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "available",
    "create",
    "create_backbone",
    "list_backbones",
    "register",
    "register_backbone",
]


def __getattr__(name: str) -> Any:
    """Load the registry at first use: `import tread_zoo` alone stays light."""
    if name in __all__:
        return getattr(import_module("tread_zoo.registry"), name)
    raise AttributeError(f"module 'tread_zoo' has no attribute {name!r}")
