"""Routing methods: which tokens run through which blocks in a training step.

    crossings = method.draw(Stack.of(backbone), images, Step(index, num_steps, seed))
    backbone(x, t, y, routes=crossings)

A `Crossing` is a range of blocks that see fewer tokens, and `images` generates random numbers per
image. A method is a registered frozen dataclass. Its fields are its options; it has no state and no
weights. If it needs weights, `build` returns a module that is stored as `backbone.routing`, and
that module's `cross(crossings)` runs in every call. docs/adding_a_method.md shows how to write one.

A choice for all images together depends only on (seed, step), the choice of an image's tokens only
on (seed, step, image). So runs on different numbers of ranks make the same choices.

B batch, N tokens, K kept tokens.
"""

import functools
import itertools
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn

from tread_zoo.contract.crossing import Crossing
from tread_zoo.fields import Auto, Fraction
from tread_zoo.registry import complete, create, describe_part
from tread_zoo.routing.select import Ranked, Select, draw_gumbel, num_kept_tokens
from tread_zoo.routing.timing import Chance, Rate, check_rate, rate_at, stairs
from tread_zoo.seeding import ImageGenerator, make_generator, make_image_generator

logger = logging.getLogger(__name__)


def _selector(part: Any) -> Any:
    return part if part == "auto" else complete("selector", part, "routing.selector")


Selector = Annotated[Auto | dict[str, Any], BeforeValidator(_selector)]
Crossings = tuple[Crossing, ...]
TYPICAL_STEPS = 1000  # assumed length of a run, where only fractions of a run matter


