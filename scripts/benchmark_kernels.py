"""Time every form of the operations on this machine: a table, a plot, and all numbers as CSV.

python scripts/benchmark_kernels.py
python scripts/benchmark_kernels.py ops=[ssd] threads=[1,2] lengths=[256] rounds=15
python scripts/benchmark_kernels.py batch=32 width=768 dtype=bf16 out=docs/benchmarks/kernels_gpu

On a CUDA device every fused form that can be imported takes part, after it was compared with the
torch form.
"""

import csv
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark_kernels")
@clear_errors
def main(config: DictConfig) -> None:
    import torch

    from tread_zoo.errors import unknown_name
    from tread_zoo.kernels import get_forms
    from tread_zoo.kernels.benchmark import make_case, measure
    from tread_zoo.runtime import describe_device, resolve_device

    settings = as_keywords(config)
    device = resolve_device(settings["device"])
    if settings["dtype"] not in DTYPES:
        raise unknown_name("dtype", settings["dtype"], DTYPES)
    ops = settings["ops"] or list(get_forms())
    for op in ops:
        if op not in get_forms():
            raise unknown_name("ops", op, get_forms())
    command = shlex.join(["python", "scripts/benchmark_kernels.py", *sys.argv[1:]])
    facts = (
        f"torch {torch.__version__}, batch {settings['batch']}, width {settings['width']}, "
        f"{settings['dtype']}, {settings['rounds']} rounds"
    )
    rows, out = [], settings["out"] and Path(settings["out"])
    for threads in settings["threads"] or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for op in ops:
            for length in settings["lengths"]:
                for rate in settings["rates"]:
                    case = make_case(
                        op, length, batch=settings["batch"], width=settings["width"], rate=rate
                    )
                    rows += measure(
                        case,
                        device=device,
                        dtype=getattr(torch, DTYPES[settings["dtype"]]),
                        forms=settings["forms"],
                        rounds=settings["rounds"],
                    )
                    print(f"{op}: {case.tokens} of {length} tokens", file=sys.stderr)
            if out:  # after each operation, so that a run that is cut short leaves what it has
                write(rows, out, command, f"{describe_device(device)}, {facts}")
    print(report(rows, command, f"{describe_device(device)}, {facts}"))
    if out:
        print(f"written to {out}")


def report(rows: list, command: str, facts: str) -> str:
    """Return command, machine, table and growth with the length as Markdown."""
    lines = ["```bash", command, "```", "", facts, "", *table(rows), "", *fits(rows)]
    return "\n".join(lines)


def write(rows: list, out: Path, command: str, facts: str) -> None:
    """Write report.md, results.csv and time.png."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(f"# Forms of the kernels\n\n{report(rows, command, facts)}\n")
    with (out / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    plot(rows, out / "time.png")


def table(rows: list) -> list[str]:
    """Return the rows as a Markdown table."""
    titles = (
        "op", "form", "tokens", "threads", "forward ms", "both ms", "x baseline", "x torch",
        "saved MiB", "peak MiB", "error", "gradient error",
    )  # fmt: skip
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        tokens = f"{row.tokens}" if row.tokens == row.length else f"{row.tokens} of {row.length}"
        start = (f"`{row.op}`", row.form, tokens, str(row.threads))
        if row.skipped:
            lines.append((*start, f"not run: {row.skipped}", *[""] * (len(titles) - 5)))
            continue
        formats = (
            (row.forward_ms, ".2f"), (row.total_ms, ".2f"), (row.speedup, ".2f"),
            (row.over_torch, ".2f"), (row.saved_mib, ".1f"), (row.peak_mib, ".1f"),
            (row.error, ".0e"), (row.gradient_error, ".0e"),
        )  # fmt: skip
        lines.append((*start, *("" if math.isnan(x) else format(x, f) for x, f in formats)))
    return ["| " + " | ".join(line) + " |" for line in lines]


def fits(rows: list) -> list[str]:
    """Return the growth of time with length."""
    from tread_zoo.kernels.benchmark import slopes

    found = slopes(rows)
    if not found:
        return []
    return ["Time grows with the length to the power of:", ""] + [
        f"- `{op}`, {form}, {threads} thread(s): {slope:.2f}"
        for (op, form, threads), slope in found.items()
    ]


def plot(rows: list, path: Path) -> None:
    """Draw forward and backward time against the length, one panel an operation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ops = list(dict.fromkeys(row.op for row in rows))
    figure, axes = plt.subplots(1, len(ops), figsize=(3.6 * len(ops), 3.4), squeeze=False)
    for axis, op in zip(axes[0], ops, strict=True):
        mine = [r for r in rows if r.op == op and r.tokens == r.length and not r.skipped]
        for form, threads in dict.fromkeys((row.form, row.threads) for row in mine):
            points = [
                (r.length, r.total_ms) for r in mine if (r.form, r.threads) == (form, threads)
            ]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=form)
        axis.set(title=op, xlabel="tokens", xscale="log", yscale="log")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("forward + backward, ms")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
