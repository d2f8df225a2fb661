"""Dataclasses of options: how they are declared, and made of plain values, checked.

@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RouteConfig: ...

check(RouteConfig, {"selection_rate": 0.5}, "routing")
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from tread_zoo.errors import describe_invalid

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# A number is that of a GPU.
Device = Annotated[str, BeforeValidator(lambda v: f"cuda:{v}" if isinstance(v, int) else v)]
OPTIONS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


def check(
    cls: type[Any],
    fields: Mapping[str, Any],
    prefix: str = "",
    options: Callable[[], Mapping[str, Any]] = dict,
) -> Any:
    """Return an instance of a dataclass of options made of plain values.

    Args:
        cls: the class.
        fields: some or all of its fields.
        prefix: the group that they stand under, for errors.
        options: returns further fields, nested as they are written, for suggestions.

    Raises:
        ValueError: in one line, what is wrong with the first field that is.
    """
    plain = json.loads(json.dumps(dict(fields), default=as_plain))
    try:
        return TypeAdapter(cls).validate_json(json.dumps(plain))
    except ValidationError as error:
        raise describe_invalid(prefix, error, plain, default_fields(cls), options) from None


def as_plain(value: Any) -> Any:
    """Return what JSON has no form for as plain values: dataclasses, paths, arrays and scalars of
    numpy and torch."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if hasattr(value, "tolist") else os.fspath(value)


def default_fields(cls: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of options with their defaults, nested ones as mappings; a
    required one as "???", hydra's sign for what is missing."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = "???" if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        name = field.name.rstrip("_")  # of a word of Python's, as `in_`
        defaults[name] = default_fields(value) if dataclasses.is_dataclass(value) else value
    return defaults
