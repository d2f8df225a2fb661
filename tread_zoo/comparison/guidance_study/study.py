"""A study from its settings to its report: check everything, plan, sample, score, write."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread_zoo.comparison.guidance_study.asked import read_guidances, read_samplers
from tread_zoo.comparison.guidance_study.groups import group_runs
from tread_zoo.comparison.guidance_study.pictures import draw_samples, plot_scales
from tread_zoo.comparison.guidance_study.plan import Plan, plan_group
from tread_zoo.comparison.guidance_study.records import (
    Record,
    Scoring,
    list_jobs,
    run_jobs,
)
from tread_zoo.comparison.guidance_study.report import (
    describe_plan,
    metrics_of,
    records_of,
    write_report,
)
from tread_zoo.comparison.markdown import QUALITY
from tread_zoo.evaluation.evaluate import EvaluationOptions, check_evaluation
from tread_zoo.runtime import resolve_device, resolve_precision

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Study:
    """What a study asks.

    Args:
        runs: folders of runs, whose newest checkpoints are taken, or checkpoints; those that differ
            in seed alone are one group.
        guidances, scales: see `read_guidances`.
        samplers: see `read_samplers`.
        num_steps: the budget as what classifier-free guidance costs in so many steps of the first
            sampler; None: as many as the run's own sampler has.
        flops: the budget itself, of an image from noise to data; None: `num_steps` says it.
    """

    runs: Sequence[str]
    guidances: Sequence[str | Mapping[str, Any]]
    scales: Sequence[float]
    samplers: Sequence[str | Mapping[str, Any]]
    num_steps: int | None = None
    flops: int | None = None


def plan_study(study: Study, scoring: Scoring) -> list[Plan]:
    """Return what is to be done with each group, all of it checked; nothing is sampled.

    Raises:
        ValueError: something that cannot work, with its name.
    """
    guidances = read_guidances(study.guidances, study.scales)
    samplers = read_samplers(study.samplers)
    if scoring.num_pictures < 0:
        raise ValueError(f"num_pictures={scoring.num_pictures} must be at least 0.")
    plans = []
    for group in group_runs(study.runs):
        runs = [scoring.restore(checkpoint) for checkpoint in group.checkpoints]
        check_evaluation(scoring.options, runs[0].data(scoring.data))
        plans.append(
            plan_group(
                group, runs, guidances, samplers, num_steps=study.num_steps, flops=study.flops
            )
        )
    return plans


def compare_guidance(
    study: Study,
    scoring: Scoring,
    out: Path,
    *,
    title: str = "Guidance at equal network cost",
    command: str = "",
    plan_only: bool = False,
) -> str:
    """Make the study in the folder `out`, and return its report.

    What was made before is read, so the same call again continues a study that was cut off.

    Args:
        study: what is asked.
        scoring: how records are made.
        out: folder of report.md, results.csv, results.json, pictures and records/.
        title, command: of the report.
        plan_only: return the plan instead, with the steps and the cost of each setting.

    Raises:
        ValueError: something that cannot work, before anything is sampled.
    """
    plans = plan_study(study, scoring)
    if plan_only:
        return "\n".join(line for plan in plans for line in describe_plan(plan))
    precision = resolve_precision(scoring.precision, resolve_device(scoring.device))
    jobs = list_jobs(plans, scoring, precision, out)
    records = run_jobs(jobs, scoring)
    pictures = [_draw(plan, records, scoring.options, out) for plan in plans]
    return write_report(plans, records, out, title=title, command=command, pictures=pictures)


def _draw(
    plan: Plan, records: Sequence[Record], options: EvaluationOptions, out: Path
) -> list[tuple[str, str]]:
    """Write the pictures of a group, and return what each shows, and its name."""
    own, drawn = records_of(plan.group, records), []
    slug = re.sub(r"[^\w.,=-]+", "_", plan.group.label)
    metrics = metrics_of(own)
    if metrics:
        drawn.append(("Each metric against the scale", f"scales_{slug}.png"))
        plot_scales(plan, own).savefig(out / drawn[-1][1], dpi=120)
    judge = next((name for name in (*options.metrics, *metrics) if name in metrics), None)
    samples = draw_samples(plan, own, judge, out / "records")
    if samples is not None:
        scale = f"best scale by {QUALITY[judge][0]}" if judge else "first scale"
        text = f"The first images of seed {options.seed}, each guidance at its {scale}"
        drawn.append((text, f"samples_{slug}.png"))
        samples.savefig(out / drawn[-1][1], dpi=150)
    return drawn
