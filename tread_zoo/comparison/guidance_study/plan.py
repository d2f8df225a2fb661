"""How many steps the budget pays, for each guidance; and what a network cannot be guided by.

With C(n) FLOPs an image in n steps, counted on the code that runs, a setting takes

    n* = max {n: C(n) <= budget}

C does not fall with n: one step more costs one evaluation more, or two, and the number of levels of
a grid that lie in an interval changes by one, or two, at most. So n* is found by bisection.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tread_zoo.comparison.guidance_study.asked import (
    AskedGuidance,
    AskedSampler,
    sampler_settings,
    sampling_options,
)
from tread_zoo.comparison.guidance_study.groups import RunGroup, run_name
from tread_zoo.diffusion import AutoGuidance, SamplingOptions, build_sampling
from tread_zoo.evaluation.flops import SamplingCost, SamplingCounter, count_sampling
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.restore import Restored

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """A guidance at a scale with a sampler, in as many steps as the budget pays."""

    guidance: AskedGuidance
    sampler: AskedSampler
    scale: float
    num_steps: int
    cost: SamplingCost

    @property
    def key(self) -> tuple[str, str, float]:
        """What names it in tables: guidance, sampler, scale."""
        return self.guidance.label, self.sampler.label, self.scale


@dataclass(frozen=True)
class Refusal:
    """A guidance and a sampler that a group's networks cannot be sampled with."""

    guidance: str
    sampler: str
    why: str


@dataclass(frozen=True)
class Plan:
    """What is done with a group: its trials, at most `budget` FLOPs an image each."""

    group: RunGroup
    budget: int
    trials: tuple[Trial, ...]
    refusals: tuple[Refusal, ...]


def choose_num_steps(cost: Callable[[int], int], budget: int) -> int:
    """Return the greatest n with cost(n) <= budget, or 0 if there is none.

    `cost` must not fall; it is asked some 2 + log2(n) times.
    """
    first = cost(1)
    if first > budget:
        return 0
    low, high = 1, budget // first + 1
    while high > low and cost(high) <= budget:  # a step after the first may cost nothing like it
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low


def plan_group(
    group: RunGroup,
    runs: Sequence[Restored],
    guidances: Sequence[AskedGuidance],
    samplers: Sequence[AskedSampler],
    *,
    num_steps: int | None,
    flops: int | None,
) -> Plan:
    """Return what is to be done with a group.

    Args:
        group: and `runs`, its checkpoints restored.
        guidances, samplers: all of them are tried with each other.
        num_steps, flops: see `study_budget`.

    Raises:
        ValueError: a budget that pays no step, or the only guidance cannot be.
    """
    budget = study_budget(runs[0], samplers[0], num_steps=num_steps, flops=flops)
    counter = SamplingCounter(runs[0].backbone, runs[0].objective)
    trials: list[Trial] = []
    refusals: list[Refusal] = []
    for sampler in samplers:
        for guidance in guidances:
            try:
                cost = _checked_cost(runs, guidance, sampler, counter)
            except ValueError as error:
                if len(guidances) * len(samplers) == 1:
                    raise
                logger.warning("%s: %s is not possible: %s", group.label, guidance.label, error)
                refusals.append(Refusal(guidance.label, sampler.label, str(error)))
                continue
            trials += _trials(guidance, sampler, cost, budget)
    if not trials:
        raise ValueError(f"{group.label}: nothing asked for is possible. {refusals[0].why}")
    return Plan(group, budget, tuple(trials), tuple(refusals))


def study_budget(
    run: Restored, sampler: AskedSampler, *, num_steps: int | None, flops: int | None
) -> int:
    """Return the FLOPs an image that each guidance may cost.

    `flops` itself, or what classifier-free guidance costs in `num_steps` steps of the sampler, None
    being as many as the run's own has: two evaluations of the dense network, labels or not.

    Raises:
        ValueError: both are given, or one that is below 1.
    """
    if num_steps is not None and flops is not None:
        raise ValueError(
            f"num_steps={num_steps} and flops={flops} are two budgets; give one of them."
        )
    for name, value in (("num_steps", num_steps), ("flops", flops)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1, or null.")
    if flops is not None:
        return int(flops)
    steps = run.checkpoint.meta["sampler"]["num_steps"] if num_steps is None else num_steps
    settings = {**sampler_settings(run.checkpoint, sampler), "num_steps": steps}
    options = build_sampling(settings, {"name": "none"})
    return 2 * count_sampling(run.backbone, run.objective, options).flops


def _checked_cost(
    runs: Sequence[Restored],
    guidance: AskedGuidance,
    sampler: AskedSampler,
    unpaired: SamplingCounter,
) -> Callable[[float, int], SamplingCost]:
    """Return the cost as a function of scale and steps, once every run of the group can be so.

    Args:
        unpaired: counts for the first run without a weak network.

    Raises:
        ValueError: one cannot, or the seeds' weak networks are of different steps.
    """

    def options_of(run: Restored, scale: float, num_steps: int) -> SamplingOptions:
        return sampling_options(run.checkpoint, guidance, sampler, scale=scale, num_steps=num_steps)

    weak_steps: dict[int, str] = {}
    for run in runs:
        options = options_of(run, guidance.scales[0], 1)
        options.check(run.backbone, run.objective)
        if isinstance(options.guidance, AutoGuidance):
            found = find_checkpoint(options.guidance.checkpoint)
            weak_steps.setdefault(found.step, run_name(run.checkpoint))
    if len(weak_steps) > 1:
        said = ", ".join(f"{step} of {name}" for step, name in weak_steps.items())
        raise ValueError(
            f"the weak networks are of different steps ({said}); give one for all seeds: "
            "{name: auto, checkpoint: runs/…}."
        )
    first = runs[0]
    weak = first.weak(options_of(first, guidance.scales[0], 1))
    counter = SamplingCounter(first.backbone, first.objective, weak=weak) if weak else unpaired

    counted: dict[tuple[float | None, int], SamplingCost] = {}

    def cost(scale: float, num_steps: int) -> SamplingCost:
        # All scales cost the same, but 0 and 1, which need one branch alone.
        key = (scale if scale in (0, 1) else None, num_steps)
        if key not in counted:
            options = options_of(first, scale, num_steps)
            counted[key] = counter.count(options)
        return counted[key]

    cost(guidance.scales[0], 1)  # a route that the network refuses is told here
    return cost


def _trials(
    guidance: AskedGuidance,
    sampler: AskedSampler,
    cost: Callable[[float, int], SamplingCost],
    budget: int,
) -> list[Trial]:
    """Return a trial for each scale, at most `budget` each.

    Raises:
        ValueError: the budget pays no step.
    """
    trials = []
    for scale in guidance.scales:
        steps = choose_num_steps(lambda n, at=scale: cost(at, n).flops, budget)  # type: ignore[misc]
        if not steps:
            raise ValueError(
                f"flops={budget} pays no step of guidance {guidance.label} with sampler "
                f"{sampler.label}, which costs {cost(scale, 1).flops} an image; give more, or "
                "leave it out."
            )
        trials.append(Trial(guidance, sampler, scale, steps, cost(scale, steps)))
    return trials
