"""A training step: its random draws, its loss, and its FLOPs.

The random choices for image i of step k depend only on (seed, k, i) and the size of the step's
batch.

B batch, C channels, H height, W width.
"""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tread_zoo.config import RunConfig
from tread_zoo.contract.backbone import Backbone, Features
from tread_zoo.contract.crossing import Crossing
from tread_zoo.diffusion import Draw
from tread_zoo.evaluation.flops import mean_flops, stage_flops, without_data
from tread_zoo.routing import Method, Stack, Step
from tread_zoo.routing.token_loss import loss_by_token
from tread_zoo.runtime import autocast, resolve_precision
from tread_zoo.seeding import ImageGenerator, make_image_generators
from tread_zoo.training.setup import Setup, build_setup

PURPOSES = ("flip", "latents", "label", "noise", "second level", "route")  # of random numbers


class Drawn(NamedTuple):
    """What the loss of one rank's micro-step is computed from. x: images [B,C,H,W] in the model's
    range. y: their labels or contexts, some of them dropped, or None. draw: the objective's noise
    and noise levels. routes: what the routing method chose. features: an encoder's features
    [B,S,h,w] in S channels, mirrored for the images that are mirrored in x, or None."""

    x: Tensor
    y: Tensor | None
    draw: Draw
    routes: Sequence[Crossing]
    features: Tensor | None


