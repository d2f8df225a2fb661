"""Latents of an autoencoder: encoding images once, reading them, and decoding what is sampled."""

from tread_zoo.data.latents.codec import LatentCodec, imported_codec, restore_codec
from tread_zoo.data.latents.manifest import Manifest, read_manifest
from tread_zoo.data.latents.source import LatentDataset, latents
from tread_zoo.data.latents.vae import Vae, load_vae

__all__ = [
    "LatentCodec",
    "LatentDataset",
    "Manifest",
    "Vae",
    "imported_codec",
    "latents",
    "load_vae",
    "read_manifest",
    "restore_codec",
]
