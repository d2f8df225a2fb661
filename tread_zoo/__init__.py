"""Diffusion backbones under one token-routing interface."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tread_zoo.version import __version__

if TYPE_CHECKING:
    from tread_zoo.factory import create_backbone
    from tread_zoo.registry import available, create, list_backbones, register, register_backbone
    from tread_zoo.routing.others.handle import enable_routing
    from tread_zoo.runs.hub import load_pretrained, push_to_hub, save_pretrained
    from tread_zoo.training.loop import train

# A waiting thread of torch's OpenMP (libgomp) spins for a millisecond or, beside other processes,
# for a whole time slice. Torch reads this setting when it is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"

__all__ = [
    "__version__",
    "available",
    "create",
    "create_backbone",
    "enable_routing",
    "list_backbones",
    "load_pretrained",
    "push_to_hub",
    "register",
    "register_backbone",
    "save_pretrained",
    "train",
]

_HOMES = {
    "create_backbone": "factory",
    "enable_routing": "routing.others.handle",
    "train": "training.loop",
    **dict.fromkeys(("load_pretrained", "push_to_hub", "save_pretrained"), "runs.hub"),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name of this package when it is first used, so that `import tread_zoo` stays
    light."""
    if name in __all__:
        return getattr(import_module(f"tread_zoo.{_HOMES.get(name, 'registry')}"), name)
    raise AttributeError(f"module 'tread_zoo' has no attribute {name!r}")
