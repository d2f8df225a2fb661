"""The report of a study: for each group of runs all trials, and the best of each guidance."""

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tread_zoo.comparison.guidance_study.groups import RunGroup, run_name, seed_of
from tread_zoo.comparison.guidance_study.plan import Plan, Trial
from tread_zoo.comparison.guidance_study.records import Record
from tread_zoo.comparison.markdown import (
    LOWER_IS_BETTER,
    NEWER,
    QUALITY,
    SAME_PROTOCOL,
    check_same,
    describe_notes,
    row,
    spread,
)

# What all records of a group share; the sampling is what is compared.
SHARED = (*(key for key in SAME_PROTOCOL if key != "sampling"), "precision")


def metrics_of(records: Sequence[Record]) -> list[str]:
    """Return the metrics that the records have, in the order of tables."""
    return [name for name in QUALITY if any(name in record.values for record in records)]


def values_of(records: Sequence[Record], trial: Trial, metric: str) -> list[float]:
    """Return a metric of each seed of a trial that has it."""
    return [r.values[metric] for r in records if r.key == trial.key and metric in r.values]


def mean_of(records: Sequence[Record], trial: Trial, metric: str) -> float | None:
    """Return the mean of a metric over the seeds of a trial, None where it is missing."""
    values = values_of(records, trial, metric)
    return statistics.mean(values) if values else None


def best_trial(trials: Sequence[Trial], records: Sequence[Record], metric: str) -> Trial | None:
    """Return the trial with the best mean of `metric`, the first of equals; None if none has it."""
    scored = [
        (mean, trial) for trial in trials if (mean := mean_of(records, trial, metric)) is not None
    ]
    if not scored:
        return None
    choose = min if metric in LOWER_IS_BETTER else max
    return choose(scored, key=lambda pair: pair[0])[1]


def by_guidance(trials: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """Return the trials of each guidance and sampler."""
    found: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.key[:2], []).append(trial)
    return found


def several_samplers(plan: Plan) -> bool:
    """Return whether tables must say which sampler a row is of."""
    return len({one.sampler.label for one in plan.trials} | {r.sampler for r in plan.refusals}) > 1


def records_of(group: RunGroup, records: Sequence[Record]) -> list[Record]:
    """Return the records of a group."""
    return [record for record in records if record.group == group.label]


def write_report(
    plans: Sequence[Plan],
    records: Sequence[Record],
    out: Path,
    *,
    title: str,
    command: str,
    pictures: Sequence[Sequence[tuple[str, str]]] = (),
) -> str:
    """Write `report.md`, `results.csv` and `results.json` to `out`, and return the report.

    Args:
        plans: of each group.
        records: of all groups.
        title: first line of the report.
        command: what made it.
        pictures: for each plan, what the report shows: words and a file's name in `out`.

    Raises:
        ValueError: records of one group were scored by different protocols.
    """
    lines = [f"# {title}", "", "```bash", command, "```", ""]
    for number, plan in enumerate(plans):
        own = records_of(plan.group, records)
        named = [(f"{r.guidance} of {r.run}", r.protocol) for r in own]
        check_same(named, SHARED, NEWER)
        lines += _section(plan, own)
        for text, name in pictures[number] if pictures else ():
            lines += [f"{text}:", "", f"![{plan.group.label}]({name})", ""]
    report = "\n".join(lines).rstrip() + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(report)
    _write_numbers(plans, records, out)
    return report


def describe_plan(plan: Plan) -> list[str]:
    """Return what is to be sampled as a table without scores."""
    return [
        f"{plan.group.label}: at most {plan.budget / 1e6:.1f} MFLOPs an image",
        "",
        *_table(plan, []),
        *_refusals(plan),
    ]


def _section(plan: Plan, records: Sequence[Record]) -> list[str]:
    group, protocol = plan.group, records[0].protocol
    seeds = ", ".join(str(seed_of(checkpoint)) for checkpoint in group.checkpoints)
    runs = ", ".join(f"`{run_name(checkpoint)}`" for checkpoint in group.checkpoints)
    scored = f"{protocol['num_generated']} samples against {protocol['num_reference']} images of " \
        f"{protocol['data']} ({protocol['reference']}), features {protocol['extractor']}" \
        if "extractor" in protocol else f"data {protocol['data']}"  # fmt: skip
    metrics = metrics_of(records)
    lines = [
        f"## {group.label}",
        "",
        f"Runs {runs}. Mean over seed {seeds}, in brackets the smallest and the largest. {scored}; "
        f"{protocol['weights']} weights at step {protocol['step']}, {protocol['precision']}. Each "
        f"row takes as many steps as {plan.budget / 1e6:.1f} MFLOPs an image pay; all start from "
        "the same noises and labels. NFE: evaluations of a network, strong and weak. Bold: the "
        f"best of each guidance.{describe_notes([record.protocol for record in records])}",
        "",
        *_table(plan, records),
        *_refusals(plan),
    ]
    if metrics:
        lines += [*_best(plan, records, metrics), ""]
    return lines


