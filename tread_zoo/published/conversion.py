"""Import: another project's checkpoint file becomes a checkpoint folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.errors import unknown_name
from tread_zoo.factory import create_backbone
from tread_zoo.published.dis import DIS
from tread_zoo.published.dit import DIT, SIT, TREAD
from tread_zoo.published.drwkv import DRWKV
from tread_zoo.published.format import CheckpointFormat, Tensors
from tread_zoo.published.lightning_dit import LIGHTNING_DIT
from tread_zoo.published.reader import list_names, read_parts
from tread_zoo.published.uvit import UVIT
from tread_zoo.published.zigma import ZIGMA
from tread_zoo.registry import get_entry, list_backbones
from tread_zoo.runs.checkpoint import CheckpointError, has_checkpoints, save_checkpoint

FORMATS: dict[str, CheckpointFormat] = {
    "dit": DIT,
    "sit": SIT,
    "tread": TREAD,
    "uvit": UVIT,
    "dis": DIS,
    "drwkv": DRWKV,
    "lightning_dit": LIGHTNING_DIT,
    "zigma": ZIGMA,
}
_SAMPLING = {"flow": ("heun", 50), "edm": ("heun", 40), "ddpm": ("euler", 250)}
# Weight averaging moves a fixed table by 2e-4, bfloat16 by 2e-3; trained tables differ by more.
_TABLE_TOLERANCE = 4e-3
LABEL_TABLE = "label_embed.table.weight"


@dataclass(frozen=True)
class Imported:
    """The checkpoint that an import wrote, and notes for the user.

    Args:
        path: the checkpoint's folder.
        backbone, config: registered name and options of the network.
        num_parameters: number of the network's parameters.
        notes: one text each.
    """

    path: Path
    backbone: str
    config: dict[str, Any]
    num_parameters: int
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
    """Convert another project's checkpoint to one of ours in the folder `out`, and describe it.

    Args:
        file: the project's checkpoint, from `torch.save` or in safetensors.
        out: a run folder without checkpoints.
        format: a name in `FORMATS`.
        objective: the training objective, if the project has several; None: its usual one.
        num_heads: number of attention heads, which no tensor shows; None: as in the published
            sizes.
        num_classes: number of classes; None: rows of the label table, minus one if it has a row for
            the null label. A table of 1000 rows has none.
        drop_unknown: leave out tensors that our network does not have; else they are an error.

    Raises:
        ValueError: the format or objective is unknown, or sizes do not fit.
        CheckpointError: the file cannot be read, or its tensors do not fit; the message names them.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    form, out = FORMATS[format], Path(out)
    objective = objective or form.objectives[0]
    if objective not in form.objectives:
        choices = " or ".join(form.objectives)
        raise ValueError(f"objective={objective!r} is none of format={format}: it has {choices}.")
    if has_checkpoints(out):
        raise CheckpointError(f"out={str(out)!r} holds a checkpoint already; name another folder.")
    parts, step = read_parts(file)
    said = [form.note]
    if "ema" not in parts:  # sampling uses `ema`
        parts = {"ema": parts["model"]}
        said.append("No averaged weights were found in the file; `ema` has the others.")
    converted = {
        part: _convert(theirs, format, num_heads, num_classes, drop_unknown)
        for part, theirs in parts.items()
    }
    backbone, _, notes = converted["ema"]
    assert backbone.name is not None
    sampler, num_steps = _SAMPLING[objective]
    meta = {
        "step": step,
        "plugins": [],
        "backbone": {"name": backbone.name, "config": backbone.config},
        "config": {
            "objective": form.objective(backbone, objective),
            "sampler": {"name": sampler, "num_steps": num_steps},
            "guidance": {"name": "none"},
        },
        "imported": {
            "format": format,
            "file": Path(file).name,
            "project": form.project,
            "license": form.license,
        },
    }
    tensors = {part: ours for part, (_, ours, _) in converted.items()}
    path = save_checkpoint(out, tensors, meta, keep=1)
    count = sum(tensor.numel() for tensor in tensors["ema"].values())
    origin = f"{form.project} has the licence {form.license}; tread-zoo push keeps it."
    return Imported(path, backbone.name, backbone.config, count, (*said, *notes, origin))


def _convert(
    theirs: Tensors, format: str, num_heads: int | None, num_classes: int | None, drop_unknown: bool
) -> tuple[Backbone, Tensors, list[str]]:
    """Return our backbone on the meta device, its weights, made from the file's tensors `theirs`,
    and notes for the user. For the other arguments see `import_checkpoint`."""
    form = FORMATS[format]
    _check_format(theirs, format)
    backbone = build(form, form.keywords(theirs, num_heads, num_classes))
    state, blocks = backbone.state_dict(), form.blocks(theirs)
    ours: Tensors = {}
    if form.zero_without_labels and not backbone.num_classes:
        zero = [key for key in state if key.startswith(form.zero_without_labels)]
        ours = {key: torch.zeros(state.pop(key).shape) for key in zero}
    rules = {key: form.rule(key, blocks) for key in state}
    fixed = form.fixed(backbone)
    wanted = set(fixed).union(*(names for names, _ in rules.values()))
    unknown = _check_names(theirs, wanted, format, drop_unknown)
    notes = list(_notes(backbone, format, num_heads))
    for name, exact in fixed.items():
        gap = _gap(name, theirs[name], exact)
        if gap > 1e-5:
            notes.append(f"{name} is up to {gap:.1g} off the fixed table; ours is exact.")
    for key, (names, rule) in rules.items():
        ours[key] = rule(*(theirs[name].float() for name in names))
    table = ours.get(LABEL_TABLE)
    if table is not None and len(table) == backbone.num_classes:
        ours[LABEL_TABLE] = torch.cat([table, table.mean(dim=0, keepdim=True)])
        notes.append(
            f"The label table has {backbone.num_classes} rows, none for the null label, which "
            "becomes their mean. It was not trained: do not guide with it."
        )
    if unknown:
        notes.append(f"Left out: {list_names(unknown)}.")
    sources = {key: names for key, (names, _) in rules.items()}
    _check_shapes(state, ours, sources)
    broken = [" + ".join(sources[key]) for key in sources if not ours[key].isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{len(broken)} tensors have NaN or infinite values: {list_names(broken)}."
        )
    return backbone, ours, notes


