"""Guidance extrapolates dx/dt from a weak prediction past a strong one.

    d = d_weak + w (d_strong - d_weak)           w = 0: weak, w = 1: strong, w > 1: extrapolation

The kinds differ in what the weak prediction lacks; `custom` has all options:

    cfg           the condition                                            arXiv 2207.12598
    interval      the condition, where low < level <= high                 arXiv 2404.07724
    sparse        tokens, as more of them bypass blocks                    arXiv 2601.01608
    auto          size or training: its network is smaller or earlier      arXiv 2406.02507
    path_drop     the condition and the middle of the network              arXiv 2510.21986
    sparse_auto   training and, early in sampling, tokens                  arXiv 2601.01608, B.1
    sparse_cfg    the condition and tokens

With sparse_auto, late in sampling the strong prediction lacks tokens instead. The condition is a
label or a context; without it, the network gets the null label or zeros. The scale is w of the
formula above; the first paper's w is smaller by 1. At one (x, level), dx/dt is an affine function
of the estimate of the clean image, with the same coefficients for both predictions, so guiding
dx/dt equals guiding estimates.

The two predictions are two calls with B images, not one with 2B: a sparse or smaller network cannot
share a call, and this way guidance takes no more memory. Two equal predictions are one call.

Dimensions: B batch, C channels, H height, W width, K kept tokens.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.crossing import Crossing
from tread_zoo.diffusion.image_batch import ImageBatch
from tread_zoo.diffusion.objective import Objective
from tread_zoo.diffusion.samplers import DxDt
from tread_zoo.fields import Fraction
from tread_zoo.registry import available, complete, create, register
from tread_zoo.routing import Method, Stack
from tread_zoo.seeding import make_image_generator


def combine(weak: DxDt, strong: DxDt, scale: float, channels: int | None = None) -> DxDt:
    """Return the function weak + scale (strong - weak) of two functions dx/dt.

    channels: how many channels to guide, from the first; the others are those of `strong`. None:
    all. `weak` is not called at scale 1, nor `strong` at scale 0 if all channels are guided.
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


class Guidance(Protocol):
    """A kind of guidance, with its settings as fields.

    Three more members are optional:

        weak_checkpoint: str | None           a run or a checkpoint: its network is `batch.weak`
        check(backbone, objective)            raise ValueError if the guidance does not fit
        check_training(backbone, label_dropout, routing)
                                              raise ValueError if the guidance needs what
                                              training did not include
    """

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        """Return the guided dx/dt of an `ImageBatch`, a function of x and the level."""


