"""Diffusion backbones under one token-routing interface."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tread_zoo.registry import create_backbone, list_backbones, register_backbone

__version__ = "0.1.0"

__all__ = ["__version__", "create_backbone", "list_backbones", "register_backbone"]


def __getattr__(name: str) -> Any:
    """Load the registry, and torch with it, at first use: `import tread_zoo` alone stays light."""
    if name in ("create_backbone", "list_backbones", "register_backbone"):
        return getattr(import_module("tread_zoo.registry"), name)
    raise AttributeError(f"module 'tread_zoo' has no attribute {name!r}")
