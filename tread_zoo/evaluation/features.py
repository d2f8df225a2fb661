"""Feature extractors: networks that turn images into named features.

    pooled        one vector per image, which distances compare
    spatial       the first 7 channels of the 1x1 branch of Inception's mixed_6, 17x17, for sfid
    logits        one logit per class, for isc and label_accuracy
    feature_map   [B, S, h, w], S values at each position, for `tread_zoo.training.alignment`:
                  DINOv2's patch tokens, Inception's mixed_7, or a small classifier's last
                  convolution

Nothing is downloaded. torch-fidelity's Inception is the 2015 network that defines FID; its
`Mixed_6d` is the original graph's `mixed_6`. Spatial features are ordered [H, W, 7], as in the
reference files of ADM's evaluator (`mu_s`, `sigma_s`).

Dimensions: B batch, C channels, H height, W width, D features.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.data.files import atomic_file, checksum
from tread_zoo.errors import unknown_name

DIGITS, FASHION = "digits-cnn-64", "fashion-cnn-128"
DIGITS_WEIGHTS = Path(__file__).parent / "weights" / "digits_cnn.safetensors"
SHIPPED = {DIGITS: DIGITS_WEIGHTS, FASHION: DIGITS_WEIGHTS.with_name("fashion_cnn.safetensors")}
INCEPTION = "inception-v3-compat"
INCEPTION_URL = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
    "weights-inception-2015-12-05-6726825d.pth"
)
DINOV2_CODE = "https://github.com/facebookresearch/dinov2"
DINOV2 = {  # name -> the name in the authors' code, D; arXiv 2306.04675 uses the large one
    "dinov2-vit-s-14": ("dinov2_vits14", 384),
    "dinov2-vit-b-14": ("dinov2_vitb14", 768),
    "dinov2-vit-l-14": ("dinov2_vitl14", 1024),
    "dinov2-vit-g-14": ("dinov2_vitg14", 1536),
}
EXTRACTORS = (*SHIPPED, INCEPTION, *DINOV2)
EXPORTED = ".pt2"
_SPATIAL_CHANNELS = 7
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std of ImageNet's pixels
_RESIZE = "bilinear as in TensorFlow 1 (corners not aligned, no antialiasing) to {0}x{0}"

Network = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Extractor:
    """The description of a feature extractor; `load` returns its network.

    Args:
        name: its name in settings.
        file: file of the weights.
        sizes: number of features D by name of feature, without the feature map.
        resize: how the network resizes images, in words for records.
        shape: the [C, H, W] that images must have; None: any.
        num_classes: number of logits, if labels can be compared with them; else 0.
    """

    name: str
    file: Path
    sizes: Mapping[str, int]
    resize: str = "none"
    shape: tuple[int, ...] | None = None
    num_classes: int = 0

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the weights' file, 64 hex digits."""
        return checksum(self.file)

    @property
    def label(self) -> str:
        """Name for records, with the first 8 digits of the hash: name@01234567."""
        name = self.name if self.name in EXTRACTORS else self.file.stem
        return f"{name}@{self.sha256[:8]}"

    def load(self, names: Collection[str], device: torch.device) -> Network:
        """Return the network on `device`. It maps uint8 [B,C,H,W] to the features in `names`,
        float32 [B,D]; a feature_map is [B,S,h,w], with S values at each position. The global random
        generator is not changed."""
        with torch.random.fork_rng(devices=[]):
            if self.name == INCEPTION:
                network = _load_inception(self.file, names, device)
            elif self.name in DINOV2:
                network = _load_dinov2(self, device)
            elif self.file.suffix == EXPORTED:
                network = _load_exported(self.file, device)[0]
            else:
                network = load_features(self.file).to(device)

        @torch.no_grad()
        def extract(images: Tensor) -> dict[str, Tensor]:
            images = images.to(device, non_blocking=True)
            features = network(images.expand(-1, 3, -1, -1) if self.shape is None else images)
            return {name: values for name, values in features.items() if name in names}

        return extract


