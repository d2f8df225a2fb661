"""A data set of 60 grey 8x8 images, a network for it, and features of its own: for whole scores."""

import numpy as np
import torch

from tread_zoo import create, create_backbone
from tread_zoo.config import EvaluationConfig
from tread_zoo.data import ArrayDataset, ImageData
from tread_zoo.diffusion import build_sampling
from tread_zoo.evaluation.evaluate import evaluate
from tread_zoo.evaluation.features import ClassifierFeatures, save_features
from tread_zoo.fields import check

METRICS = ("fid", "kid", "precision", "recall", "isc")


def random_images(count, seed=0, channels=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, 8, 8), dtype=torch.uint8, generator=generator)


def write_features(path, seed=0, shape=(1, 8, 8), num_classes=3):
    """Write features with random weights, and return their path."""
    torch.manual_seed(seed)
    channels, *size = shape
    network = ClassifierFeatures(
        image_size=tuple(size), channels=channels, num_classes=num_classes, num_features=12
    )
    with torch.no_grad():  # as drawn, images would hardly differ in their features
        for parameter in network.parameters():
            if parameter.ndim == 4:
                parameter.mul_(3)
    save_features(network, path, "a test's")
    return str(path)


def write_npz(path, images, labels=None):
    """Write images in the format of ADM's files, and return the path."""
    arrays = {"arr_0": images.permute(0, 2, 3, 1).numpy()}
    np.savez(path, **arrays, **({} if labels is None else {"arr_1": np.asarray(labels)}))
    return str(path)


class Tiny:
    """A network, its data and an extractor, in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.extractor = write_features(folder / "own.safetensors")
        images, labels = random_images(60), torch.arange(60) % 3
        parts = [ArrayDataset(images[a:b], labels[a:b]) for a, b in ((0, 45), (45, 60))]
        self.data = ImageData("tiny", *parts, (8, 8), 1, 3, ("a", "b", "c"))
        self.objective = create("objective", "flow")
        self.sampling = build_sampling({"name": "euler", "num_steps": 2}, {"name": "none"})
        torch.manual_seed(1)
        self.backbone = create_backbone(
            "dit_tiny", input_size=8, in_channels=1, num_classes=3, depth=2, hidden_size=16
        ).eval()
        with torch.no_grad():  # at the start it predicts nothing, whatever the noise
            for parameter in self.backbone.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    @property
    def real(self):
        """The training images, uint8 [45,1,8,8]."""
        return self.data.train.images

    def options(self, **changes):
        given = {
            "num_images": 23, "extractor": self.extractor, "metrics": METRICS, "batch_size": 7,
        }  # fmt: skip
        return check(EvaluationConfig, {**given, **changes}, "evaluation")

    def score(self, *, data=None, cache=None, **changes):
        """Return the record of an evaluation."""
        return evaluate(
            self.backbone, self.objective, data or self.data, self.sampling,
            self.options(**changes), cache=cache,
        )  # fmt: skip
