"""Checkpoints: written beside and renamed, verified when read, free of pickle.

    <run>/checkpoints/step_00001000/
        model.safetensors       weights
        ema.safetensors         averaged weights, which are sampled and scored
        optimizer.safetensors   `<parameter>.<state>` tensors
        checkpoint.json         step, backbone, objective, data facts, sha256 of all of these

A checkpoint exists once its folder has its final name; a crash or a full disk on the way leaves the
one before untouched. Folders that begin with a dot are what it left; the next save clears them.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tread_zoo.backbone import Backbone
from tread_zoo.plain import check_plain
from tread_zoo.registry import create_backbone
from tread_zoo.training.sharding import slice_like

logger = logging.getLogger(__name__)

FORMAT = 1
META_NAME = "checkpoint.json"
META_CHECKSUM = "checkpoint_sha256"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # safetensors' errors have but their words


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or used; the text says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder and what its `checkpoint.json` says."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.meta["step"]

    @property
    def digest(self) -> str:
        """The sha256 of its record, which has those of all of its files."""
        return _meta_checksum(self.meta)

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Load `model`, `ema` or `optimizer` onto the CPU.

        Raises:
            CheckpointError: it has no such part; an imported one may hold `ema` alone.
        """
        file = self.path / f"{part}.safetensors"
        if not file.exists():
            there = ", ".join(sorted(path.stem for path in self.path.glob("*.safetensors")))
            raise CheckpointError(f"{self.path} has no part {part!r}; it has {there}.")
        return load_file(file)


def save_checkpoint(
    run_dir: Path, parts: dict[str, dict[str, Tensor]], meta: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of `meta["step"]`, then delete all but the newest `keep`.

    The newest one before which no step was skipped (`meta["skipped_steps"]`) is kept beside them.

    Raises:
        CheckpointError: it could not be written; nothing half-written is left, older ones stay.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step_{meta['step']:08d}"
    partial = folder / f".partial_{final.name}"
    try:
        _clear_leftovers(folder)
        partial.mkdir(parents=True)
        checksums = {}
        for part, tensors in parts.items():
            file = partial / f"{part}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
            checksums[file.name] = _checksum(file)
        meta = {"format": FORMAT, **meta, "sha256": checksums}
        text = json.dumps({**meta, META_CHECKSUM: _meta_checksum(meta)}, indent=2)
        (partial / META_NAME).write_text(text)
        _sync(partial)
        if final.exists():  # the same step, saved again after a resume
            _put_aside(final)
        os.rename(partial, final)
        _sync_entries(folder)
    except (OSError, SafetensorError) as error:
        _clear_leftovers(folder)
        older: list[Path] = []
        with suppress(OSError):  # it may not even be read
            older = _folders(folder)
        kept = f"{older[-1]} is intact" if older else "there is no earlier checkpoint"
        full = any(os.strerror(number) in str(error) for number in _FULL)
        remedy = "Free some space" if full else "Make the folder writable"
        raise CheckpointError(
            f"could not save {final}: {error}. Nothing half-written is left; {kept}. {remedy} "
            "and continue with resume=latest."
        ) from error
    _rotate(folder, keep)
    return final


def find_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at `path`: its own folder, or a run's, whose newest sound one is taken.

    Raises:
        CheckpointError: there is none, or it is damaged or of another format.
    """
    path = Path(path)
    if (path / META_NAME).exists() or path.name.startswith("step_"):
        return _verify(path)
    folders = _folders(path / "checkpoints") or _folders(path)
    if not folders:
        raise CheckpointError(
            f"checkpoint={str(path)!r} holds no checkpoint. Give a run's folder or one of its "
            "checkpoints/step_… folders; scripts/train.py prints where it saves."
        )
    for folder in reversed(folders):
        try:
            return _verify(folder)
        except CheckpointError as error:
            if folder == folders[0]:
                raise
            logger.warning("%s Falling back to the one before.", error)
    raise AssertionError("unreachable")


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a run has left any checkpoint."""
    return bool(_folders(run_dir / "checkpoints"))


def load_backbone(checkpoint: Checkpoint, weights: str = "ema") -> Backbone:
    """Build the checkpoint's backbone with its `ema` (default) or `model` weights, in eval mode.

    Raises:
        CheckpointError: the weights do not fit the backbone that this version builds.
    """
    if weights not in ("ema", "model"):
        raise ValueError(f"weights={weights!r} must be ema or model.")
    backbone = build_described(checkpoint.meta["backbone"])
    load_weights(backbone, checkpoint, weights)
    return backbone.eval()


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    """Return what `build_described` needs: `name`, `config`, and `fusions` if there are any."""
    described: dict[str, Any] = {"name": backbone.name, "config": backbone.config}
    if backbone.fused_ranges:
        described["fusions"] = [list(pair) for pair in backbone.fused_ranges]
    return described


def build_described(described: dict[str, Any]) -> Backbone:
    """Build the backbone that a checkpoint or a run's settings describe, with fresh weights."""
    backbone = create_backbone(described["name"], **described["config"])
    backbone.add_fusions(described.get("fusions", ()))
    return backbone


def load_weights(network: nn.Module, checkpoint: Checkpoint, part: str) -> None:
    """Fill `network` with the checkpoint's `part`.

    Raises:
        CheckpointError: keys or shapes differ; some of them are named.
    """
    tensors, own = checkpoint.tensors(part), network.state_dict()
    wrong = sorted(tensors.keys() ^ own.keys())
    wrong += [k for k in sorted(tensors.keys() & own.keys()) if tensors[k].shape != own[k].shape]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this backbone: {len(wrong)} tensors are missing, "
            f"unknown or of another shape, among them {', '.join(wrong[:3])}."
        )
    network.load_state_dict(tensors)


