"""Guidance combines two slopes: away from a weak prediction, towards and past a strong one.

    d = d_weak + w (d_strong - d_weak)           w = 0: weak, w = 1: strong, w > 1: extrapolation

    kind        weak prediction                                             after
    none        -                                                           the network as it is
    cfg         without the condition                                       arXiv 2207.12598
    interval    cfg where low < level <= high, the network alone elsewhere  arXiv 2404.07724
    sparse      the condition kept, more tokens bypass                      arXiv 2601.01608
    auto        a smaller or an earlier network                             arXiv 2406.02507
    path_drop   the condition kept, the middle of the network skipped       arXiv 2510.21986

The condition is a label or a context; the null label or zeros stand for none.
w counts as in the formula above for all of them; the first paper's w is ours less 1. At one (x,
level) dx/dt is an affine function of the estimate (EDM's denoiser D, flow matching's velocity),
with the same coefficients in both branches; so guiding dx/dt is guiding estimates, of all C
channels.

The branches are two calls of B images rather than one of 2B: a sparse or a smaller branch cannot
share a call, the memory stays that of unguided sampling, and on a CPU one call of 2B was measured
slower (`benchmarks/guidance.py` times it as `cfg doubled`).

Dimensions: B batch, C channels, H height, W width, K kept tokens.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.diffusion.objective import Objective, per_image
from tread_zoo.diffusion.samplers import DxDt
from tread_zoo.registry import available, complete, register
from tread_zoo.routing import PathDrop, Route, Routing, build_routing
from tread_zoo.seeding import make_generator

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
_ROUTES_AT_ONCE = 32  # evaluations whose routes one generator draws
# Options of an objective that say what a network's output means.
_OF_THE_OUTPUT = ("sigma_data", "prediction", "schedule", "first_step")


def combine(weak: DxDt, strong: DxDt, scale: float, channels: int | None = None) -> DxDt:
    """Return weak + scale (strong - weak); at a scale of 1 or 0 that branch itself, alone.

    With `channels` only the first ones are guided; the others are the strong prediction's.
    """
    if scale == 1:
        return strong
    if scale == 0 and channels is None:
        return weak

    def guided(x: Tensor, level: Tensor) -> Tensor:
        away, towards = weak(x, level), strong(x, level)
        out = away + scale * (towards - away)
        return out if channels is None else torch.cat([out[:, :channels], towards[:, channels:]], 1)

    return guided


@dataclass(frozen=True)
class ImageBatch:
    """The images that are sampled together, and the networks that predict them.

    Args:
        backbone: the network that is sampled.
        objective: the one it was trained with.
        labels: [B], or contexts [B, T, S], on the network's device; None for no condition.
        indices: B places in the seed's sequence of images.
        seed: of that sequence.
        weak: the network of a guidance's `weak_checkpoint`.
    """

    backbone: Backbone
    objective: Objective
    labels: Tensor | None
    indices: Sequence[int]
    seed: int
    weak: Backbone | None = None

    def dx_dt(self, routes: Callable[[], Sequence[Route | PathDrop]] = tuple) -> DxDt:
        """Return dx/dt as the backbone predicts it with the labels.

        A weak prediction is that of another batch: `replace(batch, labels=…).dx_dt()`.

        Args:
            routes: called at each evaluation; none is the dense network.
        """

        def dx_dt(x: Tensor, level: Tensor) -> Tensor:
            moved = [route.to(x.device) for route in routes()]
            return self.objective.dx_dt(
                lambda x_t, t: self.backbone(x_t, t, self.labels, routes=moved), x, level
            )

        return dx_dt


class Guidance(Protocol):
    """A kind of guidance, with its settings as fields.

    Three more members are optional:

        weak_checkpoint: str                  a run or a checkpoint: its network is `batch.weak`
        check(backbone, objective)            raise ValueError if this network cannot be guided so
        check_training(*, conditional, label_dropout, has_routes)
                                              raise ValueError if training never showed the network
                                              what the weak prediction needs
    """

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        """Return the guided dx/dt of a batch."""


@register("guidance", "none")
@dataclass(frozen=True, kw_only=True)
class NoGuidance:
    """The network as it is, with its label if it has labels.

    Args:
        scale: 1, which is what no guidance means.

    Raises:
        ValueError: another scale.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scale != 1:
            kinds = [name for name in available("guidance") if name != "none"]
            raise ValueError(
                f"guidance.scale={self.scale} needs a kind of guidance: guidance=cfg "
                f"guidance.scale={self.scale}, or another of {', '.join(kinds)}."
            )

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        return batch.dx_dt()


