"""What a run is made of, and what one step of it draws.

B batch, C channels, H height, W width.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.data import ImageData, StepBatches, build_data, make_loader
from tread_zoo.data.build import as_set
from tread_zoo.data.loader import OnCorrupt, warn_of
from tread_zoo.diffusion import Draw, Objective, SamplingOptions, build_sampling
from tread_zoo.evaluation.evaluate import (
    EvaluationOptions,
    Plan,
    check_evaluation,
    evaluation_settings,
)
from tread_zoo.kinds import check_keywords
from tread_zoo.registry import create, create_backbone, get_entry
from tread_zoo.routing import PathDrop, PendingRoute, Route, Routing, build_routing
from tread_zoo.seeding import make_generator
from tread_zoo.training.checkpoints import describe_backbone
from tread_zoo.training.options import TrainingOptions
from tread_zoo.training.restore import load_weak

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The parts of a run, built and checked before anything is written.

    `settings` is all that made them, as plain values: what a checkpoint remembers. `weak` is the
    network that guidance=auto names.
    """

    data: ImageData
    backbone: Backbone
    routing: Routing
    objective: Objective
    sampling: SamplingOptions
    evaluation: EvaluationOptions
    options: TrainingOptions
    seed: int
    settings: dict[str, Any]
    weak: Backbone | None = None

    def batches(
        self,
        rank: int,
        num_ranks: int,
        step: int,
        on_corrupt: OnCorrupt = warn_of,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return (images as stored, labels [B]) of every micro-step from `step` on; where the data
        have contexts, these [B,T,S] in place of labels."""
        micro_steps = self.options.gradient_accumulation_steps
        plan = StepBatches(
            len(self.data.train),  # type: ignore[arg-type]
            self.options.batch_size,
            seed=self.seed,
            rank=rank,
            num_ranks=num_ranks,
            start_step=step * micro_steps,
            num_steps=max(step, self.options.num_steps) * micro_steps,
        )
        workers = self.options.num_workers
        return make_loader(self.data.train, plan, workers, seed=self.seed, on_corrupt=on_corrupt)

    def check_batches(self, num_ranks: int) -> None:
        """Raise `ValueError` if the data cannot fill a batch on each rank."""
        self.batches(0, num_ranks, 0)


@dataclass(frozen=True)
class StepDraw:
    """The input of one micro-step, with all that is random in it, on the device."""

    images: Tensor  # [B, C, H, W] as the model sees them: in [-1, 1], or normalised latents
    labels: Tensor | None  # [B], some replaced by the null label; or contexts [B,T,S], some 0
    draw: Draw
    routes: tuple[Route | PendingRoute | PathDrop, ...]


def build_parts(
    *,
    backbone: dict[str, Any],
    routing: dict[str, Any],
    objective: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    sampler: dict[str, Any],
    guidance: dict[str, Any],
    evaluation: dict[str, Any],
    seed: int,
) -> Parts:
    """Build and check every part of a run; the weights come from the seed alone.

    See `tread_zoo.training.train` for the arguments.

    Raises:
        ValueError: a setting that cannot work, with its name.
    """
    check_keywords("", build_parts, locals())
    check_keywords("routing", build_routing, routing)
    options = TrainingOptions(**training)
    sampling = build_sampling(sampler, guidance)
    built_objective = create("objective", objective)
    sampling.levels(built_objective)
    scoring = EvaluationOptions(**evaluation)
    get_entry("backbone", backbone["name"])  # an unknown name fails before the data is read
    images = build_data(**data)
    images.codec.check(flip=options.horizontal_flip)
    _warn_of_deviation(built_objective, images)
    _check_scoring(options.score_every, check_evaluation(scoring, images))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(make_generator("weights", seed).initial_seed())
        network = create_backbone(
            input_size=images.image_size,
            in_channels=images.channels,
            num_classes=images.num_classes,
            **{**images.context_keywords, **backbone},
        )
    _check_contexts(network, images)
    network.checkpoint_blocks = int(options.activation_checkpointing)
    built_routing = build_routing(
        **routing,
        num_blocks=network.num_blocks,
        default_selector=network.default_selector,
        default_range=network.default_range,
    )
    if built_routing.plans and not built_routing.routed_steps(options.num_steps):
        raise ValueError(
            f"routing.warm_start={built_routing.warm_start:g} and routing.dense_tail="
            f"{built_routing.dense_tail:g} leave none of training.num_steps={options.num_steps} to "
            "route; make them smaller, or set routing=none."
        )
    network.add_fusions(built_routing.fused_ranges)
    sampling.check(network, built_objective)
    sampling.check_training(
        conditional=network.is_conditional,
        label_dropout=options.label_dropout,
        has_routes=bool(built_routing.plans),
    )
    settings = {
        "backbone": describe_backbone(network),
        "routing": routing,
        "objective": objective,
        "data": {
            "name": images.name,
            "image_size": images.image_size,
            "channels": images.channels,
            "num_classes": images.num_classes,
            "num_images": len(images.train),  # type: ignore[arg-type]
            **({"codec": images.codec.facts} if images.codec.facts else {}),
            **({"context": images.context} if images.context else {}),
        },
        "data_options": {**as_set(data), **images.codec.options},
        "training": options.as_settings(),
        "sampler": sampler,
        "guidance": guidance,
        "evaluation": evaluation_settings(evaluation),
        "seed": seed,
    }
    return Parts(
        data=images,
        backbone=network,
        routing=built_routing,
        objective=built_objective,
        sampling=sampling,
        evaluation=scoring,
        options=options,
        seed=seed,
        settings=json.loads(json.dumps(settings)),
        weak=load_weak(sampling, network, built_objective),
    )


def _check_scoring(score_every: int, plan: Plan) -> None:
    """Raise `ValueError` if scores are asked for on the way and there is nothing to measure."""
    if not score_every or plan.metrics or plan.judge:
        return
    asked = f"training.score_every={score_every} asks for scores on the way"
    if not plan.options.metrics:
        raise ValueError(
            f"{asked}, and evaluation.metrics=[] leaves none but the held-out loss: name some, as "
            "in evaluation.metrics=[fid], or set training.score_every=0 (training.sample_every "
            "logs the held-out loss)."
        )
    raise ValueError(
        f"{asked}, and there can be none but the held-out loss: {plan.not_scored} Or set "
        "training.score_every=0."
    )


def _warn_of_deviation(objective: Objective, data: ImageData) -> None:
    """Say so where EDM is told of data with another deviation than standardized latents have."""
    expected = getattr(objective, "sigma_data", 1.0)
    if data.codec.facts.get("normalization") == "standardize" and expected != 1.0:
        logger.warning(
            "objective.sigma_data=%g, but these latents have a deviation of 1: set "
            "objective.sigma_data=1", expected,
        )  # fmt: skip


def _check_contexts(network: Backbone, data: ImageData) -> None:
    """Raise `ValueError` where the backbone was told of other contexts than the data have."""
    length, size = data.context or (0, 0)
    if (network.context_length, network.context_size) != (length, size):
        raise ValueError(
            f"backbone.context_length={network.context_length}, backbone.context_size="
            f"{network.context_size}, but the data have {length} embeddings of width {size}. Leave "
            "both out: they come from the data."
        )


def draw_step(
    parts: Parts,
    images: Tensor,
    labels: Tensor,
    *,
    rank: int,
    micro_step: int,
    device: torch.device,
    num_ranks: int = 1,
) -> StepDraw:
    """Draw all that micro-step `micro_step` of a rank needs, from a generator of its own.

    images as stored (uint8 [B, C, H, W]; see `parts.data.codec`) and labels int64 [B], or contexts
    [B, T, S], on the CPU.
    Every rank draws for the images of all of them, num_ranks B, and takes its own share: the same
    images get the same draws on whatever number of ranks. The order of the draws is fixed: flips,
    dropped labels, noise level and noise, kept ids, and last what the codec draws; none depends on
    an option of another.
    Whether and how much is routed, and whether the step drops its paths, depends on the optimizer
    step alone, not on rank or micro-step: a path saves time only if none waits for another.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank} is not in 0 … num_ranks - 1 = {num_ranks - 1}.")
    step = micro_step // parts.options.gradient_accumulation_steps
    generator = make_generator("train", parts.seed, 0, micro_step)  # 0: the same on every rank
    codec, batch, total = parts.data.codec, len(images), num_ranks * len(images)
    own, stored = slice(rank * batch, (rank + 1) * batch), (total, *images.shape[1:])
    flipped = (torch.rand(total, generator=generator) < 0.5)[own]
    dropped = (torch.rand(total, generator=generator) < parts.options.label_dropout)[own]
    draw = parts.objective.draw(codec.model_shape(stored), generator)
    routes = draw_routes(parts, step, total, generator)
    noise = codec.draw(stored, generator)
    x = codec.to_model(
        images,
        device=device,
        noise=None if noise is None else noise[own],
        flip=flipped if parts.options.horizontal_flip else None,
    )
    y = None
    if parts.backbone.is_conditional:
        dropped = dropped.view(-1, *[1] * (labels.ndim - 1))
        y = torch.where(dropped, parts.backbone.null_like(labels), labels).to(device)
    return StepDraw(
        x,
        y,
        Draw(draw.noise[own], draw.level[own]).to(device),
        tuple(_own_rows(route, own).to(device) for route in routes),
    )


def draw_routes(
    parts: Parts, step: int, batch: int, generator: torch.Generator
) -> tuple[Route | PendingRoute | PathDrop, ...]:
    """Draw the routes of `batch` images at optimizer step `step`; what kind they are of, none
    among them, depends on the step and the run's seed alone."""
    routing = parts.routing.at(step, parts.options.num_steps, parts.seed)
    return routing.drop_paths(
        routing.draw(batch, parts.backbone.grid, generator),
        make_generator("path drop", parts.seed, step),
    )


def _own_rows(
    route: Route | PendingRoute | PathDrop, own: slice
) -> Route | PendingRoute | PathDrop:
    """Return a route of the images `own` of its batch."""
    if isinstance(route, Route):
        return Route.of_sorted(route.start, route.end, route.ids[own])
    if isinstance(route, PendingRoute) and len(route.noise) > 1:  # else all images share it
        return replace(route, noise=route.noise[own])
    return route