def draw_step(
    setup: Setup, batch: tuple[Tensor, ...], step: int, rank: int, device: torch.device
) -> Drawn:
    """Return what the loss of a micro-step is computed from, with its random choices.

    The random numbers of image i depend only on (seed, step, i), with i counted over all ranks. A
    rank draws them for its own images, so images get the same numbers on any number of ranks. Which
    blocks are routed or skipped, and how many tokens run through them, depend on the optimizer step
    alone: if ranks differed, the faster ones would wait for the others.

    Args:
        setup: the parts of the run.
        batch: images as stored (uint8 [B,C,H,W] or latents), labels int64 [B] or contexts [B,T,S],
            and, if the alignment uses them now, features [B,K,F,h,w]: K copies of F channels.
        step: the micro-step, from 0 over the whole run.
        rank: rank of this process, which has part `rank` of the step's batch.
        device: device of the weights and of the numbers.
    """
    images, labels, *features = batch
    training, codec, seed = setup.training, setup.data.codec, setup.config.seed
    numbers = range(rank * len(images), (rank + 1) * len(images))
    generator = make_image_generators(PURPOSES, seed, step, images=numbers, device=device)
    flip = generator["flip"].rand() < 0.5 if training.horizontal_flip else None
    noise = codec.draw(images.shape, generator["latents"])
    x = codec.to_model(images, device=device, noise=noise, flip=flip)
    y = None
    if setup.backbone.is_conditional:
        y = labels.to(device, non_blocking=True)
        dropped = generator["label"].rand() < training.label_dropout
        y = torch.where(dropped.view(-1, *[1] * (y.ndim - 1)), setup.backbone.null_like(y), y)
    draw = _draw(setup, codec.model_shape(images.shape), generator)
    routed = Step(step // training.gradient_accumulation_steps, setup.num_steps, seed)
    routes = setup.routing.draw(Stack.of(setup.backbone), generator["route"], routed)
    target = None
    if features:
        copies = features[0].to(device, non_blocking=True)
        mirrored = 0 if flip is None else flip.long()
        target = copies[torch.arange(len(images), device=device), mirrored]
    return Drawn(x, y, draw, routes, target)


def _draw(setup: Setup, shape: Sequence[int], generator: Mapping[str, ImageGenerator]) -> Draw:
    """Return the objective's noise and noise levels for images of `shape` [B,C,H,W] and, if images
    may have two levels, the level of each token. `generator` has one for each of `PURPOSES`."""
    draw = setup.objective.draw(shape, generator["noise"])
    if getattr(setup.objective, "second_level_fraction", 0):
        levels = setup.objective.draw_token_levels(  # type: ignore[attr-defined]
            draw.level, setup.backbone.num_tokens, generator["second level"]
        )
        draw = replace(draw, token_levels=levels)
    return draw


class StepLoss(NamedTuple):
    """The loss per image [B], other values of the objective by name, and the noise levels [B]."""

    losses: Tensor
    values: dict[str, Tensor]
    levels: Tensor


def step_loss(
    setup: Setup,
    drawn: Drawn,
    *,
    model: torch.nn.Module | None = None,
    projector: torch.nn.Module | None = None,
    teacher: Backbone | None = None,
) -> StepLoss:
    """Return the loss of a batch.

    Args:
        setup: the parts of the run.
        drawn: the result of `draw_step`.
        model, projector: the backbone and the alignment's projection, wrapped for several
            processes; None: `setup.backbone`, `setup.projector`.
        teacher: the averaged network, if the alignment takes its features from it.
    """
    x, y, draw, routes, features = drawn
    device, precision = x.device, "fp32"
    if device.type != "meta":  # where FLOPs are counted
        precision = resolve_precision(setup.training.precision, device)
    if teacher is not None:
        with torch.no_grad(), autocast(device, precision):
            features = _features_of(teacher, setup, x, y, draw)
    network: Any = model or setup.backbone
    project: Any = projector or setup.projector
    block = None if features is None else setup.projector.block  # type: ignore[union-attr]
    tokens: dict[int, Features] = {}

    def predict(x_t: Tensor, t: Tensor, y: Tensor | None = y, **given: Any) -> Tensor:
        with autocast(device, precision):
            if block is None or not torch.is_grad_enabled():
                output: Tensor = network(x_t, t, y, routes=routes, **given)
            else:
                output, collected = network(x_t, t, y, routes=routes, features=[block], **given)
                tokens.update(collected)
        return output

    patch_size = setup.backbone.patch_size
    if draw.token_levels is not None:
        losses, values = loss_by_token(setup.objective, predict, x, draw, patch_size=patch_size)
    else:
        losses, values = setup.routing.loss(
            setup.objective, predict, x, draw, tuple(routes), patch_size
        )
    if features is not None:
        with autocast(device, precision):
            term = project(*tokens[block], features)  # type: ignore[index]
        losses = losses + setup.alignment.weight * term
        values = {**values, "alignment_loss": term}
    return StepLoss(losses, values, draw.level)


def _features_of(
    teacher: Backbone, setup: Setup, x: Tensor, y: Tensor | None, draw: Draw
) -> Tensor:
    """Return the tokens [B,D,h,w] of `teacher` after the alignment's `teacher_block`, for images x
    with the noise of `draw`. An image with two noise levels gets the lower one everywhere."""
    each, projector = draw.token_levels, setup.projector
    level = draw.level if each is None else each.amin(dim=1)
    objective, tokens = setup.objective, torch.empty(0)
    shape = (-1, 1, 1, 1)
    x_t = objective.signal(level).view(shape) * x + objective.noise(level).view(shape) * draw.noise

    def predict(x_t: Tensor, t: Tensor) -> Tensor:
        nonlocal tokens
        tokens = teacher.tokens_after(x_t, t, y, projector.teacher_block)  # type: ignore
        return x_t  # the objective scales the network's input; the slope is not used

    objective.dx_dt(predict, x_t, level)
    out: Tensor = tokens.mT.unflatten(2, teacher.grid)
    return out


def affordable_steps(config: RunConfig) -> int:
    """Return how many steps `training.num_flops` pays for, at least one."""
    training, setup = config.training, build_setup(config)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    images = num_ranks * training.batch_size * training.gradient_accumulation_steps
    flops = images * mean_flops(step_flops(setup, setup.backbone))
    return max(1, round(float(training.num_flops or 0) / flops))


def step_flops(
    setup: Setup, network: Backbone, routing: Method | None = None
) -> list[tuple[range, float]]:
    """Return (steps, FLOPs per image) for each stage of a run, in which all steps cost the same on
    average. The FLOPs are those of a step's whole loss and its gradient. They include every pass of
    the network, the pass of an alignment's averaged network, and the alignment's projection.

    Args:
        setup: the run.
        network: the network whose passes are counted.
        routing: the routing method; None: the run's.
    """
    network = copy(network)
    network.checkpoint_blocks = 0  # recomputation is not counted
    stages, stop = [], setup.aligned_steps
    for aligned, part in ((True, range(stop)), (False, range(stop, setup.num_steps))):
        for steps, flops in stage_flops(
            network, routing or setup.routing, setup.num_steps, _CountedLoss(setup, aligned)
        ) if part else ():  # fmt: skip
            both = range(max(steps.start, part.start), min(steps.stop, part.stop))
            stages += [(both, flops)] if both else []
    return stages


@dataclass(frozen=True)
class _CountedLoss:
    """The loss of a step on the meta device, as a function for `stage_flops`; `aligned` says
    whether the alignment's loss is part of it."""

    setup: Setup
    aligned: bool

    @property
    def key(self) -> str:
        """What the FLOPs depend on besides the network and the routes."""
        setup = self.setup
        alignment = (setup.alignment, setup.data.features) if self.aligned else None
        return repr((setup.objective, alignment, setup.routing))

    def __call__(
        self, network: Backbone, x: Tensor, y: Tensor | None, routes: Sequence[Crossing]
    ) -> Tensor:
        projector = without_data(self.setup.projector) if self.aligned else None  # type: ignore[type-var]
        setup = replace(self.setup, backbone=network, projector=projector)
        generator = make_image_generators(PURPOSES, images=range(len(x)))
        draw = _draw(setup, x.shape, generator).to("meta")
        taught = self.aligned and setup.is_self_taught
        stored = self.aligned and not taught
        features = x.new_empty(len(x), *setup.data.features[1:]) if stored else None  # type: ignore[index]
        teacher = network if taught else None
        return step_loss(setup, Drawn(x, y, draw, routes, features), teacher=teacher).losses
