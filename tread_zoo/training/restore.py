"""From a checkpoint back to what samples and scores need."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread_zoo.backbone import Backbone
from tread_zoo.data import ImageData, build_data
from tread_zoo.diffusion import OBJECTIVES, Objective, SamplingOptions, build_objective
from tread_zoo.runtime import resolve_device, resolve_precision
from tread_zoo.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    load_backbone,
)


@dataclass(frozen=True)
class Restored:
    """A trained backbone on its device, with the objective that gives its output a meaning."""

    checkpoint: Checkpoint
    backbone: Backbone
    objective: Objective
    precision: str

    @property
    def run_dir(self) -> Path:
        """The folder of the run that saved the checkpoint."""
        return self.checkpoint.path.parent.parent

    def sampling(self, sampler: dict[str, Any], guidance: dict[str, Any]) -> SamplingOptions:
        """Return the run's own sampling options, with the values that are not None in place."""
        own = self.checkpoint.meta
        name = sampler["name"] or own["sampler"]["name"]
        num_steps = sampler["num_steps"]
        scale = guidance["scale"]
        return SamplingOptions(
            name,
            own["sampler"]["num_steps"] if num_steps is None else num_steps,
            own["guidance"]["scale"] if scale is None else scale,
        )

    @property
    def has_data(self) -> bool:
        """Whether it names the data that it was trained on: an imported checkpoint does not."""
        return "data" in self.checkpoint.meta

    def data(self, changed: dict[str, Any]) -> ImageData:
        """Build the data that it was trained on, with `changed` options.

        Raises:
            ValueError: the data has another size, other channels or other classes.
            CheckpointError: the checkpoint was imported, and names no data.
        """
        if not self.has_data:
            raise CheckpointError(
                f"{self.checkpoint.path} was imported, and knows no data of its own to be compared "
                "with. It can be sampled: scripts/sample.py."
            )
        own = self.checkpoint.meta["data"]
        data = build_data(**{**self.checkpoint.meta["data_options"], **changed})
        facts = (list(data.image_size), data.channels, data.num_classes)
        expected = (own["image_size"], own["channels"], own["num_classes"])
        if facts != expected:
            raise ValueError(
                f"the data has (size, channels, classes) {facts}; the checkpoint was trained on "
                f"{expected}. Set data.path and its options to data of the same kind."
            )
        return data


def restore(path: str | Path, *, weights: str, device: str, precision: str) -> Restored:
    """Load the checkpoint at `path`, a run's folder or a checkpoint's own.

    Args:
        weights: `ema` or `model`.
        device, precision: see `tread_zoo.runtime`.

    Raises:
        CheckpointError: there is none, it is damaged or does not fit, or it was imported from a
            project whose objective this version does not have.
        ValueError: an unknown weights, device or precision.
    """
    place = resolve_device(device)
    chosen = resolve_precision(precision, place)
    checkpoint = find_checkpoint(path)
    objective = checkpoint.meta["objective"]
    if "imported" in checkpoint.meta and objective["name"] not in OBJECTIVES:
        raise CheckpointError(
            f"{checkpoint.path} was trained for objective={objective['name']!r}, which this "
            f"version does not have: with one of {', '.join(OBJECTIVES)} it would give noise. From "
            f"Python: load_backbone(find_checkpoint({str(path)!r})) is the network itself."
        )
    backbone = load_backbone(checkpoint, weights).to(place)
    return Restored(checkpoint, backbone, build_objective(**objective), chosen)
