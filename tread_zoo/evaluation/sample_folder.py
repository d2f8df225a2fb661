"""A folder of samples: one PNG for each, all of them as arrays, and a record of what made them.

    <folder>/000000.png …      pictures alone, for tools that read a folder
             samples.npz       arr_0 uint8 [N,H,W,C], arr_1 labels, numbers int64 [N]
             latents.npz       instead of both, where latents stay latents: arr_0 float [N,C,h,w]
             sampling.json     the settings, which checkpoint, what an image costs
    <folder>_grid.png          the images of the last call, beside the folder: no tool counts it

All images of a folder were made with the same settings, but for their numbers: a set can be
continued, and is never mixed with another.

Dimensions: B images of a call, N of a folder, C channels, H height, W width.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tread_zoo.evaluation.pictures import save_grid, save_png
from tread_zoo.outputs import check_out_folder, write_out_file

RECORD = "sampling.json"
_ARRAYS = ("samples.npz", "latents.npz")


def check_request(settings: Mapping[str, Any]) -> None:
    """Check the ranges of what is asked of `scripts/sample.py`, beside what its parts check.

    Raises:
        ValueError: a field that is out of range.
    """
    for name, least in (("num_images", 1), ("batch_size", 1), ("first_index", 0), ("label", 0)):
        if settings[name] is not None and settings[name] < least:
            raise ValueError(f"{name}={settings[name]} must be at least {least}.")


def folder_name(settings: Mapping[str, Any]) -> str:
    """Return a folder's name for settings: what people look for, then a digest of all of them."""
    words = [f"step{settings['step']}", f"{settings['sampler']}{settings['num_steps']}"]
    if settings["guidance"] != "none":
        words.append(f"{settings['guidance']}{settings['guidance_scale']:g}")
    words.append(f"seed{settings['seed']}")
    if settings["label"] is not None:
        words.append(f"label{settings['label']}")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return "_".join([*words, digest[:6]])


class SampleFolder:
    """A folder that takes the images of one set of settings.

    Args:
        path: new, or of the same settings.
        settings: plain values; any difference makes other images.
        facts: what else the record tells; not compared.
        overwrite: take the place of a set with other settings, which `save` then removes.

    Raises:
        ValueError: it cannot be written, or it holds samples of other or of unknown settings.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        self.path = check_out_folder("out", path)
        check_out_folder("out", self.path.absolute().parent)  # for the grid
        self.settings = json.loads(json.dumps(dict(settings)))
        self.facts = dict(facts)
        changed = self._changed(str(path))
        if changed and not overwrite:
            raise ValueError(
                f"out={str(path)!r} holds samples made with {'; '.join(changed)}, and images of "
                "several settings must not mix. Name another out=…, or replace them with "
                "overwrite=true."
            )
        self._replaces = bool(changed)

    @property
    def grid_path(self) -> Path:
        """Of the picture for people."""
        place = self.path if self.path.name not in ("", "..") else self.path.resolve()
        return place.with_name(f"{place.name}_grid.png")

    def save(self, numbers: range, images: Tensor, labels: Tensor | None) -> None:
        """Write images uint8 [B,C,H,W], named by their numbers, with labels [B] or None."""
        self._begin()
        for number, image in zip(numbers, images, strict=True):
            save_png(image, self.path / f"{number:06d}.png")
        save_grid(images, self.grid_path)
        self._save_arrays("samples.npz", numbers, images.permute(0, 2, 3, 1).numpy(), labels)

    def save_latents(self, numbers: range, latents: Tensor, labels: Tensor | None) -> None:
        """Write latents, float [B,C,h,w], with labels [B] or None."""
        self._begin()
        self._save_arrays("latents.npz", numbers, latents.numpy(), labels)

    def _changed(self, given: str) -> list[str]:
        """Return which settings of the samples that are there differ; none where there are none."""
        own = _own_files(self.path)
        if not own:
            return []
        try:
            found = dict(json.loads((self.path / RECORD).read_text())["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"out={given!r} holds {own[0].name}, and no {RECORD} that says what made it; name "
                "another out=…, or empty it."
            ) from error
        return [
            f"{key}={found.get(key)!r}, not {self.settings.get(key)!r}"
            for key in sorted(found.keys() | self.settings.keys())
            if found.get(key) != self.settings.get(key)
        ]

    def _begin(self) -> None:
        """Make the folder, without what it is to be rid of, and say what it will hold."""
        if self._replaces:
            for file in _own_files(self.path):
                file.unlink()
            self._replaces = False
        record = {"settings": self.settings, **self.facts}
        write_out_file(self.path / RECORD, json.dumps(record, indent=2))

    def _save_arrays(
        self, name: str, numbers: range, rows: np.ndarray, labels: Tensor | None
    ) -> None:
        """Write the arrays of these images and of those that the file has already, by number."""
        arrays = {"arr_0": rows, "numbers": np.asarray(numbers, np.int64)}
        if labels is not None:
            arrays["arr_1"] = labels.numpy()
        file = self.path / name
        if file.exists():
            with np.load(file, allow_pickle=False) as earlier:
                older = ~np.isin(earlier["numbers"], arrays["numbers"])
                arrays = {k: np.concatenate([earlier[k][older], arrays[k]]) for k in arrays}
            order = arrays["numbers"].argsort()
            arrays = {key: values[order] for key, values in arrays.items()}
        partial = file.with_name(f".partial_{name}")
        np.savez(partial, **arrays)  # type: ignore[arg-type]  # numpy adds .npz to other names
        partial.replace(file)


def _own_files(folder: Path) -> list[Path]:
    """Return what `SampleFolder` writes, of what a folder holds; the record last."""
    if not folder.is_dir():
        return []
    pictures = [path for path in sorted(folder.glob("*.png")) if path.stem.isdigit()]
    others = [folder / name for name in (*_ARRAYS, RECORD)]
    return [*pictures, *(path for path in others if path.exists())]