@dataclass(frozen=True)
class Stack:
    """What a routing method knows about a network.

    Args:
        num_blocks: number of blocks.
        grid: (h, w); N = h * w tokens.
        widths: D of each stream, a tensor of tokens that goes from block to block.
        skips: {consumer: producer} for each long skip, as indices of blocks: block `consumer` also
            gets the tokens of the earlier block `producer`.
        default_range: start and end of the blocks to route by default, as in Python slices.
        default_selector: name of the selector that `auto` means.
        keep: bool [B, N], tokens that every choice must keep, or None.
    """

    num_blocks: int
    grid: tuple[int, int]
    widths: tuple[int, ...]
    skips: Mapping[int, int]
    default_range: tuple[int, int] = (2, -4)
    default_selector: str = "random"
    keep: Tensor | None = None

    @classmethod
    def of(cls, backbone: Any) -> "Stack":
        """Return what a routing method knows about a `Backbone`: its depth, grid, widths, long
        skips, default range and default selector."""
        return cls(
            backbone.num_blocks, backbone.grid, backbone.widths, backbone.skips,
            backbone.default_range, backbone.default_selector,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        """Number of tokens N of the grid."""
        return self.grid[0] * self.grid[1]

    def num_kept(self, rate: float) -> int:
        """Return K, the number of tokens that run if the fraction `rate` bypasses blocks."""
        return num_kept_tokens(self.num_tokens, rate)

    def span(self, start: int | str = "auto", end: int | str = "auto") -> tuple[int, int]:
        """Return (start, end) of a range of blocks, counted from 0; block `end` is the first after
        the range. Negative arguments count from the end, as in Python slices, and `auto` is the
        network's default.

        If the network is too shallow for its default range, `auto` at both ends means all blocks
        but the first and about the last third.

        Raises:
            ValueError: the result is not a range of the blocks.
        """
        given: list[int] = []
        for value, default in zip((start, end), self.default_range, strict=True):
            value = default if isinstance(value, str) else value
            given.append(value + self.num_blocks if value < 0 else value)
        first, last = given
        if 0 <= first < last <= self.num_blocks:
            return first, last
        if start == end == "auto" and self.num_blocks >= 3:
            return 1, self.num_blocks - max(1, self.num_blocks // 3)
        raise ValueError(
            f"routing.start={start}, routing.end={end} is not a range of the {self.num_blocks} "
            f"blocks: 0 <= start < end <= {self.num_blocks} must hold (negative values count from "
            "the end, as in Python slices). Change them, or set routing=none."
        )

    def select(
        self,
        span: tuple[int, int],
        selector: Any,
        num_kept: int,
        images: ImageGenerator,
    ) -> Select | Ranked:
        """Return a `Select` or `Ranked` by which only K tokens run through a range of blocks.

        Args:
            span: start and end of the range, as `span` returns them.
            selector: `auto`, or a registered selector by its name or as a mapping with its options.
            num_kept: K.
            images: random number generator of B images; the kept tokens' ids are on its device.

        Raises:
            ValueError: the field `keep` marks more than K tokens of an image, or the selector's
                options do not suit the grid.
        """
        keep = self.keep
        most = 0 if keep is None else int(keep.sum(dim=1).max())
        if most > num_kept:
            raise ValueError(
                f"keep has {most} tokens of an image, and the rate keeps {num_kept}: lower "
                "routing.selection_rate, or force fewer."
            )
        chosen = make_selector(self.default_selector if selector == "auto" else selector)
        if hasattr(chosen, "check"):
            chosen.check(self.grid)
        if hasattr(chosen, "score"):
            noise = draw_gumbel(self.num_tokens, images)
            if keep is not None:
                noise = noise.masked_fill(keep, math.inf)
            return Ranked(*span, num_kept, noise, chosen.score)
        ids = chosen(len(images.keys), self.grid, num_kept, images)
        if keep is not None:  # forced tokens first, then the selected ones
            order = images.rand(self.num_tokens) + 2 * keep
            order = order.scatter_add(1, ids, torch.ones(ids.shape, device=ids.device))
            ids = order.topk(num_kept, dim=1).indices.sort(dim=1).values
        return Select(*span, ids)


@dataclass(frozen=True)
class Step:
    """An optimizer step of a run: its index, counted from 0, the run's number of steps, and the
    run's seed. The step's random numbers are equal on all ranks and micro-steps."""

    index: int
    num_steps: int
    seed: int

    def chance(self, purpose: str) -> float:
        """Return a random number in [0, 1) that depends only on the seed, the step and `purpose`, a
        name for what the number decides."""
        return float(torch.rand((), generator=make_generator(purpose, self.seed, self.index)))


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of a routing method. A subclass defines `sample` or `route`, and may have a field
    `selection_rate`, the fraction of tokens that bypass blocks.

    Args:
        warm_start: fraction of training at its start that is not routed.
        dense_tail: fraction of training at its end that is not routed.
        probability: for each other step, the probability that it is routed; all ranks decide alike.

    Class attributes:
        drawn: whether all choices are made before the network runs. False: they depend on
            activations, whose rounding differs between machines.
        keep_all_is_dense: whether a call that leaves no token out equals a call without routes.
        for_any: whether the method also works in sampling from networks trained with other methods.
    """

    warm_start: Fraction = 0.0
    dense_tail: Fraction = 0.0
    probability: Chance = 1.0

    drawn: ClassVar[bool] = True
    keep_all_is_dense: ClassVar[bool] = True
    for_any: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.warm_start + self.dense_tail >= 1:
            raise ValueError(
                f"routing.warm_start={self.warm_start} and routing.dense_tail={self.dense_tail} "
                "leave no steps to route: their sum must be below 1."
            )
        for rate in self.rates():
            check_rate("routing.selection_rate", rate, self.warm_start, self.dense_tail)

    # What a method defines ------------------------------------------------------------------------

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        """Return the crossings of a routed training step: which tokens the blocks of `stack` see.
        `images` generates random numbers per image; the ids of tokens are on its device."""
        return self.sample(stack, images, self.rate_at(step))

    def outcomes(
        self, stack: Stack, images: ImageGenerator, step: Step
    ) -> Sequence[tuple[float, Crossings]]:
        """Return all possible results of `route`, each as (probability, crossings), to count FLOPs.
        For the arguments see `route`."""
        return [(1.0, self.route(stack, images, step))]

    def rates(self) -> Sequence[Any]:
        """Return the values of the options that are selection rates. Each is a number, or a list
        such as [linear, 0.5, 0]."""
        rate = getattr(self, "selection_rate", None)
        return () if rate is None else (rate,)

    def build(self, stack: Stack) -> nn.Module | None:
        """Return a module with the method's weights; None if it has no weights.

        Initial weights are drawn from torch's global generator. In every call of the network, the
        module's `cross` gets the `Crossing`s of that call, () for none, and returns those to run.
        """
        return None

    @property
    def idle_weights(self) -> bool:
        """Whether some of the network's weights may get no gradient in some steps."""
        return False

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        """Return the crossings (ranges of blocks that see fewer tokens) of a network call in
        sampling. The fraction `rate` of the tokens bypasses blocks. For the other arguments see
        `draw`.

        Raises:
            ValueError: training with this method does not prepare the network for routed sampling.
        """
        if type(self).route is Method.route:
            raise TypeError(f"{type(self).__name__} needs a method `route` or `sample`.")
        raise ValueError(f"routing={self.name} is for training only.")

    def weak(self, stack: Stack) -> Crossings:
        """Return the crossings that skip the ranges of blocks that some training steps skip. With
        them, a network makes the weaker prediction from which guidance leads away.

        Raises:
            ValueError: no training step skips blocks.
        """
        raise ValueError(
            f"routing={self.name} teaches no network to do without its routed blocks: train with "
            "routing=sprint and routing.path_drop, or use guidance=sparse or guidance=cfg."
        )

    def loss(
        self, objective: Any, predict: Any, x: Tensor, draw: Any, crossings: Crossings, patch: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return, for a step that runs `crossings`, the loss of each image [B] and other tensors by
        name, whose means are logged. `patch` is the side of a patch in pixels; for the other
        arguments see `Objective.loss`."""
        return objective.loss(predict, x, draw)

    @property
    def splits_loss(self) -> bool:
        """Whether the method overrides `loss`; then an objective may call the network only once."""
        return type(self).loss is not Method.loss

    def check(self, stack: Stack) -> None:
        """Raise `ValueError` if the method's options do not fit the network."""
        list(self.variants(stack, TYPICAL_STEPS))  # raises if a step cannot be routed
        usual = range(stack.num_blocks)[slice(*stack.default_range)]
        ends = getattr(self, "start", None), getattr(self, "end", None)
        if ends == ("auto", "auto") and stack.span() != (usual.start, usual.stop):
            logger.warning(
                "routing: the default route %d … %d does not fit %d blocks; using [%d, %d) "
                "instead. Set routing.start and routing.end to choose.",
                *stack.default_range, stack.num_blocks, *stack.span(),
            )  # fmt: skip

    def describe(self, stack: Stack) -> str:
        """Return one line for the log: which blocks see how many tokens, and when."""
        seen: dict[tuple[int, int, bool, float], set[int]] = {}
        for _, weight, crossings in self.variants(stack, TYPICAL_STEPS):
            for each in crossings:
                count = getattr(each, "num_kept", stack.num_tokens)
                seen.setdefault((each.start, each.end, each.runs, weight), set()).add(count)
        blocks: dict[str, list[tuple[int, int]]] = {}
        for (start, end, runs, weight), counts in seen.items():
            kept = " … ".join(map(str, sorted({min(counts), max(counts)})))
            what = f"see {kept} of {stack.num_tokens} tokens" if runs else "do not run"
            what += f" in {weight:.0%} of the steps" if weight < 1 else ""
            blocks.setdefault(what, []).append((start, end))
        words = []
        for what, spans in blocks.items():
            joined = _join(spans)
            shown = ", ".join(f"{a} … {b - 1}" if b - a > 1 else f"{a}" for a, b in joined)
            words.append(f"blocks {shown} {what}")
            if len(joined) < len(spans):  # adjacent blocks that each choose tokens
                words[-1] += ", each its own"
        if isinstance(rate := getattr(self, "selection_rate", None), tuple):
            words.append(f"rate {list(rate)}".replace("'", ""))
        if selector := getattr(self, "selector", None):
            name = selector if isinstance(selector, str) else selector["name"]
            words.append(f"selector {stack.default_selector if name == 'auto' else name}")
        for where, part in (("first", self.warm_start), ("last", self.dense_tail)):
            if part:
                words.append(f"the {where} {100 * part:.3g}% of training dense")
        return f"{self.name}: {'; '.join(words) or 'every block sees every token'}"

    # What all methods share -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name under which the method is registered."""
        return str(describe_part("routing", self)["name"])

    def draw(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        """Return the crossings of a training step, which are ranges of blocks that see fewer
        tokens; () if the step is not routed.

        Args:
            stack: the network's `Stack`.
            images: generator of random numbers per image; the ids of tokens are on its device.
            step: the optimizer step.

        Raises:
            ValueError: `step.index` is not in 0 … num_steps - 1.
        """
        if not 0 <= step.index < step.num_steps:
            raise ValueError(f"step={step.index} is not one of the run's {step.num_steps}, from 0.")
        if step.index not in self.routed_steps(step.num_steps):
            return ()
        if self.probability < 1 and step.chance("routed") >= self.probability:
            return ()
        return self.route(stack, images, step)

    def rate_at(self, step: Step, rate: Any = None) -> float:
        """Return the value at a step of `rate`, a number or a list such as [linear, 0.5, 0]; None
        means the option `selection_rate`."""
        rate = self.selection_rate if rate is None else rate  # type: ignore[attr-defined]
        if not isinstance(rate, list | tuple):
            return float(rate)
        return rate_at(rate, step.index, self.routed_steps(step.num_steps), step.num_steps)

    def routed_steps(self, num_steps: int) -> range:
        """Return the steps of a run that may be routed, those between `warm_start` and
        `dense_tail`."""
        return range(
            round(self.warm_start * num_steps), num_steps - round(self.dense_tail * num_steps)
        )

    def variants(self, stack: Stack, num_steps: int) -> Iterable[tuple[range, float, Crossings]]:
        """Yield (steps, weight, crossings) for a run of `num_steps`, to count FLOPs: each step of
        the range `steps` runs `crossings` with probability `weight`. Tensors are on the meta
        device."""
        routed = self.routed_steps(num_steps)
        edges = {0, num_steps, *((routed.start, routed.stop) if routed else ())}
        for rate in self.rates():
            edges |= {step for step, _ in stairs(rate, routed, num_steps) if step in routed}
        bounds = sorted(edges)
        for begin, end in itertools.pairwise(bounds):
            steps = range(begin, end)
            if begin not in routed:
                yield steps, 1.0, ()
                continue
            for weight, crossings in self.outcomes(
                stack, counted_images(), Step(begin, num_steps, 0)
            ):
                yield steps, self.probability * weight, crossings
            if self.probability < 1:
                yield steps, 1 - self.probability, ()

    def ranges(self, stack: Stack) -> list[tuple[int, int]]:
        """Return the ranges of blocks, (start, end), that see fewer tokens or do not run in a
        routed step; ranges that touch are joined."""
        variants = self.variants(stack, TYPICAL_STEPS)
        return _join((c.start, c.end) for *_, crossings in variants for c in crossings)

    def chooses_by_state(self, stack: Stack) -> bool:
        """Return whether the method chooses tokens inside the network, by their activations."""
        variants = self.variants(stack, TYPICAL_STEPS)
        ranked = any(isinstance(c, Ranked) for *_, crossings in variants for c in crossings)
        return ranked or not self.drawn

    @classmethod
    def used_parts(cls, options: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return ("selector", name) for each selector in the options of a method."""
        found = [each["name"] for each in _mappings(options) if "name" in each and each != options]
        return [("selector", name) for name in found]


@dataclass(frozen=True, kw_only=True)
class Bypass(Method):
    """Base of a method in which tokens bypass one range of blocks.

    Args:
        start, end: blocks start … end-1 run on the kept tokens. Negative values count from the end,
            as in Python slices; auto is the backbone's default.
        selection_rate: fraction of tokens that bypass these blocks. [linear, 0.75, 0.25] and
            [cosine, 0.75, 0.25] go from 0.75 to 0.25 over the routed steps; [steps, 0.75, [0.3,
            0.5]] changes from 0.75 to 0.5 after 30 % of training.
        selector: how the kept tokens are chosen; auto is the backbone's default.
    """

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    selection_rate: Rate = 0.5
    selector: Selector = "auto"

    def span(self, stack: Stack) -> tuple[int, int]:
        """Return the index of the range's first block, and of the first block after the range."""
        return stack.span(self.start, self.end)

    def bypass(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        """Return a tuple with one crossing: the fraction `rate` of the tokens bypasses the range of
        blocks. Return () at rate 0. For the other arguments see `draw`."""
        if rate == 0:
            return ()
        return (stack.select(self.span(stack), self.selector, stack.num_kept(rate), images),)


def _join(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of blocks, (start, end), in order; those that touch or overlap become one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


@functools.lru_cache(maxsize=256)
def _make_selector(text: str) -> Any:
    return create("selector", json.loads(text))


def make_selector(part: Any) -> Any:
    """Return the selector that `part` describes, a registered name or a mapping with `name` and
    options. Equal calls return the same object."""
    return _make_selector(json.dumps(part, sort_keys=True))


def counted_images(num_images: int = 1) -> ImageGenerator:
    """Return a random number generator for `num_images` images on the meta device, where FLOPs are
    counted: its numbers have no values."""
    return make_image_generator("flops", images=range(num_images), device="meta")


def _mappings(value: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for each in value.values():
            yield from _mappings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _mappings(each)
