"""Old names of what `create("data", …)` does, until their last users are gone."""

from collections.abc import Mapping
from typing import Any

from tread_zoo.data.dataset import ImageData
from tread_zoo.registry import available, create, get_entry

SOURCES = {name: get_entry("data", name).target for name in available("data")}


def as_set(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options."""
    return dict(options)


def build_data(name: str, **options: Any) -> ImageData:
    """Return the data."""
    return create("data", name, **options)
