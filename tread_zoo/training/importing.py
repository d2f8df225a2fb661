"""From another project's checkpoint file to one of ours.

    file -> tensors, without running code -> names and layouts of `published` -> checkpoint folder

Nothing is guessed silently: a tensor too many or too few, a shape that differs, fixed positions
that are not ours, each stops the import and is named.
"""

import argparse
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.registry import create_backbone, get_entry, list_backbones
from tread_zoo.training.checkpoints import CheckpointError, save_checkpoint
from tread_zoo.training.published import (
    FORMATS,
    Choices,
    Format,
    Rule,
    Tensors,
    add_null_row,
    get_format,
    recognize,
)

# Training scripts keep several networks in one file, under these names.
_PARTS = {
    "ema": ("ema", "ema_state_dict", "model_ema"),
    "model": ("model", "model_state_dict", "state_dict"),
}
_PREFIXES = ("module.", "_orig_mod.", "model.")
_SAMPLING = {"flow": ("heun", 50), "edm": ("heun", 40), "ddpm": ("euler", 250)}
_POSITIONS_TOLERANCE = 1e-4
_NAMES_SHOWN = 20


@dataclass(frozen=True)
class Imported:
    """What an import wrote, and what there is to know about it."""

    path: Path
    backbone: str
    config: dict[str, Any]
    num_parameters: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Converted:
    """One network of a file as ours: the backbone on the meta device, its tensors, remarks."""

    backbone: Backbone
    tensors: Tensors
    notes: tuple[str, ...]


def import_checkpoint(
    file: str | Path,
    out: str | Path,
    *,
    format: str,
    objective: str | None = None,
    num_heads: int | None = None,
    num_classes: int | None = None,
    drop_unknown: bool = False,
) -> Imported:
    """Write `file` as a checkpoint of ours in the folder `out`.

    Args:
        file: what another project saved, by `torch.save` or as safetensors.
        out: a folder as of a run; it must not hold a checkpoint yet.
        format: a name in `published.FORMATS`.
        objective: what it was trained for, where the project knows several; None for its usual one.
        num_heads: of its attention, which no tensor shows; None for the published sizes' own.
        num_classes: None takes the last row of its label table for the null label.
        drop_unknown: leave out tensors that ours has no place for, instead of refusing them.

    Raises:
        ValueError: an unknown format or objective, or sizes that do not fit.
        CheckpointError: the file cannot be read, or does not fit; the text names what.
    """
    form, out = get_format(format), Path(out)
    kind = objective or form.objectives[0]
    if kind not in form.objectives:
        known = " or ".join(form.objectives)
        raise ValueError(f"objective={kind!r} is none of format={format}: it has {known}.")
    if (out / "checkpoints").exists():
        raise CheckpointError(f"out={str(out)!r} holds a checkpoint already; give another folder.")
    parts, step = read_parts(file)
    choices = Choices(num_heads=num_heads, num_classes=num_classes)
    converted = {
        part: _convert(theirs, form, format, choices, drop_unknown)
        for part, theirs in parts.items()
    }
    if "ema" not in converted:  # samples are drawn from `ema`
        converted = {"ema": converted["model"]}
    backbone = converted["ema"].backbone
    assert backbone.name is not None
    sampler, num_steps = _SAMPLING[kind]
    meta = {
        "step": step,
        "plugins": [],
        "backbone": {"name": backbone.name, "config": backbone.config},
        "config": {
            "objective": {"name": kind},
            "sampler": {"name": sampler, "num_steps": num_steps},
            "guidance": {"name": "none"},
        },
        "imported": {"format": format, "file": Path(file).name},
    }
    tensors = {part: found.tensors for part, found in converted.items()}
    path = save_checkpoint(out, tensors, meta, keep=1)
    count = sum(tensor.numel() for tensor in tensors["ema"].values())
    notes = (form.note, *converted["ema"].notes)
    return Imported(path, backbone.name, backbone.config, count, notes)


def read_parts(file: str | Path) -> tuple[dict[str, Tensors], int]:
    """Return the networks in `file` as `ema` and `model`, whichever are there, and the step.

    A bare network counts as `ema`, which is what projects publish. Prefixes that wrappers put
    before every key (`module.`, `_orig_mod.`, `model.`) are taken off.

    Raises:
        CheckpointError: the file is missing, damaged, unsafe, or holds no network.
    """
    content = _load(Path(file))
    found = {
        part: next((content[name] for name in names if _is_network(content.get(name))), None)
        for part, names in _PARTS.items()
    }
    parts = {part: tensors for part, tensors in found.items() if tensors is not None}
    if not parts and _is_network(content):
        parts = {"ema": content}
    if not parts:
        raise CheckpointError(
            f"in={str(file)!r} holds no network: its entries are {_listed(map(str, content))}."
        )
    step = content.get("step")
    step = step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else 0
    return {part: _without_prefix(tensors) for part, tensors in parts.items()}, step


def _load(file: Path) -> dict[str, Any]:
    """Return what the file holds, on the CPU, without running code that it may bring."""
    if not file.is_file():
        raise CheckpointError(f"in={str(file)!r} is no file; give the checkpoint that you have.")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # argparse's Namespace, in which scripts keep their options, holds values and does nothing.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
    except (RuntimeError, ValueError, EOFError, KeyError, IndexError, AttributeError, OSError,
            pickle.UnpicklingError, SafetensorError) as error:  # fmt: skip
        unsafe = re.search(r"GLOBAL ([\w.]+)", str(error))
        if unsafe:
            raise CheckpointError(
                f"in={str(file)!r} holds a {unsafe[1]}, and to load that could run code, so it is "
                "refused. Save the network's state_dict() alone, where you trust the file."
            ) from error
        raise CheckpointError(
            f"in={str(file)!r} cannot be read: it is cut short, damaged or no checkpoint "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}). "
            "Compare its size with the published one and download it again."
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"in={str(file)!r} holds a {type(content).__name__}, not a network.")
    return dict(content)


