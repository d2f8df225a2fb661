"""Time every form of the operations, forward and backward, with its error and memory.

python benchmarks/operations.py
python benchmarks/operations.py --ops ssd --lengths 256 1024 --rounds 15
python benchmarks/operations.py --batch 32 --width 768 --dtype bfloat16 --out kernels_gpu

A case is a sequence of L tokens, or the K of them that a route keeps, with the gaps that it leaves.
The baseline is the recurrence as most code writes it, a loop over unbound time steps, or the naive
form. On a CUDA device every fused form that can be imported takes part, after it was compared with
the torch form.

    forward ms, both ms     medians over rounds in which the forms take turns
    x baseline              time of the baseline over this one's
    saved MiB               what autograd keeps between forward and backward, inputs included
    peak MiB                the most that the device held beyond the inputs (CUDA only)
    error, gradient error   largest difference from the naive form in float64 (from the loop where
                            that is too large); of the gradients over the largest value there

Dimensions: B batch, L length, K kept tokens, H heads, D or C channels, N states, G groups.
"""

import argparse
import csv
import gc
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels import get_forms
from tread_zoo.kernels.dispatch import get_implementation, list_forms, unusable
from tread_zoo.kernels.verify import cast, outputs_and_gradients
from tread_zoo.runtime import describe_device, resolve_device

LARGEST_PAIRS = 2**30  # bytes that a naive form may take for one tensor of all pairs of tokens


@dataclass(frozen=True)
class Row:
    """What one form did in one case: the columns of the table."""

    op: str
    form: str
    length: int
    tokens: int
    threads: int
    forward_ms: float = math.nan
    both_ms: float = math.nan
    over_baseline: float = math.nan
    saved_mib: float = math.nan
    peak_mib: float = math.nan
    error: float = math.nan
    gradient_error: float = math.nan
    skipped: str = ""


def main() -> None:
    args = parse()
    command = shlex.join(["python", "benchmarks/operations.py", *sys.argv[1:]])
    facts = (
        f"{describe_device(args.device)}, torch {torch.__version__}, batch {args.batch}, width "
        f"{args.width}, {args.dtype}, {args.rounds} rounds"
    )
    rows: list[Row] = []
    for threads in args.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for op in args.ops:
            for length in args.lengths:
                for rate in args.rates:
                    rows += measure(op, length, rate, args)
                    print(f"{op}: {rows[-1].tokens} of {length} tokens", file=sys.stderr)
            if args.out:  # after each operation, so that an interrupted run leaves what it has
                write(rows, args.out, command, facts)
    print(report(rows, command, facts))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ops = list(get_forms())
    forms = sorted({form for op in ops for form in list_forms(op)})
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    parser.add_argument(
        "--forms", nargs="+", choices=forms, help="beside the baseline; default all"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.0, 0.5], help="fractions that a route drops"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", nargs="+", type=int, help="of the CPU; torch's own by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", type=resolve_device, default="auto")
    parser.add_argument("--out", type=Path, help="a folder for report.md and results.csv")
    return parser.parse_args()


# Cases --------------------------------------------------------------------------------------------


