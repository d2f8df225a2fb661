"""One way into every feature extractor: images in, named features out, and what identifies it.

    features   the vector that distances are taken in
    spatial    Inception's 7 first channels of the 1x1 branch of mixed_6, 17x17, for sfid
    logits     of classes, for isc and agreement

torch-fidelity has Inception and DINOv2, with their resizing. Its Inception is the network of 2015
that the papers' FID uses; `mixed_6` of that graph is torch-fidelity's `Mixed_6d`, and ADM's
evaluator takes what comes out of the branch's ReLU in the order [H, W, 7], which is kept here, so
that `mu_s` and `sigma_s` of its reference files are of the same features.

Dimensions: B batch, C channels, H height, W width, D features.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.dinov2 import DINOV2_EXTRACTORS, DINOV2_WIDTHS, find_dinov2, load_dinov2
from tread_zoo.evaluation.features import (
    DIGITS_EXTRACTOR,
    DIGITS_FEATURES,
    DIGITS_WEIGHTS,
    INCEPTION_EXTRACTOR,
    find_inception_weights,
    load_digits_features,
    load_features,
)

FEATURES, SPATIAL, LOGITS = "features", "spatial", "logits"
SPATIAL_CHANNELS = 7
EXTRACTORS = (DIGITS_EXTRACTOR, INCEPTION_EXTRACTOR, *DINOV2_EXTRACTORS)
FEATURES_SUFFIX = ".safetensors"  # of the files that scripts/make_features.py writes

INCEPTION_SIZES = {FEATURES: 2048, SPATIAL: 17 * 17 * SPATIAL_CHANNELS}
_TENSORFLOW = "bilinear as in TensorFlow 1 (corners not aligned, no antialiasing)"
_RESIZE = {INCEPTION_EXTRACTOR: f"{_TENSORFLOW} to 299x299"}
_RESIZE |= dict.fromkeys(DINOV2_EXTRACTORS, f"{_TENSORFLOW} to 224x224")


@dataclass(frozen=True)
class Weights:
    """What an extractor is made of, before it is loaded.

    Args:
        extractor: as the settings name it.
        file: its weights.
        label: its name in records, without the hash.
        shape: the only [C,H,W] that it takes; None: any, grey or colour.
        resize: what it does to an image first.
        sizes: how many features it has, by their name.
    """

    extractor: str
    file: Path
    label: str
    shape: tuple[int, ...] | None
    resize: str
    sizes: Mapping[str, int]

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless it takes images [C,H,W] of `shape`."""
        if self.shape is None or tuple(shape) == self.shape:
            return
        if self.extractor == DIGITS_EXTRACTOR:
            raise ValueError(
                f"extractor={DIGITS_EXTRACTOR!r} knows grey 8x8 digits only, and the images "
                f"[C,H,W] are {tuple(shape)}; use extractor={INCEPTION_EXTRACTOR!r}."
            )
        raise ValueError(
            f"extractor={self.extractor!r} was trained on images [C,H,W] of {self.shape}, and "
            f"these are {tuple(shape)}; make features of this size with scripts/make_features.py."
        )


@dataclass(frozen=True)
class Extractor:
    """A loaded extractor: images uint8 [B,C,H,W] -> {name: float32 [B,D]} on its device.

    Args:
        label: name@first 8 digits of the hash, for records.
        sha256: of its weights, whole.
        weights: what it is made of.
        device: that it runs on.
        network: of images of its own channels, on its device.
    """

    label: str
    sha256: str
    weights: Weights
    device: torch.device
    network: Callable[[Tensor], dict[str, Tensor]]

    def prepare(self, images: Tensor) -> Tensor:
        """Return images as the network takes them: on its device, in its channels."""
        images = images.to(self.device, non_blocking=True)
        return images.expand(-1, 3, -1, -1) if self.weights.shape is None else images

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        return self.network(self.prepare(images))


def is_file(extractor: str) -> bool:
    """Return whether an extractor is a file that `scripts/make_features.py` wrote."""
    return extractor.endswith(FEATURES_SUFFIX)


