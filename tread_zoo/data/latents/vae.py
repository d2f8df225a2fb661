"""Autoencoders of diffusers behind one small interface, known by the hash of their weights.

    images [B,3,H,W] in [-1, 1]  --encode-->  mean, logvar [B,C,h,w]  --decode-->  images

AutoencoderKL gives a normal distribution for each image; the others give one latent, and no logvar.
Latents are the autoencoder's own, before any scaling. Only safetensors are read: no pickle.

Dimensions: B batch, C channels of a latent, H, W of an image, h, w of a latent.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tread_zoo.errors import unknown_name

KINDS = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC")
INSTALL = 'pip install "tread-zoo[latents]"'


class Vae:
    """An autoencoder in eval mode; `network` is one of diffusers' classes in `KINDS`."""

    def __init__(self, network: nn.Module, name: str):
        kind = type(network).__name__
        if kind not in KINDS:
            raise unknown_name("vae: class", kind, KINDS)
        self.network, self.name, self.kind = network.eval().requires_grad_(False), name, kind
        config: Any = network.config
        self.in_channels = int(config.in_channels)
        self.latent_channels = int(config.latent_channels)
        self.scaling_factor = float(config.scaling_factor)
        self.shift_factor = float(getattr(config, "shift_factor", None) or 0.0)
        self.sha256 = weights_digest(network)
        network.to(memory_format=torch.channels_last)  # convolutions are faster so

    @property
    def has_posterior(self) -> bool:
        """Whether `encode` gives a distribution."""
        return self.kind == "AutoencoderKL"

    @property
    def facts(self) -> dict[str, Any]:
        """What tells this autoencoder from others, and where it was."""
        return {
            "class": self.kind,
            "name": self.name,
            "sha256": self.sha256,
            "latent_channels": self.latent_channels,
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
        }

    def to(self, device: torch.device) -> "Vae":
        """Move the network; return this."""
        self.network.to(device)
        return self

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and logvar (None without a posterior), float32 [B,C,h,w], of images in
        [-1, 1]; grey ones are repeated to the channels that the network has."""
        if images.shape[1] == 1:
            images = images.expand(-1, self.in_channels, -1, -1)
        network: Any = self.network
        encoded = network.encode(images)
        if self.has_posterior:
            return encoded.latent_dist.mean.float(), encoded.latent_dist.logvar.float()
        return (encoded.latents if self.kind == "AutoencoderTiny" else encoded.latent).float(), None

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images float32 [B,3,H,W], about in [-1, 1], of latents [B,C,h,w]."""
        network: Any = self.network
        return network.decode(latents).sample.float()

    def latent_shape(self, image_size: tuple[int, int]) -> tuple[int, int, int]:
        """Return (C, h, w) for images of (H, W), by encoding and decoding an empty one.

        Raises:
            ValueError: an image of this size does not come back at its size.
        """
        device = next(self.network.parameters()).device
        height, width = image_size
        try:
            mean, _ = self.encode(torch.zeros(1, self.in_channels, height, width, device=device))
            back = "x".join(map(str, self.decode(mean).shape[2:]))
        except RuntimeError as error:
            back = str(error).strip().splitlines()[0]
        if back != f"{height}x{width}":
            raise ValueError(
                f"images of {height}x{width} do not come back at their size from {self.name!r} "
                f"({back}). Set image_size to a multiple of what it divides by (8 or 32)."
            )
        return mean.shape[1], mean.shape[2], mean.shape[3]


def load_vae(name: str) -> Vae:
    """Return the autoencoder of a local diffusers folder or a hub's name, on the CPU in float32.

    A folder with a whole pipeline is taken by its `vae` part.

    Raises:
        ValueError: diffusers is missing, there is nothing by that name, or it is of another class.
    """
    check_vae(name)
    import diffusers

    where, folder = str(Path(name).expanduser()) if _is_local(name) else name, ""
    try:
        config = _read_config(where, folder)
        if config.get("_class_name") not in KINDS:
            folder = "vae"
            config = _read_config(where, folder)
        kind = config.get("_class_name")
        if kind not in KINDS:
            raise unknown_name(f"vae={name!r}: class", kind, KINDS)
        network = getattr(diffusers, kind).from_pretrained(
            where, subfolder=folder or None, use_safetensors=True, torch_dtype=torch.float32
        )
    except (OSError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"vae={name!r} cannot be loaded ({first}). Give a folder with config.json and "
            "diffusion_pytorch_model.safetensors, or a name on the hub, which has to be reached."
        ) from error
    return Vae(network, str(Path(where).resolve()) if _is_local(name) else name)


def check_vae(name: str) -> None:
    """Check what can be checked without loading: the package, and that a path exists.

    Raises:
        ValueError: with the remedy.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise ValueError(
            f"vae={name!r} needs diffusers, which is not installed: run `{INSTALL}`; or set "
            "data.vae=none to train on latents without pictures and scores."
        )
    looks_local = name.startswith(("/", "~", ".")) or name.count("/") != 1
    if looks_local and not _is_local(name):
        raise ValueError(
            f"vae={name!r} does not exist. Where it has moved, name its new place with data.vae=… "
            "(vae=… for scripts/sample.py and evaluate.py): it is known by the hash of its weights."
        )


def weights_digest(network: nn.Module) -> str:
    """Return the sha256 of all weights as float32, with names and shapes in order: the same for
    each file format and precision of storage that loses nothing."""
    digest = hashlib.sha256()
    for key, value in sorted(network.state_dict().items()):
        array = value.detach().cpu().float().contiguous()
        digest.update(f"{key}{tuple(array.shape)}".encode())
        digest.update(array.numpy().tobytes())
    return digest.hexdigest()


def _is_local(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def _read_config(where: str, folder: str) -> dict[str, Any]:
    from diffusers import AutoencoderKL

    try:
        config = AutoencoderKL.load_config(where, subfolder=folder or None)
    except OSError:
        if folder:
            raise
        return {}
    assert isinstance(config, dict)
    return config
