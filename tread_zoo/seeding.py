"""Random numbers as a function of named integers.

The random numbers of image i in step k depend only on (seed, k, i), so no generator state has to be
saved. A resumed run gets the numbers of an unbroken one, and images get the same numbers on any
number of ranks.

B batch.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood 2014): increment of its counter and factors of its mixing, as
# signed integers, because torch cannot multiply unsigned ones.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_AHEAD = 16  # first numbers of a key, made together with it
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def make_generator(purpose: str, *key: int) -> torch.Generator:
    """Return a CPU generator that depends only on `purpose` and the integers in `key`.

    >>> a, b = make_generator("train", 0, 41), make_generator("train", 0, 41)
    >>> a.initial_seed() == b.initial_seed()
    True
    """
    return torch.Generator().manual_seed(_digest(purpose, *key) >> 1)


class ImageGenerator:
    """Random numbers for a batch. The numbers of an image depend only on its key.

    Like a `torch.Generator`, each call returns new numbers. The bits are the same on every device;
    normal numbers may be rounded differently.

    Args:
        keys: int64 [B], one per image; numbers are made on the device of `keys`.
        ahead: the first n random numbers of each key, if they are computed already: int64 [B, n].
    """

    def __init__(self, keys: Tensor, ahead: Tensor | None = None) -> None:
        self.keys, self.position = keys, 0
        self.ahead = keys.new_empty(len(keys), 0) if ahead is None else ahead

    @property
    def device(self) -> torch.device:
        """The device on which the random numbers are made."""
        return self.keys.device

    def rand(self, *shape: int) -> Tensor:
        """Return float32 [B, *shape], uniform in [0, 1)."""
        bits = self._bits(math.prod(shape))
        return (_shift(bits, 40).float() * 2.0**-24).view(-1, *shape)

    def randn(self, *shape: int) -> Tensor:
        """Return float32 [B, *shape], standard normal (Box and Muller 1958)."""
        count = math.prod(shape)
        bits = self._bits(-(-count // 2))
        radius = ((_shift(bits, 32).float() + 0.5) * 2.0**-32).log().mul(-2).sqrt()
        angle = (bits & 0xFFFFFFFF).float() * (math.tau * 2.0**-32)
        pairs = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
        return pairs[:, :count].reshape(-1, *shape)

    def randint(self, high: int, *shape: int) -> Tensor:
        """Return int64 [B, *shape], uniform in 0 … high-1; `high` is at most 2^24."""
        return (self.rand(*shape) * high).long().clamp(max=high - 1)

    def _bits(self, count: int) -> Tensor:
        """Return int64 [B, count], the next `count` numbers of 64 random bits for each image."""
        first, self.position = self.position, self.position + count
        if self.position <= self.ahead.shape[1]:
            return self.ahead[:, first : self.position]
        return _bits_from(self.keys, first, count)


Generator = torch.Generator | ImageGenerator


def make_image_generator(
    purpose: str, *key: int, images: Sequence[int], device: torch.device | str = "cpu"
) -> ImageGenerator:
    """Return a generator for numbered `images`. An image's numbers depend only on `purpose`, the
    integers in `key`, and the image's number."""
    root = _digest(purpose, *key) - 2**63
    return ImageGenerator(_mix(_counters(images, device) + root))


def make_image_generators(
    purposes: Sequence[str],
    *key: int,
    images: Sequence[int],
    device: torch.device | str = "cpu",
) -> dict[str, ImageGenerator]:
    """Return by purpose the generators that `make_image_generator` returns. The keys and first
    numbers of all purposes are computed together, because launches of GPU kernels cost more than
    the numbers."""
    roots = [_digest(purpose, *key) - 2**63 for purpose in purposes]
    counters = _counters(images, device)
    keys = _mix(torch.cat([counters + root for root in roots]))
    parts = (keys.chunk(len(roots)), _bits_from(keys, 0, _AHEAD).chunk(len(roots)))
    return {
        purpose: ImageGenerator(own, ahead)
        for purpose, own, ahead in zip(purposes, *parts, strict=True)
    }


def per_image_generator(generator: Generator, batch: int) -> ImageGenerator:
    """Return `generator` itself if it is an `ImageGenerator`; else one for `batch` images, whose
    keys are drawn from it."""
    if isinstance(generator, ImageGenerator):
        return generator
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    device = generator.device
    # The first key is not used, so that a seed gives the same noise as in earlier versions.
    keys = torch.randint(least, most, (batch + 1,), generator=generator, device=device)
    return ImageGenerator(keys[1:])


def _counters(images: Sequence[int], device: torch.device | str) -> Tensor:
    """Return int64 [B]: for each image its number times the increment of SplitMix64's counter."""
    if isinstance(images, range):
        numbers = torch.arange(images.start, images.stop, images.step, device=device)
    else:
        numbers = torch.tensor(list(images), dtype=torch.int64, device=device)
    return numbers * _INCREMENT


def _bits_from(keys: Tensor, first: int, count: int) -> Tensor:
    """Return int64 [B, count], 64 random bits each: the numbers `first` … `first` + `count` - 1 of
    the sequence that belongs to each of `keys`, int64 [B]."""
    steps = torch.arange(first + 1, first + count + 1, device=keys.device)
    return _mix(torch.add(keys[:, None], steps, alpha=_INCREMENT))


def _digest(purpose: str, *key: int) -> int:
    digest = hashlib.blake2b(repr((purpose, *map(int, key))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(z: Tensor) -> Tensor:
    """Return SplitMix64's output for each of z, int64 values of its counter."""
    z = (z ^ _shift(z, 30)) * _FACTORS[0]
    z = (z ^ _shift(z, 27)) * _FACTORS[1]
    return z ^ _shift(z, 31)


def _shift(z: Tensor, places: int) -> Tensor:
    """Return z shifted right by `places` bits. Zeros are shifted in; torch's >> copies the sign."""
    return (z >> places) & ((1 << (64 - places)) - 1)