def make_case(op: str, length: int, rate: float, *, batch: int, width: int) -> list[Any]:
    """Return arguments as a form's `run` takes them: normal, from a fixed seed, float32, on the
    CPU; a random route drops the fraction `rate` of the tokens. Heads are of 64 channels."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = length - int(length * rate), max(1, width // 64)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    def step(size: int) -> Tensor:
        return F.softplus(normal(batch, tokens, size) - 2)

    kept = segments = None
    if tokens < length:
        order = torch.rand(batch, length, generator=generator).argsort(dim=1)
        kept = order[:, :tokens].sort(dim=1).values
        segments = F.pad((kept.diff(dim=1) > 1).long().cumsum(dim=1), (1, 0))
    if op == "attention":
        return [normal(batch, heads, tokens, 64) for _ in range(3)]
    if op == "causal_conv1d":
        return [normal(batch, tokens, width), normal(width, 4), normal(width), segments]
    if op == "bidirectional_wkv":
        k, v = (normal(batch, tokens, width) for _ in range(2))
        return [k, v, normal(width).exp(), normal(width), kept, length]
    if op in ("gated_delta_rule", "kda"):
        q, k, v, falls = (normal(batch, tokens, heads, 64) for _ in range(4))
        beta, falls = normal(batch, tokens, heads).sigmoid(), -F.softplus(falls)
        falls = falls if op == "kda" else falls[..., 0].contiguous()
        return [q, F.normalize(k, dim=-1), v, beta, falls, segments]
    if op == "selective_scan":
        vectors = [normal(batch, tokens, 1, 16) for _ in range(2)]
        u, A = normal(batch, tokens, width), -torch.exp(normal(width, 16))
        return [u, step(width), A, *vectors, normal(width), segments]
    if op == "gated_linear_attention":
        q, k, v, gate = (normal(batch, tokens, heads, 64) for _ in range(4))
        return [q, k, v, F.logsigmoid(gate) / 16, segments]
    if op == "dplr_delta_rule":
        q, k, v, a, rate, decay = (normal(batch, tokens, heads, 64) for _ in range(6))
        a = F.normalize(a, dim=-1)
        falls = -math.exp(-0.5) * decay.sigmoid()  # RWKV-7's range
        return [q, k, v, -a, a * rate.sigmoid(), falls, segments]
    assert op == "ssd", f"{op} has no case here"
    vectors = [normal(batch, tokens, 1, 64) for _ in range(2)]
    x, A = normal(batch, tokens, heads, 64), -torch.exp(normal(heads))
    return [x, step(heads), A, *vectors, normal(heads), segments, None]


def list_runs(op: str, forms: Sequence[str] | None) -> dict[str, Callable[..., Tensor]]:
    """Return the baseline and then the forms of `op` to measure, by name."""
    runs = (
        {"unbind loop": LOOPS[op]}
        if op in LOOPS
        else {"naive": get_implementation(op, "naive").run}
    )
    names = [name for name in list_forms(op) if forms is None or name in forms]
    return runs | {name: get_implementation(op, name).run for name in names}


def is_too_large(op: str, args: Sequence[Any]) -> bool:
    """Return whether a naive form would hold too much: some have all pairs of tokens at once."""
    x = args[0]
    pairs = {
        "attention": x.shape[0] * x.shape[1] * x.shape[2] ** 2,
        "bidirectional_wkv": x.numel() * x.shape[1],
    }
    return pairs.get(op, 0) * x.element_size() > LARGEST_PAIRS


def why_not(op: str, name: str, args: Sequence[Any], device: torch.device) -> str:
    """Return why a form is not measured, or ""."""
    if name == "unbind loop":
        return ""
    if name == "naive" and is_too_large(op, args):
        return "holds all pairs of tokens: too large"
    which = get_implementation(op, name)
    reason = unusable(op, which, device, args[0].dtype)
    return reason or ("" if which.fits_all else which.unsuited(*args) or "")


# Measures -----------------------------------------------------------------------------------------


def measure(op: str, length: int, rate: float, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each form in a case, the baseline first."""
    device, dtype = args.device, getattr(torch, args.dtype)
    case = to(make_case(op, length, rate, batch=args.batch, width=args.width), device)
    case, runs = cast(case, dtype), list_runs(op, args.forms)
    reasons = {name: why_not(op, name, case, device) for name in runs}
    able = {name: run for name, run in runs.items() if not reasons[name]}
    times = take_turns(able, case, args.rounds, device)
    one = to(make_case(op, length, rate, batch=1, width=args.width), device)
    errors = compare(op, able, cast(one, dtype))
    baseline = sum(times.get(next(iter(runs)), (math.nan, math.nan)))
    tokens = length - int(length * rate)
    for name in runs:
        common = (op, name, length, tokens, torch.get_num_threads())
        if name not in able:
            yield Row(*common, skipped=reasons[name])
            continue
        forward, both = times[name][0], sum(times[name])
        memory = memory_of(able[name], case, device)
        yield Row(*common, forward, both, baseline / both, *memory, *errors[name])


