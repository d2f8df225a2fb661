"""Weights of checkpoints: read, compared with the network that the metadata describe, and loaded.

Weights and metadata may come from a stranger. Until the weights are known to fit, a network is only
built on the meta device, where tensors take no memory.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tread_zoo.contract.backbone import Backbone
from tread_zoo.factory import build_backbone
from tread_zoo.registry import check_plugins
from tread_zoo.runs.metadata import CheckpointError, as_checkpoint_error, check_listed, own_file
from tread_zoo.runs.old_routing import new_keys

# Names that torch.compile, DDP, FSDP and activation checkpointing insert when they wrap a module.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Most elements of an input, or of all fixed tables such as positions; files do not contain these.
_MOST_FIXED = 2**28
_MOST_NAMED = 6


def read_tensors(folder: Path, name: str, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's safetensors file, on the CPU.

    Raises:
        CheckpointError: the file is damaged or outside the folder, or only others have checksums.
    """
    with as_checkpoint_error(folder, f"is damaged: {name}"):
        check_listed(metadata, name)
        return new_keys(load_file(own_file(folder, name)))


def build_network(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> Backbone:
    """Return the backbone that a checkpoint's metadata describe, with these weights, in eval mode.

    Raises:
        CheckpointError: the weights do not fit the backbone, or are not finite.
        ValueError: a plug-in is not loaded.
    """
    check_network(metadata, tensors, path)
    backbone = build_backbone(metadata["backbone"])
    load_tensors(backbone, tensors, path)
    return backbone.eval()


def check_network(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Check that weights fit the backbone that a checkpoint's metadata describe. The cost depends
    on the weights, not on the described size.

    Raises:
        CheckpointError: they do not fit.
        ValueError: a plug-in is not loaded.
    """
    check_plugins(metadata["plugins"], str(path))
    with as_checkpoint_error(path, "does not describe its network"), torch.device("meta"):
        with _most_parameters(100 + 2 * len(tensors)):  # a few extra, so that errors name them
            network = build_backbone(metadata["backbone"])
        fixed = sum(buffer.numel() for buffer in network.buffers())
        height, width = network.input_size
        if max(fixed, height * width * network.in_channels) > _MOST_FIXED:
            raise ValueError(f"an input of {height} x {width} is too large")
    _load(network, tensors, path, assign=True)


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load the weights of the checkpoint at `path` into a network with the same names (ignoring
    wrappers) and shapes.

    Raises:
        CheckpointError: the weights do not fit, or are not finite.
    """
    check_finite(tensors, path)
    _load(network, tensors, path)


def _load(
    network: nn.Module, tensors: Mapping[str, Tensor], path: Path, assign: bool = False
) -> None:
    try:
        network.load_state_dict(named_like(tensors, network.state_dict()), assign=assign)
    except RuntimeError as error:
        differences = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path} does not fit this backbone: {differences}") from error


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise a `CheckpointError` if any weight of the checkpoint at `path` is NaN or infinite: all
    images would be, too."""
    broken = [name for name, tensor in tensors.items() if not tensor.float().isfinite().all()]
    if broken:
        more = ", …" if len(broken) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{path}: {len(broken)} of {len(tensors)} weights have NaN or infinite values: "
            f"{', '.join(broken[:_MOST_NAMED])}{more}. Use an earlier checkpoint of the run, or "
            "train with a lower learning rate."
        )


def unwrapped(name: str) -> str:
    """Return a parameter's name without wrappers: `blocks.0._orig_mod.norm.weight` becomes
    `blocks.0.norm.weight`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_like(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors renamed to the entries of `names` that are equal without wrappers."""
    names = set(names)
    own = {unwrapped(name): name for name in names}
    return {
        name if name in names else own.get(unwrapped(name), unwrapped(name)): tensor
        for name, tensor in tensors.items()
    }


@contextmanager
def _most_parameters(most: int) -> Iterator[None]:
    """Raise a `ValueError` as soon as more than `most` parameters are registered: a depth of 10^9
    would take hours, even on the meta device."""
    count = itertools.count(1)

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if next(count) > most:
            raise ValueError("the network has many more parameters than the weights")

    handle = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()
