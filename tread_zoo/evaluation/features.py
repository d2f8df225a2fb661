"""Feature extractors: the small one for digits that ships here, Inception where its file is, and
classifiers that `scripts/make_features.py` trained on data of one's own.

A score means nothing without the network that it was taken with, so an extractor's name in a
record carries the hash of its weights. B batch.
"""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIGITS_EXTRACTOR = "digits-cnn-64"
DIGITS_FEATURES = 64
DIGITS_WEIGHTS = Path(__file__).parent / "weights" / "digits_cnn.safetensors"

INCEPTION_EXTRACTOR = "inception-v3-compat"
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = (
    f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}"
)


class DigitsFeatures(nn.Module):
    """A classifier of 8x8 grey digits: three 3x3 convolutions, 64 pooled features, 10 logits.

    GELU, since half of the features of a ReLU network this small die in training.
    Trained by `scripts/make_digits_features.py` on the training part of `data.digits()` alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, DIGITS_FEATURES, 3)
        self.classify = nn.Linear(DIGITS_FEATURES, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features [B,64], logits [B,10]) of `images` uint8 [B,1,8,8]."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != (1, 8, 8):
            raise ValueError(
                f"images has dtype {images.dtype} and shape {tuple(images.shape)}; "
                f"{DIGITS_EXTRACTOR} wants uint8 [B,1,8,8]."
            )
        x = images.to(self.conv1.weight.dtype) / 255
        x = F.gelu(self.conv1(x))
        x = F.max_pool2d(F.gelu(self.conv2(x)), 2)  # [B,64,4,4]
        features = F.gelu(self.conv3(x)).mean(dim=(2, 3))  # [B,64,2,2] -> [B,64]
        return features, self.classify(features)


class ClassifierFeatures(nn.Module):
    """A classifier of small images: four 3x3 convolutions, pooled features, logits.

    Args:
        image_size: (H, W), at least 8 each.
        channels: C.
        num_classes: of the logits.
        num_features: of the vector that distances are taken in.
    """

    def __init__(
        self, *, image_size: tuple[int, int], channels: int, num_classes: int, num_features: int
    ) -> None:
        super().__init__()
        if min(image_size) < 8 or num_classes < 2:
            raise ValueError(
                f"image_size={tuple(image_size)} with num_classes={num_classes} gives no features: "
                "a classifier of images of 8x8 or more, with two classes or more, is wanted."
            )
        self.shape = (channels, *image_size)
        widths = (channels, 32, 64, num_features, num_features)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.classify = nn.Linear(num_features, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features [B, num_features], logits [B, num_classes]) of uint8 [B,C,H,W]."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.shape:
            raise ValueError(
                f"images has dtype {images.dtype} and shape {tuple(images.shape)}; these features "
                f"want uint8 [B,{','.join(map(str, self.shape))}]."
            )
        x = images.to(self.classify.weight.dtype) / 255
        for index, conv in enumerate(self.convs):
            x = F.gelu(conv(x))
            if index < 2:
                x = F.max_pool2d(x, 2)
        features = x.mean(dim=(2, 3))
        return features, self.classify(features)


def save_features(network: ClassifierFeatures, path: Path, about: str) -> None:
    """Write a classifier's weights and sizes to one safetensors file, which appears whole."""
    from safetensors.torch import save_file

    channels, *image_size = network.shape
    facts = {
        "image_size": image_size,
        "channels": channels,
        "num_classes": network.classify.out_features,
        "num_features": network.classify.in_features,
        "about": about,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(network.state_dict(), partial, metadata={"features": json.dumps(facts)})
    partial.replace(path)


def load_features(path: Path) -> ClassifierFeatures:
    """Return the classifier that `save_features` wrote, frozen.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["features"])
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"extractor={str(path)!r} is no file of features ({type(error).__name__}: {error}). "
            f"scripts/make_features.py out={path} makes one from labelled images."
        ) from error
    facts.pop("about")
    with torch.device("meta"):  # no weights are drawn: the caller's random numbers stay as they are
        network = ClassifierFeatures(**facts)
    network.load_state_dict(state, assign=True)
    return network.eval().requires_grad_(False)


def load_digits_features() -> DigitsFeatures:
    """Return the network with the weights that ship with the package, frozen."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        network = DigitsFeatures()
    network.load_state_dict(load_file(DIGITS_WEIGHTS), assign=True)
    return network.eval().requires_grad_(False)


def extractor_id(name: str, weights: Path) -> str:
    """Return `name`@<first 8 hex digits of the weights file's sha256>: the name for records."""
    with weights.open("rb") as file:
        return f"{name}@{hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"


def find_inception_weights(path: str | None) -> Path:
    """Return the file of Inception's weights: `path`, or torch hub's cache. Never downloads.

    Raises ValueError that says where it looked and how to get the file, or that the file given
    is not one of plain tensors.
    """
    file = Path(path).expanduser() if path else Path(torch.hub.get_dir(), "checkpoints")
    if not path or file.is_dir():
        file = file / INCEPTION_FILE
    if not file.is_file():
        raise ValueError(
            f"extractor={INCEPTION_EXTRACTOR!r} needs its weights, {INCEPTION_FILE}, and "
            f"{str(file)!r} does not exist. Nothing is downloaded here: get it from "
            f"{INCEPTION_URL} and put it there, or set inception_weights to where it is."
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle, end-of-file and runtime errors alike
        raise ValueError(
            f"inception_weights={str(file)!r} cannot be read as a file of plain tensors "
            f"({str(error).splitlines()[0]}). Download {INCEPTION_FILE} again from {INCEPTION_URL}."
        ) from error
    if not isinstance(state, dict) or "Conv2d_1a_3x3.conv.weight" not in state:
        raise ValueError(
            f"inception_weights={str(file)!r} holds no weights of torch-fidelity's Inception; "
            f"download {INCEPTION_FILE} from {INCEPTION_URL}."
        )
    return file
