"""Settings are plain values: nothing in a configuration or a checkpoint names code to be run.

hydra's own node names its launcher, its sweeper and what it logs with, and hydra imports and calls
them before any script of ours sees the configuration. So these are held to a list; callbacks,
which can be anything, to none.
"""

from typing import Any

# What hydra's `instantiate` would import and call. Nothing here does.
TARGET = "_target_"
PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")
FACTORY = "()"  # of logging.config.dictConfig
LOGGING = ("logging.", "colorlog.")


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


def check_hydra(node: Any) -> None:
    """Check hydra's own node, nested dicts and lists with interpolations as they stand.

    Raises:
        ValueError: it names code that is none of hydra's plugins and none of logging.
    """
    for name, value in (node or {}).items():
        where = f"hydra.{name}"
        if name in ("launcher", "sweeper"):
            target = value.get(TARGET) if isinstance(value, dict) else value
            if not str(target).startswith(PLUGINS):
                raise _not_known(f"{where}.{TARGET}", target, PLUGINS)
        elif name == "callbacks":
            if value:
                raise _not_known(where, value, ())
        elif name in ("job_logging", "hydra_logging"):
            _check_logging(value, where)
        else:
            check_plain(value, where)


def _check_logging(node: Any, where: str) -> None:
    check_plain(node, where)
    for kind in ("handlers", "formatters", "filters"):
        parts = (node.get(kind) or {}) if isinstance(node, dict) else {}
        for name, part in parts.items() if isinstance(parts, dict) else [("", parts)]:
            if not isinstance(part, dict):
                raise _not_known(f"{where}.{kind}.{name}", part, LOGGING)
            for key in (FACTORY, "class"):
                if key in part and not str(part[key]).startswith(LOGGING):
                    raise _not_known(f"{where}.{kind}.{name}.{key}", part[key], LOGGING)


def _not_known(where: str, value: Any, known: tuple[str, ...]) -> ValueError:
    allowed = f"only what begins with {' or '.join(known)} is" if known else "none is"
    return ValueError(
        f"{where}={value!r} names code to be run, and {allowed} allowed there. Remove it, and do "
        "not trust where it came from."
    )