def _is_network(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


def _without_prefix(tensors: Tensors) -> Tensors:
    """Take off each prefix that all keys share, however many wrappers put one there."""
    tensors = dict(tensors)
    while prefix := next((p for p in _PREFIXES if all(k.startswith(p) for k in tensors)), None):
        tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return tensors


def _convert(
    theirs: Tensors, form: Format, name: str, choices: Choices, drop_unknown: bool
) -> _Converted:
    """Return our backbone for their tensors, with its own."""
    _check_format(theirs, form, name)
    keywords = {**form.keywords(theirs, choices), "time_scale": form.time_scale}
    rules, fixed = form.rules(theirs, keywords), form.fixed(keywords)
    wanted = {key for rule in rules for key in rule.theirs} | fixed.keys()
    missing, unknown = sorted(wanted - theirs.keys()), sorted(theirs.keys() - wanted)
    if missing or (unknown and not drop_unknown):
        raise CheckpointError(
            f"the file does not fit format={name}. "
            + (f"Missing: {_listed(missing)}. " if missing else "")
            + (f"Unknown: {_listed(unknown)}. " if unknown else "")
            + ("" if missing else "drop_unknown=true leaves the unknown ones out.")
        )
    for key, own in fixed.items():
        _check_equal(key, theirs[key], own)
    ours = {
        r.ours: r.layout(*(theirs[key].to(torch.float32, copy=True) for key in r.theirs))
        for r in rules
    }
    ours |= {key: fold(ours[key]) for key, fold in form.folded.items()}
    backbone = build_for(form.backbone, keywords)
    _check_shapes(backbone, ours, {rule.ours: rule.theirs for rule in rules})
    return _Converted(backbone, ours, tuple(_notes(backbone, name, choices, rules, unknown)))


def _check_format(theirs: Tensors, form: Format, name: str) -> None:
    absent = [key for key in form.marks if key not in theirs]
    if absent:
        like = recognize(theirs)
        raise CheckpointError(
            f"the file is not of format={name} ({form.project}): it has no {_listed(absent)}. "
            + (f"It looks like format={' or '.join(like)}." if like else
               f"It looks like none of {', '.join(FORMATS)}.")
        )  # fmt: skip


def _check_equal(key: str, theirs: Tensor, own: Tensor) -> None:
    gap = float((theirs.float() - own).abs().max()) if theirs.shape == own.shape else float("inf")
    if gap > _POSITIONS_TOLERANCE:
        raise CheckpointError(
            f"{key} {list(theirs.shape)} is not the fixed table that this backbone computes "
            f"{list(own.shape)}: they differ by {gap:.2g}. This network was trained otherwise."
        )


def build_for(family: str, keywords: dict[str, Any]) -> Backbone:
    """Build the network under the preset that has these sizes, or else under the smallest one."""
    name = f"{family}_tiny"
    names = list_backbones(f"{family}_*")
    for candidate in sorted(names, key=lambda each: "matched" in each):  # published names first
        preset = get_entry("backbone", candidate).preset
        defaults = get_entry("backbone", candidate).defaults()
        if all({**defaults, **keywords}[key] == value for key, value in preset.items()):
            name = candidate
            break
    with torch.device("meta"):
        return create_backbone(name, **keywords)


def _check_shapes(backbone: Backbone, ours: Tensors, sources: dict[str, tuple[str, ...]]) -> None:
    own = backbone.state_dict()
    if own.keys() != ours.keys():
        raise CheckpointError(
            f"this version's {backbone.name} is built otherwise than the published network: only "
            f"one of the two has {_listed(sorted(own.keys() ^ ours.keys()))}."
        )
    wrong = [
        f"{' + '.join(sources.get(key, (key,)))} gives {list(tensor.shape)} for {key}, "
        f"not {list(own[key].shape)}"
        for key, tensor in ours.items()
        if own[key].shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors have another shape: {_listed(wrong)}.")


def _notes(
    backbone: Backbone, name: str, choices: Choices, rules: Sequence[Rule], dropped: Sequence[str]
) -> Iterator[str]:
    """Yield what a user should know that the tensors could not say."""
    twins = [other for other, form in FORMATS.items() if form.marks == FORMATS[name].marks]
    if len(twins) > 1:
        yield f"No tensor tells {', '.join(twins)} apart: format={name} is taken at its word."
    if "num_heads" in backbone.config and choices.num_heads is None:
        yield (
            f"num_heads={backbone.config['num_heads']} is what the published sizes have; no tensor "
            "shows it. Give num_heads=… if it is another."
        )
    if any(rule.layout is add_null_row for rule in rules):
        yield (
            f"Its label table has no row beside its {backbone.num_classes} classes; the row for no "
            "label is their mean, which it was not trained for: do not guide with it."
        )
    if backbone.in_channels not in (1, 3):
        yield (
            f"It works on latents of {backbone.in_channels} channels: what it samples are latents, "
            "for the autoencoder that it was trained with."
        )
    if dropped:
        yield f"Left out: {_listed(dropped)}."


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
