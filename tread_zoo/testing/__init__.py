"""Checks that any backbone or routing method, also your own, keeps its contract.

pytest --pyargs tread_zoo.testing --backbone my_package:my_name
pytest --pyargs tread_zoo.testing --routing my_package:my_name

A broken invariant fails. A broken rule of thumb only warns (`Advice`): a correct network may break
it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tread_zoo.testing.conformance import CHECKS
    from tread_zoo.testing.probe import Probe

__all__ = ["CHECKS", "Probe"]


def __getattr__(name: str) -> Any:
    """Return `CHECKS` or `Probe`. They, and with them torch, are imported only here, because pytest
    always imports this package."""
    if name in __all__:
        return getattr(import_module("tread_zoo.testing.conformance"), name)
    raise AttributeError(f"module 'tread_zoo.testing' has no attribute {name!r}")
