"""Settings are plain values: nothing in a configuration or a checkpoint names code to be run."""

from typing import Any

# What hydra's `instantiate` would import and call. Nothing here does.
TARGET = "_target_"


def check_plain(settings: Any, where: str) -> None:
    """Check that nested dicts and lists hold no `_target_`.

    Raises:
        ValueError: one does; it is named with its place.
    """
    if isinstance(settings, dict):
        if TARGET in settings:
            raise ValueError(
                f"{where} holds {TARGET}={settings[TARGET]!r}, code to be run. Settings of this "
                "project are plain values: remove it, and do not trust where it came from."
            )
        for name, value in settings.items():
            check_plain(value, f"{where}.{name}")
    elif isinstance(settings, list | tuple):
        for index, value in enumerate(settings):
            check_plain(value, f"{where}[{index}]")
