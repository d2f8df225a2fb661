"""Guidance combines two drifts: away from a weak prediction, towards and past a strong one.

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
level) the drift is an affine function of the estimate (EDM's denoiser D, flow matching's velocity),
with the same coefficients in both branches; so guiding drifts is guiding estimates, of all C
channels.

The branches are two calls of B images rather than one of 2B: a sparse or a smaller branch cannot
share a call, the memory stays that of unguided sampling, and on a CPU one call of 2B was measured
slower (scripts/benchmark_guidance.py times it as `cfg doubled`).

Dimensions: B batch, C channels, H height, W width, K kept tokens.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.diffusion.objective import Objective, per_sample
from tread_zoo.diffusion.samplers import Drift
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register
from tread_zoo.routing import PathDrop, Route, Routing, build_routing
from tread_zoo.seeding import make_generator

_ROUTES_AT_ONCE = 32  # evaluations whose routes one generator draws


def combine(weak: Drift, strong: Drift, scale: float) -> Drift:
    """Return weak + scale (strong - weak); at a scale of 1 or 0 that branch itself, alone.

    Raises:
        ValueError: `scale` is negative or not finite.
    """
    check_scale(scale)
    if scale == 1:
        return strong
    if scale == 0:
        return weak

    def guided(x: Tensor, level: Tensor) -> Tensor:
        weak_drift = weak(x, level)
        return weak_drift + scale * (strong(x, level) - weak_drift)

    return guided


def check_scale(scale: float) -> None:
    """Raise `ValueError` unless `scale` is finite and at least 0."""
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale) or scale < 0:
        raise ValueError(
            f"guidance.scale={scale} must be finite and at least 0: 0 is the weak branch, 1 the "
            "strong one, more than 1 guides."
        )


@dataclass(frozen=True)
class ImageBatch:
    """The images that are sampled together, and the networks that predict them.

    Args:
        backbone: the network that is sampled.
        objective: the one it was trained with.
        labels: [B], or contexts [B, T, S], on the network's device; None for no condition.
        indices: B places in the seed's sequence of images.
        seed: of that sequence.
        weak: the weak network of guidance by another one.
    """

    backbone: Backbone
    objective: Objective
    labels: Tensor | None
    indices: Sequence[int]
    seed: int
    weak: Backbone | None = None

    def drift(self) -> Drift:
        """Return the drift of the dense network with the labels asked for."""
        return self.drift_of(self.backbone, self.labels)

    def drift_of(
        self,
        backbone: Backbone,
        labels: Tensor | None,
        routes: Callable[[], Sequence[Any]] = tuple,
    ) -> Drift:
        """Return the drift that `backbone` predicts; `routes` is asked at each evaluation."""

        def drift(x: Tensor, level: Tensor) -> Tensor:
            used = [route.to(x.device) if isinstance(route, Route) else route for route in routes()]
            return self.objective.drift(
                lambda x_t, t: backbone(x_t, t, labels, routes=used), x, level
            )

        return drift


class Guidance(Protocol):
    """A kind of guidance, with its settings as fields."""

    name: ClassVar[str]

    def check(self, backbone: Backbone, objective: Objective) -> None:
        """Raise `ValueError` if this network cannot be guided so; computes nothing."""

    def drift(self, batch: ImageBatch) -> Drift:
        """Return the guided drift of a batch."""


@register("guidance", "none")
@dataclass(frozen=True, kw_only=True)
class NoGuidance:
    """The network as it is, with its label if it has labels.

    Args:
        scale: 1, which is what no guidance means.

    Raises:
        ValueError: another scale.
    """

    name: ClassVar[str] = "none"

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_scale(self.scale)
        if self.scale != 1:
            raise ValueError(
                f"guidance.scale={self.scale} needs a kind of guidance: guidance=cfg "
                f"guidance.scale={self.scale}, or one of {', '.join(GUIDANCE)}."
            )

    def check(self, backbone: Backbone, objective: Objective) -> None:
        """Nothing can be wrong."""

    def drift(self, batch: ImageBatch) -> Drift:
        return batch.drift()


@register("guidance", "cfg")
@dataclass(frozen=True, kw_only=True)
class ClassifierFree:
    """The weak prediction has no label.

    Args:
        scale: w; 1 is the conditional network alone, 0 the unconditional one.

    Raises:
        ValueError: a scale that is negative or not finite.
    """

    name: ClassVar[str] = "cfg"

    scale: float = 2.0

    def __post_init__(self) -> None:
        check_scale(self.scale)

    def check(self, backbone: Backbone, objective: Objective) -> None:
        _check_labels(self.name, self.scale, backbone)

    def drift(self, batch: ImageBatch) -> Drift:
        if batch.labels is None:  # scale 1, or `check` would have raised
            return batch.drift()
        null = batch.backbone.null_like(batch.labels)
        return combine(batch.drift_of(batch.backbone, null), batch.drift(), self.scale)


@register("guidance", "interval")
@dataclass(frozen=True, kw_only=True)
class IntervalGuidance:
    """Classifier-free guidance at the levels low < level <= high; elsewhere one evaluation.

    Args:
        scale: w.
        low, high: in the objective's level: t in [0, 1] for flow matching, sigma for EDM.

    Raises:
        ValueError: a scale that is negative or not finite, or no 0 <= low < high.
    """

    name: ClassVar[str] = "interval"

    scale: float = 2.0
    low: float = 0.0
    high: float = 0.7

    def __post_init__(self) -> None:
        check_scale(self.scale)
        if not 0 <= self.low < self.high < math.inf:
            raise ValueError(
                f"guidance.low={self.low}, guidance.high={self.high} is no interval of levels: "
                "0 <= low < high must hold; noise grows with the level, and 0 is clean data."
            )

    def check(self, backbone: Backbone, objective: Objective) -> None:
        _check_labels(self.name, self.scale, backbone)
        highest = float(objective.levels(1)[0])
        if self.high > highest:
            raise ValueError(
                f"guidance.high={self.high} is beyond the levels of objective={objective.name}, "
                f"which reach from 0 to {highest:g}."
            )

    def drift(self, batch: ImageBatch) -> Drift:
        strong = batch.drift()
        guided = ClassifierFree(scale=self.scale).drift(batch)

        def drift(x: Tensor, level: Tensor) -> Tensor:
            inside = (self.low < level) & (level <= self.high)
            if not bool(inside.any()):  # reads the level from the device: once an evaluation
                return strong(x, level)
            if bool(inside.all()):
                return guided(x, level)
            return torch.where(per_sample(inside), guided(x, level), strong(x, level))

        return drift


@register("guidance", "sparse")
@dataclass(frozen=True, kw_only=True)
class SparseGuidance:
    """Two predictions of the same network with the same label, at two selection rates.

    The tokens that stay depend on (seed, image, evaluation) alone, so an image repeats whatever the
    batch size; at the strong rate they are drawn from the same numbers as at the weak one.

    Args:
        scale: w.
        strong_rate, weak_rate: fractions of tokens that bypass; 0 is the dense network.
        start, end, selector: of the route, as in
            `tread_zoo.routing.build_routing`; `auto` is the backbone's own.

    Raises:
        ValueError: a scale that is negative or not finite, no 0 <= strong_rate < weak_rate < 1, or
            an unknown selector.
    """

    name: ClassVar[str] = "sparse"

    scale: float = 2.0
    strong_rate: float = 0.0
    weak_rate: float = 0.7
    start: int | str = "auto"
    end: int | str = "auto"
    selector: str | dict[str, Any] = "auto"

    def __post_init__(self) -> None:
        check_scale(self.scale)
        if not 0 <= self.strong_rate < self.weak_rate < 1:
            raise ValueError(
                f"guidance.strong_rate={self.strong_rate}, guidance.weak_rate={self.weak_rate}: "
                "0 <= strong_rate < weak_rate < 1 must hold; they are the fractions of tokens that "
                "bypass, and the weak prediction is the one that sees fewer."
            )

    def check(self, backbone: Backbone, objective: Objective) -> None:
        self._routing(backbone, self.weak_rate)

    def drift(self, batch: ImageBatch) -> Drift:
        weak, strong = (
            batch.drift_of(batch.backbone, batch.labels, self._routes(batch, rate).__next__)
            for rate in (self.weak_rate, self.strong_rate)
        )
        return combine(weak, strong, self.scale)

    def _routes(self, batch: ImageBatch, rate: float) -> Iterator[tuple[Route, ...]]:
        if rate == 0:
            return itertools.repeat(())
        plan = self._routing(batch.backbone, rate)
        return _draw_routes(plan, batch.backbone.grid, batch.seed, batch.indices)

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


@register("guidance", "auto")
@dataclass(frozen=True, kw_only=True)
class AutoGuidance:
    """The weak prediction is another network's: a smaller one, or one of an earlier step.

    Args:
        scale: w.
        checkpoint: of the weak network: a run's folder or a checkpoint's own.
        weights: its `ema` or `model`.

    Raises:
        ValueError: a scale that is negative or not finite, no checkpoint, or unknown weights.
    """

    name: ClassVar[str] = "auto"

    scale: float = 2.0
    checkpoint: str = ""
    weights: str = "ema"

    def __post_init__(self) -> None:
        check_scale(self.scale)
        if not self.checkpoint:
            raise ValueError(
                "guidance.checkpoint is not set: guidance=auto needs the run or the checkpoint of "
                "a weaker network: guidance.checkpoint=…"
            )
        if self.weights not in ("ema", "model"):
            raise unknown_name("guidance.weights", self.weights, ("ema", "model"))

    def check(self, backbone: Backbone, objective: Objective) -> None:
        """Nothing of the network itself; `check_weak` compares the two."""

    def check_weak(
        self, backbone: Backbone, objective: Objective, weak: Backbone, of_weak: Objective
    ) -> None:
        """Raise `ValueError` unless both networks predict the same thing of the same images."""
        facts = [
            {
                "size": network.input_size,
                "channels": network.in_channels,
                "classes": network.num_classes,
                "contexts": (network.context_length, network.context_size),
                "objective": trained.name,
                "sigma_data": getattr(trained, "sigma_data", None),
            }
            for network, trained in ((weak, of_weak), (backbone, objective))
        ]
        for fact, value in facts[0].items():
            if value != facts[1][fact]:
                raise ValueError(
                    f"guidance.checkpoint={self.checkpoint!r} has {fact} {value}, the network that "
                    f"it is to guide {facts[1][fact]}; autoguidance takes a weaker network of the "
                    "same data and objective."
                )

    def drift(self, batch: ImageBatch) -> Drift:
        if batch.weak is None:
            raise ValueError("guidance=auto was given no weak network: hand it over as `weak`.")
        return combine(batch.drift_of(batch.weak, batch.labels), batch.drift(), self.scale)


@register("guidance", "path_drop")
@dataclass(frozen=True, kw_only=True)
class PathDropGuidance:
    """The weak prediction skips the blocks whose result the network was trained to do without.

    Args:
        scale: w.

    Raises:
        ValueError: a scale that is negative or not finite.
    """

    name: ClassVar[str] = "path_drop"

    scale: float = 2.0

    def __post_init__(self) -> None:
        check_scale(self.scale)

    def check(self, backbone: Backbone, objective: Objective) -> None:
        if not backbone.fused_ranges:
            raise ValueError(
                "guidance=path_drop needs a network that was trained to go on without its middle "
                "blocks (routing.rejoin=project), and this one was not; use guidance=sparse or "
                "guidance=cfg."
            )

    def drift(self, batch: ImageBatch) -> Drift:
        dropped = [PathDrop(start, end) for start, end in batch.backbone.fused_ranges]
        weak = batch.drift_of(batch.backbone, batch.labels, lambda: dropped)
        return combine(weak, batch.drift(), self.scale)


GUIDANCE: dict[str, type[Guidance]] = {
    kind.name: kind
    for kind in (
        NoGuidance,
        ClassifierFree,
        IntervalGuidance,
        SparseGuidance,
        AutoGuidance,
        PathDropGuidance,
    )
}


def build_guidance(name: str, **options: Any) -> Guidance:
    """Return the guidance of that name, with its own keywords.

    Raises:
        ValueError: an unknown name or field (the nearest is suggested), or a wrong value.
    """
    if name not in GUIDANCE:
        raise unknown_name("guidance", name, GUIDANCE)
    known = guidance_options(name)
    for option in options:
        if option not in known:
            raise unknown_name(f"guidance={name}: field", option, known)
    return GUIDANCE[name](**options)


def guidance_options(name: str) -> tuple[str, ...]:
    """Return the keywords that guidance `name` takes."""
    return tuple(field.name for field in fields(GUIDANCE[name]))  # type: ignore[arg-type]


def check_trained(
    guidance: Guidance, *, conditional: bool, label_dropout: float, has_routes: bool
) -> None:
    """Check that training has shown the network what `guidance` asks of its weak prediction.

    Args:
        conditional: whether it takes labels or contexts.
        label_dropout: share of them that training left out.
        has_routes: whether training routed at all.

    Raises:
        ValueError: the weak prediction would be one that was never trained.
    """
    if isinstance(guidance, ClassifierFree | IntervalGuidance):
        if conditional and guidance.scale != 1 and label_dropout == 0:
            raise ValueError(
                f"guidance={guidance.name} with guidance.scale={guidance.scale} guides away from "
                "no label, which training.label_dropout=0 never shows the network. Train with "
                "training.label_dropout=0.1, or use guidance=none, sparse, auto or path_drop."
            )
    elif isinstance(guidance, SparseGuidance):
        strong_alone = guidance.scale == 1 and guidance.strong_rate == 0
        if not has_routes and not strong_alone:
            raise ValueError(
                "guidance=sparse lets tokens bypass blocks, which routing=none never shows the "
                "network. Train with routing=tread, or use guidance=cfg, interval or auto."
            )


def _check_labels(name: str, scale: float, backbone: Backbone) -> None:
    if not backbone.is_conditional and scale != 1:
        raise ValueError(
            f"guidance={name} with guidance.scale={scale} needs labels or contexts, and this "
            "network is unconditional; use guidance=none, or sparse, auto or path_drop, which need "
            "none."
        )


def _draw_routes(
    plan: Routing, grid: tuple[int, int], seed: int, indices: Sequence[int]
) -> Iterator[tuple[Route, ...]]:
    """Yield the routes of evaluation 0, 1, …, with ids [B, K] on the CPU.

    Evaluation k of image i has row k mod 32 of what (seed, i, k // 32) draws: one generator and one
    sort for many evaluations.
    """
    for chunk in itertools.count():
        drawn = [
            plan.draw(_ROUTES_AT_ONCE, grid, make_generator("sparse", seed, index, chunk))
            for index in indices
        ]
        stacked = [
            torch.stack([route.ids for route in of], dim=1) for of in zip(*drawn, strict=True)
        ]
        for row in range(_ROUTES_AT_ONCE):
            yield tuple(
                Route(p.start, p.end, ids[row]) for p, ids in zip(plan.plans, stacked, strict=True)
            )