@register("guidance", "cfg")
@dataclass(frozen=True, kw_only=True)
class ClassifierFree:
    """The weak prediction has no label.

    Args:
        scale: w; 1 is the conditional network alone, 0 the unconditional one.
        channels: how many are guided, the first ones; null for all. The published samplers of DiT
            and SiT guide 3 of their 4 latent channels.
    """

    scale: NonNegativeFloat = 2.0
    channels: PositiveInt | None = None

    def check(self, backbone: Backbone, objective: Objective) -> None:
        if not backbone.is_conditional and self.scale != 1:
            raise ValueError(
                f"guidance.scale={self.scale} guides away from no label, and this network is "
                "unconditional: use guidance=none, or sparse, auto or path_drop."
            )

    def check_training(self, *, conditional: bool, label_dropout: float, has_routes: bool) -> None:
        if conditional and self.scale != 1 and label_dropout == 0:
            raise ValueError(
                f"guidance.scale={self.scale} guides away from no label, which "
                "training.label_dropout=0 never shows the network: train with "
                "training.label_dropout=0.1, or use guidance=none, sparse, auto or path_drop."
            )

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        if batch.labels is None:  # scale 1, or `check` would have raised
            return batch.dx_dt()
        weak = replace(batch, labels=batch.backbone.null_like(batch.labels))
        return combine(weak.dx_dt(), batch.dx_dt(), self.scale, self.channels)


@register("guidance", "interval")
@dataclass(frozen=True, kw_only=True)
class IntervalGuidance(ClassifierFree):
    """Classifier-free guidance at the levels low < level <= high; elsewhere one evaluation.

    Args:
        scale, channels: as of `cfg`.
        low, high: in the objective's level: t in [0, 1] for flow matching, sigma for EDM and DDPM.

    Raises:
        ValueError: low is not below high.
    """

    low: NonNegativeFloat = 0.0
    high: NonNegativeFloat = 0.7

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(
                f"guidance.low={self.low}, guidance.high={self.high} is no interval of levels: "
                "0 <= low < high must hold; noise grows with the level, and 0 is clean data."
            )

    def check(self, backbone: Backbone, objective: Objective) -> None:
        super().check(backbone, objective)
        highest = float(objective.levels(1)[0])
        if self.high > highest:
            raise ValueError(
                f"guidance.high={self.high} is beyond the objective's levels, which reach from 0 "
                f"to {highest:g}."
            )

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        plain, guided = batch.dx_dt(), super().dx_dt(batch)

        def dx_dt(x: Tensor, level: Tensor) -> Tensor:
            inside = (self.low < level) & (level <= self.high)
            if not bool(inside.any()):  # reads the level from the device: once an evaluation
                return plain(x, level)
            if bool(inside.all()):
                return guided(x, level)
            return torch.where(per_image(inside), guided(x, level), plain(x, level))

        return dx_dt


def _selector(part: Any) -> Any:
    return part if part == "auto" else complete("selector", part, "guidance.selector")