def _table(plan: Plan, records: Sequence[Record]) -> list[str]:
    metrics, several = metrics_of(records), several_samplers(plan)
    header = ["guidance", *(["sampler"] if several else []), "scale", "steps", "NFE"]
    header += ["MFLOPs an image", "of the budget", *(QUALITY[name][0] for name in metrics)]
    lines = [row(header), row(["---"] * len(header))]
    for trials in by_guidance(plan.trials).values():
        best = {name: best_trial(trials, records, name) for name in metrics}
        for trial in trials:
            cells = [
                f"`{trial.guidance.label}`",
                *([f"`{trial.sampler.label}`"] if several else []),
            ]
            cells += [f"{trial.scale:g}", str(trial.num_steps), str(trial.cost.evaluations)]
            cells += [f"{trial.cost.flops / 1e6:.1f}", f"{trial.cost.flops / plan.budget:.3f}"]
            for name in metrics:
                text = spread(values_of(records, trial, name), *QUALITY[name][1:])
                bold = len(trials) > 1 and best[name] is trial
                cells.append(f"**{text}**" if bold else text)
            lines.append(row(cells))
    real = next((record.real for record in records if record.real), {})
    if real:
        cells = ["held-out real images", *[""] * (len(header) - 1 - len(metrics))]
        for name in metrics:
            _, factor, form = QUALITY[name]
            cells.append(f"{real[name] * factor:{form}}" if name in real else "")
        lines.append(row(cells))
    return [*lines, ""]


def _refusals(plan: Plan) -> list[str]:
    """Return what is not possible and why."""
    several = several_samplers(plan)
    lines = [
        f"- `{refusal.guidance}`{f' with `{refusal.sampler}`' if several else ''} is not possible: "
        f"{refusal.why}"
        for refusal in plan.refusals
    ]
    return [*lines, ""] if lines else []


def _best(plan: Plan, records: Sequence[Record], metrics: Sequence[str]) -> list[str]:
    """Return the best mean of each guidance and its scale; in bold the best of all."""
    several = several_samplers(plan)
    header = [
        "guidance",
        *(["sampler"] if several else []),
        *(QUALITY[name][0] for name in metrics),
    ]
    lines = [
        "The best mean of each guidance, and its scale; in bold the best of all. A scale that is "
        "chosen by the samples that it is then judged by looks better than it is, and the more so "
        "the more scales there are.",
        "",
        row(header),
        row(["---"] * len(header)),
    ]
    overall = {name: best_trial(plan.trials, records, name) for name in metrics}
    for (guidance, sampler), trials in by_guidance(plan.trials).items():
        cells = [f"`{guidance}`", *([f"`{sampler}`"] if several else [])]
        for name in metrics:
            best = best_trial(trials, records, name)
            mean = None if best is None else mean_of(records, best, name)
            if best is None or mean is None:
                cells.append("")
                continue
            text = f"{mean * QUALITY[name][1]:{QUALITY[name][2]}} at {best.scale:g}"
            cells.append(f"**{text}**" if overall[name] is best else text)
        lines.append(row(cells))
    return lines


def _write_numbers(plans: Sequence[Plan], records: Sequence[Record], out: Path) -> None:
    """Write one line for each record, and everything for other programs."""
    names = (
        "group", "run", "seed", "guidance", "sampler", "scale", "num_steps", "nfe", "flops",
        "budget",
    )  # fmt: skip
    rows = [{**{name: getattr(r, name) for name in names}, **r.values} for r in records]
    fields = list(dict.fromkeys(key for entry in rows for key in entry))
    with (out / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields, restval="")
        writer.writeheader()
        writer.writerows(rows)
    refused = [
        {"group": plan.group.label, "guidance": one.guidance, "sampler": one.sampler,
         "not_possible": one.why}
        for plan in plans
        for one in plan.refusals
    ]  # fmt: skip
    entries = [*(asdict(record) for record in records), *refused]
    (out / "results.json").write_text(json.dumps(entries, indent=1) + "\n")
