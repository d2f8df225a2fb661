"""Tables from many runs: a row for each setting, the mean over seeds and the range beside it."""

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tread_zoo.comparison.curves import write_curves
from tread_zoo.comparison.grid import Cell
from tread_zoo.comparison.groups import Group, group_runs, spread
from tread_zoo.comparison.markdown import (
    NEWER,
    QUALITY,
    SAME_PROTOCOL,
    check_same,
    describe_notes,
    row,
)
from tread_zoo.comparison.results import RunResult
from tread_zoo.evaluation.evaluate import describe_sampling

Column = tuple[str, Callable[[RunResult], float | None], float, str]
Table = tuple[list[str], list[list[str]]]  # header, rows


def write_report(
    cells: Sequence[Cell],
    results: Sequence[RunResult],
    out: Path,
    *,
    title: str,
    command: str,
    equal: str = "steps",
) -> str:
    """Write `report.md`, `results.csv`, `results.json` and `curves.csv` to `out`, and return the
    report.

    Args:
        cells, results: the runs and their numbers, in the same order.
        out: folder.
        title: first line of the report.
        command: what made it.
        equal: what all runs had the same of: steps, flops or seconds.

    Raises:
        ValueError: the runs were scored by different protocols.
    """
    check_protocols(cells, results, equal)
    out.mkdir(parents=True, exist_ok=True)
    groups = group_runs(cells, results)
    lines = [f"# {title}", "", "```bash", command, "```", "", describe_protocol(groups, equal), ""]
    lines += _markdown(scores_table(groups))
    lines += ["", *_failures(groups)]
    pairs = paired_table(groups)
    if pairs[1]:
        lines += [PAIRED, "", *_markdown(pairs)]
    report = "\n".join(lines).rstrip() + "\n"
    (out / "report.md").write_text(report)
    rows = [{**cell.choices, **_flat(result)} for cell, result in zip(cells, results, strict=True)]
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with (out / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields, restval="")
        writer.writeheader()
        writer.writerows(rows)
    write_curves(cells, results, out / "curves.csv")
    records = [
        {"choices": dict(cell.choices), **_record(result)}
        for cell, result in zip(cells, results, strict=True)
    ]
    (out / "results.json").write_text(json.dumps(records, indent=1) + "\n")
    return report


def check_protocols(
    cells: Sequence[Cell], results: Sequence[RunResult], equal: str = "steps"
) -> None:
    """Raise `ValueError` if numbers that stand in one table were made by different protocols.

    The step may differ where the runs were to be equal in something else.
    """
    scored = [(c, r.protocol) for c, r in zip(cells, results, strict=True) if not r.failed]
    keys = [key for key in SAME_PROTOCOL if key != "step" or equal == "steps"]
    check_same([(cell.folder.name, protocol) for cell, protocol in scored], keys, NEWER)


def describe_protocol(groups: Sequence[Group], equal: str = "steps") -> str:
    """Return what all numbers have in common, as a paragraph."""
    results = [r for group in groups for r in group.results]
    first = next((r for r in results if not r.failed), results[0])
    protocol, machine = first.protocol, first.machine
    seeds = sorted({seed for group in groups for seed in group.seeds if seed})
    sampling = protocol.get("sampling", {})
    step = f"at step {protocol.get('step')}" if equal == "steps" else f"at equal {equal}"
    scored = [
        f"{protocol['num_generated']} samples against {protocol['num_reference']} images of "
        f"{protocol['data']} ({protocol['reference']}), features {protocol['extractor']}"
        if "extractor" in protocol
        else f"data {protocol.get('data')}",
        f"{describe_sampling({k: v for k, v in sampling.items() if k != 'nfe'})}, "
        f"{protocol.get('weights')} weights {step}",
        f"{machine.get('num_processes', 1)} process(es) on {machine.get('device')}, "
        f"{machine.get('precision')}, torch {machine.get('torch')}",
    ]
    return (
        f"Mean over seed {', '.join(seeds) or 'of each run'}, in brackets the smallest and the "
        f"largest. {'; '.join(scored)}. Held-out loss: the dense network at the same draws of time "
        "and noise for all. FLOPs: forward and backward of one image, as trained, averaged over "
        "the run; of a sample, all evaluations from noise to data. Seconds: of the training steps "
        f"at the median speed, nothing else.{describe_notes([r.protocol for r in results])}"
    )


