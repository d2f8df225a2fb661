"""Metadata of checkpoints: the names of the files, and JSON that is verified when read.

checkpoint.json      of a checkpoint
config.json          of a network that was saved alone, or of a run that was pushed
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tread_zoo.runs.old_routing import new_metadata

logger = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
STEP_FOLDERS = "step_" + 8 * "[0-9]"  # checkpoints of a run; a longer name is a copy
META_NAME, AVERAGE_NAME = "checkpoint.json", "ema.safetensors"  # of a checkpoint
FORMAT = 2
META_CHECKSUM = "sha256_of_the_above"
# Options that no longer exist, with their defaults, which earlier checkpoints have.
REMOVED: dict[str, dict[str, Any]] = {
    "backbone": {"shared_modulation": False},
}


class CheckpointError(ValueError):
    """A checkpoint that is missing, or cannot be written or used."""


def sealed(metadata: Mapping[str, Any]) -> str:
    """Return the metadata of a checkpoint as JSON, with a checksum at the end."""
    return json.dumps({**metadata, META_CHECKSUM: _digest(metadata)}, indent=2)


def _digest(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata).encode()).hexdigest()


def drop_removed(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata without options that no longer exist, where they are at their default."""
    for group, options in REMOVED.items():
        given = metadata.get(group, {}).get("config", {}), metadata.get("config", {}).get(group, {})
        for place in given:
            for option, default in options.items():
                if option in place and place[option] == default:
                    del place[option]
    return metadata


def read_metadata(folder: Path, name: str = META_NAME, *only: str) -> dict[str, Any]:
    """Return the metadata in a checkpoint's file `name` after verifying all its files, or `only`
    these.

    Raises:
        CheckpointError: a file differs from what was saved, or has another format.
    """
    try:
        metadata: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
        if metadata["format"] != FORMAT:
            raise ValueError(f"it has format {metadata['format']!r}, this version reads {FORMAT}")
        checksum = metadata.pop(META_CHECKSUM, None)  # earlier checkpoints have none
        if checksum is not None and checksum != _digest(metadata):
            raise ValueError(f"{name} differs from what was saved (sha256)")
        for file in only or metadata["sha256"]:
            with (folder / file).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != metadata["sha256"][file]:
                raise ValueError(f"{file} differs from what was saved (sha256)")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is damaged: {error}. Use another checkpoint of the run, or train again."
        ) from error
    try:
        return new_metadata(drop_removed(metadata))
    except ValueError as error:
        raise CheckpointError(f"{folder} is from an earlier version: {error}.") from error


def read_newest(folders: Sequence[Path], *only: str) -> tuple[Path, dict[str, Any]]:
    """Return the newest intact checkpoint of a run and its metadata; if none is intact, raise the
    `CheckpointError` of the first."""
    for folder in reversed(folders[1:]):
        try:
            return folder, read_metadata(folder, META_NAME, *only)
        except CheckpointError as error:
            logger.warning("%s Falling back to the one before.", error)
    return folders[0], read_metadata(folders[0], META_NAME, *only)
