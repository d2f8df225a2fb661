"""Do conditional digits show the digit that was asked for? An SVM, fit on real ones, is the judge.

scikit-learn's own digits example has the same classifier. N images.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tread_zoo.data import ArrayDataset, digits

if TYPE_CHECKING:
    from sklearn.svm import SVC


def digits_agreement(images: Tensor, labels: Tensor) -> float:
    """Return the fraction of `images` uint8 [N,1,8,8] that the judge takes for their `labels` [N].

    The judge errs too: `digits_agreement_reference` is what real digits get. It saturates, and
    says nothing of variety: a model that repeats one good image a class gets 1.0.
    """
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != (1, 8, 8) or len(images) == 0:
        raise ValueError(
            f"images has dtype {images.dtype} and shape {tuple(images.shape)}; digits_agreement "
            "wants uint8 [N,1,8,8], N at least 1 (tread_zoo.data.to_uint8 converts)."
        )
    if tuple(labels.shape) != (len(images),):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} for {len(images)} images; give one an image."
        )
    return float(np.mean(_judge().predict(_pixels(images)) == labels.cpu().numpy()))


def digits_agreement_reference() -> float:
    """Return the judge's agreement with the labels of the real digits held out from its fit."""
    held_out = digits().held_out
    assert isinstance(held_out, ArrayDataset)
    return digits_agreement(held_out.images, held_out.labels)


@functools.cache
def _judge() -> "SVC":
    """Return the classifier, fit on the training part of `digits()`."""
    from sklearn.svm import SVC

    train = digits().train
    assert isinstance(train, ArrayDataset)
    return SVC(C=10.0, gamma=0.001).fit(_pixels(train.images), train.labels.numpy())


def _pixels(images: Tensor) -> np.ndarray:
    """Return float64 [N,64] in the stored scale 0 … 16, for which gamma was chosen."""
    return images.cpu().flatten(1).double().numpy() * (16 / 255)
