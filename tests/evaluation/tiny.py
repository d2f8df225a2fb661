"""A data set of 60 grey 8x8 images, a network for it, and features of its own: for whole scores."""

import numpy as np
import torch

from tests.small_run import parts_of, settings
from tread_zoo.evaluation.evaluate import EvaluationOptions, evaluate
from tread_zoo.evaluation.features import ClassifierFeatures, save_features

METRICS = ("fid", "kid", "precision", "recall", "isc")


def write_data(path, count=60, seed=0):
    """Write random images with labels 0 … 2 as an .npz file, and return its path."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(count) % 3)
    return path


def write_features(path, seed=0, shape=(1, 8, 8), num_classes=3):
    """Write features with random weights, and return their path."""
    torch.manual_seed(seed)
    channels, *size = shape
    network = ClassifierFeatures(
        image_size=tuple(size), channels=channels, num_classes=num_classes, num_features=16
    )
    with torch.no_grad():  # as drawn, images would hardly differ in their features
        for conv in network.convs:
            conv.weight.mul_(3)
    save_features(network, path, "a test's")
    return str(path)


class Tiny:
    """A network, its data and an extractor, in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.extractor = write_features(folder / "own.safetensors")
        file = write_data(folder / "tiny.npz")
        self.parts = parts_of(settings("data=npz", f"data.path={file}", "data.held_out=0.25"))
        with torch.no_grad():  # at the start it predicts nothing, whatever the noise
            torch.manual_seed(1)
            for parameter in self.parts.backbone.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.backbone = self.parts.backbone.eval()

    @property
    def real(self):
        """The training images, uint8 [45,1,8,8]."""
        return self.parts.data.train.images

    def options(self, **changes):
        given = {
            "num_images": 23, "extractor": self.extractor, "metrics": METRICS,
            "reference": "train", "seed": 1, "batch_size": 7, "allow_few_images": True,
        }  # fmt: skip
        return EvaluationOptions(**{**given, **changes})

    def score(self, *, data=None, real=None, cache=None, **changes):
        """Return the record of an evaluation."""
        parts = self.parts
        return evaluate(
            self.backbone, parts.objective, data or parts.data, parts.sampling,
            self.options(**changes), real=real, cache=cache,
        )  # fmt: skip
