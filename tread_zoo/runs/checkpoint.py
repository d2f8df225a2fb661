"""Checkpoints: saved under a temporary name and renamed, verified when read, without pickle.

    <run>/checkpoints/step_00001000/
        model.safetensors       weights
        ema.safetensors         averaged weights, used for samples and scores
        ema_0.05.safetensors    with training.ema_snapshots_every: averages of two other widths,
        ema_0.1.safetensors     which are also saved in <run>/ema_snapshots/step_…
        alignment.safetensors   weights of the loss `alignment`, if it has any
        optimizer.safetensors   state of the optimizer, keys `<parameter>|<name>`
        checkpoint.json         step, configuration, plug-ins, backbone, data, sha256 of the files
                                and of the metadata itself

A checkpoint's folder gets its final name when it is complete, so a crash or a full disk leaves the
earlier one intact. Folders whose names begin with a dot are leftovers; the next save deletes them.
"""

import errno
import itertools
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tread_zoo.config import RunConfig, make_config
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import ImageData
from tread_zoo.data.files import checksum
from tread_zoo.data.split import digest_items
from tread_zoo.registry import PRETRAINED, check_plugins
from tread_zoo.runs.hub import find_folder
from tread_zoo.runs.metadata import (
    CONFIG_NAME,
    FORMAT,
    META_NAME,
    STEP_FOLDERS,
    WEIGHTS_NAME,
    as_checkpoint_error,
    read_metadata,
    read_newest,
    sealed,
)
from tread_zoo.runs.metadata import CheckpointError as CheckpointError
from tread_zoo.runs.posthoc_ema import TRACKED_WIDTHS, posthoc_coefficients
from tread_zoo.runs.weights import build_network, load_tensors, read_tensors

logger = logging.getLogger(__name__)

SNAPSHOTS = "ema_snapshots"
# A resumed run must keep the settings in _KEPT, and all metadata of the data except _MAY_DIFFER.
# `check_same_data` compares some of the latter separately.
_KEPT = ("backbone", "routing", "objective", "data", "alignment", "seed")
_MAY_DIFFER = {"name", "num_images", "items", "decoder", "captions_by", "class_names"}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder and its metadata, from `checkpoint.json`."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return int(self.meta["step"])

    @property
    def run_dir(self) -> Path:
        """The folder of the run that saved this checkpoint, or a pushed network's own folder. For a
        network that comes with the package it is `runs/<name>`, so that the package stays
        unchanged."""
        if self.path.parent == PRETRAINED:
            return Path("runs") / self.path.name
        return self.path.parent.parent if (self.path / META_NAME).exists() else self.path

    @property
    def data(self) -> dict[str, Any]:
        """Metadata of the training data; empty for an imported network."""
        return dict(self.meta.get("data", {}))

    def config(self) -> RunConfig:
        """Return the configuration of the run; the plug-ins that it needs must be loaded."""
        check_plugins(self.meta["plugins"], str(self.path))
        with as_checkpoint_error(self.path, "has settings that this version cannot use"):
            # The package of its tracker may be missing here.
            return make_config(**{**self.meta["config"], "tracker": "local"})

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Return on the CPU one of the checkpoint's sets of tensors: the weights `model`, `ema`,
        `ema:<width>` or `alignment`, or the state `optimizer`.

        Raises:
            CheckpointError: the checkpoint has no such part; an imported one may only have `ema`.
            ValueError: the average of this width cannot be computed from the run's snapshots.
        """
        if (only := self.meta.get("weights")) is not None:  # a pushed folder has one network
            if part != only:
                raise CheckpointError(f"{self.path} has one set of weights: set weights={only}.")
            return read_tensors(self.path, WEIGHTS_NAME)
        name, _, width = part.partition(":")
        files = [self.path / f"{tracked}.safetensors" for tracked in TRACKED_WIDTHS]
        if (width or name in TRACKED_WIDTHS) and not all(file.exists() for file in files):
            raise CheckpointError(
                f"{self.path} has no averages from which to compute other widths: train with "
                "training.ema_snapshots_every=… from the first step on."
            )
        if width:
            return self._average_of(float(width))
        if not (self.path / f"{part}.safetensors").exists():
            there = ", ".join(sorted(path.stem for path in self.path.glob("*.safetensors")))
            raise CheckpointError(f"{self.path} has no part {part!r}; it has {there}.")
        return read_tensors(self.path, f"{part}.safetensors")

    def _average_of(self, width: float) -> dict[str, Tensor]:
        """Return averaged weights of a relative `width` (see `posthoc_ema`), computed from this
        checkpoint and the run's snapshots before it."""
        folders = {_step(path): path for path in _folders(self.run_dir / SNAPSHOTS)}
        folders = {step: path for step, path in folders.items() if step < self.step}
        folders[self.step] = self.path
        average, rows = dict[str, Tensor](), posthoc_coefficients(list(folders), width).tolist()
        for (step, path), row in zip(folders.items(), rows, strict=True):
            if max(map(abs, row)) < 1e-10:
                continue  # its share is negligible
            earlier = step != self.step
            source = Checkpoint(path, read_metadata(path, snapshot=True)) if earlier else self
            for part, coefficient in zip(TRACKED_WIDTHS, row, strict=True):
                for name, tensor in source.tensors(part).items():
                    average[name] = average.get(name, 0) + coefficient * tensor.double()
        return {name: tensor.float() for name, tensor in average.items()}