def check_extractor(field: str, extractor: str, others: Collection[str] = ()) -> None:
    """Raise ValueError unless an extractor is a known name, or a sound file of features."""
    if is_file(extractor):
        load_features(Path(extractor))
    elif extractor not in (*others, *EXTRACTORS):
        raise unknown_name(field, extractor, (*others, *EXTRACTORS))


def find_weights(
    extractor: str, *, inception_weights: str | None = None, dinov2_weights: str | None = None
) -> Weights:
    """Return what an extractor is made of; nothing is downloaded, and little is read.

    Raises:
        ValueError: a file is missing or damaged, or one is named that this extractor has no use of.
    """
    check_extractor("extractor", extractor)
    for field, given, known in (
        ("inception_weights", inception_weights, (INCEPTION_EXTRACTOR,)),
        ("dinov2_weights", dinov2_weights, tuple(DINOV2_EXTRACTORS)),
    ):
        if given is not None and extractor not in known:
            raise ValueError(
                f"{field}={given!r} is of no use with extractor={extractor!r}; leave it out, or "
                f"set extractor={known[0]!r}."
            )
    if extractor == INCEPTION_EXTRACTOR:
        file = find_inception_weights(inception_weights)
        return Weights(extractor, file, extractor, None, _RESIZE[extractor], INCEPTION_SIZES)
    if extractor in DINOV2_EXTRACTORS:
        file = find_dinov2(extractor, dinov2_weights).weights
        sizes = {FEATURES: DINOV2_WIDTHS[extractor]}
        return Weights(extractor, file, extractor, None, _RESIZE[extractor], sizes)
    if extractor == DIGITS_EXTRACTOR:
        sizes = {FEATURES: DIGITS_FEATURES}
        return Weights(extractor, DIGITS_WEIGHTS, extractor, (1, 8, 8), "none", sizes)
    file = Path(extractor)
    network = load_features(file)
    sizes = {FEATURES: network.classify.in_features}
    return Weights(extractor, file, file.stem, network.shape, "none", sizes)


def open_extractor(weights: Weights, names: Collection[str], device: torch.device) -> Extractor:
    """Load an extractor that gives the features called `names`.

    The global random numbers are left as they were.

    Raises:
        ValueError: this extractor has no such features.
    """
    digest = file_sha256(weights.file)
    with torch.random.fork_rng(devices=[]):
        if weights.extractor == INCEPTION_EXTRACTOR:
            network = _inception(weights.file, names, device)
        elif weights.extractor in DINOV2_EXTRACTORS:
            network = _dinov2(weights, device)
        else:
            small = weights.extractor == DIGITS_EXTRACTOR
            classifier = load_digits_features() if small else load_features(weights.file)
            network = _classifier(classifier.to(device))
    label = f"{weights.label}@{digest[:8]}"
    return Extractor(label, digest, weights, device, network)


def file_sha256(file: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _classifier(network: nn.Module) -> Callable[[Tensor], dict[str, Tensor]]:
    def forward(images: Tensor) -> dict[str, Tensor]:
        return dict(zip((FEATURES, LOGITS), network(images), strict=True))

    return forward


def _dinov2(weights: Weights, device: torch.device) -> Callable[[Tensor], dict[str, Tensor]]:
    network = load_dinov2(weights.extractor, weights.file).to(device)
    return lambda images: {FEATURES: network(images)[0]}


def _inception(
    file: Path, names: Collection[str], device: torch.device
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return Inception; it runs no further than the features asked for need."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    # "768" is read off after mixed_7: the way to it passes mixed_6.
    layers = {SPATIAL: "768", FEATURES: "2048", LOGITS: "logits_unbiased"}
    wanted = [name for name in layers if name in names]
    network = FeatureExtractorInceptionV3(
        INCEPTION_EXTRACTOR,
        [layers[name] for name in wanted],
        feature_extractor_weights_path=str(file),
    ).to(device)
    seen: dict[str, Tensor] = {}

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        spatial = output[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1)  # [B, 17, 17, 7]
        seen[SPATIAL] = spatial.flatten(1).float()

    if SPATIAL in wanted:
        network.Mixed_6d.branch1x1.register_forward_hook(watch)

    def forward(images: Tensor) -> dict[str, Tensor]:
        found = dict(zip(wanted, network(images), strict=True))
        return found | seen

    return forward
