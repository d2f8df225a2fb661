"""Addresses without credentials: users, passwords and queries are neither written nor logged."""

import logging
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# `datasets` and fsspec read these: user:password@host, host?key=value, and a command's options.
# A glob may contain `?`, and `hf://` names a revision by `@`.
_USER = re.compile(r"""(\w[\w+.-]*://)(?:[^/\s@'"?]+|[^/\s@:'"]+:(?!\d+/)[^@\s'"]*)@""")
_QUERY = re.compile(
    r"""(https?://[^\s?#'"]*|\w[\w+.-]*://[^\s?#'"]*(?=[?#][^\s'"]*=))[?#][^\s'"]+"""
)
_COMMAND = re.compile(r"\bpipe:.*", re.DOTALL)


def without_credentials(value: Any) -> Any:
    """Return `value`, a text or plain values that contain texts, with `***` in place of
    credentials: the user, password and query of every URL, and any command after `pipe:`."""
    if isinstance(value, Mapping):
        return {key: without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_credentials, value))
    if not isinstance(value, str) or ":" not in value:
        return value
    text = _COMMAND.sub(f"pipe:{HIDDEN}", value)
    return _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def are_hidden(path: object) -> bool:
    """Return whether `without_credentials` hid a part of `path`, so that it cannot be opened."""
    return isinstance(path, str) and HIDDEN in path and without_credentials(path) == path


class CleanFormatter(logging.Formatter):
    """A formatter of log records that applies `without_credentials`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record without credentials."""
        return str(without_credentials(super().format(record)))
