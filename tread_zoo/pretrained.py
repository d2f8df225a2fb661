"""Networks as folders, here or on Hugging Face's hub: two files, no pickle, no code.

    config.json          {"backbone": {"name": …, "config": {…}}, "plugins": […]}
    model.safetensors    weights

What tread-zoo push makes of a run is such a folder, too: its config.json says, beside these, what
a checkpoint does, so that scripts take the folder as one.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tread_zoo.registry import check_plugins, create_backbone, plugins_of

if TYPE_CHECKING:
    from tread_zoo.contract.backbone import Backbone

logger = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
STEP_FOLDERS = "step_" + 8 * "[0-9]"  # checkpoints of a run; what has more to its name is a copy
META_NAME, AVERAGE_NAME = "checkpoint.json", "ema.safetensors"  # of a checkpoint
FORMAT = 2
OWN_CHECKSUM = "sha256_of_the_above"


class CheckpointError(ValueError):
    """A checkpoint that is missing, or cannot be written or used; the text says what to do."""


class Pretrained(nn.Module):
    """What a backbone has for folders and the hub."""

    name: str | None
    config: dict[str, Any]
    fused_ranges: tuple[tuple[int, int], ...]
    masked_ranges: tuple[tuple[int, int], ...]

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors into `folder`, and return it.

        Raises:
            ValueError: the backbone was not made by `create_backbone`, or the folder is a run's.
        """
        if self.name is None:
            raise ValueError(
                f"{type(self).__name__} was built by its class, so that nothing says how to build "
                "it again: use create_backbone."
            )
        plugins = plugins_of([("backbone", self.name)])
        facts = {"backbone": describe_backbone(self), "plugins": plugins}
        return write_folder(Path(folder), self.state_dict(), facts)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, revision: str | None = None) -> "Backbone":
        """Return a backbone with its weights, on the CPU, in eval mode; of a run the averaged ones.

        Args:
            path: what `save_pretrained` or tread-zoo push wrote, a run's folder (its newest
                checkpoint) or one checkpoint; where there is none, `user/name` on the hub.
            revision: of the hub's repository.

        Raises:
            OSError: there is no such network.
            CheckpointError: it is damaged; of a run each of its checkpoints is.
            ValueError: it is of a plug-in that is not loaded.
        """
        folder = Path(path)
        if not folder.exists():
            folder = download(folder, revision=revision)
        folders = sorted(folder.glob(f"checkpoints/{STEP_FOLDERS}"))
        if folders or (folder / META_NAME).exists():
            folder, facts = read_newest(folders or [folder], AVERAGE_NAME)
            weights = folder / AVERAGE_NAME
        else:
            facts, weights = json.loads((folder / CONFIG_NAME).read_text()), folder / WEIGHTS_NAME
            if "format" in facts:  # it was a run
                facts = read_facts(folder, CONFIG_NAME)
        check_plugins(facts["plugins"], str(path))
        backbone = build_backbone(facts["backbone"])
        backbone.load_state_dict(load_file(weights))
        return backbone.eval()

    def push_to_hub(self, repo: str, *, private: bool = False) -> str:
        """Upload what `save_pretrained` writes as `user/name`, and return its address."""
        with TemporaryDirectory() as folder:
            return upload(self.save_pretrained(folder), repo, private=private)


def describe_backbone(backbone: Pretrained) -> dict[str, Any]:
    """Return what `build_backbone` takes: `name`, `config`, and `fusions` and `masks` if there are
    any."""
    described: dict[str, Any] = {"name": backbone.name, "config": backbone.config}
    if backbone.fused_ranges:
        described["fusions"] = [list(pair) for pair in backbone.fused_ranges]
    if backbone.masked_ranges:
        described["masks"] = [list(pair) for pair in backbone.masked_ranges]
    return described


def build_backbone(described: Mapping[str, Any]) -> "Backbone":
    """Return the backbone that `describe_backbone` described, with fresh weights."""
    backbone = create_backbone(described["name"], **described["config"])
    backbone.add_fusions(described.get("fusions", ()))
    backbone.add_mask_tokens(described.get("masks", ()))
    return backbone


def sealed(facts: Mapping[str, Any]) -> str:
    """Return what a checkpoint says as JSON, with a checksum of its own at the end."""
    return json.dumps({**facts, OWN_CHECKSUM: _checksum_of(facts)}, indent=2)


def _checksum_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_facts(folder: Path, name: str = META_NAME, *only: str) -> dict[str, Any]:
    """Return what a checkpoint's file `name` says, once it and its files (or `only` these) are
    found to be what they were when they were saved.

    Raises:
        CheckpointError: they are not, or of another format.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / name).read_text())
        if facts["format"] != FORMAT:
            raise ValueError(f"it has format {facts['format']!r}, this version reads {FORMAT}")
        own = facts.pop(OWN_CHECKSUM, None)  # earlier checkpoints have none
        if own is not None and own != _checksum_of(facts):
            raise ValueError(f"{name} differs from what was saved (sha256)")
        for file in only or facts["sha256"]:
            with (folder / file).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != facts["sha256"][file]:
                raise ValueError(f"{file} differs from what was saved (sha256)")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is damaged: {error}. Use another checkpoint of the run, or train again."
        ) from error
    return facts


def read_newest(folders: Sequence[Path], *only: str) -> tuple[Path, dict[str, Any]]:
    """Return the last of a run's checkpoints that is whole, and what `read_facts` does of it. Where
    none is, the first one's `CheckpointError` is raised."""
    for folder in reversed(folders[1:]):
        try:
            return folder, read_facts(folder, META_NAME, *only)
        except CheckpointError as error:
            logger.warning("%s Falling back to the one before.", error)
    return folders[0], read_facts(folders[0], META_NAME, *only)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write the two files of a network, and return the folder.

    Raises:
        ValueError: the folder is a run's, whose config.json is another.
    """
    if (folder / "checkpoints").exists():
        raise ValueError(f"{folder} is the folder of a run: give another one.")
    folder.mkdir(parents=True, exist_ok=True)
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(facts, indent=2))
    return folder


def download(path: Path, *, revision: str | None = None, into: Path | None = None) -> Path:
    """Return a folder with the two files of `user/name`: `into`, or one in the hub's cache.

    Raises:
        OSError: there is no such repository, or no way to it; or the path is no `user/name`, as
            `runs/…` and what would lie in a folder that is here are none.
    """
    import huggingface_hub

    repo = path.as_posix()
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo)
    if not is_name or path.parts[0] == "runs" or path.parent.exists():
        raise OSError(f"there is no {path}: give a run's folder or one of its checkpoints.")
    files = [CONFIG_NAME, WEIGHTS_NAME]
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, local_dir=into, allow_patterns=files
        )
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        text = f"{repo!r} is no folder here, and cannot be had from the hub: {why}"
        raise OSError(text) from error
    return Path(folder)


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload all files of a folder as `user/name`, and return its address.

    Raises:
        OSError: there is no way to the hub, or it refuses.
    """
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as error:  # of its network library, too
        why = " ".join(str(error).split())[:300]
        raise OSError(f"{folder} cannot be uploaded as {repo!r}: {why}") from error
    return str(address)
