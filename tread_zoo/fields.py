"""Dataclasses of options: declared with `OPTIONS`, made by `check`, listed by `walk`.

@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RouteConfig: ...

check(RouteConfig, {"selection_rate": 0.5}, "routing")
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from tread_zoo.errors import describe_invalid

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# A number means the GPU with that index.
Device = Annotated[str, BeforeValidator(lambda v: f"cuda:{v}" if isinstance(v, int) else v)]
OPTIONS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)
# Marks of a field. BOOKKEEPING: it does not change what a run computes. RARE: only `--help all`
# shows it.
BOOKKEEPING, RARE = "bookkeeping", "rare"


class Setting(NamedTuple):
    """A field of a dataclass of options. `name` is dotted if the dataclass is nested. A required
    field has the default "???", hydra's sign for a missing value. `type` does not include the
    `marks`, such as `RARE`."""

    name: str
    default: Any
    type: Any
    marks: tuple[Any, ...]


def walk(cls: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a dataclass of options, those of nested dataclasses last. All names get
    `prefix` in front."""
    hints, nested = get_type_hints(cls, include_extras=True), list[tuple[str, Any]]()
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name.rstrip("_"), hints[field.name]  # `in_`: `in` is a keyword
        if dataclasses.is_dataclass(hint):
            nested.append((name, hint))
            continue
        default = "???" if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        marks = getattr(hint, "__metadata__", ())
        yield Setting(name, default, hint.__origin__ if marks else hint, marks)
    for name, hint in nested:
        yield from walk(hint, f"{name}.")


def default_fields(cls: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass of options by name; nested ones as mappings."""
    defaults: dict[str, Any] = {}
    for setting in walk(cls):
        *groups, name = setting.name.split(".")
        node = defaults
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = setting.default
    return defaults


def check(cls: type[Any], fields: Mapping[str, Any], prefix: str = "") -> Any:
    """Return an instance of a dataclass of options, made from plain values.

    Args:
        cls: the class.
        fields: some or all of its fields.
        prefix: the group of the fields, for errors.

    Raises:
        ValueError: a field is wrong; one line says what is wrong with the first such field.
    """
    plain = json.loads(json.dumps(dict(fields), default=as_plain))
    try:
        return TypeAdapter(cls).validate_json(json.dumps(plain))
    except ValidationError as error:
        raise describe_invalid(prefix, error, plain, default_fields(cls)) from None


def as_plain(value: Any) -> Any:
    """Convert a dataclass, a path, or an array or scalar of numpy or torch to values that JSON
    supports."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if hasattr(value, "tolist") else os.fspath(value)
