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
    """What a score depends on. Scores compare where their protocols are equal. What is noted is not
    compared: scores on a curve differ in the step, others in how they round."""

    metrics: Sequence[Mapping[str, Any]] = ()  # with all options
    extractor: str | None = None  # of the features; None where none were needed
    extractor_sha256: str | None = None
    resize: str | None = None
    num_generated: int | None = None
    image_size: Sequence[int] | None = None  # [H, W]
    channels: int | None = None
    uint8: str | None = None  # the rule by which samples became bytes
    data: str | None = None  # that the samples are to be like
    reference: str | None = None  # the real images
    num_reference: int | None = None
    reference_sha256: str | None = None  # of their pixels, or of a file of statistics
    labels: str | None = None  # the rule by which samples got their labels
    seed: int | None = None  # of the samples' noise
    sampling: Mapping[str, Any] | None = None  # sampler and guidance
    weights: str | None = None  # `ema`, `model` or `ema:0.05`; None: unknown
    decoder: Mapping[str, Any] | None = None  # the autoencoder of latents, their normalization
    samples_sha256: str | None = _noted()
    step: int | None = _noted()
    nfe: int | None = _noted()
    flops_per_image: int | None = _noted()
    precision: str | None = _noted()
    device: str | None = _noted()
    torch: str | None = _noted()
    torch_fidelity: str | None = _noted()
    notes: Sequence[str] = _noted(())  # what makes a number doubtful

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
