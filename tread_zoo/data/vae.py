"""One interface to the autoencoders of diffusers, identified by the hash of their weights.

    images [B,3,H,W] in [-1, 1]  --encode-->  mean, logvar [B,C,h,w]  --decode-->  images

AutoencoderKL gives a normal distribution per image; other classes give a latent and no logvar.
Latents are not scaled here. Only safetensors are read, no pickle.

Dimensions: B batch, C channels of a latent, H, W of an image, h, w of a latent.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tread_zoo.errors import unknown_name

CLASSES = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderRAE")


class Vae:
    """An autoencoder in eval mode, `network`, of a diffusers class in `CLASSES`. `name` is the
    folder or the name on the hub that it was loaded from."""

    def __init__(self, network: nn.Module, name: str):
        self.network: Any = network.eval().requires_grad_(False)
        self.name, self.kind = name, type(network).__name__
        config: Any = self.network.config
        self.is_rae = self.kind == "AutoencoderRAE"
        self.has_posterior = self.kind == "AutoencoderKL"
        # an RAE's latents are the encoder's features
        channels = config.encoder_hidden_size if self.is_rae else config.latent_channels
        self.latent_channels, self.scaling_factor = int(channels), float(config.scaling_factor)
        self.shift_factor = float(getattr(config, "shift_factor", None) or 0.0)
        network.to(memory_format=torch.channels_last)  # faster convolutions

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the weights, see `digest_weights`."""
        return digest_weights(self.network)

    @property
    def metadata(self) -> dict[str, Any]:
        """Class, name that it was loaded from, hash of weights, channels of a latent, scale and
        shift."""
        return {
            "class": self.kind,
            "name": self.name,
            "sha256": self.sha256,
            "latent_channels": self.latent_channels,
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
        }

    def to(self, device: torch.device) -> "Vae":
        """Move the network to `device`, and return this `Vae`."""
        self.network.to(device)
        return self

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and logvar of the latents, float32 [B,C,h,w], for images in [-1, 1]. logvar
        is None if the autoencoder gives no distribution. Grey images are repeated to three
        channels."""
        images = images.expand(-1, 3, -1, -1)
        if self.is_rae:  # takes [0, 1], and scales latents itself
            return self.network.encode((images + 1) / 2).latent.float() / self.scaling_factor, None
        encoded = self.network.encode(images)
        if self.has_posterior:
            return encoded.latent_dist.mean.float(), encoded.latent_dist.logvar.float()
        return (encoded.latents if self.kind == "AutoencoderTiny" else encoded.latent).float(), None

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the images float32 [B,3,H,W], approximately in [-1, 1], for latents [B,C,h,w]."""
        scale = self.scaling_factor if self.is_rae else 1.0
        images: Tensor = self.network.decode(latents * scale).sample.float()
        return images * 2 - 1 if self.is_rae else images


def digest_weights(network: nn.Module) -> str:
    """Return a hash of the weights, as float32 in order of names, and of their names and shapes. It
    is the same for every file format, and for every storage precision that loses nothing."""
    digest = hashlib.sha256()
    for key, value in sorted(network.state_dict().items()):
        array = value.detach().cpu().float().contiguous()
        digest.update(f"{key}{tuple(array.shape)}".encode())
        digest.update(array.numpy().tobytes())
    return digest.hexdigest()


def load_vae(name: str) -> Vae:
    """Return the autoencoder in a diffusers folder or under a name on the hub, on the CPU in
    float32. From a pipeline, its `vae` is taken. Raises ValueError if its class is not in
    `CLASSES`."""
    import diffusers

    path = Path(name).expanduser()
    where, folder = (str(path.resolve()), None) if path.is_dir() else (name, None)
    try:
        config: Any = diffusers.AutoencoderKL.load_config(where)
    except OSError:
        folder = "vae"
        config = diffusers.AutoencoderKL.load_config(where, subfolder=folder)
    kind = config.get("_class_name")
    if kind not in CLASSES:
        raise unknown_name(f"vae={name!r}: class", kind, CLASSES)
    network = getattr(diffusers, kind).from_pretrained(
        where, subfolder=folder, use_safetensors=True, torch_dtype=torch.float32
    )
    return Vae(network, where)