def save_checkpoint(
    run_dir: Path,
    parts: Mapping[str, dict[str, Tensor]],
    meta: dict[str, Any],
    keep: int,
    kind: str = "checkpoints",
) -> Path:
    """Write a checkpoint of the step `meta["step"]`, and return its folder.

    Args:
        run_dir: the folder of the run.
        parts: for each file, by its name without `.safetensors`, tensors by name.
        meta: the metadata; format and checksums are added.
        keep: number of newest checkpoints to keep; 0 keeps all.
        kind: `checkpoints`, or `SNAPSHOTS` for averages only.

    Raises:
        CheckpointError: it could not be written; older checkpoints are intact.
    """
    folder = run_dir / kind
    final = folder / f"step_{meta['step']:08d}"
    partial = folder / f".partial_{final.name}"
    try:
        _clear_leftovers(folder)
        partial.mkdir(parents=True)
        for part, tensors in parts.items():
            whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(whole, partial / f"{part}.safetensors")
        checksums = {file.name: checksum(file) for file in sorted(partial.iterdir())}
        text = sealed({"format": FORMAT, **meta, "sha256": checksums})
        (partial / META_NAME).write_text(text, encoding="utf-8")
        for file in (*partial.iterdir(), partial):
            _sync(file)  # the contents must reach the disk before the rename
        if final.exists():  # the same step, saved again after a resume
            _put_aside(final)
        os.rename(partial, final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        _clear_leftovers(folder)
        older = [each for each in _folders(folder) if each != final]
        kept = f"{older[-1]} is intact" if older else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not save {final}: {error}. Partial files were deleted; {kept}. Free space, "
            "or make the folder writable, and continue with resume=latest."
        ) from error
    for old in _folders(folder)[:-keep]:
        _put_aside(old)
    _clear_leftovers(folder)
    return final


def find_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at `path`: a checkpoint's folder, a folder from tread-zoo push, or the
    folder of a run, whose newest intact checkpoint is taken.

    A `path` that does not exist may be the name of a network that comes with the package, or
    `user/name` on the hub, which is downloaded to runs/user/name: two files, no code.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged or has another format.
    """
    try:
        path = Path(path).expanduser()
        path = find_folder(path, into=Path("runs", path))
    except OSError as error:
        raise CheckpointError(str(error)) from error
    if (path / WEIGHTS_NAME).exists() and (path / CONFIG_NAME).exists():
        metadata = read_metadata(path, CONFIG_NAME)
        if "format" not in metadata:
            raise CheckpointError(
                f"{path} holds a network alone, without its training settings: load it in Python "
                "with load_pretrained, or push the run with tread-zoo push."
            )
        return Checkpoint(path, metadata)
    if (path / META_NAME).exists() or re.fullmatch(r"step_\d+", path.name):
        return Checkpoint(path, read_metadata(path))
    folders = _folders(path / "checkpoints") or _folders(path)
    if not folders:
        raise CheckpointError(
            f"checkpoint={str(path)!r} holds no checkpoint. Give a run's folder or one of its "
            "checkpoints/step_… folders."
        )
    return Checkpoint(*read_newest(folders))


def delete_later_checkpoints(run_dir: Path, step: int) -> None:
    """Delete checkpoints and snapshots after `step`, before a run continues from there."""
    for path in (*_folders(run_dir / "checkpoints"), *_folders(run_dir / SNAPSHOTS)):
        if _step(path) > step:
            shutil.rmtree(path)
            logger.info("deleted %s: the run continues from step %d", path, step)


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether the folder of a run has any checkpoint."""
    return bool(_folders(run_dir / "checkpoints"))


