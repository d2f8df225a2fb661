"""Networks as folders, here or on Hugging Face's hub: two files, no pickle, no code.

    config.json          {"backbone": {"name": …, "config": {…}}, "plugins": […]}
    model.safetensors    weights

What `scripts/push.py` makes of a run is such a folder, too: its config.json holds, beside these,
what a checkpoint says of the run, so that scripts take the folder as a checkpoint.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import nn

from tread_zoo.registry import check_plugins, create_backbone, plugins_of

if TYPE_CHECKING:
    from tread_zoo.backbone import Backbone

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


class Pretrained(nn.Module):
    """What a backbone has for folders and the hub. Its `name` and `config` are the registry's."""

    name: str | None
    config: dict[str, Any]
    fused_ranges: tuple[tuple[int, int], ...]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write config.json and model.safetensors into `folder`, and return it.

        Raises:
            ValueError: the backbone was not made by `create_backbone`, or the folder is a run's.
        """
        if self.name is None:
            raise ValueError(
                f"{type(self).__name__} was built by its class, so that nothing says how to build "
                "it again: use create_backbone."
            )
        facts = {
            "backbone": describe_backbone(self),
            "plugins": plugins_of([("backbone", self.name)]),
        }
        written = write_config(Path(folder), facts)
        whole = {key: tensor.contiguous() for key, tensor in self.state_dict().items()}
        save_file(whole, written / WEIGHTS_NAME)
        return written

    @classmethod
    def from_pretrained(
        cls, name_or_folder: str | os.PathLike[str], *, revision: str | None = None
    ) -> "Backbone":
        """Return a backbone with its weights, on the CPU, in eval mode; of a run the averaged ones.

        Args:
            name_or_folder: what `save_pretrained` or scripts/push.py wrote, a run's folder (its
                newest checkpoint) or one checkpoint; or, where no such folder exists, `user/name`
                on the hub. Files are downloaded, code is not.
            revision: of the hub's repository.

        Raises:
            OSError: there is none.
            ValueError: it is of a plug-in that is not loaded.
        """
        facts, file = _find_network(name_or_folder, revision)
        check_plugins(facts["plugins"], str(name_or_folder))
        backbone = build_backbone(facts["backbone"])
        backbone.load_state_dict(load_file(file))
        return backbone.eval()

    def push_to_hub(self, repo: str, *, private: bool = False) -> str:
        """Upload what `save_pretrained` writes as `user/name`, and return its address."""
        with TemporaryDirectory() as folder:
            return upload(self.save_pretrained(folder), repo, private=private)


def describe_backbone(backbone: Pretrained) -> dict[str, Any]:
    """Return what `build_backbone` takes: `name`, `config`, and `fusions` if there are any."""
    described: dict[str, Any] = {"name": backbone.name, "config": backbone.config}
    if backbone.fused_ranges:
        described["fusions"] = [list(pair) for pair in backbone.fused_ranges]
    return described


def build_backbone(described: Mapping[str, Any]) -> "Backbone":
    """Return the backbone that `describe_backbone` described, with fresh weights."""
    backbone = create_backbone(described["name"], **described["config"])
    backbone.add_fusions(described.get("fusions", ()))
    return backbone


def write_config(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Make the folder of a network and its config.json, and return it.

    Raises:
        ValueError: the folder is a run's, whose config.json is another.
    """
    if (folder / "checkpoints").exists():
        raise ValueError(f"{folder} is the folder of a run: give another one.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(facts, indent=2))
    return folder


def _find_network(
    name_or_folder: str | os.PathLike[str], revision: str | None
) -> tuple[dict[str, Any], Path]:
    """Return what describes a network, and the file of its weights."""
    folder = Path(name_or_folder)
    if not folder.exists():
        folder = download(folder.as_posix(), revision=revision)
    folder = max(folder.glob("checkpoints/step_*"), default=folder)
    for facts, weights in (("checkpoint.json", "ema.safetensors"), (CONFIG_NAME, WEIGHTS_NAME)):
        if (folder / facts).exists() and (folder / weights).exists():
            return json.loads((folder / facts).read_text()), folder / weights
    raise FileNotFoundError(f"{folder} holds no network: no {CONFIG_NAME} with {WEIGHTS_NAME}.")


# The hub -------------------------------------------------------------------------------------


def is_hub_name(path: Path) -> bool:
    """Return whether a path that does not exist may be `user/name` of the hub."""
    named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path.as_posix())
    return named is not None and not path.parent.exists()


def download(name: str, *, revision: str | None = None, into: Path | None = None) -> Path:
    """Return the folder with the two files of the hub's repository `name`.

    Args:
        name: user/name.
        revision: a branch, tag or commit.
        into: the folder; None: within the hub's cache.

    Raises:
        OSError: there is no such repository, or no way to it.
    """
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, local_dir=into, allow_patterns=[CONFIG_NAME, WEIGHTS_NAME]
        )
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise FileNotFoundError(
            f"{name!r} is no folder here, and cannot be had from the hub: {why}"
        ) from error
    return Path(folder)


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload all files of a folder to the hub as `repo`, user/name; return its address."""
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    address = hub.create_repo(repo, private=private, exist_ok=True)
    hub.upload_folder(repo_id=repo, folder_path=folder)
    return str(address)
