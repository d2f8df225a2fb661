"""Single networks as folders, local or on the Hugging Face hub: two files, no pickle, no code.

    config.json          {"backbone": {"name": …, "config": {…}}, "plugins": […], "sha256": {…}}
    model.safetensors    weights

tread-zoo push writes such a folder, too. Its config.json also has a checkpoint's metadata, so that
scripts accept the folder as a checkpoint.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.credentials import without_credentials
from tread_zoo.data.files import checksum
from tread_zoo.factory import describe_backbone
from tread_zoo.registry import PRETRAINED, list_backbones, plugins_of
from tread_zoo.runs.metadata import (
    AVERAGE_NAME,
    CONFIG_NAME,
    META_NAME,
    STEP_FOLDERS,
    WEIGHTS_NAME,
    read_metadata,
    read_newest,
)
from tread_zoo.runs.weights import build_network, read_tensors


def save_pretrained(backbone: Backbone, folder: str | Path) -> Path:
    """Return `folder` after writing a backbone's config.json and model.safetensors to it.

    Raises:
        ValueError: `create_backbone` did not make the backbone, or the folder is a run's.
    """
    if backbone.name is None:
        raise ValueError(
            f"{type(backbone).__name__} was built by calling its class, so its options are not "
            "recorded: use create_backbone."
        )
    plugins = plugins_of([("backbone", {"name": backbone.name, **backbone.config})])
    metadata = {"backbone": describe_backbone(backbone), "plugins": plugins}
    # torch.compile(backbone) and compiled blocks insert a name
    tensors = {k.replace("_orig_mod.", ""): tensor for k, tensor in backbone.state_dict().items()}
    return write_folder(Path(folder), tensors, metadata)


def load_pretrained(path: str | Path, *, revision: str | None = None) -> Backbone:
    """Return a backbone with its weights, on the CPU, in eval mode. From a run or a checkpoint, the
    weights are the averaged ones.

    Args:
        path: a folder from `save_pretrained` or tread-zoo push, a run's folder (its newest
            checkpoint) or one checkpoint. A path that does not exist is a name of
            `list_backbones(pretrained=True)`, or `user/name` on the hub.
        revision: revision of the hub's repository.

    Raises:
        OSError: there is no such network.
        CheckpointError: the network, or every checkpoint of the run, is damaged.
        ValueError: a plug-in of the network is not loaded.
    """
    folder = find_folder(Path(path), revision=revision)
    folders = sorted(folder.glob(f"checkpoints/{STEP_FOLDERS}"))
    if folders or (folder / META_NAME).exists():
        (folder, metadata), name = read_newest(folders or [folder], AVERAGE_NAME), AVERAGE_NAME
    else:
        metadata, name = read_metadata(folder, CONFIG_NAME), WEIGHTS_NAME
    return build_network(metadata, read_tensors(folder, name), folder)


def push_to_hub(backbone: Backbone, repo: str, *, private: bool = False) -> str:
    """Upload the files of `save_pretrained` as `repo`, `user/name`, and return the address."""
    with TemporaryDirectory() as folder:
        return upload(save_pretrained(backbone, folder), repo, private=private)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Path:
    """Write a network's weights `tensors` and its metadata to `folder` as model.safetensors and
    config.json, and return `folder`. The weights' checksum is added to the metadata. Raises
    ValueError for the folder of a run."""
    if (folder / "checkpoints").exists():
        raise ValueError(f"{folder} is the folder of a run: give another one.")
    folder.mkdir(parents=True, exist_ok=True)
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS_NAME)
    metadata = {**metadata, "sha256": {WEIGHTS_NAME: checksum(folder / WEIGHTS_NAME)}}
    (folder / CONFIG_NAME).write_text(json.dumps(metadata, indent=2), encoding="utf-8")
    return folder


def find_folder(path: Path, *, revision: str | None = None, into: Path | None = None) -> Path:
    """Return the folder of a network.

    Args:
        path: the folder itself, the name of a network that comes with the package, or `user/name`
            on the hub, of which config.json and model.safetensors are downloaded.
        revision: revision of the hub's repository.
        into: where a download goes; None: the hub's cache.

    Raises:
        OSError: the download fails, or there is no such network. A path that begins with `runs/`,
            or whose `user` is a local folder, is not taken for a name on the hub.
    """
    repo, ours = path.as_posix(), list_backbones(pretrained=True)
    if path.exists():
        return path
    if repo in ours:
        return PRETRAINED / repo
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo)
    if not is_name or path.parts[0] == "runs" or path.parent.exists():
        raise OSError(
            f"there is no {path}: give a run's folder, one of its checkpoints, "
            f"user/name on the hub, or one of {', '.join(ours)}."
        )
    import huggingface_hub

    files = [CONFIG_NAME, WEIGHTS_NAME]
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, local_dir=into, allow_patterns=files
        )
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        text = f"{repo!r} is not a local folder, and cannot be downloaded from the hub: {why}"
        raise OSError(text) from error
    return Path(folder)


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload all files of a folder as `repo`, `user/name` on the hub, and return the address.

    Raises:
        ValueError: a text file contains credentials.
        OSError: the upload fails.
    """
    import huggingface_hub

    for file in (f for f in folder.rglob("*") if f.suffix in (".json", ".md", ".txt", ".yaml")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if line := next((n for n in text.splitlines() if n != without_credentials(n)), None):
            raise ValueError(
                f"{file} has an address with credentials, {without_credentials(line).strip()[:80]}"
                ": remove them, then push again."
            )

    hub = huggingface_hub.HfApi()
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as error:  # its network library raises its own
        why = " ".join(str(error).split())[:300]
        raise OSError(f"{folder} cannot be uploaded as {repo!r}: {why}") from error
    return str(address)
