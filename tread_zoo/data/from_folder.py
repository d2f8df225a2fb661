"""Images from a folder of picture files: one sub-folder a class, or a flat folder unlabelled.

C channels, H height, W width.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.contexts import FileContexts, WithContexts, check_context_options
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.pictures import check_picture_options, common_size, read_picture
from tread_zoo.data.split import choose_num_classes, split_held_out
from tread_zoo.registry import register

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@register("data", "image_folder")
def image_folder(
    path: str,
    image_size: int | None = None,
    channels: int = 3,
    held_out: float = 0.1,
    num_classes: int | None = None,
    context: str | None = None,
    context_length: int | None = None,
) -> ImageData:
    """Return the pictures under `path`, read from disk as they are asked for.

    path: with sub-folders, each is a class (in the order of their names) and all pictures under
      it, however deep, are in it; without, its pictures are unlabelled. Names that begin with a
      dot are left out.
    image_size: the shorter side is resized to it and the centre cropped, to a square. Not given,
      all pictures must have one size, which is checked here by reading every header.
    channels: 1 (grey) or 3 (RGB).
    held_out: the fraction split off, the same files in every run.
    num_classes: None for the number of sub-folders; 0 drops the labels.
    context: what follows a picture's name in that of its embeddings: `context.npy` finds
      cat.context.npy beside cat.png. They take the place of the labels.
    context_length: embeddings of an image, others filled up with zeros; None is the most there are.
    """
    root = Path(path).expanduser()
    check_picture_options(image_size, channels)
    check_context_options(context, context_length, num_classes)
    files, labels, class_names = _find_files(root)
    if context is not None:
        num_classes = 0
    if choose_num_classes(num_classes, len(class_names)) == 0:
        labels, class_names = [0] * len(files), ()
    size = (
        common_size(zip(files, files, strict=True))
        if image_size is None
        else (image_size, image_size)
    )
    kept, split_off = split_held_out(torch.tensor(labels), held_out)
    contexts = None
    if context is not None:
        beside = [f"{os.path.splitext(file)[0]}.{context.lstrip('.')}" for file in files]
        contexts = FileContexts(beside, context_length)

    def subset(indices: Tensor) -> Dataset:
        chosen = indices.tolist()
        pictures = FileDataset(
            [files[i] for i in chosen], [labels[i] for i in chosen], image_size, channels
        )
        return pictures if contexts is None else WithContexts(pictures, contexts, chosen)

    return ImageData(
        name=f"{root.name}/",  # never mistaken for a built-in source
        train=subset(kept),
        held_out=subset(split_off) if len(split_off) else None,
        image_size=size,
        channels=channels,
        num_classes=len(class_names),
        class_names=class_names,
        context=None if contexts is None else contexts.shape,
    )


class FileDataset(Dataset):
    """Picture files and their labels; see `image_folder` for `image_size` and `channels`."""

    def __init__(
        self, files: Sequence[str], labels: Sequence[int], image_size: int | None, channels: int
    ):
        self.files = list(files)
        self.labels = list(labels)
        self.image_size = image_size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image uint8 [C,H,W], label). Raises ValueError naming an unreadable file."""
        file = self.files[index]
        image = read_picture(file, file, self.image_size, self.channels)
        return image, self.labels[index]

    def item_name(self, index: int) -> str:
        """Return the file of item `index`."""
        return self.files[index]


def _find_files(root: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Return files, their labels and the class names (none: unlabelled), in a fixed order."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise ValueError(
            f"data.path={str(root)!r} {what}; set data.path to a folder of pictures "
            f"({', '.join(SUFFIXES)})."
        )
    entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    folders = [entry for entry in entries if entry.is_dir()]
    loose = [str(entry) for entry in entries if entry.is_file() and _is_picture(entry.name)]
    if not folders and not loose:
        raise ValueError(
            f"data.path={str(root)!r} has no pictures ({', '.join(SUFFIXES)}), neither in it nor "
            "in sub-folders; set data.path to the folder that has them."
        )
    if folders and loose:
        raise ValueError(
            f"data.path={str(root)!r} has pictures beside sub-folders ({Path(loose[0]).name!r} "
            f"beside {folders[0].name!r}); sort them all into sub-folders, one a class, or put "
            "them all in one flat folder (unlabelled)."
        )
    if loose:
        return loose, [0] * len(loose), ()
    files: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = _pictures_under(folder)
        if not found:
            raise ValueError(
                f"data.path={str(root)!r}: the class folder {folder.name!r} has no pictures "
                f"({', '.join(SUFFIXES)}); fill it or remove it."
            )
        files += found
        labels += [label] * len(found)
    return files, labels, tuple(folder.name for folder in folders)


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _pictures_under(folder: Path) -> list[str]:
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if _is_picture(name)
    )
