"""What a model sees of stored latents, and how what it makes becomes an image.

    x = (z - shift) scale,    z = mean + std noise   (moments)  or as stored

`normalization=standardize` takes shift and scale from the data's own mean and deviation, channel
by channel, so that x has mean 0 and deviation 1 with every autoencoder. `scale` takes the
autoencoder's own numbers, which published networks were trained with.

Dimensions: B batch, K copies (2: as it is, mirrored), C channels of a latent (2 C stored where
there are moments), h height, w width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tread_zoo.data.latents.vae import Vae, check_vae, load_vae
from tread_zoo.data.ranges import to_uint8
from tread_zoo.errors import unknown_name

CONTENTS = ("samples", "mean_logvar", "mean_std")
NORMALIZATIONS = ("standardize", "scale")
DECODE_BATCH = 8  # images: decoding needs far more memory than the latents
_LOGVAR_RANGE = (-30.0, 20.0)  # as diffusers has it


def num_moments(content: str) -> int:
    """Return how many times C a stored latent's channels are.

    Raises:
        ValueError: an unknown content.
    """
    if content not in CONTENTS:
        raise unknown_name("data.content", content, CONTENTS)
    return 1 if content == "samples" else 2


def split_moments(stored: Tensor, content: str) -> tuple[Tensor, Tensor | None]:
    """Return mean and deviation (None for samples), float32 [..., C, h, w], of stored latents."""
    stored = stored.float()
    if content == "samples":
        return stored, None
    mean, spread = stored.chunk(2, dim=-3)
    if content == "mean_logvar":
        spread = (0.5 * spread.clamp(*_LOGVAR_RANGE)).exp()
    return mean, spread


@dataclass
class Decoder:
    """An autoencoder by name, loaded when it is first needed and checked by its hash."""

    name: str
    kind: str
    sha256: str | None  # None: whatever is there
    _loaded: Vae | None = field(default=None, repr=False, compare=False)

    def load(self) -> Vae:
        """Return the autoencoder.

        Raises:
            ValueError: it is not there, or it is another one.
        """
        if self._loaded is None:
            found = load_vae(self.name)
            if self.sha256 is not None and found.sha256 != self.sha256:
                raise ValueError(
                    f"vae={self.name!r} is another autoencoder ({found.kind}, sha256 "
                    f"{found.sha256[:12]}…) than the latents were made with ({self.kind}, sha256 "
                    f"{self.sha256[:12]}…): its images would be wrong. Name the right one."
                )
            self._loaded = found
        return self._loaded


@dataclass(frozen=True)
class LatentCodec:
    """Latents [B,K,C,h,w] or, with moments, [B,K,2C,h,w].

    Args:
        content: `samples`, `mean_logvar` or `mean_std`.
        flips: K is 2, and the second copy is that of the mirrored image.
        normalization: its name, for records.
        shift, scale: C numbers each.
        vae: class and sha256 of the autoencoder that they were made with; None if unknown.
        decoder: where it is; None leaves pictures out.
    """

    content: str
    flips: bool
    normalization: str
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    vae: dict[str, Any] | None
    decoder: Decoder | None

    @property
    def facts(self) -> dict[str, Any]:
        """All that a model depends on; not where the autoencoder is."""
        return {
            "kind": "latents",
            "content": self.content,
            "normalization": self.normalization,
            "shift": list(self.shift),
            "scale": list(self.scale),
            "vae": self.vae,
        }

    @property
    def options(self) -> dict[str, Any]:
        """Where the autoencoder is, as an option of the data."""
        return {"vae": "none" if self.decoder is None else self.decoder.name}

    @property
    def has_pixels(self) -> bool:
        """Whether there is an autoencoder to decode with."""
        return self.decoder is not None

    @property
    def decoded_by(self) -> dict[str, Any] | None:
        """See `Codec.decoded_by`."""
        if self.decoder is None:
            return None
        if self.decoder.sha256 is None:  # whatever is there is taken, and told
            found = self.decoder.load()
            return {"class": found.kind, "sha256": found.sha256}
        return {"class": self.decoder.kind, "sha256": self.decoder.sha256}

    def check(self, *, flip: bool = False) -> None:
        """See `Codec.check`."""
        if flip and not self.flips:
            raise ValueError(
                "training.horizontal_flip=true, but these latents have no mirrored copies, and a "
                "mirrored latent is not the latent of a mirrored image. Encode with flips=true, or "
                "set training.horizontal_flip=false."
            )
        if self.decoder is not None:
            check_vae(self.decoder.name)

    def prepare(self, device: torch.device) -> None:
        """Load the autoencoder onto `device`, if there is one.

        Raises:
            ValueError: it is missing, or another one.
        """
        if self.decoder is not None:
            self.decoder.load().to(device)

    def model_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return (B, C, h, w) for (B, K, C or 2C, h, w)."""
        batch, _, channels, height, width = stored
        return batch, channels // num_moments(self.content), height, width

    def draw(self, stored: Sequence[int], generator: torch.Generator) -> Tensor | None:
        """Return the noise of moments; samples have none."""
        if num_moments(self.content) == 1:
            return None
        return torch.randn(self.model_shape(stored), generator=generator)

    def to_model(
        self,
        stored: Tensor,
        *,
        device: torch.device,
        noise: Tensor | None = None,
        flip: Tensor | None = None,
    ) -> Tensor:
        """Return normalised latents, those of moments at their `noise`."""
        chosen = stored[:, 0]
        if flip is not None:
            chosen = torch.where(flip.view(-1, 1, 1, 1), stored[:, 1], chosen)
        z, spread = split_moments(chosen.to(device), self.content)
        if spread is not None and noise is not None:
            z = z + spread * noise.to(device)
        return (z - self._column(self.shift, device)) * self._column(self.scale, device)

    def to_pixels(self, x: Tensor, *, device: torch.device) -> Tensor:
        """Return decoded images; without an autoencoder, a preview: the first three channels (or
        the first) as colours, 3 deviations to the brightest and darkest."""
        if self.decoder is None:
            return to_uint8(x[:, : 3 if x.shape[1] >= 3 else 1] / 3).cpu()
        vae = self.decoder.load().to(device)
        parts = self.to_latents(x).split(DECODE_BATCH)
        return torch.cat([to_uint8(vae.decode(z.to(device))).cpu() for z in parts])

    def to_latents(self, x: Tensor) -> Tensor:
        """Return the autoencoder's own latents, float32, of x: z = x / scale + shift."""
        return x.float() / self._column(self.scale, x.device) + self._column(self.shift, x.device)

    @staticmethod
    def _column(values: Sequence[float], device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def normalizing(
    normalization: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    vae: dict[str, Any] | None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return shift and scale, C numbers each, of a normalization.

    Args:
        normalization: `standardize` or `scale`.
        mean, std: of the latents, by channel.
        vae: has scaling_factor and shift_factor.

    Raises:
        ValueError: an unknown name, a constant channel, or no autoencoder to take factors from.
    """
    if normalization not in NORMALIZATIONS:
        raise unknown_name("data.normalization", normalization, NORMALIZATIONS)
    if normalization == "scale":
        if vae is None:
            raise ValueError(
                "data.normalization=scale takes the factor of the autoencoder, and none is named: "
                "set data.vae=…, or data.normalization=standardize."
            )
        num_channels = len(mean)
        return (vae["shift_factor"],) * num_channels, (vae["scaling_factor"],) * num_channels
    for channel, value in enumerate(std):
        if not value > 0:
            raise ValueError(
                f"data.normalization=standardize: channel {channel} of the latents has the "
                f"deviation {value:g}, and cannot be scaled to 1. Set data.normalization=scale."
            )
    return tuple(mean), tuple(1.0 / value for value in std)


def decoder_at(name: str, vae: dict[str, Any] | None) -> Decoder | None:
    """Return the autoencoder at `name`, which has to be the one of `vae` if that is known."""
    if name == "none":
        return None
    return Decoder(name, vae["class"], vae["sha256"]) if vae else Decoder(name, "", None)


def imported_codec(vae: str, num_channels: int) -> LatentCodec:
    """Return the codec of a network from elsewhere on latents of C channels, scaled as `vae` says;
    for `vae=none` they are left as they are.

    Raises:
        ValueError: the autoencoder cannot be loaded, or has other channels.
    """
    if vae == "none":
        zeros, ones = (0.0,) * num_channels, (1.0,) * num_channels
        return LatentCodec("samples", False, "scale", zeros, ones, None, None)
    found = load_vae(vae)
    if found.latent_channels != num_channels:
        raise ValueError(
            f"vae={vae!r} has latents of {found.latent_channels} channels, and the network of "
            f"{num_channels}; name the autoencoder that it was trained with."
        )
    zeros = (0.0,) * num_channels
    shift, scale = normalizing("scale", mean=zeros, std=zeros, vae=found.facts)
    known = {"class": found.kind, "sha256": found.sha256}
    return LatentCodec(
        "samples",
        False,
        "scale",
        shift,
        scale,
        known,
        Decoder(vae, found.kind, found.sha256, found),
    )


def restore_codec(facts: dict[str, Any], vae: str) -> LatentCodec:
    """Return the codec of a checkpoint's `facts`; its autoencoder is at `vae` (`none`: nowhere)."""
    return LatentCodec(
        content=facts["content"],
        flips=False,
        normalization=facts["normalization"],
        shift=tuple(facts["shift"]),
        scale=tuple(facts["scale"]),
        vae=facts["vae"],
        decoder=decoder_at(vae, facts["vae"]),
    )
