"""Checkpoints: written beside and renamed, verified when read, free of pickle.

    <run>/checkpoints/step_00001000/
        model.safetensors       weights
        ema.safetensors         averaged weights, which are sampled and scored
        alignment.safetensors   what an alignment trains beside, if there is one
        optimizer.safetensors   its state, `<parameter>|<name>`
        checkpoint.json         step, configuration, plug-ins, backbone, data, sha256 of the files

A checkpoint exists once its folder has its final name: a crash or a full disk on the way leaves the
one before untouched. Folders that begin with a dot are what it left; the next save clears them.
"""

import hashlib
import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tread_zoo.backbone import Backbone
from tread_zoo.config import RunConfig, make_config
from tread_zoo.data import ImageData
from tread_zoo.registry import check_plugins, create_backbone
from tread_zoo.training.ema import is_sharded, slice_like

logger = logging.getLogger(__name__)

FORMAT = 2
META_NAME = "checkpoint.json"
_SAME = ("backbone", "objective", "data", "alignment", "seed")  # what a resumed run must share


class CheckpointError(ValueError):
    """A checkpoint that is missing, or cannot be written or used; the text says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder and what its `checkpoint.json` says."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.meta["step"])

    @property
    def run_dir(self) -> Path:
        """The folder of the run that saved it."""
        return self.path.parent.parent

    def config(self) -> RunConfig:
        """Return the configuration of the run.

        Raises:
            ValueError: the run had a plug-in that is not loaded, or this version lacks a field.
        """
        check_plugins(self.meta["plugins"], str(self.path))
        return make_config(**self.meta["config"])

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
    run_dir: Path, parts: Mapping[str, dict[str, Tensor]], meta: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of `meta["step"]`, delete all but the newest `keep`, return its folder.

    Raises:
        CheckpointError: it could not be written; nothing half-written is left, older ones stay.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step_{meta['step']:08d}"
    partial = folder / f".partial_{final.name}"
    try:
        _clear_leftovers(folder)
        partial.mkdir(parents=True)
        for part, tensors in parts.items():
            whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(whole, partial / f"{part}.safetensors")
        checksums = {file.name: _checksum(file) for file in sorted(partial.iterdir())}
        text = json.dumps({"format": FORMAT, **meta, "sha256": checksums}, indent=2)
        (partial / META_NAME).write_text(text)
        for file in (*partial.iterdir(), partial):
            _sync(file)  # a rename must not outrun what it renames
        if final.exists():  # the same step, saved again after a resume
            _put_aside(final)
        os.rename(partial, final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        _clear_leftovers(folder)
        older = _folders(folder)
        kept = f"{older[-1]} is intact" if older else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not save {final}: {error}. Nothing half-written is left; {kept}. Make room, or "
            "the folder writable, and continue with resume=latest."
        ) from error
    for old in _folders(folder)[:-keep]:
        _put_aside(old)
    _clear_leftovers(folder)
    return final


def find_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at `path`: its own folder, or a run's, whose newest whole one is taken.

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
            "checkpoints/step_… folders."
        )
    for folder in reversed(folders[1:]):
        try:
            return _verify(folder)
        except CheckpointError as error:
            logger.warning("%s Falling back to the one before.", error)
    return _verify(folders[0])


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a run has left any checkpoint."""
    return bool(_folders(run_dir / "checkpoints"))


