"""Between what a data set stores, what a model sees, and pixels.

    stored batch  --to_model-->  x float32 [B,C,H,W]  --to_pixels-->  images uint8

Images are stored as bytes and seen in [-1, 1]; latents (`tread_zoo.data.latents`) are stored as an
autoencoder gave them and seen normalised. What of it is random is drawn from the caller's
generator, a row for each item, and never in a loader.

Dimensions: B batch, C channels, H height, W width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_model_range(images: Tensor) -> Tensor:
    """Return uint8 `images` as float32 in [-1, 1]: x / 127.5 - 1."""
    if images.dtype != torch.uint8:
        raise ValueError(
            f"images has dtype {images.dtype}; to_model_range wants uint8 0 … 255 "
            "(anything else may have been scaled already)."
        )
    return images.to(torch.float32) / 127.5 - 1.0


def to_uint8(x: Tensor) -> Tensor:
    """Return `x` of [-1, 1] as uint8, clamped and rounded: the exact inverse of `to_model_range`.

    Raises:
        ValueError: NaN, which has no nearest byte.
    """
    if torch.isnan(x).any():
        raise ValueError(
            f"x of shape {tuple(x.shape)} has NaN; no image can be made of it. "
            "Look at the loss of the run, or at the sampler's settings, that it came from."
        )
    return ((x.to(torch.float32).clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


class Codec:
    """How stored items become what a model sees, and what it makes becomes pixels.

    These are the methods for images, uint8 [B,C,H,W], seen as x / 127.5 - 1; latents have their own
    (`LatentCodec`).
    """

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint remembers, as plain values; empty for pixels."""
        return {}

    @property
    def has_pixels(self) -> bool:
        """Whether `to_pixels` gives images: False for latents without their autoencoder."""
        return True

    @property
    def decoded_by(self) -> dict[str, Any] | None:
        """Class and sha256 of the network that `to_pixels` decodes with; None without one."""
        return None

    def check(self, *, flip: bool = False) -> None:
        """Check what costs nothing: that items can be mirrored, that the autoencoder is there.

        Raises:
            ValueError: what is missing, with the remedy.
        """

    def prepare(self, device: torch.device) -> None:
        """Load onto `device` what `to_pixels` needs.

        Raises:
            ValueError: it is missing, or another one.
        """

    def model_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that `to_model` gives a batch of shape `stored`."""
        return tuple(stored)

    def draw(self, stored: Sequence[int], generator: torch.Generator) -> Tensor | None:
        """Return what is random in a batch of shape `stored`, [B,C,H,W] on the CPU, or None."""
        return None

    def to_model(
        self,
        stored: Tensor,
        *,
        device: torch.device,
        noise: Tensor | None = None,
        flip: Tensor | None = None,
    ) -> Tensor:
        """Return a stored batch as the model sees it: float32 [B,C,H,W] on `device`.

        Args:
            stored: as the loader gave it, on the CPU.
            device: where to.
            noise: what `draw` gave, or the rows of these items; without it, the mean.
            flip: bool [B], which items are mirrored.
        """
        if flip is not None:
            stored = torch.where(flip.view(-1, 1, 1, 1), stored.flip(-1), stored)
        return to_model_range(stored.to(device))

    def to_pixels(self, x: Tensor, *, device: torch.device) -> Tensor:
        """Return x float [B,C,H,W] of the model's range as images uint8 on the CPU."""
        return to_uint8(x).cpu()


PIXELS = Codec()
