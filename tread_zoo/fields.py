"""Dataclasses of options: their declaration, and how `check` makes them from plain values.

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
# A number means the GPU with that index.
Device = Annotated[str, BeforeValidator(lambda v: f"cuda:{v}" if isinstance(v, int) else v)]
OPTIONS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


def check(
    cls: type[Any],
    fields: Mapping[str, Any],
    prefix: str = "",
    options: Callable[[], Mapping[str, Any]] = dict,
) -> Any:
    """Return an instance of a dataclass of options, made from plain values.

    Args:
        cls: the class.
        fields: some or all of its fields.
        prefix: the group of the fields, for errors.
        options: returns further nested fields, which errors may suggest.

    Raises:
        ValueError: a field is wrong; one line says what is wrong with the first such field.
    """
    plain = json.loads(json.dumps(dict(fields), default=as_plain))
    try:
        return TypeAdapter(cls).validate_json(json.dumps(plain))
    except ValidationError as error:
        raise describe_invalid(prefix, error, plain, default_fields(cls), options) from None


def as_plain(value: Any) -> Any:
    """Return a value that JSON does not support as plain values: a dataclass, a path, or an array
    or scalar of numpy or torch."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if hasattr(value, "tolist") else os.fspath(value)


def default_fields(cls: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of options with their defaults. Nested dataclasses become
    mappings; a required field has "???", hydra's sign for a missing value."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = "???" if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        name = field.name.rstrip("_")  # `in_`, because `in` is a keyword
        defaults[name] = default_fields(value) if dataclasses.is_dataclass(value) else value
    return defaults