def check_same_run(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that a resumed run continues what the checkpoint began; see `RunConfig.differences`.

    Other differences are allowed, to finetune, and are warned about.

    Raises:
        CheckpointError: another backbone, objective, data, alignment or seed; the differences are
            named.
    """
    differences = checkpoint.config().differences(config)
    fields = {f: f"{f}={old!r}, not {new!r}" for f, (old, new) in differences.items()}
    wrong = [text for field, text in fields.items() if field.partition(".")[0] in _SAME]
    if wrong:
        raise CheckpointError(
            f"cannot resume from {checkpoint.path}: it was trained with {'; '.join(wrong)}. Resume "
            "with the same settings, or start a new run in another run_dir."
        )
    for text in fields.values():
        logger.warning("resumed with another setting: it was %s", text)


def data_facts(data: ImageData) -> dict[str, Any]:
    """Return what a checkpoint and `facts.json` say of the data."""
    facts: dict[str, Any] = {
        "name": data.name,
        "image_size": list(data.image_size),
        "channels": data.channels,
        "num_classes": data.num_classes,
        "num_images": len(data.train),  # type: ignore[arg-type]
    }
    if data.codec.facts:
        facts["codec"] = data.codec.facts
    if data.context:
        facts["context"] = list(data.context)
    return facts


def check_same_data(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    """Check that the data are of the kind that the checkpoint was trained on: under the same path,
    another normalisation or other classes would go unnoticed.

    Raises:
        CheckpointError: size, channels, classes, contexts or what makes images of latents differ.
    """
    own = checkpoint.meta["data"]
    wrong = [
        f"{name}={own.get(name)!r}, not {facts.get(name)!r}"
        for name in sorted({*own, *facts} - {"name", "num_images"})
        if own.get(name) != facts.get(name)
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} was trained on data with {'; '.join(wrong)}. Set data.path and its "
            "options to data of the same kind, or start a new run in another run_dir."
        )


# Networks ------------------------------------------------------------------------------------


def load_backbone(checkpoint: Checkpoint, weights: str = "ema") -> Backbone:
    """Return the checkpoint's backbone with its `ema` (default) or `model` weights, in eval mode.

    Raises:
        CheckpointError: the weights do not fit the backbone that this version builds.
        ValueError: the backbone is of a plug-in that is not loaded.
    """
    check_plugins(checkpoint.meta["plugins"], str(checkpoint.path))
    described = checkpoint.meta["backbone"]
    backbone = create_backbone(described["name"], **described["config"])
    backbone.add_fusions(described.get("fusions", ()))
    load_weights(backbone, checkpoint, weights)
    return backbone.eval()


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    """Return what `load_backbone` builds from: `name`, `config`, and `fusions` if there are any."""
    described: dict[str, Any] = {"name": backbone.name, "config": backbone.config}
    if backbone.fused_ranges:
        described["fusions"] = [list(pair) for pair in backbone.fused_ranges]
    return described


def load_weights(network: nn.Module, checkpoint: Checkpoint, part: str) -> None:
    """Load the checkpoint's `part` into `network`.

    Raises:
        CheckpointError: keys or shapes differ; some of them are named.
    """
    try:
        network.load_state_dict(checkpoint.tensors(part))
    except RuntimeError as error:
        differences = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{checkpoint.path} does not fit this backbone: {differences}"
        ) from error


# Optimizers ----------------------------------------------------------------------------------
# torch.distributed.checkpoint.state_dict is not used for them: it takes a step of its own to make
# the state that it loads into, which not every optimizer survives unchanged.


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have state: those that `optimizer` holds as attributes or in lists
    of them, or itself."""
    inner = []
    for value in vars(optimizer).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.optim.Optimizer):
                inner += inner_optimizers(each)
    return inner or [optimizer]


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the state of an optimizer of any kind, of parameters by name; every rank must call
    this.

    Returns:
        Its tensors, whole, by `<parameter>|<name>`; and, as plain values for each of
        `inner_optimizers`, what else the state and the groups hold: {"state": {key: value},
        "groups": [{option: value}]}.
    """
    tensors: dict[str, Tensor] = {}
    plain: list[Any] = []
    for inner in inner_optimizers(optimizer):
        values, content = {}, inner.state_dict()
        for number, parameter in enumerate(_names(inner, parameters)):
            for name, value in content["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    whole = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
                    tensors[f"{parameter}|{name}"] = whole.detach().cpu()
                else:
                    values[f"{parameter}|{name}"] = value
        groups = [
            {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)}
            for group in content["param_groups"]
        ]
        plain.append({"state": values, "groups": groups})
    return tensors, plain


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    plain: list[Any],
    *,
    with_groups: bool,
) -> None:
    """Load what `optimizer_state` returned; of a sharded network each rank takes its slices.

    Args:
        with_groups: the groups' options, too; False keeps those that the optimizer was built with.
    """
    for inner, saved in zip(inner_optimizers(optimizer), plain, strict=True):
        numbers = {name: number for number, name in enumerate(_names(inner, parameters))}
        content, state = inner.state_dict(), defaultdict[int, dict[str, Any]](dict)
        for key, value in {**tensors, **saved["state"]}.items():
            parameter, _, name = key.partition("|")
            if parameter in numbers:
                if isinstance(value, Tensor):
                    value = slice_like(value, parameters[parameter])
                state[numbers[parameter]][name] = value
        content["state"] = dict(state)
        if with_groups:
            for group, options in zip(content["param_groups"], saved["groups"], strict=True):
                group |= options
        inner.load_state_dict(content)


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters of an optimizer, by name, in the order that its state counts them."""
    names = {parameter: name for name, parameter in parameters.items()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


# Files ---------------------------------------------------------------------------------------


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def _put_aside(path: Path) -> None:
    """Give a checkpoint a name that none has, at once: deleting its files takes a while."""
    os.rename(path, path.with_name(f".removed_{path.name}"))


def _clear_leftovers(folder: Path) -> None:
    for path in (*folder.glob(".partial_*"), *folder.glob(".removed_*")):
        shutil.rmtree(path, ignore_errors=True)


def _verify(path: Path) -> Checkpoint:
    """Return the checkpoint in `path` if every file is what it was when it was saved."""
    try:
        meta = json.loads((path / META_NAME).read_text())
        if meta["format"] != FORMAT:
            raise ValueError(f"it has format {meta['format']!r}, this version reads {FORMAT}")
        for name, expected in meta["sha256"].items():
            if _checksum(path / name) != expected:
                raise ValueError(f"{name} differs from what was saved (sha256)")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Use another checkpoint of the run, or train again."
        ) from error
    return Checkpoint(path, meta)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    with suppress(OSError):  # some systems cannot open folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
