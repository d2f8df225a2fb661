"""Error texts that every module words alike: the field, its value, and what would work."""

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_LISTED = 24  # names in one line
# What fields are called elsewhere; the last part alone where the other groups have it, too.
USUAL_NAMES = {
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("wd", "weight_decay"), "optimizer.weight_decay"),
    "warmup": "lr_schedule.warmup_steps",
    "batch": "training.batch_size",
    "bs": "training.batch_size",
    "clip": "training.max_grad_norm",
    "grad_clip": "training.max_grad_norm",
    "ema": "training.ema_decay",
    "workers": "training.num_workers",
    "amp": "training.precision",
    "cfg": "guidance.scale",
    "cfg_scale": "guidance.scale",
    "dataset": "data",
    "data_dir": "data.path",
    "data_path": "data.path",
    "model": "backbone",
    "ckpt": "checkpoint",
    "output_dir": "run_dir",
    **dict.fromkeys(("steps", "max_steps", "iterations", "epochs"), "training.num_steps"),
}


def unknown_name(field: str, value: object, known: Iterable[str]) -> ValueError:
    """Return a `ValueError` for a name that is not among `known`, suggesting the nearest one; of
    many names the nearest few are listed."""
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if len(names) > MOST_LISTED:
        few = ", ".join(difflib.get_close_matches(str(value), names, n=6, cutoff=0))
        listed = f"Nearest of {len(names)}: {few}; tread-zoo train --help {field} lists all."
    else:
        listed = f"Known: {', '.join(names) or 'none'}."
    return ValueError(f"{field}={value!r} is unknown.{hint} {listed}")


def unknown_field(
    group: str,
    field: object,
    known: Iterable[str],
    tree: Mapping[str, Any] | None = None,
    options: Callable[[], Mapping[str, Any]] = dict,
) -> ValueError:
    """Return a `ValueError` for a field that its group does not have, suggesting the nearest one.

    Args:
        group: dotted; "" at the top.
        field: what was given.
        known: the fields that there are.
        tree: all groups with their fields, as nested mappings: the field may be of another one.
        options: returns the same with the options of parts, where these have none like it.
    """
    names, prefix = sorted(known), f"{group}." if group else ""
    paths = [prefix + name for name in names]
    near = _nearest_field(str(field), prefix, [*dict.fromkeys([*paths, *_paths(tree or {})])])
    near = near or _nearest_field(str(field), prefix, [*_paths(options())])
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ValueError(f"{prefix}{field} is no setting.{hint} Known: {', '.join(names) or 'none'}.")


def _nearest_field(field: str, prefix: str, paths: list[str]) -> list[str]:
    """Return the dotted names that `field` may mean: one by its usual name; two where a name is the
    same in several groups; the one that is written most alike, of its own group if there is one."""
    usual = USUAL_NAMES.get(field, "")
    if usual.partition(".")[0] in paths:
        return [usual]
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
    """Yield the dotted names of a tree's fields, groups among them."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")


def missing_path(field: str, path: str, why: str = "") -> ValueError:
    """Return a `ValueError` for a path that is not there, with what lies near it.

    Args:
        field: that it was given for.
        path: of a file or a folder.
        why: where it might have been a name elsewhere: why that could not be had.
    """
    place = Path(path).expanduser().absolute()
    while not place.parent.is_dir():
        place = place.parent
    names = sorted(name for name in os.listdir(place.parent) if not name.startswith("."))
    near = difflib.get_close_matches(place.name, names, n=1, cutoff=0.5)
    listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    hint = f"Did you mean {near[0]!r}?" if near else f"It has {listed or 'nothing'}."
    also = f" ({why})" if why else ""
    return ValueError(
        f"{field}={path!r} is not there{also}: {place.parent} has no {place.name!r}. {hint}"
    )


def describe_invalid(
    prefix: str,
    error: "ValidationError",
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    options: Callable[[], Mapping[str, Any]] = dict,
) -> ValueError:
    """Return what pydantic found, as one `ValueError` of one line.

    Args:
        prefix: the group that `given` stands under; "" for none.
        error: pydantic's.
        given: what was validated.
        defaults: the fields that there are, with their defaults as far as they have some; nested
            groups are mappings.
        options: see `unknown_field`.
    """
    details = error.errors(include_url=False)
    first = details[0]
    if isinstance(first.get("ctx", {}).get("error"), ValueError):  # worded already
        return ValueError(str(first["ctx"]["error"]))
    path, value, known = [prefix] if prefix else [], given, defaults
    for depth, key in enumerate(first["loc"]):
        last = depth == len(first["loc"]) - 1
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument") and last:
            names = known if isinstance(known, Mapping) else ()
            if prefix:
                return unknown_field(".".join(path), key, names)
            return unknown_field(".".join(path), key, names, defaults, options)
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
        # else it is the name of one member of a union
    field = ".".join(path)
    if first["type"] == "missing":  # of a list
        return ValueError(f"{field}={value!r} has too few values.")
    same = [d for d in details if d["loc"][: len(first["loc"]) - 1] == first["loc"][:-1]]
    rules = dict.fromkeys(d["msg"].removeprefix("Input should be ") for d in same[:3])
    rule = " or ".join(rules) if len(first["loc"]) > len(path) - bool(prefix) else next(iter(rules))
    text = f"{field}={value!r} must be {rule}"
    if first["type"] in ("list_type", "tuple_type"):
        text += f", as in {field}=[{value}]"
    if first["type"] == "string_type" and isinstance(value, int | float):
        text += (
            f"""; a name that looks like a number takes two pairs of quotes, "{field}='{value}'\""""
        )
    elif not isinstance(known, Mapping) and known is not None:
        text += f"; the default is {known!r}"
    return ValueError(text + ".")