def check_same_run(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that a resumed run has the settings of the checkpoint; see `RunConfig.differences`.

    Raises:
        CheckpointError: backbone, routing, objective, data, alignment or seed differ, and
            `resume_changed` is not set. For other differences there is only a warning.
    """
    differences = checkpoint.config().differences(config)
    fields = {f: f"{f}={old!r}, not {new!r}" for f, (old, new) in differences.items()}
    moved = {"data.vae", "data.text_encoder"}  # paths may differ: the weights are compared
    fixed = {f for f in fields if f.partition(".")[0] in _KEPT} - moved
    wrong = [text for field, text in fields.items() if field in fixed]
    if wrong and not config.resume_changed:
        raise CheckpointError(
            f"cannot resume from {checkpoint.path}: it was trained with {'; '.join(wrong)}. Resume "
            "with the same settings or, as far as the weights fit, with resume_changed=true; or "
            "start a new run in another run_dir."
        )
    for text in fields.values():
        logger.warning("resumed with another setting: it was %s", text)


def data_metadata(data: ImageData) -> dict[str, Any]:
    """Return the metadata that describe the training data, for checkpoints and `facts.json`."""
    metadata: dict[str, Any] = {
        "name": data.name, "image_size": list(data.image_size), "channels": data.channels,
        "num_classes": data.num_classes, "num_images": len(data.train),  # type: ignore[arg-type]
        "items": digest_items(data.train),
    }  # fmt: skip
    if data.codec.metadata:
        metadata |= {"codec": data.codec.metadata, "decoder": data.codec.decoder}
    if data.context:
        metadata["context"] = list(data.context)
    if data.text_encoder:
        encoder = dict(data.text_encoder)
        metadata |= {"captions_by": encoder.pop("name"), "text_encoder": encoder}
    if data.class_names != tuple(map(str, range(data.num_classes))):  # real names
        metadata["class_names"] = list(data.class_names)
    return metadata


def check_same_data(checkpoint: Checkpoint, given: dict[str, Any], *, images: bool = False) -> None:
    """Check that the data are those of the checkpoint. Without this check, other classes or another
    normalisation under the same path would go unnoticed.

    Args:
        given: metadata of the data, from `data_metadata`.
        images: also compare a sample of the images, if both have hashes.

    Raises:
        CheckpointError: size, channels, classes, contexts, images or the latents' codec differ.
    """
    saved = checkpoint.meta["data"]
    wrong = [
        f"{name}={saved.get(name)!r}, not {given.get(name)!r}"
        for name in sorted({*saved, *given} - _MAY_DIFFER)
        if saved.get(name) != given.get(name)
    ]
    names = zip(saved.get("class_names", ()), given.get("class_names", ()), strict=False)
    renamed = ((i, *pair) for i, pair in enumerate(names) if pair[0] != pair[1])
    wrong += [f"class {i} {one!r}, not {other!r}" for i, one, other in itertools.islice(renamed, 1)]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} was trained on data with {'; '.join(wrong)}. Set data.path and its "
            "options to data of the same kind, or start a new run in another run_dir."
        )
    if saved["num_images"] != given["num_images"]:
        logger.warning(
            "%s was trained on %d images, and now there are %d: the held-out images are drawn "
            "again, and training has seen some of them",
            checkpoint.path, saved["num_images"], given["num_images"],
        )  # fmt: skip
        return
    pairs = zip(saved.get("items", "").split(), given["items"].split(), strict=False)
    differ = [old != new for old, new in pairs if "----" not in (old, new)]  # both readable
    if images and any(differ):
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data than these: of {len(differ)} images that "
            f"were compared, {sum(differ)} or their labels differ. Set data.path to the same data, "
            "or start a new run in another run_dir."
        )


# Networks ------------------------------------------------------------------------------------


def load_backbone(checkpoint: Checkpoint, weights: str = "ema") -> Backbone:
    """Return the checkpoint's backbone with its `ema` (default), `model` or `ema:<width>` weights,
    in eval mode.

    Raises:
        CheckpointError: the weights do not fit the backbone that this version builds.
        ValueError: a plug-in is not loaded, or the run's snapshots do not allow this width.
    """
    return build_network(checkpoint.meta, checkpoint.tensors(weights), checkpoint.path)


def load_weights(network: nn.Module, checkpoint: Checkpoint, part: str) -> None:
    """Load the checkpoint's weights `part`, such as `ema`, into a network whose weights have the
    same names and shapes."""
    load_tensors(network, checkpoint.tensors(part), checkpoint.path)


# Files ---------------------------------------------------------------------------------------


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(STEP_FOLDERS) if path.is_dir())


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _put_aside(path: Path) -> None:
    """Rename a checkpoint before its files are deleted, because deleting takes a while and an
    interruption must not leave half of it."""
    os.rename(path, path.with_name(f".removed_{path.name}"))


def _clear_leftovers(folder: Path) -> None:
    for path in (*folder.glob(".partial_*"), *folder.glob(".removed_*")):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some file systems cannot
            raise
    finally:
        os.close(handle)
