"""Metadata of checkpoints: the names of the files, and JSON that is verified when read.

checkpoint.json      metadata of a checkpoint
config.json          metadata of a network that was saved alone, or of a run that was pushed

Only this module reads these files. Any fault in one raises a `CheckpointError` of one line.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tread_zoo.data.files import checksum
from tread_zoo.runs.old_routing import new_metadata

logger = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
STEP_FOLDERS = "step_" + 8 * "[0-9]"  # checkpoints of a run; a longer name is a copy
META_NAME, AVERAGE_NAME = "checkpoint.json", "ema.safetensors"  # in a checkpoint
FORMAT = 2
META_CHECKSUM = "sha256_of_the_above"


class CheckpointError(ValueError):
    """A checkpoint that is missing, or cannot be written or used."""


def sealed(metadata: Mapping[str, Any]) -> str:
    """Return the metadata of a checkpoint as JSON, with a checksum at the end."""
    return json.dumps({**metadata, META_CHECKSUM: _digest(metadata)}, indent=2)


def _digest(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata).encode()).hexdigest()


@contextmanager
def as_checkpoint_error(
    path: Path, claim: str, remedy: str = "Use another checkpoint, or download or train it again."
) -> Iterator[None]:
    """Turn any error that is raised in the context into a `CheckpointError` of one line: path,
    `claim`, reason, `remedy`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # parsing a stranger's file may raise anything
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        why = kind + " ".join(str(error).split())[:300].rstrip(". ")
        raise CheckpointError(f"{path} {claim}: {why}. {remedy}") from error


def read_metadata(
    folder: Path, name: str = META_NAME, *only: str, snapshot: bool = False
) -> dict[str, Any]:
    """Return the metadata of a checkpoint, after checking the checksums of the checkpoint's files.
    The metadata of a network that was saved alone have no `format`.

    Args:
        folder: the checkpoint's folder.
        name: the file with the metadata.
        only: names of the files to check; none given: all.
        snapshot: the folder is a snapshot of averages, without a description of the network.

    Raises:
        CheckpointError: a file is missing, differs from what was saved, or has another format.
    """
    with as_checkpoint_error(folder, "is damaged"):
        metadata: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
        alone = name == CONFIG_NAME and "format" not in metadata
        if not alone and metadata.get("format") != FORMAT:
            has = repr(metadata.get("format"))[:40]
            raise ValueError(f"{name} has format {has}, this version reads {FORMAT}")
        seal = metadata.pop(META_CHECKSUM, None)  # earlier checkpoints have none
        if seal is not None and seal != _digest(metadata):
            raise ValueError(f"{name} differs from what was saved (sha256)")
        needed = ["step", "sha256"] if snapshot else ["backbone", "plugins"]
        needed += [] if snapshot or alone else ["step", "sha256", "config"]
        if missing := [field for field in needed if field not in metadata]:
            raise ValueError(f"{name} has no {', '.join(missing)}")
        for file in only or metadata.get("sha256", {}):
            if checksum(folder / file) != metadata["sha256"][file]:
                raise ValueError(f"{file} differs from what was saved (sha256)")
    with as_checkpoint_error(folder, "is from an earlier version", "Import or train it again."):
        return new_metadata(metadata)


def read_newest(folders: Sequence[Path], *only: str) -> tuple[Path, dict[str, Any]]:
    """Return folder and metadata of the newest intact checkpoint. `folders` are sorted, the oldest
    checkpoint first; for `only` see `read_metadata`. If none is intact, the `CheckpointError` of
    the oldest is raised."""
    for folder in reversed(folders[1:]):
        try:
            return folder, read_metadata(folder, META_NAME, *only)
        except CheckpointError as error:
            logger.warning("%s Falling back to the one before.", error)
    return folders[0], read_metadata(folders[0], META_NAME, *only)