@register("guidance", "none")
@dataclass(frozen=True, kw_only=True)
class NoGuidance:
    """No guidance: the network with its label, if it has labels.

    Raises:
        ValueError: `scale` is not 1.
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


# Options that change over sampling ----------------------------------------------------------------

_Ramp = Literal["linear", "cosine"]
_Interval = Literal["interval"]
_Portion = Annotated[float, Field(ge=0, le=1)]
Drop = bool | tuple[_Interval, _Portion, _Portion]
Rate = Fraction | tuple[_Ramp, Fraction, Fraction] | tuple[_Interval, Fraction, _Portion, _Portion]
Scale = (
    NonNegativeFloat
    | tuple[_Ramp, NonNegativeFloat, NonNegativeFloat]
    | tuple[_Interval, NonNegativeFloat, _Portion, _Portion]
)

# Options that may change over sampling, and their values outside an interval.
_OFF = {
    "scale": 1.0, "drop_label": False, "weak_rate": 0.0, "drop_path": False, "strong_rate": 0.0,
}  # fmt: skip
_FRACTIONS = np.linspace(0, 1, 101).tolist()  # of sampling, where rates are checked


def _value(option: Any, done: float, off: float) -> Any:
    """Return the value of an option at the fraction `done` of sampling.

    Args:
        option: a constant; or (`linear` or `cosine`, first value, last value); or (`interval`,
            value, start, end); or (`interval`, start, end), whose value is True.
        done: fraction of sampling, 0 to 1.
        off: value outside of an interval.
    """
    if not isinstance(option, list | tuple):
        return option
    shape, *numbers = option
    if shape == "interval":
        *value, after, until = numbers
        return (value or [True])[0] if after <= done <= until else off
    first, last = numbers
    place = (1 - math.cos(math.pi * done)) / 2 if shape == "cosine" else done
    return last if done == 1 else first + (last - first) * place


def _highest(rate: Any) -> float:
    """Return the highest value of a rate, which may change during sampling."""
    return max(float(_value(rate, done, 0.0)) for done in _FRACTIONS)


# The kinds ----------------------------------------------------------------------------------------


def _method(part: Any) -> Any:
    return part if part == "auto" else complete("routing", part, "guidance.routing")


RoutingPart = Annotated[str | dict[str, Any], BeforeValidator(_method)]


class _Options:
    """The base of all kinds of guidance. Each kind declares some of the options of
    `CustomGuidance` as fields, and may fix others."""

    scale: Any = 2.0
    channels: int | None = None
    drop_label: Any = False
    weak_rate: Any = 0.0
    drop_path: Any = False
    weak_checkpoint: str | None = None
    strong_rate: Any = 0.0
    routing: str | dict[str, Any] = "auto"
    low: float = 0.0
    high: float | None = None

    def __post_init__(self) -> None:
        if self.high is not None and self.low >= self.high:
            raise ValueError(
                f"guidance.low={self.low} must be below guidance.high={self.high}; noise grows "
                "with the level, and 0 is clean data."
            )
        gaps = [
            weak_rate - strong_rate
            for _, label, weak_rate, path, strong_rate in map(self._at, _FRACTIONS)
            if not (label or path or self.weak_checkpoint)
        ]
        if min(gaps, default=0) < 0 or (len(gaps) == len(_FRACTIONS) and max(gaps) == 0):
            raise ValueError(
                f"guidance.strong_rate={self.strong_rate} must be below "
                f"guidance.weak_rate={self.weak_rate}, the fractions of tokens that bypass, unless "
                "the weak prediction lacks something else, as drop_label or drop_path."
            )

    def _at(self, done: float) -> tuple[Any, ...]:
        """Return the values, at the fraction `done` of sampling, of the options that may change
        during sampling, in the order of `_OFF`."""
        return tuple(_value(getattr(self, name), done, off) for name, off in _OFF.items())

    def check(self, backbone: Backbone, objective: Objective) -> None:
        if self.channels is not None and self.channels > backbone.in_channels:
            raise ValueError(
                f"guidance.channels={self.channels} is more than the images' "
                f"{backbone.in_channels}: leave it out to guide all channels."
            )
        lacks_label = self.drop_label is not False and self.drop_path is False
        if lacks_label and self.scale != 1 and not backbone.is_conditional:
            raise ValueError(
                f"guidance.scale={self.scale} guides away from no label, and this network is "
                "unconditional: use guidance=none, or sparse, auto or path_drop."
            )
        highest = float(objective.levels(1)[0])
        if self.high is not None and self.high > highest:
            raise ValueError(
                f"guidance.high={self.high} is above the objective's highest level, {highest:g}."
            )

    def check_training(self, backbone: Backbone, label_dropout: float, routing: Method) -> None:
        guided, stack = self.scale != 1, Stack.of(backbone)
        if (
            guided
            and self.drop_label is not False
            and backbone.is_conditional
            and not label_dropout
        ):
            raise ValueError(
                f"guidance.scale={self.scale} guides away from no label, which "
                "training.label_dropout=0 never shows the network: train with "
                "training.label_dropout=0.1, or use guidance=none, sparse or auto."
            )
        rate = max(_highest(self.strong_rate), _highest(self.weak_rate) if guided else 0)
        if rate > 0:
            try:
                sampled_method(self.routing, routing, stack, rate)
            except ValueError as error:
                raise ValueError(
                    f"this guidance lets tokens bypass blocks, but {error} guidance=cfg, interval "
                    "and auto need no routes."
                ) from error
        if self.drop_path is not False and self.weak_checkpoint is None:
            try:
                routing.weak(stack)
            except ValueError as error:
                raise ValueError(f"guidance.drop_path leaves blocks out: {error}") from error

    def dx_dt(self, batch: ImageBatch) -> DxDt:
        other, evaluations = batch, itertools.count()
        if self.weak_checkpoint is not None:
            if batch.weak is None:
                raise ValueError("guidance needs a weak network: pass it to generate as `weak`.")
            other = replace(batch, backbone=batch.weak)
        stack = Stack.of(other.backbone)
        paths = () if self.drop_path is False else batch.routing.weak(stack)
        draw_weak = self._draw_routes(other, self.weak_rate)
        draw_strong = self._draw_routes(batch, self.strong_rate)
        is_scheduled = any(isinstance(getattr(self, name), list | tuple) for name in _OFF)

        def dx_dt(x: Tensor, level: Tensor) -> Tensor:
            evaluation = next(evaluations)
            done = batch.fraction_done(level) if is_scheduled else 0.0
            scale, label, weak_rate, path, strong_rate = self._at(done)
            strong = batch.dx_dt(lambda: draw_strong(evaluation, strong_rate))
            if not self._is_on(level):
                return strong(x, level)
            weak = other
            if label and batch.labels is not None:
                weak = replace(other, labels=batch.backbone.null_like(batch.labels))
            if weak is batch and not path and weak_rate == strong_rate:
                return strong(x, level)
            lacking = weak.dx_dt(lambda: paths if path else draw_weak(evaluation, weak_rate))
            return combine(lacking, strong, scale, self.channels)(x, level)

        return dx_dt

    def _is_on(self, level: Tensor) -> bool:
        """Return whether low < level <= high."""
        if self.low == 0 and self.high is None:
            return True  # without waiting for the device
        return bool(self.low < level[0] <= (math.inf if self.high is None else self.high))

    def _draw_routes(
        self, batch: ImageBatch, rate: Any
    ) -> Callable[[int, float], Sequence[Crossing]]:
        """Return a function from the number of an evaluation of dx/dt, and the rate at that time,
        to the crossings (routed ranges of blocks) of the evaluation.

        rate: the option `weak_rate` or `strong_rate`. If this option is 0, the crossings are those
        that `batch.draw_routes` chooses.
        """
        if rate == 0:
            return lambda evaluation, rate: batch.draw_routes(evaluation)
        try:
            stack = Stack.of(batch.backbone)
            method = sampled_method(self.routing, batch.routing, stack, _highest(rate))
        except ValueError as error:
            raise ValueError(f"guidance.routing: {error}") from error
        return lambda evaluation, rate: batch.sample_routes(method, rate, evaluation)


def sampled_method(
    part: str | dict[str, Any], trained: Method, stack: Stack, rate: float
) -> Method:
    """Return the routing method that lets tokens bypass blocks in sampling.

    Args:
        part: the name of a routing method, or a mapping with its name and options; `auto`: the
            method of training.
        trained: the method of training.
        stack: the network's blocks, as a routing method sees them.
        rate: the highest fraction of tokens that is to bypass blocks.

    Raises:
        ValueError: training did not prepare the network for the method, or the rate is too high.
    """
    method: Method = trained if part == "auto" else create("routing", part)
    images = make_image_generator("check", images=[0])
    if not method.for_any:
        trained.sample(stack, images, rate)
    method.sample(stack, images, rate)
    return method


@register("guidance", "custom")
@dataclass(frozen=True, kw_only=True)
class CustomGuidance(_Options):
    """The weak prediction lacks what is set here; the strong one is the network with its label.

    A rate or the scale may change with the fraction p of sampling that is done
    (`ImageBatch.fraction_done`): [linear, 0.6, 0] and [cosine, 0.6, 0] go from 0.6 to 0, and
    [interval, 0.6, 0.2, 0.8] is 0.6 for 0.2 <= p <= 0.8; elsewhere a rate is 0 and w is 1.
    drop_label and drop_path take true, false or [interval, 0.2, 0.8].

    The kept tokens depend on (seed, image, evaluation) alone, and come from the same random numbers
    at every rate.

    Args:
        scale: w: 0 is the weak prediction, 1 the strong one; above 1 goes past the strong one.
        channels: number of guided channels, from the first; null for all. The published samplers of
            DiT and SiT guide 3 of their 4 latent channels.
        drop_label: the weak prediction has no label, or no context.
        weak_rate: fraction of tokens that bypass blocks in the weak prediction; 0: none.
        strong_rate: fraction of tokens that bypass blocks in the strong prediction; 0: none.
        drop_path: the weak prediction skips the blocks that training with path drops lets it skip;
            weak_rate is then ignored.
        weak_checkpoint: folder of a run or a checkpoint, whose smaller or earlier network makes the
            weak prediction.
        routing: the method that applies the rates, such as {name: tread, start: 2, end: 6}; auto is
            the method of training.
        low, high: guidance is on at low < level <= high; high=null: no upper bound. Elsewhere the
            strong prediction is used alone. A level is sigma for EDM and DDPM, else t.

    Raises:
        ValueError: low is not below high, or the weak prediction lacks no more than the strong one.
    """

    scale: Scale = 2.0
    channels: PositiveInt | None = None
    drop_label: Drop = False
    weak_rate: Rate = 0.0
    drop_path: Drop = False
    weak_checkpoint: str | None = None
    strong_rate: Rate = 0.0
    routing: RoutingPart = "auto"
    low: NonNegativeFloat = 0.0
    high: NonNegativeFloat | None = None


# Special cases; see `CustomGuidance` for their fields ---------------------------------------------


@register("guidance", "cfg")
@dataclass(frozen=True, kw_only=True)
class ClassifierFree(_Options):
    """The weak prediction has no label, or no context: classifier-free guidance.

    `CustomGuidance` documents the options.
    """

    drop_label = True
    scale: Scale = 2.0
    channels: PositiveInt | None = None


@register("guidance", "interval")
@dataclass(frozen=True, kw_only=True)
class IntervalGuidance(ClassifierFree):
    """Classifier-free guidance at the levels low < level <= high. At other levels the prediction
    with the condition is used alone."""

    low: NonNegativeFloat = 0.0
    high: NonNegativeFloat = 0.7


@register("guidance", "sparse")
@dataclass(frozen=True, kw_only=True)
class SparseGuidance(_Options):
    """Both predictions come from one network with the same label; in the weak one, more tokens
    bypass blocks.

    `CustomGuidance` documents the options.
    """

    scale: Scale = 2.0
    strong_rate: Rate = 0.0
    weak_rate: Rate = 0.7
    routing: RoutingPart = "auto"


@register("guidance", "auto")
@dataclass(frozen=True, kw_only=True)
class AutoGuidance(_Options):
    """The weak prediction is from a smaller network, or from an earlier step of training.

    `CustomGuidance` documents the options.
    """

    weak_checkpoint: str = field()
    scale: Scale = 2.0


@register("guidance", "path_drop")
@dataclass(frozen=True, kw_only=True)
class PathDropGuidance(_Options):
    """As in SPRINT's released sampler, the weak prediction has no label and skips the blocks that
    some training steps skip. The guidance `custom` can keep the label."""

    drop_label = True
    drop_path = True
    scale: Scale = 2.0


@register("guidance", "sparse_auto")
@dataclass(frozen=True, kw_only=True)
class SparseAutoGuidance(SparseGuidance):
    """The weak prediction is from an earlier step of training. During sampling, the fraction of
    tokens that bypass blocks falls in the weak prediction and rises in the strong one."""

    weak_checkpoint: str = field()
    weak_rate: Rate = ("cosine", 0.6, 0.0)
    strong_rate: Rate = ("cosine", 0.0, 0.6)


@register("guidance", "sparse_cfg")
@dataclass(frozen=True, kw_only=True)
class SparseClassifierFree(SparseGuidance):
    """The weak prediction has no label, and some of its tokens bypass blocks: it is cheaper."""

    drop_label = True
    weak_rate: Rate = 0.5
    channels: PositiveInt | None = None
