"""Weights of checkpoints: read, checked, and loaded into the network that the metadata describe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from tread_zoo.contract.backbone import Backbone
from tread_zoo.factory import build_backbone
from tread_zoo.registry import check_plugins
from tread_zoo.runs.metadata import CheckpointError, as_checkpoint_error
from tread_zoo.runs.old_routing import new_keys

_MOST_NAMED = 6


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors in a checkpoint's file `name`, on the CPU. Parameter names of earlier
    versions are replaced by today's.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with as_checkpoint_error(folder, f"is damaged: {name}"):
        return new_keys(load_file(folder / name))


def build_network(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> Backbone:
    """Return the backbone that `metadata` describe, with the weights `tensors`, in eval mode.
    Errors name `path`, the checkpoint.

    Raises:
        CheckpointError: the weights do not fit the backbone, or are not finite.
        ValueError: a plug-in is not loaded.
    """
    check_plugins(metadata["plugins"], str(path))
    with as_checkpoint_error(path, "does not describe its network"):
        backbone = build_backbone(metadata["backbone"])
    load_tensors(backbone, tensors, path)
    return backbone.eval()


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load `tensors` of the checkpoint at `path` into a network whose weights have the same names
    and shapes.

    Raises:
        CheckpointError: the weights do not fit, or are not finite.
    """
    check_finite(tensors, path)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        differences = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path} does not fit this backbone: {differences}") from error


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise a `CheckpointError` if any weight of the checkpoint at `path` is NaN or infinite,
    because sampled images would be, too."""
    broken = [name for name, tensor in tensors.items() if not tensor.float().isfinite().all()]
    if broken:
        more = ", …" if len(broken) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{path}: {len(broken)} of {len(tensors)} weights have NaN or infinite values: "
            f"{', '.join(broken[:_MOST_NAMED])}{more}. Use an earlier checkpoint of the run, or "
            "train with a lower learning rate."
        )
