"""Settings of the commands on trained networks. They do not import the commands, so `--help` and
errors in settings do not wait for torch.
"""

from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from tread_zoo.config import Weights
from tread_zoo.fields import OPTIONS, Device


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class CheckpointConfig:
    """What every script on a trained network takes.

    Args:
        plugins: modules that register parts; those of the checkpoint must be loaded.
        checkpoint: a run's folder (its newest checkpoint) or one checkpoint.
        out: where the result goes; null: to the run's folder, see each script.
        weights: ema; model; or ema:0.05, an average of that relative width, for runs with
            `training.ema_snapshots_every` (docs/evaluation.md).
        device, kernels: as of `RunConfig`.
        precision: as of `TrainingConfig`.
    """

    plugins: tuple[str, ...] = ()
    checkpoint: str
    out: str | None = None
    weights: Weights = "ema"
    device: Device = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class EvaluateConfig(CheckpointConfig):
    """Settings of tread-zoo evaluate, which scores a checkpoint's samples or existing images.

    Args:
        samples: in place of a checkpoint, a folder of pictures, or an .npz with arr_0 uint8
            [N,H,W,C] and perhaps labels arr_1. All images are scored.
        data: for a checkpoint, options that differ from the run's, as in data={path: …}; for
            samples, the data of the reference, as in data=cifar10.
        sampler, guidance: fields that differ from the run's; `name` chooses another one.
        evaluation: fields that differ from the run's or, for samples, from the defaults.
        out: file of the record; null is <run>/score_<step>_<digest of the protocol>.json, or
            <samples>_score.json.
        vae: the autoencoder of latents; null is the run's.
    """

    checkpoint: str | None = None  # type: ignore[assignment]
    samples: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    guidance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    vae: str | None = None

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.samples is None):
            raise ValueError("name what to score: either checkpoint=… or samples=…")
