"""What a score depends on: one frozen dataclass beside every number."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _noted(default: Any = None) -> Any:
    """Return a field that is recorded, and not compared."""
    return field(default=default, compare=False)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What a score depends on. Scores compare where their protocols are equal.

    Args:
        metrics: with all options.
        extractor, extractor_sha256, resize: the features; None where none were needed.
        num_generated, image_size, channels: the images; (H, W) as [H, W].
        uint8: the rule by which samples became bytes.
        data: that the samples are to be like.
        reference, num_reference, reference_sha256: the real images: their name, how many, and the
            hash of their pixels, or of a file of statistics.
        labels: the rule by which samples got their labels.
        seed, sampling, weights: of the samples: their noise, sampler with guidance, `ema`,
            `model` or `ema:0.05`; None where that is unknown.
        decoder: the autoencoder of latents, and their normalization.
        samples_sha256, step, nfe, flops_per_image, precision, device, torch, torch_fidelity: noted,
            and not compared: scores on a curve differ in the step, and rounding in the others.
        notes: what makes a number doubtful.
    """

    metrics: Sequence[Mapping[str, Any]] = ()
    extractor: str | None = None
    extractor_sha256: str | None = None
    resize: str | None = None
    num_generated: int | None = None
    image_size: Sequence[int] | None = None
    channels: int | None = None
    uint8: str | None = None
    data: str | None = None
    reference: str | None = None
    num_reference: int | None = None
    reference_sha256: str | None = None
    labels: str | None = None
    seed: int | None = None
    sampling: Mapping[str, Any] | None = None
    weights: str | None = None
    decoder: Mapping[str, Any] | None = None
    samples_sha256: str | None = _noted()
    step: int | None = _noted()
    nfe: int | None = _noted()
    flops_per_image: int | None = _noted()
    precision: str | None = _noted()
    device: str | None = _noted()
    torch: str | None = _noted()
    torch_fidelity: str | None = _noted()
    notes: Sequence[str] = _noted(())

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Protocol":
        """Return the protocol of a record, as it was or as JSON gave it back."""
        names = {f.name for f in fields(cls)}
        plain = json.loads(json.dumps(record["protocol"]))
        return cls(**{name: value for name, value in plain.items() if name in names})

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for records."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @property
    def digest(self) -> str:
        """Six hex digits that are equal for equal protocols, for the names of files."""
        compared = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:6]
