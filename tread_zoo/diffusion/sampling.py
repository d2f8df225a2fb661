"""From seeds to images: noise, guided dx/dt, sampler. B batch, C channels, H height, W width."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tread_zoo.config import complete_sampler
from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.crossing import Crossing
from tread_zoo.diffusion.grids import DEFAULT_GRID, TimeGrid
from tread_zoo.diffusion.guidance import Guidance, NoGuidance, sampled_method
from tread_zoo.diffusion.image_batch import ImageBatch
from tread_zoo.diffusion.objective import Objective
from tread_zoo.diffusion.samplers import DxDt, Problem, Sampler, initial_noise, step_noise
from tread_zoo.progress import progress
from tread_zoo.registry import create, describe_part
from tread_zoo.routing import Method, Stack
from tread_zoo.routing.methods.none import NO_ROUTING
from tread_zoo.runtime import autocast

NO_GUIDANCE = NoGuidance()
# Options of an objective that define the meaning of a network's output.
_OF_THE_OUTPUT = ("sigma_data", "prediction", "schedule", "first_step")


@dataclass(frozen=True)
class SamplingOptions:
    """How images are sampled.

    Args:
        sampler: the sampler with its options.
        num_steps: number of steps from noise to data.
        grid: the levels of the steps.
        guidance: the guidance of dx/dt.
        selection_rate: fraction of tokens that bypass blocks in each call of the network for which
            the guidance does not choose such tokens itself; 0: none.
        routing: the routing method that applies `selection_rate`; `auto`: the method of training.
        trained: the routing method of training.
    """

    sampler: Sampler
    num_steps: int
    grid: TimeGrid = DEFAULT_GRID
    guidance: Guidance = NO_GUIDANCE
    selection_rate: float = 0.0
    routing: str | dict[str, Any] = "auto"
    trained: Method = NO_ROUTING

    def levels(self, objective: Objective) -> Tensor:
        """Return the noise levels of all steps, ending at 0: float64 [num_steps + 1].

        Raises:
            ValueError: the sampler or the grid does not fit the objective.
        """
        fits = getattr(self.sampler, "objectives", None)
        name = describe_part("objective", objective)["name"]
        if fits is not None and name not in fits:
            raise ValueError(
                f"sampler={describe_part('sampler', self.sampler)['name']} is for objective="
                f"{' or '.join(fits)}, and the network is trained with objective={name}; euler "
                "and heun fit every objective."
            )
        return objective.levels(self.num_steps, self.grid)

    def check(self, backbone: Backbone, objective: Objective) -> None:
        """Raise `ValueError` if the options do not fit the network, without a forward pass."""
        self.levels(objective)
        if self.selection_rate:
            self._check_routing(backbone)
        if hasattr(self.guidance, "check"):
            self.guidance.check(backbone, objective)

    def _check_routing(self, backbone: Backbone) -> None:
        """Raise `ValueError` if tokens cannot bypass blocks in sampling: training did not prepare
        the network for the routing method, or the guidance has rates of its own."""
        try:
            sampled_method(self.routing, self.trained, Stack.of(backbone), self.selection_rate)
            reason = ""
        except ValueError as error:
            reason = str(error).rstrip(".")
        if any(getattr(self.guidance, f"{side}_rate", 0) != 0 for side in ("weak", "strong")):
            reason = "this guidance has its own rates: set guidance.strong_rate instead"
        elif getattr(self.guidance, "weak_checkpoint", None) is not None:
            reason = "with guidance.weak_checkpoint it is not known of which blocks"
        if reason:
            raise ValueError(
                f"sampler.selection_rate={self.selection_rate} lets tokens bypass blocks, but "
                f"{reason}. sampler.selection_rate=0 is dense."
            )

    def check_training(self, backbone: Backbone, label_dropout: float) -> None:
        """Raise `ValueError` if training does not teach `backbone` the predictions that the
        guidance needs; for example, a weak prediction without a label needs a label dropout.

        label_dropout: fraction of conditions that training drops, 0 to 1.
        """
        if hasattr(self.guidance, "check_training"):
            self.guidance.check_training(backbone, label_dropout, self.trained)

    def try_guidance(
        self, backbone: Backbone, objective: Objective, weak: Backbone | None = None
    ) -> None:
        """Evaluate the guidance once, with networks that return zeros, before training starts;
        raise `ValueError` if this fails. `weak`: network of the guidance's `weak_checkpoint`."""
        x = torch.zeros(1, backbone.in_channels, *backbone.input_size)
        levels = self.levels(objective)
        batch = ImageBatch(
            blank(backbone), objective, any_condition(backbone), [0], 0, levels,
            weak and blank(weak), self.trained,
        )  # fmt: skip
        name = describe_part("guidance", self.guidance)["name"]
        try:
            shape = self.guidance.dx_dt(batch)(x, levels[:1].float()).shape
        except Exception as error:
            raise ValueError(f"guidance={name} fails: {type(error).__name__}: {error}") from error
        if shape != x.shape:
            raise ValueError(
                f"guidance={name} returns dx/dt of shape {list(shape)} for images {list(x.shape)}."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return every setting as plain values by name; the guidance's begin with `guidance_`."""
        sampler = describe_part("sampler", self.sampler)
        guidance = describe_part("guidance", self.guidance)
        return {
            "sampler": sampler.pop("name"),
            "num_steps": self.num_steps,
            **asdict(self.grid),
            **sampler,
            "selection_rate": self.selection_rate,
            **({} if self.routing == "auto" else {"routing": self.routing}),
            "guidance": guidance.pop("name"),
            **{f"guidance_{field}": value for field, value in guidance.items()},
        }


def blank(
    network: Backbone, watch: Callable[[int, Sequence[Crossing]], None] = lambda *call: None
) -> Backbone:
    """Return a copy of a network that computes nothing and returns zeros. Each call passes the
    number of images and the crossings (routed ranges of blocks) to `watch`."""

    def forward(
        x: Tensor, t: Tensor, y: Tensor | None = None, *, r: Any = None, routes: Any = ()
    ) -> Tensor:
        watch(len(x), routes)
        return x.new_zeros(len(x), network.out_channels, *network.input_size)

    stand_in = copy(network)
    stand_in.forward = forward  # type: ignore[method-assign,assignment]
    return stand_in


def any_condition(backbone: Backbone) -> Tensor | None:
    """Return a condition for one image: label 0, a context of zeros, or None."""
    if backbone.context_size:
        return torch.zeros(1, backbone.context_length, backbone.context_size)
    return default_labels([0], backbone.num_classes)


def build_sampling(
    sampler: str | Mapping[str, Any], guidance: str | Mapping[str, Any] = "none"
) -> SamplingOptions:
    """Return the sampling options of the groups `sampler` and `guidance` of a configuration.

    Args:
        sampler: a name, or a mapping with `name`, any field of `tread_zoo.config.SamplingGrid` and
            any option of the sampler.
        guidance: a name, or a mapping with `name` and options.

    Raises:
        ValueError: a name or field is unknown (the nearest is suggested), or a value is wrong.
    """
    options = complete_sampler(sampler)
    num_steps, rate = options.pop("num_steps"), options.pop("selection_rate")
    routing = options.pop("routing")
    grid = TimeGrid(**{field: options.pop(field) for field in asdict(DEFAULT_GRID)})
    return SamplingOptions(
        create("sampler", options), num_steps, grid, create("guidance", guidance), rate, routing
    )


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
    watch: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return samples float32 [len(indices), C, H, W] on the CPU, in the model's range.

    Image i depends on (seed, i) and its label alone, up to rounding.

    Args:
        backbone: the network, on the device to sample on.
        objective: its objective in training.
        indices: positions in the seed's sequence of images.
        labels: int64 [n] in 0 … num_classes, or contexts [n, T, S] of T vectors of width S, for
            the n indices; None for an unconditional network.
        seed: seed of the sequence.
        batch_size: images per batch.
        precision: fp32, bf16 or fp16, see `tread_zoo.runtime`.
        weak: the network of the guidance's `weak_checkpoint`, on the same device.
        watch: called with the noisy images [B, C, H, W] before each evaluation, scaled down where
            their noise has a standard deviation above 1.

    Raises:
        ValueError: the options do not fit the network or the objective, or the labels do not fit
            the network.
    """
    options.check(backbone, objective)
    if labels is not None and len(labels) != len(indices):
        raise ValueError(f"{len(labels)} labels or contexts for {len(indices)} images.")
    if labels is not None and (number := backbone.num_classes):
        for label in labels.tolist():
            if not 0 <= label <= number:  # the number itself stands for no label
                raise ValueError(f"label {label}: this network has the classes 0 … {number - 1}.")
    device = next(backbone.parameters()).device
    levels = options.levels(objective)
    shape = (backbone.in_channels, *backbone.input_size)
    images = []
    starts = range(0, len(indices), batch_size)
    for first in progress("sampling", starts, " batches", shown=len(starts) > 1):
        part = slice(first, first + batch_size)
        y = None if labels is None else labels[part].to(device)
        batch = ImageBatch(
            backbone, objective, y, indices[part], seed, levels, weak, options.trained,
            mean_slope=getattr(options.sampler, "uses_mean_slope", False),
        )  # fmt: skip
        if options.selection_rate:
            rate = options.selection_rate
            method = sampled_method(options.routing, options.trained, Stack.of(backbone), rate)
            batch = replace(batch, draw_routes=partial(batch.sample_routes, method, rate))

        def fresh_noise(step: int, chosen: Sequence[int] = batch.indices) -> Tensor:
            return step_noise(shape, seed, chosen, step).to(device)

        dx_dt = options.guidance.dx_dt(batch)
        if watch is not None:
            dx_dt = _watched(dx_dt, objective, watch)
        problem = Problem(dx_dt, objective, fresh_noise)
        noise = initial_noise(shape, seed, batch.indices).to(device) * objective.initial_std
        with torch.no_grad(), autocast(device, precision):
            images.append(options.sampler(problem, noise, levels).cpu())
    return torch.cat(images) if images else torch.empty(0, *shape)


def _watched(dx_dt: DxDt, objective: Objective, watch: Callable[[Tensor], None]) -> DxDt:
    def watched(x: Tensor, level: Tensor) -> Tensor:
        watch(x / objective.noise(level).clamp(min=1).view(-1, 1, 1, 1))
        return dx_dt(x, level)

    return watched


def check_weak(
    backbone: Backbone, objective: Objective, weak: Backbone, objective_of_weak: Objective
) -> None:
    """Raise `ValueError` if `weak`, trained with `objective_of_weak`, predicts another quantity, or
    has other images or conditions than `backbone`, trained with `objective`: guidance would be
    silently wrong."""
    weak_metadata, metadata = (
        {
            "size": network.input_size,
            "channels": network.in_channels,
            "classes": network.num_classes,
            "contexts": (network.context_length, network.context_size),
            "objective": type(trained).__name__,
            **{option: getattr(trained, option, None) for option in _OF_THE_OUTPUT},
        }
        for network, trained in ((weak, objective_of_weak), (backbone, objective))
    )
    for name, value in weak_metadata.items():
        if value != metadata[name]:
            raise ValueError(
                f"the network of guidance.weak_checkpoint has {name} {value}, and the guided one "
                f"has {metadata[name]}: both need the same data and objective."
            )
