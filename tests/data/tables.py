"""Small folders, tables and shards of pictures, some with contexts; no autoencoder is needed."""

import io
import os
import tarfile
from typing import ClassVar

import datasets
import numpy as np
import torch
from PIL import Image

from tread_zoo.checkpoint_config import EncodingConfig
from tread_zoo.data import ArrayDataset, ImageData
from tread_zoo.data.encode import encode

SHAPE = (3, 4)  # T, S of contexts
LENGTHS = (2, 1, 3, 2, 1, 2, 1, 2)  # embeddings of an image, as they are before filling up


def made_contexts(count, seed=0):
    """Return contexts float32 [t, 4], of which some are shorter than T."""
    rng = np.random.default_rng(seed)
    shape = [(LENGTHS[i % len(LENGTHS)], SHAPE[1]) for i in range(count)]
    return [rng.standard_normal(one).astype(np.float32) for one in shape]


def filled(array, length=SHAPE[0]):
    """Return a context as an item must have it: float32 [T, S], padded with zeros."""
    rest = torch.zeros(length - len(array), array.shape[1])
    return torch.cat([torch.from_numpy(array), rest])


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def flat(value, size=(8, 8)):
    """Return the pixels of a picture with one value everywhere, which identifies it."""
    return np.full((*size, 3), value, np.uint8)


def write_tar(file, values, *, labels=True, contexts=(), suffix="png"):
    """Write a shard of flat pictures, with the label value mod 4, or with texts as labels."""
    with tarfile.open(file, "w") as tar:
        for number, value in enumerate(values):
            members = {suffix: png(flat(value))}
            if labels is True:
                members["cls"] = b"%d" % (value % 4)
            elif labels:
                members["cls"] = labels[number].encode(errors="surrogateescape")
            if len(contexts):
                members["context.npy"] = npy(contexts[number])
            for kind, content in members.items():
                info = tarfile.TarInfo(f"s{value:03d}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def picture_table(values, size=(8, 8), **columns):
    """Return a table of flat pictures, with the class value mod 3."""
    kinds = {
        "picture": datasets.Image(),
        "kind": datasets.ClassLabel(names=["ant", "bee", "cat"]),
    }
    rows = {
        "picture": [Image.fromarray(flat(value, size)) for value in values],
        "kind": [value % 3 for value in values],
    }
    for name, (kind, column) in columns.items():
        kinds[name], rows[name] = kind, column
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def values_of(*parts):
    """Return the values of flat pictures, in order."""
    return [int(part[i][0][0, 0, 0]) for part in parts if part for i in range(len(part))]


def image_data(num_train=11, num_held_out=5, channels=3, size=8):
    """Return random images, labels 0 … 3."""

    def part(count, seed):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (count, channels, size, size), generator=generator)
        return ArrayDataset(images.to(torch.uint8), torch.arange(count) % 4)

    held_out = part(num_held_out, 1) if num_held_out else None
    return ImageData("made", part(num_train, 0), held_out, (size, size), channels, 4, tuple("abcd"))


def with_contexts(num_train=24, num_held_out=6):
    """Return random images of 8x8, each with a context."""
    plain = image_data(num_train, num_held_out)
    parts = []
    for seed, part in enumerate((plain.train, plain.held_out)):
        contexts = map(filled, made_contexts(len(part), seed))
        parts.append(list(zip(part.images, contexts, strict=True)))
    return ImageData("made", *parts, (8, 8), 3, 0, (), context=SHAPE)


class Stub:
    """An autoencoder whose posterior has the mean of 2x2 pixels, and as logvar that mean minus
    2."""

    name, kind, sha256, latent_channels = "stub/vae", "AutoencoderKL", "5" * 64, 3
    has_posterior = True
    network = torch.nn.Linear(1, 1)
    metadata: ClassVar = {
        "class": kind, "name": name, "sha256": sha256, "latent_channels": 3, "scaling_factor": 0.5,
        "shift_factor": 0.25,
    }  # fmt: skip

    def to(self, device):
        return self

    def encode(self, x):
        mean = torch.nn.functional.avg_pool2d(x, 2)
        return mean, mean - 2

    def decode(self, z):
        return z.repeat_interleave(2, -1).repeat_interleave(2, -2)


def write_latents(folder, data=None, **options):
    """Encode `data` with the stub, [3,4,4] for a picture of 8x8; return the folder."""
    config = EncodingConfig(
        vae="", out="", **{"content": "mode", "batch_size": 4, "part_size": 10, **options}
    )
    assert encode(data or with_contexts(), Stub(), folder, config)
    return folder


def place_features(images):
    """Return features [B, 5, 3, 4] of uint8 images [B, 3, H, W], which differ when mirrored."""
    mixed = torch.linspace(-1, 1, 15).view(5, 3, 1, 1).cos()
    pooled = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, (3, 4))
    return torch.nn.functional.conv2d(pooled, mixed).sin()


def write_features(folder, vae=None, **options):
    """Encode random images, by the stub or as they are, with features; return the folder."""
    config = EncodingConfig(**{"vae": "", "out": "", "batch_size": 16, "flips": True, **options})
    features = ("places", place_features)
    assert encode(image_data(40, 8), vae, folder, config, features=features)
    return folder
