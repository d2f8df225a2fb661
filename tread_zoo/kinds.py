"""Of what kind a setting must be: what its function's annotation says, where that is plain.

An integer is not a boolean, "no" is not false, and 1.5 is not an integer; a whole number does for a
float. Annotations of anything but these kinds are left to the function that has them.
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    types.NoneType: "null",
}


def check_kinds(group: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check keywords of `function`, a function or a class, against its annotations.

    Args:
        group: what the settings are called by, as `data` in `data.image_size`.
        function: with annotations; keywords that it does not have are passed over.
        given: keywords and their values.

    Raises:
        ValueError: a value of another kind; the text has the field, the value and the kind.
    """
    target = function.__init__ if inspect.isclass(function) else function
    try:
        hints = typing.get_type_hints(target)
    except NameError:  # of a package that imports a type for its checker alone
        return
    for name, value in given.items():
        if name in hints:
            check_kind(f"{group}.{name}", value, hints[name])


def check_kind(field: str, value: object, annotation: Any) -> None:
    """Raise `ValueError` unless `value` is of a kind that `annotation` names: int | None."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    if any(kind not in _WORDS for kind in kinds) or any(_is(value, kind) for kind in kinds):
        return
    words = " or ".join(_WORDS[kind] for kind in kinds)
    hint = ", in quotes" if str in kinds and value is not None else ""
    raise ValueError(f"{field}={value!r} must be {words}{hint}.")


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