def take_turns(
    runs: dict[str, Callable[..., Tensor]], case: Sequence[Any], rounds: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds of forward, and of backward, the forms taking turns."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * time.perf_counter()

    inputs, leaves = with_leaves(case)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = now()
            y = run(*inputs)
            between = now()
            torch.autograd.grad(y, leaves, torch.ones_like(y))
            times[name].append((between - began, now() - between))
            del y
    return {  # the first round warms up
        name: tuple(statistics.median(column) for column in zip(*each[1:], strict=True))
        for name, each in times.items()
    }  # type: ignore[return-value]


def memory_of(
    run: Callable[..., Tensor], case: Sequence[Any], device: torch.device
) -> tuple[float, float]:
    """Return MiB that autograd keeps, every storage once, and at the peak (NaN but on CUDA)."""
    inputs, leaves = with_leaves(case)
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = run(*inputs)
    torch.autograd.grad(y, leaves, torch.ones_like(y))
    peak = math.nan
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return sum(saved.values()) / 2**20, peak


def compare(
    op: str, runs: dict[str, Callable[..., Tensor]], case: Sequence[Any]
) -> dict[str, tuple[float, float]]:
    """Return the errors of each form's output and gradients."""
    exact = cast(case, torch.float64)
    large = is_too_large(op, exact) and op in LOOPS
    truth = LOOPS[op] if large else get_implementation(op, "naive").run
    true_out, true_grads = outputs_and_gradients(truth, exact)

    def difference(value: Tensor, true: Tensor) -> float:
        return float((value.double() - true).abs().max())

    errors = {}
    for name, run in runs.items():
        out, grads = outputs_and_gradients(run, case)
        pairs = zip(grads, true_grads, strict=True)
        relative = [difference(*pair) / float(pair[1].abs().max() + 1e-30) for pair in pairs]
        errors[name] = difference(out, true_out), max(relative)
    return errors


def with_leaves(case: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return the arguments, and those of them that are differentiated."""
    floats = [isinstance(arg, Tensor) and arg.is_floating_point() for arg in case]
    inputs = [
        arg.detach().requires_grad_() if is_float else arg
        for arg, is_float in zip(case, floats, strict=True)
    ]
    return inputs, [arg for arg, is_float in zip(inputs, floats, strict=True) if is_float]


def to(case: Sequence[Any], device: torch.device) -> list[Any]:
    return [arg.to(device) if isinstance(arg, Tensor) else arg for arg in case]


# The recurrences as most code writes them: a loop over unbound time steps under autograd. An index
# into [B, L, ...] inside the loop would make the backward pass quadratic.


def selective_scan_loop(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, segments: Tensor | None
) -> Tensor:
    """Return `tread_zoo.kernels.selective_scan`; steps are [B, G, N, D/G]."""
    batch, length, width = u.shape
    groups, size = B.shape[2:]
    shape = (batch, length, groups, 1, width // groups)
    now, step = (x.view(shape).transpose(0, 1) for x in (u, delta))
    decays = torch.exp(step * A.view(groups, -1, size).transpose(1, 2).contiguous())
    if segments is not None:
        same = (segments == segments.roll(1, dims=1)).t()
        decays = decays * same[:, :, None, None, None].to(decays.dtype)
    inputs = step * now * B.transpose(0, 1).unsqueeze(-1)
    h, states = torch.zeros_like(inputs[0]), []
    for decay, driven in zip(decays.unbind(0), inputs.unbind(0), strict=True):
        h = torch.addcmul(driven, decay, h)
        states.append(h)
    y = (torch.stack(states) * C.transpose(0, 1).unsqueeze(-1)).sum(-2)
    return y.transpose(0, 1).reshape(u.shape) + D * u


def bidirectional_wkv_loop(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return `tread_zoo.kernels.bidirectional_wkv` on a running maximum."""
    steps, slope = list(zip(k.unbind(1), v.unbind(1), strict=True)), w / length
    slopes = [(slope, torch.zeros_like(slope))] * (k.shape[1] - 1)
    if positions is not None:
        gaps = positions.diff(dim=1).to(k.dtype).unsqueeze(-1).unbind(1)
        slopes = [(gap * slope, (gap - 1) * slope) for gap in gaps]

    def sums_before(steps: list, slopes: list) -> list[tuple[Tensor, Tensor, Tensor]]:
        top = bottom = torch.zeros_like(steps[0][0])
        sums = [(top, bottom, peak := torch.full_like(top, -1e30))]
        for (key, value), (fall, entry) in zip(steps, slopes, strict=False):
            higher = torch.maximum(peak - fall, key - entry)
            old, new = torch.exp(peak - fall - higher), torch.exp(key - entry - higher)
            top, bottom, peak = old * top + new * value, old * bottom + new, higher
            sums.append((top, bottom, peak))
        return sums

    ways = sums_before(steps, slopes), sums_before(steps[::-1], slopes[::-1])[::-1]
    outs = []
    for (key, value), before, after in zip(steps, *ways, strict=True):
        higher = torch.maximum(torch.maximum(before[2], after[2]), u + key)
        one, other, own = (torch.exp(x - higher) for x in (before[2], after[2], u + key))
        top = one * before[0] + other * after[0] + own * value
        outs.append(top / (one * before[1] + other * after[1] + own))
    return torch.stack(outs, dim=1)


LOOPS: dict[str, Callable[..., Tensor]] = {
    "selective_scan": selective_scan_loop,
    "bidirectional_wkv": bidirectional_wkv_loop,
}


# Reports ------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], command: str, facts: str) -> str:
    """Return command, machine and table as Markdown."""
    titles = (
        "op", "form", "tokens", "threads", "forward ms", "both ms", "x baseline", "saved MiB",
        "peak MiB", "error", "gradient error",
    )  # fmt: skip
    formats = (".2f", ".2f", ".2f", ".1f", ".1f", ".0e", ".0e")
    lines = [titles, ("---",) * len(titles)]
    for row in rows:
        _, _, _, _, threads, *values, skipped = asdict(row).values()
        tokens = f"{row.tokens}" if row.tokens == row.length else f"{row.tokens} of {row.length}"
        pairs = zip(values, formats, strict=True)
        cells = ["" if math.isnan(value) else format(value, how) for value, how in pairs]
        if skipped:
            cells[0] = f"not run: {skipped}"
        lines.append((f"`{row.op}`", row.form, tokens, str(threads), *cells))
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(["```bash", command, "```", "", facts, "", *table])


def write(rows: Sequence[Row], out: Path, command: str, facts: str) -> None:
    """Write report.md and results.csv."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(f"# Forms of the kernels\n\n{report(rows, command, facts)}\n")
    with (out / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
