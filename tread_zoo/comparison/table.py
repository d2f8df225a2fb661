"""One table from many runs: a row for each setting, the mean over seeds and the range beside it."""

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tread_zoo.comparison.grid import SEED, Cell
from tread_zoo.comparison.markdown import QUALITY, check_same, row, spread
from tread_zoo.comparison.results import RunResult
from tread_zoo.evaluation.evaluate import describe_sampling

Column = tuple[str, Callable[[RunResult], float | None], float, str]

# Of the sampling, what it costs is left out: that is the network's, and has a column of its own.
SAME_PROTOCOL = (
    "data", "reference", "labels", "sampling", "extractor", "weights", "step", "held_out_draws",
)  # fmt: skip


def write_report(
    cells: Sequence[Cell], results: Sequence[RunResult], out: Path, *, title: str, command: str
) -> str:
    """Write `report.md`, `results.csv` and `results.json` to `out`, and return the report.

    Args:
        cells, results: the runs and their numbers, in the same order.
        out: folder.
        title: first line of the report.
        command: what made it.

    Raises:
        ValueError: the runs were scored by different protocols.
    """
    check_protocols(cells, results)
    out.mkdir(parents=True, exist_ok=True)
    report = _report(cells, results, title, command)
    (out / "report.md").write_text(report)
    rows = [{**cell.choices, **_flat(result)} for cell, result in zip(cells, results, strict=True)]
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with (out / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields, restval="")
        writer.writeheader()
        writer.writerows(rows)
    records = [
        {"choices": dict(cell.choices), **asdict(result)}
        for cell, result in zip(cells, results, strict=True)
    ]
    (out / "results.json").write_text(json.dumps(records, indent=1) + "\n")
    return report


def check_protocols(cells: Sequence[Cell], results: Sequence[RunResult]) -> None:
    """Raise `ValueError` if numbers that stand in one table were made by different protocols."""
    ended = [(c, r) for c, r in zip(cells, results, strict=True) if not r.failed]
    check_same([(c.folder.name, r.protocol) for c, r in ended], SAME_PROTOCOL)


def _report(cells: Sequence[Cell], results: Sequence[RunResult], title: str, command: str) -> str:
    groups: dict[tuple[str, ...], list[RunResult]] = {}
    fields = list(dict.fromkeys(f for cell in cells for f in cell.choices if f != SEED))
    for cell, result in zip(cells, results, strict=True):
        groups.setdefault(_key(cell, fields), []).append(result)
    columns = _columns(results)
    header = [*fields, *(name for name, *_ in columns)]
    lines = [f"# {title}", "", "```bash", command, "```", "", _protocol(cells, results), ""]
    lines += [row(header), row(["---"] * len(header))]
    for key, members in groups.items():
        ended = [result for result in members if not result.failed]
        numbers = [_spread(ended, *column[1:]) for column in columns]
        lines.append(row([*_code(key), *numbers]))
        for result in members:
            if result.failed:
                lines.append(row([*key, f"a seed failed: {result.failed}"]))
    real = next((result.real for result in results if result.real), {})
    if real:
        names = {title: name for name, (title, *_) in QUALITY.items()}
        cellular = [
            f"{real[names[title]] * scale:{form}}" if names.get(title) in real else ""
            for title, _, scale, form in columns
        ]
        lines.append(row(["held-out real images", *[""] * (len(fields) - 1), *cellular]))
    lines += ["", *_paired(cells, results, fields)]
    return "\n".join(lines).rstrip() + "\n"


def _columns(results: Sequence[RunResult]) -> list[Column]:
    """Return (title, value of a run, factor, format) for all that was measured."""

    def score(name: str) -> Callable[[RunResult], float | None]:
        return lambda result: result.values.get(name)

    def sampling_flops(result: RunResult) -> float | None:
        flops = result.protocol.get("sampling", {}).get("flops_per_image")
        return None if flops is None else flops / 1e6

    present = [name for name in QUALITY if any(name in r.values for r in results)]
    sampled = [("MFLOPs a sample", sampling_flops, 1.0, ".0f")]
    return [
        *((QUALITY[name][0], score(name), *QUALITY[name][1:]) for name in present),
        ("M parameters", lambda r: r.parameters / 1e6, 1, ".2f"),
        ("MFLOPs an image", lambda r: r.flops / 1e6, 1, ".1f"),
        ("of dense", lambda r: r.flops / r.flops_dense, 1, ".2f"),
        *(column for column in sampled if any(sampling_flops(r) is not None for r in results)),
        ("images/s", lambda r: r.images_per_s, 1, ".0f"),
        ("seconds", lambda r: r.seconds, 1, ".0f"),
    ]


