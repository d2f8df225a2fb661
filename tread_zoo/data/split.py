"""A fixed, stratified held-out part: the same images in every run, whatever the run's seed."""

import torch
from torch import Tensor

from tread_zoo.data.dataset import ArrayDataset
from tread_zoo.seeding import make_generator


def split_held_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return sorted (train, held-out) indices, int64, of images with `labels` int64 [N].

    round(fraction * N) images are held out, each class in proportion, by systematic sampling:
    image i of the n in a class (in a fixed random order) gets the key (i + u) / n, u uniform per
    class, and the smallest keys are held out. Every class keeps at least one training image.
    """
    if not 0.0 <= fraction < 1.0:
        raise ValueError(
            f"data.held_out={fraction!r} is no fraction of the images; use 0 (nothing held out) "
            "or a number below 1, say 0.1."
        )
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


def choose_parts(
    train: ArrayDataset, test: ArrayDataset, held_out: float | None
) -> tuple[ArrayDataset, ArrayDataset | None]:
    """Return what is trained on and what is held out, of a set that has a test part of its own.

    held_out: None holds out `test`; a fraction is split off `train` instead, and `test` left alone.
    """
    if held_out is None:
        return train, test
    kept, split_off = split_held_out(train.labels, held_out)
    return (
        ArrayDataset(*train.gather(kept)),
        ArrayDataset(*train.gather(split_off)) if len(split_off) else None,
    )


def choose_num_classes(num_classes: int | None, own: int) -> int:
    """Return the number of classes of a set with `own`: None keeps them, 0 drops the labels.

    Raises:
        ValueError: another number.
    """
    if num_classes not in (None, 0, own):
        raise ValueError(
            f"data.num_classes={num_classes!r}: the set has {own} classes. Leave it out, or set 0 "
            "to train without labels."
        )
    return own if num_classes is None else num_classes
