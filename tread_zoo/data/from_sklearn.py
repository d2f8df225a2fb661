"""Handwritten digits, 8x8 grey, that come with scikit-learn: real data without a download."""

import torch

from tread_zoo.data.dataset import ArrayDataset, ImageData
from tread_zoo.data.split import split_held_out
from tread_zoo.registry import register


@register("data", "digits", num_steps=800)
def digits(held_out: float = 0.2) -> ImageData:
    """Return scikit-learn's 1797 digits, 10 classes, with a fixed stratified held-out part.

    The stored values 0 … 16 become 0 … 255 by rounding v * 255 / 16.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    values = torch.from_numpy(bunch.images).to(torch.float64)
    images = (values * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    train, test = split_held_out(labels, held_out)
    return ImageData(
        name="digits",
        train=ArrayDataset(images[train], labels[train]),
        held_out=ArrayDataset(images[test], labels[test]) if len(test) else None,
        image_size=(8, 8),
        channels=1,
        num_classes=10,
        class_names=tuple(str(digit) for digit in range(10)),
    )
