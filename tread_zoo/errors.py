"""Error texts that every module words alike: the field, its value, and what would work."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


def unknown_name(field: str, value: object, known: Iterable[str]) -> ValueError:
    """Return a `ValueError` for a name that is not among `known`, suggesting the nearest one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{field}={value!r} is unknown.{hint} Known: {', '.join(names) or 'none'}.")


def unknown_field(group: str, field: object, known: Iterable[str]) -> ValueError:
    """Return a `ValueError` for a field that its group does not have, suggesting the nearest one.

    Args:
        group: dotted; "" at the top.
        field: what was given.
        known: the fields that there are.
    """
    names, prefix = sorted(known), f"{group}." if group else ""
    near = difflib.get_close_matches(str(field), names, n=1, cutoff=0.4)
    hint = f" Did you mean {prefix}{near[0]}?" if near else ""
    return ValueError(f"{prefix}{field} is no setting.{hint} Known: {', '.join(names) or 'none'}.")


def describe_invalid(
    prefix: str, error: "ValidationError", given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> ValueError:
    """Return what pydantic found, as one `ValueError` of one line.

    Args:
        prefix: the group that `given` stands under; "" for none.
        error: pydantic's.
        given: what was validated.
        defaults: the fields that there are, with their defaults as far as they have some; nested
            groups are mappings.
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
            return unknown_field(".".join(path), key, names)
        if first["type"] == "missing" and last:
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
