"""Reading networks from files of `torch.save` or safetensors, without running code in them."""

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tread_zoo.published.format import Tensors
from tread_zoo.runs.checkpoint import CheckpointError

# Training scripts keep several networks in one file, under these names.
_TENSORS_OF = {
    "ema": ("ema", "ema_state_dict", "model_ema"),
    "model": ("model", "model_state_dict", "state_dict"),
}
# Names that torch.compile, DDP, FSDP and activation checkpointing insert when they wrap a module.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_NAMES_SHOWN = 20


def read_parts(file: str | Path) -> tuple[dict[str, Tensors], int]:
    """Return the networks in `file`, as tensors by name under `ema` and `model`, and the training
    step, 0 if the file has none.

    A file that is a single network counts as `ema`, which is what projects publish. Prefixes from
    wrappers are removed from the tensors' names, and so is `model.` if all names have it. Raises
    CheckpointError if the file is missing, damaged or unsafe, or contains no network.
    """
    content = _load(Path(file))
    parts = {}
    for part, names in _TENSORS_OF.items():
        networks = [content[name] for name in names if _is_network(content.get(name))]
        if networks:
            parts[part] = networks[0]
    if not parts and _is_network(content):
        parts["ema"] = content
    if not parts:
        raise CheckpointError(
            f"in={str(file)!r} holds no network: its entries are {list_names(map(str, content))}."
        )
    step = content.get("step")
    step = step if type(step) is int and step >= 0 else 0
    return {part: _plainly_named(tensors) for part, tensors in parts.items()}, step


def list_names(names: Iterable[str]) -> str:
    """Return a text with the first 20 names, and with how many more there are."""
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


class _Ignored:
    """Placeholder for an object whose class is not loaded; its state is dropped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __setstate__ = append = extend = __setitem__ = __init__


def _load(file: Path) -> Mapping[str, Any]:
    """Return the content of a file, on the CPU, without running code in it.

    Scripts save options and optimizers together with weights. `_Ignored` replaces their classes, so
    that the packages that define them are not needed.
    """
    if not file.is_file():
        raise CheckpointError(f"in={str(file)!r} is not a file; name the checkpoint.")
    with open(file, "rb") as opened:
        start = opened.read(16)
    if start.startswith(b"version https"):
        raise CheckpointError(
            f"in={str(file)!r} is a pointer of Git LFS, not the file: run `git lfs pull` there."
        )
    try:
        if start[8:9] == b"{":  # a safetensors header, whatever the file's name
            return load_file(file)
        zipped = zipfile.is_zipfile(file)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if zipped else []
        with torch.serialization.safe_globals([(type("_", (_Ignored,), {}), n) for n in names]):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # parsing a damaged file may raise anything
        unsafe = re.search(r"GLOBAL ([\w.]+)", str(error))
        if unsafe:
            raise CheckpointError(
                f"in={str(file)!r} holds a {unsafe[1]}, which could run code when loaded. If you "
                "trust the file, load it yourself and save the network's state_dict() alone."
            ) from error
        kind = "a web page" if start.lstrip().startswith(b"<") else "cut short or no checkpoint"
        raise CheckpointError(
            f"in={str(file)!r} cannot be read: it is {kind}. Check its size, and download it again."
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"in={str(file)!r} holds a {type(content).__name__}, not a network.")
    return content


def _is_network(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


def _plainly_named(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors under names without what wrappers such as DDP insert, and without the
    prefix `model.` if all names have it."""
    plain = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): tensor
        for name, tensor in tensors.items()
    }
    while all(name.startswith("model.") for name in plain):
        plain = {name.removeprefix("model."): tensor for name, tensor in plain.items()}
    return plain
