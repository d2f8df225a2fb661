"""`manifest.json`: what a folder of encoded latents holds, and what made them.

    <folder>/manifest.json            this
             train-000000.tar …       samples `<key>.latent.npy`, and `<key>.cls` or
                                      `<key>.context.npy`
             held_out-000000.tar …
             index_latent_npy.npz …   where each sample lies; made anew where it is missing

Latents lie there as the autoencoder gave them, before any scaling, [C',h,w] or, with mirrored
copies, [2,C',h,w]; C' is 2 C where mean and logvar are kept. bfloat16 is stored as its bits, `<u2`.
Contexts are float16 [T,S], filled up with zeros. The number in a key is that of the image in its
part; those that could not be read are left out, and listed with their shard.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tread_zoo.data.files import written_whole
from tread_zoo.data.loader import CorruptItem
from tread_zoo.data.shards import Damage

FORMAT = 1
NAME = "manifest.json"
PARTS = ("train", "held_out")
LATENT = "latent.npy"  # the suffix of a sample's latent
CONTEXT = "context.npy"  # and of its context
DTYPES = ("float16", "bfloat16", "float32")
VERIFY = ("size", "sha256")  # how a shard is compared with the manifest
_REMEDY = (
    "Copy it again, or give scripts/encode_latents.py the command that encoded it (with "
    "verify=sha256 if its length is right), which encodes anew what is missing or damaged."
)


@dataclass(frozen=True)
class ShardFacts:
    """One shard: file name, samples, length in bytes, sha256, and the images of its span that
    could not be read, by their number in the part."""

    name: str
    count: int
    num_bytes: int
    sha256: str
    left_out: tuple[CorruptItem, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a folder of latents holds.

    Args:
        vae: class, name, sha256 of the weights, latent_channels, scaling_factor, shift_factor.
        image_size: (H, W) of the encoded images.
        latent_shape: (C, h, w).
        content: `mean_logvar`, `samples` or `mode`.
        dtype: float16, bfloat16 or float32.
        flips: whether each latent has that of the mirrored image beside it.
        num_classes, class_names: of the labels; 0 without.
        mean, std: by channel, over the training part, flips included.
        source: name and options of the data that was encoded.
        psnr_db, psnr_images: of decoded latents against their images, a mean over some.
        parts: the shards of `train` and `held_out`, in order.
        context: (T, S) of the contexts; None without, and then it is not in the file.
        precision, batch_size, shard_size: with which it was encoded; None in older files.
    """

    vae: dict[str, Any]
    image_size: tuple[int, int]
    latent_shape: tuple[int, int, int]
    content: str
    dtype: str
    flips: bool
    num_classes: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: dict[str, Any]
    psnr_db: float
    psnr_images: int
    parts: dict[str, tuple[ShardFacts, ...]]
    context: tuple[int, int] | None = None
    precision: str | None = None
    batch_size: int | None = None
    shard_size: int | None = None

    @property
    def shards(self) -> list[ShardFacts]:
        """Those of the training part, then those of the held-out part."""
        return [shard for part in PARTS for shard in self.parts[part]]

    @property
    def stamp(self) -> str:
        """What tells that an index belongs to these shards."""
        return hashlib.sha256("".join(s.sha256 for s in self.shards).encode()).hexdigest()

    def count(self, part: str) -> int:
        """Return the number of samples of `train` or `held_out`."""
        return sum(shard.count for shard in self.parts[part])

    def num_images(self, part: str) -> int:
        """Return the number of images of a part, those that were left out included."""
        return self.count(part) + sum(len(shard.left_out) for shard in self.parts[part])

    def write(self, folder: Path) -> None:
        """Write it, beside and renamed."""
        counts = {part: self.count(part) for part in PARTS}
        content = {"format": FORMAT, "counts": counts, **asdict(self)}
        for key in ("context", "precision", "batch_size", "shard_size"):
            if content[key] is None:
                del content[key]
        for shard in (shard for part in PARTS for shard in content["parts"][part]):
            if not shard["left_out"]:
                del shard["left_out"]
        with written_whole(folder / NAME) as stream:
            stream.write(json.dumps(content, indent=2).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        ValueError: there is none, or it is of another format, or damaged.
    """
    file = folder / NAME
    try:
        found = json.loads(file.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"it has format {found['format']!r}; this version reads {FORMAT}")
        del found["format"], found["counts"]
        parts = {part: tuple(map(_as_facts, found["parts"][part])) for part in PARTS}
        tuples = ["image_size", "latent_shape", "class_names", "mean", "std"]
        tuples += ["context"] if "context" in found else []
        return Manifest(**{**found, **{key: tuple(found[key]) for key in tuples}, "parts": parts})
    except FileNotFoundError:
        raise ValueError(
            f"data.path={str(folder)!r} has no {NAME}. If scripts/encode_latents.py was stopped, "
            "the same command again finishes it."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} cannot be used ({error}). Copy it again, or encode into another folder."
        ) from error


def _as_facts(shard: dict[str, Any]) -> ShardFacts:
    left_out = tuple(CorruptItem(**one) for one in shard.get("left_out", ()))
    return ShardFacts(**{**shard, "left_out": left_out})


def damage_of(folder: Path, shard: ShardFacts, verify: str) -> Damage | None:
    """Return what is wrong with a shard: that it is missing, or differs from the manifest.

    Args:
        folder: where it lies.
        shard: what the manifest says of it.
        verify: `size`, or `sha256`, which reads every byte.
    """
    file = folder / shard.name
    try:
        size = file.stat().st_size
        if size == shard.num_bytes and verify == "sha256":
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != shard.sha256:
                return Damage(f"differs from what was written (sha256). {_REMEDY}")
    except FileNotFoundError:
        return Damage(f"is missing, and in the manifest. {_REMEDY}")
    except OSError as error:
        return Damage(f"cannot be read ({error}). {_REMEDY}")
    if size == shard.num_bytes:
        return None
    what = f"has {size} bytes, and {shard.num_bytes} in the manifest"
    if size > shard.num_bytes:
        return Damage(f"{what}: it is another one. {_REMEDY}")
    return Damage(f"{what}: it is cut short. {_REMEDY}", whole_bytes=size)


def check_shards(folder: Path, manifest: Manifest, verify: str) -> dict[int, Damage]:
    """Return what is wrong with shards, by number; nothing if all are as the manifest has them.

    Args:
        folder, manifest: whose.
        verify: `size`, or `sha256`, which reads every byte.
    """
    found = {n: damage_of(folder, shard, verify) for n, shard in enumerate(manifest.shards)}
    return {number: damage for number, damage in found.items() if damage is not None}
