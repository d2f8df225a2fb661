"""A folder of samples: PNG files, the same images as arrays, and a record of the settings.

    <folder>/000000.png …      for tools that read a folder of pictures
             samples.npz       arr_0 uint8 [N,H,W,C], arr_1 labels, numbers int64 [N]
             latents.npz       instead of both if latents are not decoded: arr_0 float [N,C,h,w]
             sampling.json     settings, checkpoint, cost per image
    <folder>_grid.png          100 images of the last call, outside the folder

All images of a folder have the same settings: a set can be continued, but not mixed with another.
Pictures are written batch by batch, so an interrupted set continues with the missing ones.

Dimensions: B images per call, N images in the folder, C channels, H height, W width.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tread_zoo.data.files import atomic_file, write_text
from tread_zoo.evaluation.pictures import save_grid, save_numbered

RECORD = "sampling.json"
GRID_IMAGES = 100


def folder_name(settings: Mapping[str, Any]) -> str:
    """Return a folder's name: the training step and a digest of the settings, as in
    step500_0a1b2c."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"step{settings['step']}_{digest[:6]}"


class SampleFolder:
    """A folder of samples that were made with the same settings.

    Args:
        path: the folder; it is created if it does not exist.
        settings: plain values by name, `step` among them.
        metadata: further values for the record in sampling.json; samples may differ in them.
        overwrite: replace samples that were made with other settings.

    Raises:
        ValueError: there are samples without a record, or with other settings and no `overwrite`.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        metadata: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path).expanduser()
        self.settings, self.metadata = json.loads(json.dumps(dict(settings))), dict(metadata)
        record, files = self.path / RECORD, self._files()
        if files and not record.exists():
            raise ValueError(
                f"out={str(path)!r} holds {files[0].name}, and no {RECORD}: name another folder."
            )
        earlier = (
            json.loads(record.read_text(encoding="utf-8"))["settings"] if files else self.settings
        )
        changed = [
            f"{key}={earlier.get(key)!r}, not {self.settings.get(key)!r}"
            for key in sorted(earlier.keys() | self.settings.keys())
            if earlier.get(key) != self.settings.get(key)
        ]
        if changed and not overwrite:
            raise ValueError(
                f"out={str(path)!r} holds samples made with {'; '.join(changed)}: name another "
                "out=…, or replace them with overwrite=true."
            )
        self._replaces = bool(changed)
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def grid_path(self) -> Path:
        """Path of the picture of a grid of samples, beside the folder."""
        folder = self.path.resolve()
        return folder.with_name(f"{folder.name}_grid.png")

    def begin(self) -> None:
        """Delete the samples that will be replaced, and write sampling.json."""
        for outdated in self._files() if self._replaces else ():
            outdated.unlink()
        self._replaces = False
        record = {"settings": self.settings, **self.metadata}
        write_text(self.path / RECORD, json.dumps(record, indent=2))

    def has(self, numbers: Iterable[int]) -> bool:
        """Return whether all images with these numbers exist and will not be replaced."""
        return not self._replaces and all(self._picture(number).exists() for number in numbers)

    def save(self, numbers: Iterable[int], images: Tensor) -> None:
        """Write images uint8 [B,C,H,W], named by their numbers."""
        save_numbered(images, numbers, self.path)

    def finish(
        self, numbers: Sequence[int], labels: Tensor | None, names: Sequence[str] = ()
    ) -> None:
        """Write samples.npz and the grid from the images saved under `numbers`. `labels` [B] are
        stored, too, unless None; `names`, the images' classes or prompts, may become titles in the
        grid."""
        pictures = (np.asarray(Image.open(self._picture(number))) for number in numbers)
        images = np.stack([p if p.ndim == 3 else p[..., None] for p in pictures])
        self._save_arrays("samples.npz", numbers, images, labels)
        save_grid(torch.from_numpy(images[:GRID_IMAGES]).permute(0, 3, 1, 2), self.grid_path, names)

    def save_latents(self, numbers: Sequence[int], latents: Tensor, labels: Tensor | None) -> None:
        """Write latents, float [B,C,h,w], to latents.npz, with their numbers and, unless None,
        labels [B]."""
        self._save_arrays("latents.npz", numbers, latents.numpy(), labels)

    def _picture(self, number: int) -> Path:
        return self.path / f"{number:06d}.png"

    def _files(self) -> list[Path]:
        """Return the files of existing samples."""
        files = [path for path in sorted(self.path.glob("*.png")) if path.stem.isdigit()]
        return [*files, *self.path.glob("samples.npz"), *self.path.glob("latents.npz")]

    def _save_arrays(
        self, name: str, numbers: Sequence[int], rows: Any, labels: Tensor | None
    ) -> None:
        """Add images or latents `rows` and their labels to the file `name`, sorted by number. They
        replace those that have the same `numbers`."""
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
        with atomic_file(file) as stream:
            np.savez(stream, **arrays)