def build(form: CheckpointFormat, keywords: dict[str, Any]) -> Backbone:
    """Return our network for a format, on the meta device; `keywords` are its constructor's. It
    gets the name of the preset that has these sizes or, if there is none, of the smallest
    preset."""
    name = f"{form.backbone}_tiny"
    names = list_backbones(f"{form.backbone}_*")
    for candidate in sorted(names, key=lambda each: "matched" in each):  # published names first
        entry = get_entry("backbone", candidate)
        sizes = {**entry.defaults(), **keywords}
        if all(sizes[key] == value for key, value in entry.preset.items()):
            name = candidate
            break
    with torch.device("meta"):
        return create_backbone(name, **keywords)


def recognize(theirs: Tensors) -> list[str]:
    """Return the names of the formats that fit a file's tensors. DiT, SiT and TREAD cannot be told
    apart."""
    return [name for name, form in FORMATS.items() if not form.missing_marks(theirs)]


def _check_format(theirs: Tensors, name: str) -> None:
    absent = FORMATS[name].missing_marks(theirs)
    if absent:
        like = " or ".join(recognize(theirs))
        raise CheckpointError(
            f"the file is not of format={name} ({FORMATS[name].project}): it has no "
            f"{list_names(absent)}. It looks like "
            + (f"format={like}." if like else f"none of {', '.join(FORMATS)}.")
        )


def _check_names(theirs: Tensors, wanted: set[str], format: str, drop_unknown: bool) -> list[str]:
    """Return the names in `theirs`, the file's tensors, that are not in `wanted`. Raises
    CheckpointError if a wanted name is missing, or if there are names that are not wanted and
    `drop_unknown` is false."""
    missing, unknown = sorted(wanted - theirs.keys()), sorted(theirs.keys() - wanted)
    if missing or (unknown and not drop_unknown):
        raise CheckpointError(
            f"the file does not fit format={format}. "
            + (f"Missing: {list_names(missing)}. " if missing else "")
            + (f"Unknown: {list_names(unknown)}. " if unknown else "")
            + ("" if missing else "If its forward pass does not use them, drop_unknown=true.")
        )
    return unknown


def _check_shapes(state: Tensors, ours: Tensors, sources: dict[str, tuple[str, ...]]) -> None:
    wrong = [
        f"{' + '.join(names)} gives {list(ours[key].shape)} for {key}, not {list(state[key].shape)}"
        for key, names in sources.items()
        if ours[key].shape != state[key].shape
    ]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors have the wrong shape: {list_names(wrong)}.")


def _gap(name: str, theirs: Tensor, ours: Tensor) -> float:
    """Return the largest difference between `theirs`, the table `name` in a file, and `ours`, the
    same table computed. Raises CheckpointError if averaging or rounding of weights cannot explain
    it."""
    same_shape = theirs.shape == ours.shape
    gap = float((theirs.float() - ours).abs().max()) if same_shape else float("inf")
    if gap > _TABLE_TOLERANCE:
        raise CheckpointError(
            f"{name} {list(theirs.shape)} is not the fixed table {list(ours.shape)} that this "
            f"backbone computes: they differ by {gap:.2g}. This network was trained otherwise."
        )
    return gap


def _notes(backbone: Backbone, format: str, num_heads: int | None) -> Iterator[str]:
    """Yield notes for the user on what an imported file's tensors do not show."""
    published = list_backbones(f"{FORMATS[format].backbone}_*_[0-9]")
    if backbone.name not in published:
        sizes = f"depth={backbone.num_blocks}, hidden_size={backbone.config['hidden_size']}"
        yield (
            f"{sizes}, patch_size={backbone.config['patch_size']} is not a published size: check "
            "that the file is complete."
        )
    if not backbone.num_classes:
        yield "There is no label table, so the network is unconditional."
    twins = [name for name, form in FORMATS.items() if form.names == FORMATS[format].names]
    if len(twins) > 1:
        yield f"Files of {', '.join(twins)} look alike; format={format} was not checked."
    if FORMATS[format].has_heads and num_heads is None:
        yield (
            f"num_heads={backbone.config['num_heads']} is taken from the published sizes; no "
            "tensor shows it. Set num_heads=… if yours differs."
        )
    if backbone.in_channels not in (1, 3):
        yield (
            f"The samples are latents of {backbone.in_channels} channels: decode them with the "
            "autoencoder of the training."
        )