def scores_table(groups: Sequence[Group]) -> Table:
    """Return a row for each setting, and one for real images where they were scored."""
    results = [result for group in groups for result in group.results]
    columns = _columns(results)
    fields = list(groups[0].choices)
    uneven = len({len(group.ended) for group in groups}) > 1
    rows = []
    for group in groups:
        ended = list(group.ended.values())
        numbers = [spread(ended, *column[1:]) for column in columns]
        rows.append([*_code(group), *([str(len(ended))] if uneven else []), *numbers])
    real = next((result.real for result in results if result.real), {})
    if real:
        names = {title: name for name, (title, *_) in QUALITY.items()}
        cellular = [
            f"{real[names[title]] * scale:{form}}" if names.get(title) in real else ""
            for title, _, scale, form in columns
        ]
        rows.append(["held-out real images", *[""] * (len(fields) - 1 + uneven), *cellular])
    return [*fields, *(["runs"] if uneven else []), *(title for title, *_ in columns)], rows


PAIRED = (
    "Held-out loss less that of the dense run of the same seed; by level: the mean over seeds, for "
    "the fourths of the noise levels from the lowest to the highest:"
)


def paired_table(groups: Sequence[Group]) -> Table:
    """Return, for each setting that has a dense one beside it, the differences by seed and level;
    no rows if there is none."""
    rows = []
    for group in groups:
        pairs = pairs_with_dense(group, groups)
        if not pairs:
            continue
        losses = [r.values["held_out_loss"] - b.values["held_out_loss"] for b, r in pairs]
        levels = [[x - y for x, y in zip(r.by_level, b.by_level, strict=True)] for b, r in pairs]
        means = [statistics.mean(column) for column in zip(*levels, strict=True)]
        texts = [", ".join(f"{d:+.4f}" for d in row) for row in (losses, means)]
        rows.append([*_code(group), *texts])
    return [*(groups[0].choices if groups else ()), "each seed", "by level"], rows


def pairs_with_dense(group: Group, groups: Sequence[Group]) -> list[tuple[RunResult, RunResult]]:
    """Return (dense run, run of `group`) of each seed that both have a held-out loss of."""
    dense = next((other for other in groups if other.is_dense_of(group)), None)
    if dense is None:
        return []
    return [
        (dense.ended[seed], result)
        for seed, result in group.ended.items()
        if "held_out_loss" in result.values
        and seed in dense.ended
        and "held_out_loss" in dense.ended[seed].values
    ]


def _columns(results: Sequence[RunResult]) -> list[Column]:
    """Return (title, value of a run, factor, format) for all that was measured."""

    def score(name: str) -> Callable[[RunResult], float | None]:
        return lambda result: result.values.get(name)

    def sampling_flops(result: RunResult) -> float | None:
        return result.protocol.get("sampling", {}).get("flops_per_image")

    def memory(result: RunResult) -> float | None:
        return result.machine.get("peak_memory_bytes")

    measured: list[Column] = [
        ("MFLOPs a sample", sampling_flops, 1e-6, ".0f"),
        ("images/s", lambda r: r.images_per_s, 1, ".0f"),
        ("of peak FLOPs, %", lambda r: r.utilisation, 100, ".0f"),
        ("peak memory, MiB", memory, 2**-20, ".0f"),
        ("seconds", lambda r: r.seconds, 1, ".0f"),
    ]
    present = [name for name in QUALITY if any(name in r.values for r in results)]
    steps: list[Column] = [("steps", lambda r: r.num_steps or None, 1, ".0f")]
    return [
        *((QUALITY[name][0], score(name), *QUALITY[name][1:]) for name in present),
        ("M parameters", lambda r: r.parameters / 1e6, 1, ".2f"),
        ("MFLOPs an image", lambda r: r.flops / 1e6, 1, ".1f"),
        ("of dense", lambda r: r.flops / r.flops_dense, 1, ".2f"),
        *(steps if len({r.num_steps for r in results}) > 1 else []),
        *(column for column in measured if any(column[1](r) is not None for r in results)),
    ]


def _failures(groups: Sequence[Group]) -> list[str]:
    lines = []
    for group in groups:
        for seed, result in zip(group.seeds, group.results, strict=True):
            if result.failed:
                lines += [f"{group.label}: seed {seed} failed: {result.failed}", ""]
    return lines


def _markdown(table: Table) -> list[str]:
    header, rows = table
    return [row(texts) for texts in (header, ["---"] * len(header), *rows)]


def _code(group: Group) -> list[str]:
    return [f"`{value}`" if value else "" for value in group.choices.values()]


def _record(result: RunResult) -> dict[str, Any]:
    """Return all of a result but where its picture lies, and what curves.csv has summed up."""
    record = asdict(result)
    del record["picture"], record["stages"]
    return record


def _flat(result: RunResult) -> dict[str, object]:
    plain = {
        name: getattr(result, name)
        for name in ("parameters", "flops", "flops_dense", "seconds", "images_per_s", "num_steps",
                     "images", "failed")
    }  # fmt: skip
    levels = {f"held_out_loss_{i}": loss for i, loss in enumerate(result.by_level)}
    return {**result.values, **levels, **plain}
