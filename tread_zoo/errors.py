"""Error texts that every module words alike: the field, its value, and what would work."""

import difflib
from collections.abc import Iterable


def unknown_name(field: str, value: object, known: Iterable[str]) -> ValueError:
    """Return a `ValueError` for a name that is not among `known`, suggesting the nearest one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{field}={value!r} is unknown.{hint} Known: {', '.join(names) or 'none'}.")
