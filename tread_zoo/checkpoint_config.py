"""Settings of commands other than train. This module does not import the commands themselves, so
`--help` and errors in settings do not wait for torch.
"""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.config import Weights, part_type
from tread_zoo.fields import OPTIONS, RARE, Device, Fraction


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class CheckpointConfig:
    """Settings of every script that uses a trained network.

    Args:
        plugins: modules that register parts, among them all those whose parts the checkpoint has.
        checkpoint: a run's folder (its newest checkpoint) or one checkpoint.
        out: where the result goes; null: to the run's folder, see each script.
        weights: `ema`, the averaged weights; `model`, those without averaging; or `ema:0.05`, an
            average of relative width 0.05, for runs with `training.ema_snapshots_every`.
        device, kernels: see `RunConfig`.
        precision: see `TrainingConfig`.
    """

    plugins: tuple[str, ...] = ()
    checkpoint: str
    out: str | None = None
    weights: Weights = "ema"
    device: Device = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    kernels: Annotated[dict[str, str], RARE] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class EvaluateConfig(CheckpointConfig):
    """Settings of tread-zoo evaluate, which scores a checkpoint's samples or existing images.

    Args:
        samples: in place of a checkpoint, a folder of pictures, or an .npz with arr_0 uint8
            [N,H,W,C] and perhaps labels arr_1. All images are scored.
        data: for a checkpoint, options that differ from the run's, as in data={path: …}; for
            samples, the data of the reference, as in data=cifar10.
        sampler, guidance: fields that replace the run's; `name` takes another sampler or guidance.
        evaluation: fields that differ from the run's or, for samples, from the defaults.
        out: the JSON file for scores and protocol; null: <run>/score_<step>_<digest of the
            protocol>.json or, for samples, <samples>_score_<digest>.json.
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


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class EncodingConfig:
    """Settings of tread-zoo encode.

    Args:
        plugins: see `RunConfig`.
        data: a source of images.
        vae: a diffusers autoencoder: a folder or a name on the hub; `none` keeps images as pixels.
        text_encoder: the text encoder of CLIP or T5 that turns captions into contexts: a folder or
            a name on the hub; null: none.
        text_length: embeddings per caption; longer captions are cut. null takes the length of the
            longest caption, at most 77.
        features: an extractor whose features are stored for `alignment`, named as in
            evaluation.extractor; null: none.
        inception_weights, dinov2_weights: see `EvaluationConfig`.
        out: folder of the table; the same command continues a stopped encoding.
        content: what is stored: `moments` (mean and logvar, from which training samples), `samples`
            (one sample) or `mode` (the mean); `auto`: `moments` if the autoencoder has them, else
            `mode`.
        flips: encode mirrored images, too, for training.horizontal_flip.
        dtype: type of stored latents.
        batch_size: images per batch.
        part_size: images per file.
        num_workers: processes that read images.
        max_corrupt_share: fraction of the images that may be unreadable; they are left out.
        device: see `RunConfig`.
        precision: precision of the autoencoder and the text encoder.
    """

    plugins: tuple[str, ...] = ()
    data: part_type("image_folder") = "image_folder"  # type: ignore[valid-type]
    vae: str
    text_encoder: str | None = None
    text_length: PositiveInt | None = None
    features: str | None = None
    inception_weights: Annotated[str | None, RARE] = None
    dinov2_weights: Annotated[str | None, RARE] = None
    out: str
    content: Literal["auto", "moments", "samples", "mode"] = "auto"
    flips: bool = False
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    batch_size: PositiveInt = 16
    part_size: Annotated[PositiveInt, RARE] = 4000
    num_workers: Annotated[NonNegativeInt, Field(le=1024)] = 0
    max_corrupt_share: Annotated[Fraction, RARE] = 0.01
    device: Device = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        if "://" in self.out:
            raise ValueError(
                f"out={self.out!r} is in a bucket, and out is a folder on a disk: copy the whole "
                f"folder there, as by aws s3 sync FOLDER {self.out}, and data.path={self.out} "
                "reads it."
            )
