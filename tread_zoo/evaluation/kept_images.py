"""Samples that are kept: one PNG file each, named by its number.

Dimensions: B batch, C channels, H height, W width.
"""

from pathlib import Path

from torch import Tensor

from tread_zoo.evaluation.pictures import save_png


def check_empty(folder: str) -> None:
    """Raise ValueError unless `folder` is new or empty: samples of two networks must not mix."""
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"evaluation.keep_images={folder!r} is a file; name a new folder.")
    if path.exists() and any(path.iterdir()):
        raise ValueError(
            f"evaluation.keep_images={folder!r} is not empty, and samples of several networks must "
            "not mix; name another folder, or empty it."
        )


def save_images(images: Tensor, numbers: range, folder: str) -> None:
    """Write images uint8 [B,C,H,W] as `<number>.png`; the folder is made."""
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    for number, image in zip(numbers, images, strict=True):
        save_png(image, path / f"{number:06d}.png")
