"""The protocol of a score: everything that its value depends on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _noted(default: Any = None) -> Any:
    """Return a dataclass field that is recorded but not compared."""
    return field(default=default, compare=False)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Everything that a score depends on. Scores with equal protocols can be compared. Fields made
    by `_noted`, such as the step and the precision, may differ. Fields ending in `sha256` are
    hashes of files or images; `uint8` says how samples became bytes; `nfe` is network evaluations
    per image."""

    metrics: Sequence[Mapping[str, Any]] = ()  # with all options
    extractor: str | None = None  # None if no features were needed
    extractor_sha256: str | None = None
    resize: str | None = None
    num_generated: int | None = None
    image_size: Sequence[int] | None = None  # [H, W]
    channels: int | None = None
    uint8: str | None = None  # how samples became bytes
    data: str | None = None  # training data
    reference: str | None = None  # real images
    num_reference: int | None = None
    reference_sha256: str | None = None  # hash of their pixels, or of a file of statistics
    labels: str | None = None  # how the samples' labels were chosen
    seed: int | None = None  # seed of the samples' noise
    sampling: Mapping[str, Any] | None = None  # sampler and guidance
    weights: str | None = None  # `ema`, `model` or `ema:0.05`; None: unknown
    decoder: Mapping[str, Any] | None = None  # decoder of latents, and their normalization
    samples_sha256: str | None = _noted()
    step: int | None = _noted()
    nfe: int | None = _noted()
    flops_per_image: int | None = _noted()
    precision: str | None = _noted()
    device: str | None = _noted()
    torch: str | None = _noted()
    torch_fidelity: str | None = _noted()
    notes: Sequence[str] = _noted(())  # warnings about doubtful values

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Protocol":
        """Return the protocol in `record`, a score's record from memory or read from JSON."""
        names = {f.name for f in fields(cls)}
        plain = json.loads(json.dumps(record["protocol"]))
        return cls(**{name: value for name, value in plain.items() if name in names})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def digest(self) -> str:
        """Return six hex digits for file names, equal for equal protocols."""
        compared = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:6]