def _spread(
    results: Sequence[RunResult],
    value: Callable[[RunResult], float | None],
    scale: float,
    form: str,
) -> str:
    """Return the mean over the results that have the value, and its range."""
    return spread([v for r in results if (v := value(r)) is not None], scale, form)


def _protocol(cells: Sequence[Cell], results: Sequence[RunResult]) -> str:
    """Return what all numbers have in common, as a paragraph."""
    first = next((r for r in results if not r.failed), results[0])
    protocol, machine = first.protocol, first.machine
    seeds = sorted({cell.choices[SEED] for cell in cells if SEED in cell.choices})
    sampling = protocol.get("sampling", {})
    scored = [
        f"{protocol['num_generated']} samples against {protocol['num_reference']} images of "
        f"{protocol['data']} ({protocol['reference']}), features {protocol['extractor']}"
        if "extractor" in protocol
        else f"data {protocol.get('data')}",
        f"{describe_sampling({k: v for k, v in sampling.items() if k != 'nfe'})}, "
        f"{protocol.get('weights')} weights at step {protocol.get('step')}",
        f"{machine.get('num_processes', 1)} process(es) on {machine.get('device')}, "
        f"{machine.get('precision')}, torch {machine.get('torch')}",
    ]
    return (
        f"Mean over seed {', '.join(seeds) or 'of each run'}, in brackets the smallest and the "
        f"largest. {'; '.join(scored)}. Held-out loss: the dense network at the same draws of time "
        "and noise for all. FLOPs: forward and backward of one image, as trained, averaged over "
        "the run; of a sample, all evaluations from noise to data. Seconds: of the training steps "
        "at the median speed, nothing else."
    )


def _paired(
    cells: Sequence[Cell], results: Sequence[RunResult], fields: Sequence[str]
) -> list[str]:
    """Return, for each setting with routes, its held-out loss less the dense one's, by seed and by
    noise level."""
    if "routing" not in fields:
        return []
    dense = [(c, r) for c, r in zip(cells, results, strict=True) if _is_dense(c)]
    pairs: dict[tuple[str, ...], list[tuple[RunResult, RunResult]]] = {}
    for cell, result in zip(cells, results, strict=True):
        base = next((r for c, r in dense if _differ_in_routing(c, cell)), None)
        if _is_dense(cell) or base is None:
            continue
        if "held_out_loss" in base.values and "held_out_loss" in result.values:
            pairs.setdefault(_key(cell, fields), []).append((base, result))
    if not pairs:
        return []
    lines = [
        "Held-out loss less that of the dense run of the same seed; by level: the mean over seeds, "
        "for the fourths of the noise levels from the lowest to the highest:",
        "",
        row([*fields, "each seed", "by level"]),
        row(["---"] * (len(fields) + 2)),
    ]
    for key, found in pairs.items():
        losses = [r.values["held_out_loss"] - b.values["held_out_loss"] for b, r in found]
        levels = [[x - y for x, y in zip(r.by_level, b.by_level, strict=True)] for b, r in found]
        means = [statistics.mean(column) for column in zip(*levels, strict=True)]
        texts = [", ".join(f"{d:+.4f}" for d in row) for row in (losses, means)]
        lines.append(row([*_code(key), *texts]))
    return lines


def _is_dense(cell: Cell) -> bool:
    return cell.choices.get("routing") == "none"


def _differ_in_routing(dense: Cell, routed: Cell) -> bool:
    """Return whether all that the dense run chose, but for its routing, is as in the routed one."""
    chosen = {field: value for field, value in dense.choices.items() if field != "routing"}
    return all(routed.choices.get(field) == value for field, value in chosen.items())


def _key(cell: Cell, fields: Sequence[str]) -> tuple[str, ...]:
    """Return what the cell chose of `fields`, "" for those of other grids."""
    return tuple(cell.choices.get(field, "") for field in fields)


def _code(key: Sequence[str]) -> list[str]:
    return [f"`{part}`" if part else "" for part in key]


def _flat(result: RunResult) -> dict[str, object]:
    plain = {
        name: getattr(result, name)
        for name in ("parameters", "flops", "flops_dense", "seconds", "images_per_s", "failed")
    }
    levels = {f"held_out_loss_{i}": loss for i, loss in enumerate(result.by_level)}
    return {**result.values, **levels, **plain}
