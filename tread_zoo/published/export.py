"""Export: a checkpoint becomes another project's file, the inverse of the import."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tread_zoo.contract.backbone import Backbone
from tread_zoo.errors import unknown_name
from tread_zoo.published.conversion import FORMATS, LABEL_TABLE
from tread_zoo.published.format import CheckpointFormat, Tensors
from tread_zoo.registry import complete, get_entry
from tread_zoo.runs.checkpoint import Checkpoint, CheckpointError, find_checkpoint, load_backbone


def export_checkpoint(
    folder: str | Path, out: str | Path, *, format: str, weights: str = "ema"
) -> Path:
    """Write a checkpoint's weights to the file `out` as tensors of `format`, and return `out`.

    Exporting an imported checkpoint gives the names and shapes of the project's file and, if that
    was float32, its exact values.

    Args:
        folder: a run or one checkpoint.
        out: a new file; `.safetensors`, or any other suffix for `torch.save`.
        format: a name in `FORMATS`.
        weights: see `load_backbone`.

    Raises:
        ValueError: the format is unknown.
        CheckpointError: `out` exists, or the format cannot hold this network.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    form, out = FORMATS[format], Path(out)
    if out.exists():
        raise CheckpointError(f"out={str(out)!r} exists; name another file.")
    checkpoint = find_checkpoint(folder)
    theirs = _convert_back(checkpoint, load_backbone(checkpoint, weights), form, format)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".safetensors":
        save_file(theirs, out)
    else:
        torch.save(theirs, out)
    return out


def _convert_back(
    checkpoint: Checkpoint, backbone: Backbone, form: CheckpointFormat, format: str
) -> Tensors:
    config, trained = backbone.config, complete("objective", checkpoint.meta["config"]["objective"])
    needed = form.objective(
        backbone, trained["name"] if trained["name"] in form.objectives else form.objectives[0]
    )
    if type(backbone) is not get_entry("backbone", f"{form.backbone}_tiny").target:
        raise CheckpointError(
            f"backbone={backbone.name} is not in {form.project}: format={format} needs "
            f"backbone={form.backbone}."
        )
    usual = get_entry("backbone", f"{form.backbone}_tiny").defaults()
    expected = {
        "backbone.time_scale": (config.get("time_scale"), form.time_scale),
        "backbone.reversed_time": (config.get("reversed_time", False), form.reversed_time),
        **{  # tensors do not show these
            f"backbone.{option}": (config.get(option), usual.get(option))
            for option in ("window", "scan_order")
        },
        "objective": (trained["name"], needed["name"]),
        **{
            f"objective.{option}": (trained.get(option), needed.get(option))
            for option in ("prediction", "schedule", "first_step", "sigma_data")
        },
    }
    for key, (value, wanted) in expected.items():
        if value != wanted:
            raise CheckpointError(
                f"{key}={value} differs from {form.project}: format={format} needs {key}={wanted}."
            )
    blocks = form.block_names(backbone.num_blocks)
    theirs: Tensors = {}
    for key, tensor in backbone.state_dict().items():
        if key == LABEL_TABLE and not form.has_null_label:
            tensor = tensor[:-1]
        try:
            theirs |= form.export_tensor(key, tensor, blocks, backbone.patch_size)
        except KeyError:
            raise CheckpointError(
                f"{key} of the checkpoint has no place in a file of format={format}."
            ) from None
    return {
        name: tensor.contiguous() for name, tensor in {**theirs, **form.fixed(backbone)}.items()
    }
