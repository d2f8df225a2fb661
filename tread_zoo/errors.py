"""Errors in one line: the field, its value, and what would work."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_LISTED = 24  # names in one line


def _by_alias(names: Mapping[str, str]) -> dict[str, str]:
    """Return {alias: name} from {name: "alias alias"}."""
    return {alias: name for name, aliases in names.items() for alias in aliases.split()}


# Names of fields in other projects, and ours. Two fields separated by a space: either may be meant.
USUAL_NAMES = _by_alias(
    {
        "optimizer.learning_rate": "lr learning_rate",
        "optimizer.weight_decay": "wd weight_decay",
        "lr_schedule.warmup_steps": "warmup",
        "training.num_steps": "max_steps iterations epochs",
        "training.num_steps sampler.num_steps": "steps num_inference_steps",
        "training.batch_size": "batch bs",
        "training.max_grad_norm": "clip grad_clip",
        "training.ema_decay": "ema",
        "training.num_workers": "workers",
        "training.precision": "amp",
        "guidance.scale": "cfg cfg_scale",
        "routing.selection_rate": "rate ratio bypass_rate",
        "prompt contexts": "prompts caption captions text",
        "data": "dataset",
        "data.path": "data_dir data_path",
        "backbone": "model",
        "backbone.depth": "depth num_layers num_blocks",
        "backbone.hidden_size": "hidden_size width embed_dim",
        "backbone.num_heads": "num_heads heads",
        "backbone.patch_size": "patch_size",
        "routing.start": "start",
        "routing.end": "end",
        "checkpoint": "ckpt",
        "run_dir": "output_dir",
    }
)
_USUAL = [path for paths in USUAL_NAMES.values() for path in paths.split()]
# Names of parts in other projects, and ours.
USUAL_PARTS = _by_alias(
    {
        "flow": "rectified_flow flow_matching fm cfm",
        "euler": "ddim ode",
        "dpmpp_2m": "dpm dpm_solver",
        "custom": "parts",
        "image_folder": "imagenet folder imagefolder photos",
        "webdataset": "wds tar",
    }
)
# Settings of earlier versions or of other commands, and what to use instead.
INSTEAD = {
    "routing.rejoin": "routing=sprint or routing=maskdit",
    "routing.bypassed": "routing.absent of routing=sprint",
    "routing.path_drop_probability": "routing.path_drop of routing=sprint",
    "routing.reconstruction_weight": "routing=maskdit or routing=microdit",
    "routing.redraw": "routing=random_ltd",
    "objective.second_level": "objective.second_level_fraction",
    "optimizer.decayed": "optimizer.weight_decay_on",
    **dict.fromkeys(
        ("text_encoder", "data.text_encoder"),
        "data.text_encoder=… of data=image_folder, hf or webdataset",
    ),
    **dict.fromkeys(
        ("routing.schedule", "routing.final_rate", "routing.rate_steps"),
        "routing.selection_rate=[linear,0.75,0.25]",
    ),
}


def unknown_name(field: str, value: object, known: Iterable[str]) -> ValueError:
    """Return a `ValueError` for the `value` of `field`, a name that is not among `known`. It
    suggests the nearest known name, and lists all of them or the nearest few."""
    names, text = sorted(known), re.sub(r"[^a-z0-9]+", "_", str(value).lower())
    near = [name for name in (text, USUAL_PARTS.get(text)) if name in names]
    near = near or difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if len(names) > MOST_LISTED:
        few = ", ".join(difflib.get_close_matches(text, names, n=6, cutoff=0))
        where = "compare --help" if field == "study" else f"train --help {field}"
        listed = f"Nearest of {len(names)}: {few}; tread-zoo {where} lists all."
    else:
        listed = f"Known: {', '.join(names) or 'none'}."
    return ValueError(f"{field}={value!r} is unknown.{hint} {listed}")


def unknown_field(
    group: str,
    field: object,
    known: Iterable[str],
    tree: Mapping[str, Any] | None = None,
) -> ValueError:
    """Return a `ValueError` for a field that its group does not have; it suggests the nearest one.

    Args:
        group: dotted name of the group; "" at the top.
        field: the name that was given.
        known: the group's fields.
        tree: all groups with their fields, as nested mappings; with it, the nearest name may be of
            another group.
    """
    names, prefix = sorted(known), f"{group}." if group else ""
    paths = [prefix + name for name in names]
    others = [*_paths(tree), *_USUAL] if tree else []
    near = _nearest_field(str(field), prefix, [*dict.fromkeys([*paths, *others])])
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    if instead := INSTEAD.get(f"{prefix}{field}"):
        hint = f" Use {instead}."
    return ValueError(f"{prefix}{field} is no setting.{hint} Known: {', '.join(names) or 'none'}.")


def _nearest_field(field: str, prefix: str, paths: list[str]) -> list[str]:
    """Return the dotted names that the unknown `field` may mean; `paths` are the known ones.

    They are our name for what other projects call `field`; else up to two fields of this name in
    any group; else the field with the most similar name, preferably in the group `prefix`.
    """
    usual = USUAL_NAMES.get(field, "")
    for each in usual.split():
        if each.partition(".")[0] in paths:
            return [each]
    name = usual.rpartition(".")[2] or field
    same = [path for path in paths if path.rpartition(".")[2] == name]
    if same:
        return same[:2]

    def likeness(path: str) -> float:
        group, _, own = path.rpartition(".")
        bonus = 0.1 if group == prefix.rstrip(".") else 0.0
        return difflib.SequenceMatcher(None, name, own).ratio() + bonus

    best = max(paths, key=likeness, default="")
    return [best] if best and likeness(best) > 0.65 else []


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of a tree's fields and groups, each with `prefix` in front."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")


def missing_path(field: str, path: str, why: str = "") -> ValueError:
    """Return a `ValueError` for a `path` that does not exist, with the nearest name that does.
    `field` is the setting with the path. `why` says why another place, such as the hub, has no such
    path."""
    place = Path(path).expanduser().absolute()
    while not place.parent.is_dir():
        place = place.parent
    near = difflib.get_close_matches(place.name, os.listdir(place.parent), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    also = f" ({why})" if why else ""
    return ValueError(
        f"{field}={path!r} does not exist{also}: {place.parent} has no {place.name!r}.{hint}"
    )


def describe_invalid(
    prefix: str,
    error: "ValidationError",
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> ValueError:
    """Return the first of pydantic's errors as a `ValueError` of one line.

    Args:
        prefix: the group of the fields in `given`; "" for none.
        error: pydantic's exception.
        given: the fields that were validated.
        defaults: all fields with their defaults; nested groups are mappings.
    """
    details = error.errors(include_url=False)
    first = details[0]
    if isinstance(first.get("ctx", {}).get("error"), ValueError):  # a message of ours
        return ValueError(str(first["ctx"]["error"]))
    path, value, known = [prefix] if prefix else [], given, defaults
    for depth, key in enumerate(first["loc"]):
        last = depth == len(first["loc"]) - 1
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument") and last:
            names = known if isinstance(known, Mapping) else ()
            return unknown_field(".".join(path), key, names, None if prefix else defaults)
        if first["type"] == "missing" and last and isinstance(key, str):
            field = ".".join([*path, str(key)])
            return ValueError(f"{field} is not set: add {field}=… to the command line.")
        if isinstance(value, Mapping) and key in value:
            path.append(str(key))
            known = known.get(str(key), {}) if isinstance(known, Mapping) else {}
            value = value[key]  # type: ignore[index]
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            path[-1] += f"[{key}]"
            value = value[key]
        # otherwise the key is the name of a member of a union
    field = ".".join(path)
    if first["type"] == "missing":  # in a list
        return ValueError(f"{field}={value!r} has too few values.")
    same = [d for d in details if d["loc"][: len(first["loc"]) - 1] == first["loc"][:-1]]
    rules = dict.fromkeys(d["msg"].removeprefix("Input should be ") for d in same[:3])
    rule = " or ".join(rules) if len(first["loc"]) > len(path) - bool(prefix) else next(iter(rules))
    text = f"{field}={value!r} must be {rule}"
    if first["type"] in ("list_type", "tuple_type"):
        text += f", as in {field}=[{value}]"
    if first["type"] == "string_type" and isinstance(value, int | float):
        text += (
            f"; a name that looks like a number takes two pairs of quotes, \"{field}='{value}'\""
        )
    elif not isinstance(known, Mapping) and known is not None:
        text += f"; the default is {known!r}"
    return ValueError(text + ".")
