"""A fixed, stratified held-out part: the same images in every run, whatever the run's seed."""

import torch
from torch import Tensor

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
