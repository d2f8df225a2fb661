"""Conversion of earlier versions' routing, a single set of options, to today's methods.

rejoin=replace                                     tread
rejoin=replace reconstruction_weight=0             microdit
rejoin=replace redraw=true                         random_ltd
rejoin=project bypassed=… path_drop_probability=…  sprint
rejoin=mask reconstruction_weight=…                maskdit
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# options without a successor: the value at which the option had no effect
_GONE = {
    "carry_from": None,
    "detach": False,
    "sparsify": True,
    "rate_range": None,
    "per_batch": False,
}
# removed options by the beginning of a part's name: the value that every network now has
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
_SHARED = ("start", "end", "selector", "warm_start", "dense_tail", "probability")


def new_routing(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's routing method and options for an earlier version's configuration.

    Raises:
        ValueError: no method has this combination of options.
    """
    if "sparsify" not in old or old["name"] == "none":
        return {"name": old["name"]} if old["name"] == "none" else dict(old)
    kept = {key: old[key] for key in _SHARED if key in old} | {"selection_rate": _rate(old)}
    rejoin, weight = old.get("rejoin", "replace"), old.get("reconstruction_weight")
    routes = [_route(route) for route in old.get("routes", ())]
    for option, usual in _GONE.items():
        if any(each.get(option, usual) != usual for each in (old, *old.get("routes", ()))):
            raise ValueError(f"routing.{option}={old.get(option)} is no option of any method now")
    if rejoin == "project":
        kept |= {"name": "sprint", "absent": old.get("bypassed", "dense")}
        kept |= {"path_drop": old["path_drop_probability"]}
    elif rejoin == "mask" and weight:
        kept |= {"name": "maskdit", "reconstruction_weight": weight}
    elif rejoin == "replace" and weight == 0:
        kept |= {"name": "microdit"}
    elif rejoin == "replace" and weight is None and old.get("redraw"):
        kept |= {"name": "random_ltd"}
    elif rejoin == "replace" and weight is None:
        kept |= {"name": "tread", "routes": routes}
        routes = []
    else:
        raise ValueError(
            f"routing.rejoin={rejoin} with reconstruction_weight={weight} is no method"
        )
    if routes:
        raise ValueError(f"routing.routes is no option of routing={kept['name']}")
    return kept


def new_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a checkpoint with today's routing methods and names of settings."""
    config, backbone = metadata.get("config", {}), metadata.get("backbone", {})
    _remove_options(backbone.get("config", {}), backbone.get("name", ""))
    if "routing" in config:
        config["routing"] = new_routing(config["routing"])
    guidance = with_new_names(config).get("guidance", {})
    ends = {key: guidance.pop(key) for key in ("start", "end", "selector") if key in guidance}
    if ends:
        plain = all(value == "auto" for value in ends.values())
        guidance["routing"] = "auto" if plain else {"name": "tread", **ends}
    fused, masked = backbone.pop("fusions", ()), backbone.pop("masks", ())
    absent = backbone.pop("bypassed", "dense")
    if fused or masked:
        start, end = (fused or masked)[0]
        own = {"name": "sprint", "absent": absent} if fused else {"name": "maskdit"}
        backbone["routing"] = {**own, "start": start, "end": end}
    return metadata


def with_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run with today's names of settings, and without removed ones
    that had no effect."""
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
    """Remove the options of a part that no longer exist, where they had no effect."""
    for beginning, removed in _REMOVED.items():
        for option, usual in removed.items() if name.startswith(beginning) else ():
            if options.get(option) == usual:
                del options[option]


def new_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under today's parameter names: `fusions.2_8.weights.0` becomes
    `routing.weights.0`."""
    return {_key(name): tensor for name, tensor in tensors.items()}


def _key(name: str) -> str:
    owner, _, rest = name.partition(".")
    return f"routing.{rest.partition('.')[2]}" if owner in ("fusions", "mask_tokens") else name


def _rate(old: Mapping[str, Any]) -> Any:
    schedule, rate = old.get("schedule", "constant"), old["selection_rate"]
    if schedule == "constant":
        return rate
    return [schedule, rate, *(old["rate_steps"] if schedule == "steps" else [old["final_rate"]])]


def _route(old: Mapping[str, Any]) -> dict[str, Any]:
    route = {key: old[key] for key in ("start", "end", "selector") if key in old}
    return route | ({"selection_rate": _rate(old)} if "selection_rate" in old else {})
