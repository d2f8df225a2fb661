"""Conversion of earlier versions' routing options to today's methods tread and sprint.

rejoin=replace                                     tread
rejoin=project bypassed=… path_drop_probability=…  sprint
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_SHARED = ("start", "end", "selector", "selection_rate", "warm_start", "dense_tail", "probability")
# options that are not converted, with the value at which they had no effect
_UNUSED = {
    "routes": [], "schedule": "constant", "redraw": False, "reconstruction_weight": None,
    "carry_from": None, "detach": False, "sparsify": True, "rate_range": None, "per_batch": False,
}  # fmt: skip
# beginning of a part's name -> removed options, with the value that every network now has
_REMOVED: dict[str, dict[str, Any]] = {
    "tread": {"per_batch": False},
    "layer_drop": {"unit": "range"},
    "token_merging": {"every": 0, "share": 0.25},
    "lightning_dit": {"shared_modulation": False, "num_class_tokens": 0, "value_residual": False},
    "linear_dit": {"gated": False},
    "rwkv7": {"published_init": False},
}
_RENAMED = (
    ("objective", "second_level", "second_level_fraction"),
    ("optimizer", "decayed", "weight_decay_on"),
)


def new_routing(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's routing method, as its name and options, for the options `old`, which an
    earlier version may have saved.

    Raises:
        ValueError: an option in use has no counterpart today.
    """
    if old["name"] == "none":
        return {"name": "none"}
    if "sparsify" not in old:  # already today's form
        return dict(old)
    new = {key: old[key] for key in _SHARED if key in old}
    for option, usual in _UNUSED.items():
        if old.get(option, usual) != usual:
            raise ValueError(f"routing.{option}={old[option]} is not converted to today's methods")
    rejoin = old.get("rejoin", "replace")
    if rejoin == "replace":
        return {**new, "name": "tread"}
    if rejoin == "project":
        absent, path_drop = old.get("bypassed", "dense"), old["path_drop_probability"]
        return {**new, "name": "sprint", "absent": absent, "path_drop": path_drop}
    raise ValueError(f"routing.rejoin={rejoin} is not converted to today's methods")


def new_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a checkpoint with today's routing methods and names of settings."""
    config, backbone = with_new_names(metadata.get("config", {})), metadata.get("backbone", {})
    _remove_options(backbone.get("config", {}), backbone.get("name", ""))
    if "routing" in config:
        config["routing"] = new_routing(config["routing"])
    absent = backbone.pop("bypassed", "dense")
    for start, end in backbone.pop("fusions", ()):
        backbone["routing"] = {"name": "sprint", "absent": absent, "start": start, "end": end}
    return metadata


def with_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run with today's names of settings. Settings that no longer
    exist are removed if they had no effect."""
    for kind, old, new in _RENAMED:
        part = config.get(kind, {})
        if old in part:
            part[new] = part.pop(old)
    if config.get("guidance", {}).get("name") == "parts":
        config["guidance"]["name"] = "custom"
    owners = (config, config.get("guidance", {}), config.get("sampler", {}))
    for part in (config.get("backbone"), *(owner.get("routing") for owner in owners)):
        if isinstance(part, dict):
            _remove_options(part, part.get("name", ""))
    return config


def _remove_options(options: dict[str, Any], name: str) -> None:
    """Remove from the `options` of a backbone or routing method those that no longer exist and had
    no effect. `name` is the name of the backbone or method."""
    for beginning, removed in _REMOVED.items():
        for option, usual in removed.items() if name.startswith(beginning) else ():
            if options.get(option) == usual:
                del options[option]


def new_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under today's parameter names: `fusions.2_8.weights.0` becomes
    `routing.weights.0`."""
    return {
        f"routing.{name.split('.', 2)[2]}" if name.startswith("fusions.") else name: tensor
        for name, tensor in tensors.items()
    }
