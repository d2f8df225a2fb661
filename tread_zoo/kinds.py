"""Whether plain settings are of the kind that their field's annotation says.

    seed: int               evaluation.seed='abc' must be a whole number.
    horizontal_flip: bool   training.horizontal_flip='no' must be true or false.
    resume: str | None      resume=True must be text or null.
    metrics: Sequence[str]  evaluation.metrics='fid' must be a list, as in evaluation.metrics=[fid].

A command line and YAML give text where one means a number, and text is truthy whatever it says. The
annotations of dataclasses and of functions are the one list of kinds; what they say besides bool,
int, float, str, lists, mappings and None is left to whoever takes the value. Ranges are not checked
here.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tread_zoo.errors import unknown_name

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
    Sequence: "a list",
    Mapping: "a group of settings",
}


def check_fields(prefix: str, options: Any) -> None:
    """Check the fields of a dataclass, from its `__post_init__`.

    Args:
        prefix: of the fields' names in errors: `training` makes `training.seed`; "" for none.
        options: the instance.

    Raises:
        ValueError: a field of another kind than its annotation.
    """
    hints = get_type_hints(type(options))
    for field in fields(options):
        check_kind(_join(prefix, field.name), getattr(options, field.name), hints[field.name])


def check_typed(settings: Mapping[str, Any], kinds: type) -> None:
    """Check settings against the annotations of a class, as of a `TypedDict`.

    Raises:
        ValueError: a setting of another kind than the annotation of its name.
    """
    for name, hint in get_type_hints(kinds).items():
        if name in settings:
            check_kind(name, settings[name], hint)


def check_keywords(prefix: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check keywords against the signature of a function or a class, before it is called with them.

    Annotations that cannot be resolved, as of types that are imported for a checker alone, are left
    to the function.

    Raises:
        ValueError: a keyword that it does not have (the nearest is suggested), or a value of
            another kind than the annotation of its keyword.
    """
    known = inspect.signature(function).parameters
    target = function.__init__ if inspect.isclass(function) else function
    try:
        hints = get_type_hints(target)
    except NameError:
        hints = {}
    for name, value in given.items():
        if name not in known:
            raise unknown_name(f"{prefix}: field", name, known)
        check_kind(_join(prefix, name), value, hints.get(name, Any))


def check_kind(field: str, value: object, hint: Any) -> None:
    """Raise `ValueError`, naming `field` and `value`, unless the value is what the annotation
    `hint` says; an annotation that is not understood takes anything."""
    kinds = [_plain_kind(one) for one in _alternatives(hint)]
    if not all(plain in _WORDS for plain, _ in kinds):
        return
    for plain, item in kinds:
        if not _is_of(value, plain):
            continue
        if plain is Sequence and item is not None:
            for index, one in enumerate(value):  # type: ignore[arg-type, var-annotated]
                check_kind(f"{field}[{index}]", one, item)
        return
    words = " or ".join(dict.fromkeys(_WORDS[plain] for plain, _ in kinds))
    raise ValueError(f"{field}={value!r} must be {words}{_remedy(field, value, kinds)}.")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _plain_kind(hint: Any) -> tuple[Any, Any]:
    """Return one of `_WORDS` for an annotation, and for a list what its items are; the annotation
    itself where it is none of them."""
    origin = get_origin(hint) or hint
    if origin in (dict, Mapping):
        return Mapping, None
    if origin in (list, Sequence):
        return Sequence, next(iter(get_args(hint)), None)
    return origin, None


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):  # a number to Python, not to who writes it
        return kind is bool
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    if kind is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return isinstance(value, kind)


def _remedy(field: str, value: object, kinds: Sequence[tuple[Any, Any]]) -> str:
    known = [plain for plain, _ in kinds]
    if Sequence in known and isinstance(value, str):
        return f", as in {field}=[{value}]"
    if str in known and isinstance(value, Real) and not isinstance(value, bool):
        return (
            f"""; a name that looks like a number takes two pairs of quotes, "{field}='{value}'\""""
        )
    return ""


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
