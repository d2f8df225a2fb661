"""From seeds to images: noise, guided drift, sampler. B batch, C channels, H height, W width."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.diffusion.checks import check_num_steps
from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid
from tread_zoo.diffusion.guidance import Guidance, ImageBatch, NoGuidance, build_guidance
from tread_zoo.diffusion.objective import Objective
from tread_zoo.diffusion.samplers import (
    Problem,
    Sampler,
    build_sampler,
    initial_noise,
    sampler_options,
    step_noise,
)
from tread_zoo.errors import unknown_name
from tread_zoo.runtime import autocast

NO_GUIDANCE = NoGuidance()
GRID_FIELDS = tuple(field.name for field in fields(TimeGrid))


@dataclass(frozen=True)
class SamplingOptions:
    """How images are drawn.

    Args:
        sampler: the rule, with its options.
        num_steps: steps of the sampler from noise to data.
        grid: how the steps are spread.
        guidance: what the drift is guided by.

    Raises:
        ValueError: a value that cannot work.
    """

    sampler: Sampler
    num_steps: int
    grid: TimeGrid = DEFAULT_GRID
    guidance: Guidance = NO_GUIDANCE

    def __post_init__(self) -> None:
        check_num_steps(self.num_steps, "sampler.num_steps")

    def levels(self, objective: Objective) -> Tensor:
        """Return the levels of all steps: float64 [num_steps + 1].

        Raises:
            ValueError: the sampler or the grid does not fit the objective.
        """
        fits = self.sampler.objectives
        if fits is not None and objective.name not in fits:
            raise ValueError(
                f"sampler={self.sampler.name} is for objective={' or '.join(fits)}, and the "
                f"network is trained with objective={objective.name}; euler, heun and dpmpp_2m fit "
                "every objective."
            )
        return objective.levels(self.num_steps, self.grid)

    def check(self, backbone: Backbone, objective: Objective) -> None:
        """Raise `ValueError` if this network cannot be sampled so; computes nothing."""
        self.levels(objective)
        self.guidance.check(backbone, objective)

    def as_dict(self) -> dict[str, Any]:
        """Return every setting as plain values, for records; guidance's with its prefix."""
        return {
            "sampler": self.sampler.name,
            "num_steps": self.num_steps,
            **asdict(self.grid),
            **asdict(self.sampler),  # type: ignore[call-overload]
            "guidance": self.guidance.name,
            **{
                f"guidance_{field}": value
                for field, value in asdict(self.guidance).items()  # type: ignore[call-overload]
            },
        }


def build_sampling(sampler: Mapping[str, Any], guidance: Mapping[str, Any]) -> SamplingOptions:
    """Return the sampling options of two groups of settings.

    Args:
        sampler: `name`, `num_steps`, fields of `TimeGrid` and the sampler's own.
        guidance: `name` and the guidance's own fields; see `named_guidance` for one without.

    Raises:
        ValueError: an unknown name or field (the nearest is suggested), or a wrong value.
    """
    for group, given in (("sampler", sampler), ("guidance", named_guidance(guidance))):
        if given.get("name") is None:
            raise ValueError(
                f"{group}=as_run repeats what a checkpoint was trained with, and there is none "
                f"here: name the {group}."
            )
    own = {k: v for k, v in sampler.items() if k not in ("name", "num_steps", *GRID_FIELDS)}
    name = sampler["name"]
    rule = build_sampler(name)  # an unknown name before an unknown option
    for option in own:
        if option not in sampler_fields(name):
            raise unknown_name(f"sampler={name}: field", option, sampler_fields(name))
    if own:
        rule = build_sampler(name, **own)
    return SamplingOptions(
        rule,
        sampler["num_steps"],
        TimeGrid(**{field: sampler[field] for field in GRID_FIELDS if field in sampler}),
        build_guidance(**named_guidance(guidance)),
    )


def sampler_fields(name: str) -> tuple[str, ...]:
    """Return the settings that sampler `name` can have, besides its name."""
    return ("num_steps", *GRID_FIELDS, *sampler_options(name))


def named_guidance(guidance: Mapping[str, Any]) -> dict[str, Any]:
    """Return guidance settings that have a name; older ones have a scale alone."""
    if "name" in guidance:
        return dict(guidance)
    scale = guidance.get("scale", 1.0)
    return {"name": "none"} if scale == 1 else {"name": "cfg", "scale": scale}


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
    weak: Backbone | None = None,
) -> Tensor:
    """Return samples float32 [len(indices), C, H, W] on the CPU, in the model's range.

    Image i is a function of (seed, i) and its label; the batch size changes it by rounding alone.

    Args:
        backbone: on the device to sample on.
        objective: the one it was trained with.
        indices: which images of the seed's sequence.
        labels: int64, one per index, in 0 … num_classes, or contexts [n, T, S], one per index; None
            for an unconditional network.
        seed: of the sequence.
        batch_size: images at a time.
        precision: resolved, see `tread_zoo.runtime`.
        weak: the weak network of guidance=auto, on the same device.

    Raises:
        ValueError: options that do not fit the network or the objective, a label outside the range,
            contexts of another shape, or a count that differs.
    """
    options.check(backbone, objective)
    _check_labels(backbone, indices, labels)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    device = next(backbone.parameters()).device
    levels = options.levels(objective)
    shape = (backbone.in_channels, *backbone.input_size)
    images = []
    for first in range(0, len(indices), batch_size):
        part = slice(first, first + batch_size)
        chosen = indices[part]
        y = None if labels is None else labels[part].to(device)
        batch = ImageBatch(backbone, objective, y, chosen, seed, weak)

        def fresh_noise(step: int, chosen: Sequence[int] = chosen) -> Tensor:
            return step_noise(shape, seed, chosen, step).to(device)

        problem = Problem(options.guidance.drift(batch), objective, fresh_noise)
        noise = initial_noise(shape, seed, chosen).to(device) * objective.initial_std
        with torch.no_grad(), autocast(device, precision):
            images.append(options.sampler(problem, noise, levels).cpu())
    return torch.cat(images) if images else torch.empty(0, *shape)


def _check_labels(backbone: Backbone, indices: Sequence[int], labels: Tensor | None) -> None:
    if labels is None:
        return
    if len(labels) != len(indices):
        raise ValueError(f"{len(labels)} labels were given for {len(indices)} images.")
    if backbone.context_size:
        expected = (len(labels), backbone.context_length, backbone.context_size)
        if labels.shape != expected or not labels.is_floating_point():
            raise ValueError(
                f"the conditions have shape {list(labels.shape)} and dtype {labels.dtype}; this "
                f"network takes contexts, floats {list(expected)}."
            )
        return
    if not backbone.num_classes:
        raise ValueError("labels were given, but the network is unconditional (num_classes=0).")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) <= backbone.num_classes:
        raise ValueError(
            f"labels reach from {int(labels.min())} to {int(labels.max())}; this network knows "
            f"0 … {backbone.num_classes - 1}, and {backbone.num_classes} for no label."
        )
