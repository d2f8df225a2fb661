"""The knobs of a training run, checked before any work is done."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tread_zoo.errors import unknown_name
from tread_zoo.kinds import check_fields

SCHEDULES = ("constant", "linear", "cosine")
# How a run meets faults; not part of what it computes, so a resumed run may have others.
FAULTS = ("max_corrupt_share", "max_skipped_in_a_row", "timeout_s")


@dataclass(frozen=True)
class TrainingOptions:
    """How to train.

    Args:
        num_steps: optimizer steps of the whole run.
        batch_size: images per process and micro-step.
        gradient_accumulation_steps: micro-steps per optimizer step.
        learning_rate: its peak.
        schedule: after the warm-up `constant`, `linear` to 0, or `cosine` to 0.
        warmup_steps: steps of linear warm-up.
        weight_decay, beta1, beta2: AdamW's.
        max_grad_norm: gradients are clipped to this norm; 0 switches clipping off.
        ema_decay: of the averaged weights, which are what is sampled and scored; it grows to this
            as (1 + k) / (10 + k) at step k.
        label_dropout: share of labels replaced by the null label, or of contexts replaced by zeros,
            for classifier-free guidance.
        horizontal_flip: mirror each image with probability one half.
        precision: auto, fp32, bf16 or fp16; weights stay float32.
        activation_checkpointing: recompute blocks in the backward pass to save memory: true for
            every block, n for blocks 0, n, 2n, … alone; false or 0 for none.
        compile: compile each block with torch.compile, at its first step.
        num_workers: loader processes, for data that is not in memory.
        max_corrupt_share: share of the training images that may be unreadable, each replaced by
            another; past it the run ends. 0 ends it at the first.
        log_every, sample_every, score_every, checkpoint_every: in optimizer steps; 0 switches
            samples, scores or checkpoints on the way off (the last step always leaves them).
        keep_checkpoints: how many of the newest to keep.
        max_skipped_in_a_row: steps whose loss or gradient is not finite are skipped; so many in a
            row end the run.
        timeout_s: seconds after which a process that waits for another gives up.

    Raises:
        ValueError: a value that cannot work, with the field's name.
    """

    num_steps: int
    batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    ema_decay: float
    label_dropout: float
    horizontal_flip: bool
    precision: str
    activation_checkpointing: bool | int
    compile: bool
    num_workers: int
    max_corrupt_share: float
    log_every: int
    sample_every: int
    score_every: int
    checkpoint_every: int
    keep_checkpoints: int
    max_skipped_in_a_row: int
    timeout_s: int

    def __post_init__(self) -> None:
        check_fields("training", self)
        at_least_one = (
            "num_steps", "batch_size", "gradient_accumulation_steps", "log_every",
            "keep_checkpoints", "max_skipped_in_a_row", "timeout_s",
        )  # fmt: skip
        not_negative = (
            "warmup_steps", "num_workers", "sample_every", "score_every", "checkpoint_every",
        )  # fmt: skip
        for name in (*at_least_one, *not_negative):
            least = 1 if name in at_least_one else 0
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"training.{name}={value!r} must be an integer >= {least}.")
        every = self.activation_checkpointing
        if every < 0:
            raise ValueError(
                f"training.activation_checkpointing={every!r} must be true, false or an integer: "
                "every how many blocks one is computed again."
            )
        for name, low, high in (
            ("learning_rate", 0.0, math.inf),
            ("weight_decay", 0.0, math.inf),
            ("max_grad_norm", 0.0, math.inf),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("ema_decay", 0.0, 1.0),
            ("label_dropout", 0.0, 1.0),
            ("max_corrupt_share", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not low <= value < high:
                raise ValueError(f"training.{name}={value!r} must be a number in [{low}, {high}).")
        if self.schedule not in SCHEDULES:
            raise unknown_name("training.schedule", self.schedule, SCHEDULES)

    def as_settings(self) -> dict[str, Any]:
        """Return what decides what a run computes, as plain values.

        `score_every` is named where it is set: runs from before it was there are runs without it.
        """
        left_out = (*FAULTS, *(() if self.score_every else ("score_every",)))
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[self.schedule]
        return self.learning_rate * factor
