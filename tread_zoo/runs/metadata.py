"""Metadata of checkpoints: the names of the files, and JSON that is verified when read.

checkpoint.json      metadata of a checkpoint
config.json          metadata of a network that was saved alone, or of a run that was pushed

Metadata may come from a stranger. Only this module reads them, and raises a `CheckpointError` of
one line for any fault.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, StringConstraints, ValidationError

from tread_zoo.data.files import checksum
from tread_zoo.runs.old_routing import new_metadata

logger = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
STEP_FOLDERS = "step_" + 8 * "[0-9]"  # checkpoints of a run; a longer name is a copy
META_NAME, AVERAGE_NAME = "checkpoint.json", "ema.safetensors"  # in a checkpoint
FORMAT = 2
META_CHECKSUM = "sha256_of_the_above"
LARGEST_METADATA = 64 << 20  # bytes; names of 100,000 classes take 2 MiB
# Options that no longer exist but occur in earlier checkpoints, with their defaults.
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
    """Return the metadata without options that no longer exist, if these have their defaults."""
    for group, options in REMOVED.items():
        given = metadata.get(group, {}).get("config", {}), metadata.get("config", {}).get(group, {})
        for place in given:
            for option, default in options.items():
                if option in place and place[option] == default:
                    del place[option]
    return metadata


@contextmanager
def as_checkpoint_error(
    path: Path, claim: str, remedy: str = "Use another checkpoint, or download or train it again."
) -> Iterator[None]:
    """Turn any error about a checkpoint's content into a `CheckpointError` of one line: path,
    `claim`, reason, `remedy`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # parsing a stranger's file may raise anything
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        why = kind + " ".join(str(error).split())[:300].rstrip(". ")
        raise CheckpointError(f"{path} {claim}: {why}. {remedy}") from error


def own_file(folder: Path, name: str) -> Path:
    """Return the path of one of a checkpoint's files, without links.

    Raises:
        OSError: the file does not exist.
        ValueError: it is outside the folder, or not a regular file: a device never ends.
    """
    home, file = folder.resolve(), (folder / name).resolve(strict=True)
    # In the hub's cache the files are links to blobs.
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if file.parent not in (home, *blobs) or not file.is_file():
        raise ValueError(f"{name} is no file of this folder; put the file itself there")
    return file


_Checksums = dict[Annotated[str, StringConstraints(pattern=r"^[\w.-]+\.safetensors$")], str]


class _Open(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Part(_Open):
    name: str


class _Sizes(_Open):
    input_size: Any
    in_channels: int
    num_classes: int


class _Described(_Part):
    config: _Sizes
    routing: _Part | None = None


class _Network(_Open):
    """Metadata of a single network; old files of `save_pretrained` have no checksums."""

    backbone: _Described
    plugins: list[str]
    sha256: _Checksums = {}


class _Data(_Open):
    name: str
    num_images: int
    items: str = ""
    codec: dict[str, Any] = {}
    class_names: list[str] = []


class _Config(_Open):
    objective: _Part
    sampler: _Part
    guidance: _Part
    backbone: _Part | None = None
    routing: _Part | None = None
    data: _Part | None = None
    optimizer: _Part | None = None
    training: dict[str, Any] = {}


class _Snapshot(_Open):
    """Metadata of a snapshot of averages, from which other averages are computed."""

    step: NonNegativeInt
    sha256: _Checksums


class _Checkpoint(_Snapshot, _Network):
    sha256: _Checksums
    config: _Config
    weights: str | None = None  # which weights of a run were pushed
    data: _Data | None = None
    seconds: dict[str, float] = {}
    optimizer: list[Any] = []
    scaler: dict[str, Any] | None = None
    images_per_step: int = 0


def read_metadata(
    folder: Path, name: str = META_NAME, *only: str, snapshot: bool = False
) -> dict[str, Any]:
    """Return the metadata in a checkpoint's file `name` after verifying all of its files, or only
    the files `only`. A network that was saved alone has no `format`.

    Args:
        snapshot: the folder is a snapshot of averages, without a description of the network.

    Raises:
        CheckpointError: a file differs from what was saved, has another format, or is outside the
            folder.
    """
    with as_checkpoint_error(folder, "is damaged"):
        metadata = read_json(folder, name)
        alone = name == CONFIG_NAME and "format" not in metadata
        if not alone and metadata.get("format") != FORMAT:
            has = repr(metadata.get("format"))[:40]
            raise ValueError(f"{name} has format {has}, this version reads {FORMAT}")
        seal = metadata.pop(META_CHECKSUM, None)  # earlier checkpoints have none
        if seal is not None and seal != _digest(metadata):
            raise ValueError(f"{name} differs from what was saved (sha256)")
        try:
            schema = _Snapshot if snapshot else _Network if alone else _Checkpoint
            schema.model_validate(metadata)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise ValueError(f"{field} of {name}: {first['msg'].lower()}") from None
        for file in only or metadata.get("sha256", {}):
            check_listed(metadata, file)
            if checksum(own_file(folder, file)) != metadata["sha256"][file]:
                raise ValueError(f"{file} differs from what was saved (sha256)")
    with as_checkpoint_error(folder, "is from an earlier version", "Import or train it again."):
        return new_metadata(drop_removed(metadata))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a folder.

    Raises:
        CheckpointError: the file is missing or too large, or is not a JSON object.
    """
    with as_checkpoint_error(folder, f"is damaged: {name}"):
        file = own_file(folder, name)
        if file.stat().st_size > LARGEST_METADATA:
            raise ValueError(f"it has more than {LARGEST_METADATA >> 20} MiB")
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    return content


def check_listed(metadata: Mapping[str, Any], file: str) -> None:
    """Raise a `ValueError` if metadata have checksums, but none for this file."""
    if file not in metadata.get("sha256", (file,)):
        raise ValueError(f"{file} is not among the files with a checksum")


def read_newest(folders: Sequence[Path], *only: str) -> tuple[Path, dict[str, Any]]:
    """Return the newest intact checkpoint of a run and its metadata. If none is intact, raise the
    oldest one's `CheckpointError`."""
    for folder in reversed(folders[1:]):
        try:
            return folder, read_metadata(folder, META_NAME, *only)
        except CheckpointError as error:
            logger.warning("%s Falling back to the one before.", error)
    return folders[0], read_metadata(folders[0], META_NAME, *only)
