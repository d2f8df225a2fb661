"""Time every implementation (form) of the operations, forward and backward, with error and memory.

python benchmarks/operations.py
python benchmarks/operations.py --ops ssd --lengths 256 1024 --rounds 15
python benchmarks/operations.py --batch 32 --width 768 --dtype bfloat16 > kernels_gpu.md

A case is a sequence of L tokens, or the K of them that a route keeps, with the gaps that it leaves;
its inputs are those of the operation's example. On a CUDA device every fused form that can be
imported takes part, after it was compared with the torch form.

    forward ms, both ms     medians over rounds in which the forms take turns
    x naive                 both ms of the naive form (the plain formula) divided by this form's
    saved MiB               what autograd keeps between forward and backward, inputs included
    peak MiB                the most that the device held beyond the inputs (CUDA only)
    error, gradient error   difference from the naive form in float64, over the largest value
"""

import argparse
import gc
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from timing import take_turns
from torch import Tensor

from tread_zoo.kernels import get_forms
from tread_zoo.kernels.dispatch import NAIVE, get_example, get_implementation, list_forms, unusable
from tread_zoo.kernels.verify import cast, difference, outputs_and_gradients
from tread_zoo.runtime import describe_device, resolve_device

LARGEST = 2**30  # bytes that a naive form may keep for all pairs of tokens
TITLES = (
    "op", "form", "tokens", "threads", "forward ms", "both ms", "x naive", "saved MiB", "peak MiB",
    "error", "gradient error",
)  # fmt: skip


def main() -> None:
    args = parse()
    print(f"```bash\n{shlex.join(['python', 'benchmarks/operations.py', *sys.argv[1:]])}\n```\n")
    print(
        f"{describe_device(args.device)}, torch {torch.__version__}, batch {args.batch}, width "
        f"{args.width}, {args.dtype}, {args.rounds} rounds\n"
    )
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for threads in args.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for op in args.ops:
            for length in args.lengths:
                for rate in args.rates:
                    for cells in measure(op, length, rate, args):
                        print("| " + " | ".join(cells) + " |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ops = list(get_forms())
    forms = sorted({form for op in ops for form in list_forms(op)})
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    parser.add_argument("--forms", nargs="+", choices=forms, help="beside the naive; default all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.0, 0.5], help="fractions that a route drops"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", nargs="+", type=int, help="of the CPU; torch's own by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", type=resolve_device, default="auto")
    return parser.parse_args()


def make_case(op: str, length: int, rate: float, batch: int, args: argparse.Namespace) -> list[Any]:
    """Return arguments of `op` for `batch` sequences, of which a route drops the fraction `rate`;
    at rate 0 they have no segments, positions or gaps."""
    tokens, heads = length - int(length * rate), max(1, args.width // args.head_size)
    dtype = getattr(torch, args.dtype)
    case = get_example(op, args.device, dtype, (batch, tokens, heads, args.head_size))
    if rate:
        return case
    return [x if is_float(x) or isinstance(x, int | float) else None for x in case]


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def why_not(op: str, name: str, case: Sequence[Any]) -> str | None:
    """Return why the form `name` of `op` is not measured on the arguments `case`, or None."""
    x, form = case[0], get_implementation(op, name)
    pairs = {"attention": x.shape[0] * x.shape[1], "bidirectional_wkv": x.shape[0] * x.shape[-1]}
    if name == NAIVE and pairs.get(op, 0) * x.shape[-2] ** 2 * x.element_size() > LARGEST:
        return "keeps all pairs of tokens: too large"
    reason = unusable(op, form, x.device, x.dtype)
    return reason or (None if form.fits_all else form.refuses(*case))


def measure(op: str, length: int, rate: float, args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a table row per form of `op` at this length and rate, the naive form first."""
    case, one = (make_case(op, length, rate, batch, args) for batch in (args.batch, 1))
    names = [n for n in list_forms(op) if n != NAIVE and (not args.forms or n in args.forms)]
    reasons = {name: why_not(op, name, case) for name in (NAIVE, *names)}
    runs = {name: get_implementation(op, name).run for name in reasons if reasons[name] is None}
    times = time_forms(runs, case, args)
    truth = None
    if NAIVE in runs:
        truth = outputs_and_gradients(runs[NAIVE], cast(one, torch.float64))
    tokens = f"{length - int(length * rate)} of {length}" if rate else f"{length}"
    for name, reason in reasons.items():
        cells = [f"`{op}`", name, tokens, f"{torch.get_num_threads()}"]
        if reason is not None:
            yield [*cells, f"not run: {reason}", *[""] * 6]
            continue
        forward, both = times[name]
        faster = f"{times[NAIVE][1] / both:.2f}" if NAIVE in times else ""
        cells += [f"{1e3 * forward:.2f}", f"{1e3 * both:.2f}", faster]
        cells += memory_of(runs[name], case)
        errors = truth and difference(outputs_and_gradients(runs[name], one), truth)
        yield [*cells, *(f"{error:.0e}" for error in errors or ())]


def time_forms(
    runs: dict[str, Callable[..., Tensor]], case: Sequence[Any], args: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of forward, and of forward and backward, by form. The forms run in
    turns."""
    inputs = [x.detach().requires_grad_() if is_float(x) else x for x in case]
    leaves, outputs = [x for x in inputs if is_float(x)], dict[str, Tensor]()

    def forward(name: str) -> None:
        outputs[name] = runs[name](*inputs)

    def backward(name: str) -> None:
        y = outputs.pop(name)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    steps = {
        (name, step): lambda name=name, step=step: step(name)
        for name in runs
        for step in (forward, backward)
    }
    rounds = take_turns(steps, args.rounds, args.device)
    return {
        name: (
            median(each[name, forward] for each in rounds),
            median(each[name, forward] + each[name, backward] for each in rounds),
        )
        for name in runs
    }


def memory_of(run: Callable[..., Tensor], case: Sequence[Any]) -> list[str]:
    """Return two texts: the MiB that autograd keeps, and the peak MiB ("" without CUDA)."""
    inputs = [x.detach().requires_grad_() if is_float(x) else x for x in case]
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    gc.collect()
    device, peak = case[0].device, ""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = run(*inputs)
    torch.autograd.grad(y, [x for x in inputs if is_float(x)], torch.ones_like(y))
    if device.type == "cuda":
        peak = f"{(torch.cuda.max_memory_allocated(device) - before) / 2**20:.1f}"
    return [f"{sum(saved.values()) / 2**20:.1f}", peak]


if __name__ == "__main__":
    main()