def check_same_run(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """Check that a resumed run continues what the checkpoint began.

    Another routing or other training options are allowed, to finetune, and are said.

    Raises:
        CheckpointError: another backbone, objective, data or seed; the differences are named.
    """
    old = checkpoint.meta
    wrong = [
        difference
        for section in ("backbone", "objective", "data", "seed")
        for difference in differences(section, old.get(section), settings[section])
    ]
    if wrong:
        fusions = "(Fusions follow routing.rejoin and the ranges of the routes.) "
        raise CheckpointError(
            f"cannot resume from {checkpoint.path}: it was trained with {'; '.join(wrong)}. "
            f"{fusions if 'backbone.fusions' in ''.join(wrong) else ''}Resume with the same "
            "settings, or start a new run in another run_dir."
        )
    for section in ("routing", "training"):
        for difference in differences(section, old.get(section), settings[section]):
            logger.warning("resumed with another setting: it was %s", difference)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `<parameter index>.<name>` tensors."""
    return {
        f"{index}.{name}": value
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave, whole; of a sharded optimizer each rank its slice."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = slice_like(value, parameters[int(index)])
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def _rotate(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` and the newest that was saved while all was well.

    What cannot be deleted stays, with a warning: the new checkpoint is there all the same.
    """
    folders = _folders(folder)
    sound = next((path for path in reversed(folders) if _no_step_was_skipped(path)), None)
    try:
        for old in folders[:-keep]:
            if old != sound:
                _put_aside(old)
        _clear_leftovers(folder)
    except OSError as error:
        logger.warning("an old checkpoint could not be deleted: %s", error)


def _no_step_was_skipped(path: Path) -> bool:
    """Return whether all went well between this checkpoint and the one before."""
    try:
        skipped = json.loads((path / META_NAME).read_text()).get("skipped_steps")
        return not (skipped and skipped["since_last"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _put_aside(path: Path) -> None:
    """Give a checkpoint a name that none has, at once: deleting its files takes a while."""
    os.rename(path, path.with_name(f".removed_{path.name}"))


def _clear_leftovers(folder: Path) -> None:
    """Delete what is half-written or half-deleted, as far as this process may."""
    with suppress(OSError):
        for path in (*folder.glob(".partial_*"), *folder.glob(".removed_*")):
            shutil.rmtree(path, ignore_errors=True)


def _verify(path: Path) -> Checkpoint:
    """Return the checkpoint in `path` if every file is what it was when it was saved."""
    advice = "Use another checkpoint of the run, or train again."
    try:
        meta = json.loads((path / META_NAME).read_text())
    except OSError as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}. {advice}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {META_NAME} is no JSON. {advice}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise CheckpointError(f"{path} has format {found!r}; this version reads {FORMAT}. {advice}")
    own = meta.pop(META_CHECKSUM, None)  # checkpoints of earlier versions have none
    if own is not None and own != _meta_checksum(meta):
        raise CheckpointError(
            f"{path} is damaged: {META_NAME} differs from what was saved (sha256). {advice} If you "
            f"changed it yourself, remove {META_CHECKSUM} from it."
        )
    check_plain(meta, str(path / META_NAME))
    for name, expected in meta["sha256"].items():
        if not (path / name).exists():
            raise CheckpointError(f"{path} is damaged: {name} is missing. {advice}")
        if _checksum(path / name) != expected:
            raise CheckpointError(
                f"{path} is damaged: {name} differs from what was saved (sha256). {advice}"
            )
    return Checkpoint(path, meta)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _meta_checksum(meta: dict[str, Any]) -> str:
    """Return the sha256 of all that `checkpoint.json` says but this itself."""
    as_read = json.loads(json.dumps(meta))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Wait until the folder's files are on the disk, so that the rename cannot outrun them."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    _sync_entries(folder)


def _sync_entries(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can wait for that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def differences(name: str, old: Any, new: Any) -> list[str]:
    """Return `name.key=old, not new` for each value that differs, however deep."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in differences(f"{name}.{key}", old.get(key), new.get(key))]
    return [] if old == new else [f"{name}={old!r}, not {new!r}"]