@register("guidance", "sparse")
@dataclass(frozen=True, kw_only=True)
class SparseGuidance:
    """Two predictions of the same network with the same label, at two selection rates.

    The tokens that stay depend on (seed, image, evaluation) alone, so an image repeats whatever the
    batch size; at the strong rate they are drawn from the same numbers as at the weak one.

    Args:
        scale: w.
        strong_rate, weak_rate: fractions of tokens that bypass; 0 is the dense network.
        start, end, selector: of the route, as in `tread_zoo.config.RouteConfig`; `auto` is the
            backbone's own.

    Raises:
        ValueError: strong_rate is not below weak_rate.
    """

    scale: NonNegativeFloat = 2.0
    strong_rate: Fraction = 0.0
    weak_rate: Fraction = 0.7
    start: Auto | int = "auto"
    end: Auto | int = "auto"
    selector: Annotated[str | dict[str, Any], BeforeValidator(_selector)] = "auto"

    def __post_init__(self) -> None:
        if self.strong_rate >= self.weak_rate:
            raise ValueError(
                f"guidance.strong_rate={self.strong_rate} must be below "
                f"guidance.weak_rate={self.weak_rate}: they are the fractions of tokens that "
                "bypass, and the weak prediction is the one that sees fewer."
            )

    def check(self, backbone: Backbone, objective: Objective) -> None:
        for plan in self._routing(backbone, self.weak_rate).plans:
            if getattr(plan.selector, "needs_importance", False):
                raise ValueError(
                    f"guidance.selector={plan.selector_name} chooses tokens by their importance, "
                    "which is computed in training alone: use another, such as random."
                )

    def check_training(self, *, conditional: bool, label_dropout: float, has_routes: bool) -> None:
        dense = self.scale == 1 and self.strong_rate == 0
        if not has_routes and not dense:
            raise ValueError(
                "guidance=sparse lets tokens bypass blocks, which routing=none never shows the "
                "network: train with routing=tread, or use guidance=cfg, interval or auto."
            )

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        weak, strong = (
            batch.dx_dt(self._routes(batch, rate).__next__)
            for rate in (self.weak_rate, self.strong_rate)
        )
        return combine(weak, strong, self.scale)

    def _routes(self, batch: ImageBatch, rate: float) -> Iterator[tuple[Route, ...]]:
        if rate == 0:
            return itertools.repeat(())
        routing = self._routing(batch.backbone, rate)
        return _draw_routes(routing, batch.backbone.grid, batch.seed, batch.indices)

    def _routing(self, backbone: Backbone, rate: float) -> Routing:
        try:
            return build_routing(
                "tread",
                num_blocks=backbone.num_blocks,
                default_selector=backbone.default_selector,
                default_range=backbone.default_range,
                selection_rate=rate,
                start=self.start,
                end=self.end,
                selector=self.selector,
            )
        except ValueError as error:
            raise ValueError(f"guidance=sparse, its route as of routing=tread: {error}") from error


def _draw_routes(
    routing: Routing, grid: tuple[int, int], seed: int, indices: Sequence[int]
) -> Iterator[tuple[Route, ...]]:
    """Yield the routes of evaluation 0, 1, …, with ids [B, K] on the CPU.

    Evaluation k of image i has row k mod 32 of what (seed, i, k // 32) draws: one generator and one
    sort for many evaluations.
    """
    for chunk in itertools.count():
        drawn = [
            routing.draw(_ROUTES_AT_ONCE, grid, make_generator("sparse", seed, index, chunk))
            for index in indices
        ]
        ids = [torch.stack([r.ids for r in routes], dim=1) for routes in zip(*drawn, strict=True)]
        for row in range(_ROUTES_AT_ONCE):
            yield tuple(
                Route(plan.start, plan.end, each[row])
                for plan, each in zip(routing.plans, ids, strict=True)
            )


@register("guidance", "auto")
@dataclass(frozen=True, kw_only=True)
class AutoGuidance:
    """The weak prediction is another network's: a smaller one, or one of an earlier step.

    Args:
        scale: w.
        weak_checkpoint: of the weak network: a run's folder or a checkpoint's own.
    """

    weak_checkpoint: str
    scale: NonNegativeFloat = 2.0

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        if batch.weak is None:
            raise ValueError("guidance=auto needs a weak network: pass it to generate as `weak`.")
        return combine(replace(batch, backbone=batch.weak).dx_dt(), batch.dx_dt(), self.scale)


def check_weak(
    backbone: Backbone, objective: Objective, weak: Backbone, objective_of_weak: Objective
) -> None:
    """Raise `ValueError` unless a weak network predicts the same of the same images as `backbone`:
    else the guided samples are wrong and nothing says so."""
    weak_facts, facts = (
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
    for fact, value in weak_facts.items():
        if value != facts[fact]:
            raise ValueError(
                f"the network of guidance.weak_checkpoint has {fact} {value}, and the one to guide "
                f"has {facts[fact]}: both must be of the same data and objective."
            )


@register("guidance", "path_drop")
@dataclass(frozen=True, kw_only=True)
class PathDropGuidance:
    """The weak prediction skips the blocks whose result the network was trained to do without.

    Args:
        scale: w.
    """

    scale: NonNegativeFloat = 2.0

    def check(self, backbone: Backbone, objective: Objective) -> None:
        if not backbone.fused_ranges:
            raise ValueError(
                "guidance=path_drop needs a network that was trained to go on without its middle "
                "blocks (routing.rejoin=project), and this one was not; use guidance=sparse or "
                "guidance=cfg."
            )

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        dropped = [PathDrop(start, end) for start, end in batch.backbone.fused_ranges]
        return combine(batch.dx_dt(lambda: dropped), batch.dx_dt(), self.scale)