def find_extractor(
    name: str, inception_weights: str | None = None, dinov2_weights: str | None = None
) -> Extractor:
    """Return an extractor by its name, or from a file written by `tread-zoo make-features` or
    `torch.export.save`. Weights are in torch's hub folder unless a path is given. Raises
    ValueError for an unknown name or a missing file."""
    if name == INCEPTION:
        file = _hub_file(inception_weights, INCEPTION_URL, "inception_weights")
        sizes = {"pooled": 2048, "spatial": 17 * 17 * _SPATIAL_CHANNELS, "logits": 1008}
        return Extractor(name, file, sizes, _RESIZE.format(299))
    if name in DINOV2:
        network, size = DINOV2[name]
        url = f"https://dl.fbaipublicfiles.com/dinov2/{network}/{network}_pretrain.pth"
        file = _hub_file(dinov2_weights, url, "dinov2_weights")
        return Extractor(name, file, {"pooled": size}, _RESIZE.format(224))
    if name.endswith(EXPORTED):
        file = Path(name).expanduser()
        exported, shape = _load_exported(file, torch.device("cpu"))
        named = exported(torch.zeros(2, *shape, dtype=torch.uint8))
        return Extractor(name, file, {k: v.shape[1] for k, v in named.items()}, "none", shape)
    if name not in SHIPPED and not name.endswith(".safetensors"):
        known = (*EXTRACTORS, "auto", "….safetensors", f"…{EXPORTED}")
        raise unknown_name("evaluation.extractor", name, known)
    file = SHIPPED.get(name) or Path(name).expanduser()
    classifier = load_features(file)
    sizes = {"pooled": classifier.num_features, "logits": classifier.num_classes}
    return Extractor(name, file, sizes, "none", classifier.shape, classifier.num_classes)


class ClassifierFeatures(nn.Module):
    """A classifier of small images: 3x3 convolutions, pooled features, logits.

    It uses GELU, because half of the features of so small a ReLU network die in training.

    Args:
        image_size: (H, W), each at least 8.
        channels: C.
        num_classes: number of logits.
        num_features: D, unless `layers` is given.
        layers: channels and padding of each convolution, and whether a 2x2 pooling follows.
    """

    def __init__(
        self,
        *,
        image_size: Sequence[int],
        channels: int,
        num_classes: int,
        num_features: int = 128,
        layers: Sequence[tuple[int, int, bool]] | None = None,
    ) -> None:
        super().__init__()
        self.shape = (channels, *image_size)
        last = (num_features, 1, False)
        self.layers = layers or ((32, 1, True), (64, 1, True), last, last)
        self.num_classes, self.num_features = num_classes, self.layers[-1][0]
        before = channels
        for index, (after, padding, _) in enumerate(self.layers, start=1):
            self.add_module(f"conv{index}", nn.Conv2d(before, after, 3, padding=padding))
            before = after
        self.classify = nn.Linear(self.num_features, num_classes)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the features of images uint8 [B,C,H,W] by name: pooled [B, D], logits [B,
        num_classes] and feature_map [B, D, h, w]."""
        x = images.to(self.classify.weight.dtype) / 255
        for index, (_, _, is_pooled) in enumerate(self.layers, start=1):
            x = F.gelu(self.get_submodule(f"conv{index}")(x))
            x = F.max_pool2d(x, 2) if is_pooled else x
        pooled = x.mean(dim=(2, 3))
        return {"pooled": pooled, "logits": self.classify(pooled), "feature_map": x}


# Sizes for the file of digits, which stores none.
_DIGITS_LAYERS = ((32, 1, False), (64, 1, True), (64, 0, False))
_DIGITS = {"image_size": (8, 8), "channels": 1, "num_classes": 10, "layers": _DIGITS_LAYERS}


def save_features(network: ClassifierFeatures, path: Path, about: str) -> None:
    """Write a classifier's weights, sizes and the text `about` to a safetensors file,
    atomically."""
    from safetensors.torch import save

    channels, *image_size = network.shape
    sizes = {"image_size": image_size, "channels": channels, "num_classes": network.num_classes}
    metadata = json.dumps({**sizes, "layers": network.layers, "about": about})
    # one entry of metadata: several have no fixed order, and records name the file by its hash
    with atomic_file(path) as stream:
        stream.write(save(network.state_dict(), metadata={"features": metadata}))


def load_features(path: Path = DIGITS_WEIGHTS) -> ClassifierFeatures:
    """Return a classifier saved by `save_features`, frozen; by default the shipped digits one."""
    from safetensors import safe_open

    metadata: dict[str, Any] = dict(_DIGITS)
    with safe_open(path, framework="pt") as file:
        if path != DIGITS_WEIGHTS:
            metadata = json.loads(file.metadata()["features"])
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    metadata.pop("about", None)
    with torch.device("meta"):  # no random weights: the global generator is not changed
        network = ClassifierFeatures(**metadata)
    network.load_state_dict(state, assign=True)
    return network.eval().requires_grad_(False)


def _load_exported(file: Path, device: torch.device) -> tuple[Network, tuple[int, ...]]:
    """Return the network in a file of torch.export, as a function from uint8 [B,C,H,W] to
    {"pooled": features [B,D]}, and the size [C,H,W] of the images that it takes."""
    from torch.export import load
    from torch.export.passes import move_to_device_pass

    program = load(str(file))
    example: Any = program.example_inputs
    module: Any = move_to_device_pass(program, device).module()
    return lambda images: {"pooled": module(images).float()}, tuple(example[0][0].shape[1:])


def _load_inception(file: Path, names: Collection[str], device: torch.device) -> Network:
    """Return Inception, which computes no more layers than the features in `names` need."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    # "768" is computed after mixed_7, so asking for it also runs mixed_6
    layers = {
        "spatial": "768", "feature_map": "768", "pooled": "2048", "logits": "logits_unbiased"
    }  # fmt: skip
    wanted = {layer: name for name, layer in layers.items() if name in names}
    network = FeatureExtractorInceptionV3(
        INCEPTION, list(wanted), feature_extractor_weights_path=str(file)
    ).to(device)
    kept: dict[str, Tensor] = {}

    def keep_spatial(module: nn.Module, inputs: Any, output: Tensor) -> None:
        first = output[:, :_SPATIAL_CHANNELS].permute(0, 2, 3, 1)  # [B, 17, 17, 7]
        kept["spatial"] = first.flatten(1).float()

    def keep_map(module: nn.Module, inputs: Any, output: Tensor) -> None:
        kept["feature_map"] = output.float()  # [B, 768, 17, 17]

    network.Mixed_6d.branch1x1.register_forward_hook(keep_spatial)
    network.Mixed_6e.register_forward_hook(keep_map)
    return lambda images: dict(zip(wanted.values(), network(images), strict=True)) | kept


