"""From seeds to images: noise, guided drift, sampler. B batch, C channels, H height, W width."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.diffusion.guidance import check_scale, classifier_free
from tread_zoo.diffusion.objective import Network, Objective, check_num_steps
from tread_zoo.diffusion.samplers import Drift, build_sampler, initial_noise
from tread_zoo.runtime import autocast


@dataclass(frozen=True)
class SamplingOptions:
    """How images are drawn.

    Args:
        sampler: a name in `SAMPLERS`.
        num_steps: steps of the sampler from noise to data.
        guidance_scale: 1 samples from the conditional network alone.

    Raises:
        ValueError: a value that cannot work.
    """

    sampler: str
    num_steps: int
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        build_sampler(self.sampler)
        check_num_steps(self.num_steps)
        check_scale(self.guidance_scale)


def default_labels(indices: Sequence[int], num_classes: int) -> Tensor | None:
    """Return label i mod num_classes for image i, or None for an unconditional network."""
    if not num_classes:
        return None
    return torch.tensor(list(indices)) % num_classes


def generate(
    backbone: Backbone,
    objective: Objective,
    options: SamplingOptions,
    *,
    indices: Sequence[int],
    labels: Tensor | None,
    seed: int,
    batch_size: int,
    precision: str = "fp32",
) -> Tensor:
    """Return samples float32 [len(indices), C, H, W] on the CPU, in the model's range.

    Image i is a function of (seed, i) and its label; the batch size changes it by rounding alone.

    Args:
        backbone: on the device to sample on.
        objective: the one it was trained with.
        indices: which images of the seed's sequence.
        labels: int64, one per index, in 0 … num_classes; None for an unconditional network.
        seed: of the sequence.
        batch_size: images at a time.
        precision: resolved, see `tread_zoo.runtime`.

    Raises:
        ValueError: guidance without classes, a label outside the range, or a count that differs.
    """
    _check_labels(backbone, options, indices, labels)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    device = next(backbone.parameters()).device
    sampler, levels = build_sampler(options.sampler), objective.levels(options.num_steps)
    shape = (backbone.in_channels, *backbone.input_size)
    images = []
    for first in range(0, len(indices), batch_size):
        part = slice(first, first + batch_size)
        noise = initial_noise(shape, seed, indices[part]).to(device) * objective.initial_std

        drift = _drift(
            backbone, objective, None if labels is None else labels[part].to(device), options
        )
        with torch.no_grad(), autocast(device, precision):
            images.append(sampler(drift, noise, levels).cpu())
    return torch.cat(images) if images else torch.empty(0, *shape)


def _drift(
    backbone: Backbone, objective: Objective, labels: Tensor | None, options: SamplingOptions
) -> Drift:
    """Return the drift that is integrated: guided by labels, or of an unconditional network."""

    def network_of_labels(y: Tensor | None) -> Network:
        return lambda x, t: backbone(x, t, y)

    if labels is None:
        network = network_of_labels(None)
        return lambda x, level: objective.drift(network, x, level)
    return classifier_free(
        network_of_labels,
        labels,
        backbone.null_label,
        objective=objective,
        scale=options.guidance_scale,
    )


def _check_labels(
    backbone: Backbone, options: SamplingOptions, indices: Sequence[int], labels: Tensor | None
) -> None:
    if labels is None:
        if options.guidance_scale != 1.0:
            raise ValueError(
                f"guidance.scale={options.guidance_scale} needs labels; "
                "an unconditional network samples with guidance.scale=1."
            )
        return
    if len(labels) != len(indices):
        raise ValueError(f"{len(labels)} labels were given for {len(indices)} images.")
    if not backbone.num_classes:
        raise ValueError("labels were given, but the network is unconditional (num_classes=0).")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) <= backbone.num_classes:
        raise ValueError(
            f"labels reach from {int(labels.min())} to {int(labels.max())}; this network knows "
            f"0 … {backbone.num_classes - 1}, and {backbone.num_classes} for no label."
        )
