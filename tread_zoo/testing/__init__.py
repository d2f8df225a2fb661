"""The contract of `tread_zoo.contract.backbone` as checks that run on any backbone.

pytest --pyargs tread_zoo.testing --backbone my_package:my_name

Invariants fail. Rules of thumb, bounds that a sound network may miss, warn (`Advice`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tread_zoo.testing.conformance import CHECKS
    from tread_zoo.testing.probe import Probe

__all__ = ["CHECKS", "Probe"]


def __getattr__(name: str) -> Any:
    """Load the checks, and torch with them, at first use: pytest imports this package always."""
    if name in __all__:
        return getattr(import_module("tread_zoo.testing.conformance"), name)
    raise AttributeError(f"module 'tread_zoo.testing' has no attribute {name!r}")