def _load_dinov2(extractor: Extractor, device: torch.device) -> Network:
    """Return DINOv2, from its authors' code, with images resized and normalized as in
    torch-fidelity."""
    from torch_fidelity.interpolate_compat_tensorflow import (
        interpolate_bilinear_2d_like_tensorflow1x as resize,
    )
    from torchvision.transforms.functional import normalize

    code = Path(torch.hub.get_dir()) / "facebookresearch_dinov2_main"
    if not (code / "hubconf.py").is_file():
        raise ValueError(f"{extractor.name} runs its authors' code: git clone {DINOV2_CODE} {code}")
    os.environ.setdefault("XFORMERS_DISABLED", "1")  # plain attention
    load: Any = torch.hub.load
    network = load(str(code), DINOV2[extractor.name][0], source="local", pretrained=False)
    network.load_state_dict(torch.load(extractor.file, map_location="cpu", weights_only=True))
    network.eval().requires_grad_(False).to(device)

    def named(images: Tensor) -> dict[str, Tensor]:
        x = resize(images.float(), size=(224, 224), align_corners=False)
        mean, std = ([255 * value for value in values] for values in _IMAGENET)
        features = network.forward_features(normalize(x, mean, std))
        patches = features["x_norm_patchtokens"].float().mT  # [B, D, N]
        side = math.isqrt(patches.shape[2])
        feature_map = patches.unflatten(2, (side, side))
        return {"pooled": features["x_norm_clstoken"].float(), "feature_map": feature_map}

    return named


def _hub_file(path: str | None, url: str, field: str) -> Path:
    """Return the path of a file of weights.

    Args:
        path: the file, or a folder that has it; None: torch's hub folder.
        url: where it can be downloaded; in a folder, the file has the name at the end of this.
        field: setting that the error names if the file is missing.
    """
    name = url.rpartition("/")[2]
    file = Path(path).expanduser() if path else Path(torch.hub.get_dir(), "checkpoints", name)
    file = file / name if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"{str(file)!r} does not exist: download {url} to it, or set evaluation.{field} to its "
            "path."
        )
    return file
