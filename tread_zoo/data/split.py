"""Labels and the held-out part: the same images in every run, whatever the run's seed."""

import logging

import torch
from torch import Tensor

from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)


def split_held_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return sorted (train, held-out) indices, int64, of images with `labels` int64 [N].

    round(fraction * N) images are held out, each class in proportion, by systematic sampling:
    image i of the n in a class (in a fixed random order) gets the key (i + u) / n, u uniform per
    class, and the smallest keys are held out. Every class keeps at least one training image.
    """
    num_items = len(labels)
    keys = torch.full((num_items,), float("inf"), dtype=torch.float64)
    for label in labels.unique().tolist():
        generator = make_generator("held-out", label)
        members = (labels == label).nonzero().squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        places = torch.arange(len(members), dtype=torch.float64)
        offset = torch.rand((), dtype=torch.float64, generator=generator)
        # The last of each class keeps the key inf: it is never a candidate.
        keys[members[:-1]] = ((places + offset) / len(members))[:-1]
    num_held_out = min(round(fraction * num_items), int(keys.isfinite().sum()))
    chosen = keys.argsort(stable=True)[:num_held_out]
    is_held_out = torch.zeros(num_items, dtype=torch.bool)
    is_held_out[chosen] = True
    return (~is_held_out).nonzero().squeeze(1), is_held_out.nonzero().squeeze(1)


def split_parts(
    labels: Tensor, num_train: int, held_out: float | None, default: float
) -> tuple[Tensor, Tensor]:
    """Return (train, held-out) indices, int64, of images of which the first `num_train` are a
    training part and the others, if any, a test part.

    Args:
        labels: int64 [N].
        num_train: how many of them train.
        held_out: a fraction to split off the training part, which leaves the test part alone; None
            holds out the test part or, where there is none, the fraction `default`.
        default: see there.
    """
    if held_out is None and num_train < len(labels):
        return torch.arange(num_train), torch.arange(num_train, len(labels))
    return split_held_out(labels[:num_train], default if held_out is None else held_out)


def check_labels(labels: Tensor, num_classes: int | None, where: str) -> int:
    """Return the number of classes of labels int64 [N]: the largest + 1 unless it is given.

    Classes without an image are logged: labels may have been counted from 1.

    Raises:
        ValueError: a label is outside 0 … num_classes - 1.
    """
    low, high = int(labels.min()), int(labels.max())
    classes = high + 1 if num_classes is None else num_classes
    if low < 0 or high >= classes:
        raise ValueError(
            f"{where}: the labels run from {low} to {high}; they must lie in 0 … "
            f"{max(classes - 1, 0)}. data.num_classes says how many there are, and "
            "data.num_classes=0 trains without labels."
        )
    empty = (torch.bincount(labels, minlength=classes) == 0).nonzero().flatten().tolist()
    if empty:
        logger.warning(
            "labels    %s: %d of %d classes have no image (%s%s)", where, len(empty), classes,
            ", ".join(map(str, empty[:5])), ", …" if len(empty) > 5 else "",
        )  # fmt: skip
    return classes
