"""Whether a file or a folder can be written, asked before hours of work go into it.

What is asked leaves no trace: the first folder above that exists is tried with a nameless file, and
nothing is made until there is something to write.
"""

import os
import tempfile
from pathlib import Path


def check_out_file(field: str, path: str | Path) -> Path:
    """Return `path` as one that a file can be written to; its folder may be missing.

    Raises:
        ValueError: it is a folder or is not writable, or its folder cannot be made.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        raise ValueError(f"{field}={str(path)!r} is a folder; name a file in it.")
    _check_writable(field, path, place.parent)
    if place.exists() and not os.access(place, os.W_OK):
        raise ValueError(f"{field}={str(path)!r} is there and not writable; name another file.")
    return place


def check_out_folder(field: str, path: str | Path) -> Path:
    """Return `path` as a folder that is there, or can be made, and that files can be written to.

    Raises:
        ValueError: it is a file, or neither it nor what is above it is writable.
    """
    place = Path(path).expanduser()
    _check_writable(field, path, place)
    return place


def write_out_file(place: Path, text: str) -> None:
    """Write a text file, and make the folders that it lies in."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def _check_writable(field: str, given: str | Path, folder: Path) -> None:
    """Raise ValueError unless files could be made in `folder`, once it is made."""
    above = folder.absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise ValueError(
            f"{field}={str(given)!r}: {str(above)!r} is a file, not a folder; name another place."
        )
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(
            f"{field}={str(given)!r} cannot be written: {str(above)!r} takes no files "
            f"({error.strerror}); name another place."
        ) from error
