"""Time every form of an operation side by side, forward and backward, with its error and memory.

The forms take turns in every round and medians are compared, so that a busy machine disturbs all
alike. A case is a sequence of L tokens, or the K of them that a route keeps, with the gaps that it
leaves. Errors are those of one row of the batch against the naive form, or the loop where the naive
one is quadratic, in float64.

Dimensions: B batch, L length, K kept tokens, H heads.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import NAIVE, get_form, get_forms, list_forms, unusable
from tread_zoo.kernels.loops import bidirectional_wkv_loop, selective_scan_loop
from tread_zoo.kernels.verify import cast, outputs_and_gradients

LOOP = "unbind loop"
LARGEST_PAIRS = 2**30  # bytes that a naive form may take for one tensor of all pairs of tokens

_LOOPS: dict[str, Callable[..., Tensor]] = {
    "selective_scan": selective_scan_loop,
    "bidirectional_wkv": bidirectional_wkv_loop,
}
_PAIRS_FOR_EACH: dict[str, Callable[[Tensor], int]] = {  # naive forms that hold all pairs of tokens
    "attention": lambda q: q.shape[0] * q.shape[1],
    "bidirectional_wkv": lambda k: k.shape[0] * k.shape[2],
}


@dataclass(frozen=True)
class Case:
    """One call: `tokens` of `length` are present; `args` as a form's `run` takes them, float32."""

    op: str
    length: int
    tokens: int
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """What one form did in one case.

    forward_ms, total_ms: medians; total is forward and backward.
    speedup: total of the baseline over this total; the baseline is the loop, or the naive form.
    over_torch: total of the torch form over this total.
    saved_mib: what autograd keeps between forward and backward, inputs included.
    peak_mib: the most that the device held beyond the inputs (CUDA only, else NaN).
    error, gradient_error: largest absolute error of the output; of the gradients, over the largest
        value of each.
    skipped: why nothing was measured, or "".
    """

    op: str
    form: str
    length: int
    tokens: int
    threads: int
    dtype: str
    forward_ms: float = math.nan
    total_ms: float = math.nan
    speedup: float = math.nan
    over_torch: float = math.nan
    saved_mib: float = math.nan
    peak_mib: float = math.nan
    error: float = math.nan
    gradient_error: float = math.nan
    skipped: str = ""


def make_case(op: str, length: int, *, batch: int, width: int, rate: float = 0.0) -> Case:
    """Return a case of normal inputs from a fixed seed, in float32 on the CPU.

    Args:
        op: the operation.
        length: L.
        batch: B.
        width: channels, in heads of 64 where there are heads.
        rate: fraction of the tokens that a random route takes away; 0 keeps all.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = length - int(length * rate)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    kept = None
    if tokens < length:
        order = torch.rand(batch, length, generator=generator).argsort(dim=1)
        kept = order[:, :tokens].sort(dim=1).values
    return Case(op, length, tokens, _ARGS[op](normal, batch, tokens, width, kept, length))


def _segments(kept: Tensor | None) -> Tensor | None:
    """Return a number for each run of neighbours among the kept tokens [B, K]."""
    if kept is None:
        return None
    return F.pad((kept.diff(dim=1) > 1).long().cumsum(dim=1), (1, 0))


def _attention(normal: Any, batch: int, tokens: int, width: int, *_: Any) -> tuple[Any, ...]:
    return tuple(normal(batch, max(1, width // 64), tokens, 64) for _ in range(3))


def _conv(
    normal: Any, batch: int, tokens: int, width: int, kept: Tensor | None, length: int
) -> tuple[Any, ...]:
    return normal(batch, tokens, width), normal(width, 4), normal(width), _segments(kept)


def _wkv(
    normal: Any, batch: int, tokens: int, width: int, kept: Tensor | None, length: int
) -> tuple[Any, ...]:
    k, v = (normal(batch, tokens, width) for _ in range(2))
    return k, v, normal(width).exp(), normal(width), kept, length


def _scan(
    normal: Any, batch: int, tokens: int, width: int, kept: Tensor | None, length: int
) -> tuple[Any, ...]:
    delta = F.softplus(normal(batch, tokens, width) - 2)
    vectors = (normal(batch, tokens, 1, 16) for _ in range(2))
    u, A = normal(batch, tokens, width), -torch.exp(normal(width, 16))
    return u, delta, A, *vectors, normal(width), _segments(kept)


def _ssd(
    normal: Any, batch: int, tokens: int, width: int, kept: Tensor | None, length: int
) -> tuple[Any, ...]:
    heads = max(1, width // 64)
    delta, A = F.softplus(normal(batch, tokens, heads) - 2), -torch.exp(normal(heads))
    vectors = (normal(batch, tokens, 1, 64) for _ in range(2))
    x = normal(batch, tokens, heads, 64)
    return x, delta, A, *vectors, normal(heads), _segments(kept), None


_ARGS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "attention": _attention,
    "bidirectional_wkv": _wkv,
    "causal_conv1d": _conv,
    "selective_scan": _scan,
    "ssd": _ssd,
}


def list_runs(op: str, wanted: Sequence[str] | None) -> dict[str, Callable[..., Tensor]]:
    """Return the baseline and then the forms of `op` to measure, by name.

    Raises:
        ValueError: an unknown operation or form.
    """
    known = (*([LOOP] if op in _LOOPS else []), *list_forms(op))
    baseline = LOOP if op in _LOOPS else NAIVE
    for name in wanted or ():
        if name not in {form for each in get_forms() for form in (LOOP, *list_forms(each))}:
            raise ValueError(f"forms={name} is unknown. Known for {op}: {', '.join(known)}.")
    names = [baseline] + [n for n in known if n != baseline and (not wanted or n in wanted)]
    return {n: _LOOPS[op] if n == LOOP else get_form(op, n).run for n in names}


def measure(
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    forms: Sequence[str] | None = None,
    rounds: int = 5,
) -> list[Row]:
    """Measure the forms of a case, the baseline first.

    Args:
        case: of `make_case`.
        device: where.
        dtype: of the floating arguments.
        forms: names, `unbind loop` among them; None for all. The baseline is always measured.
        rounds: after a first one that is not counted.
    """
    args = cast([_to(arg, device) for arg in case.args], dtype)
    runs = list_runs(case.op, forms)
    reasons = {name: _against(case, name, args, device) for name in runs}
    able = {name: run for name, run in runs.items() if not reasons[name]}
    times = _time(able, args, device, rounds)
    totals = {name: forward + backward for name, (forward, backward) in times.items()}
    errors = _errors(case, able, device, dtype)
    rows = []
    for name in runs:
        common = (case.op, name, case.length, case.tokens, torch.get_num_threads(), str(dtype)[6:])
        if reasons[name]:
            rows.append(Row(*common, skipped=reasons[name]))
            continue
        saved, peak = _memory(able[name], args, device)
        first = totals.get(next(iter(runs)), math.nan)
        rows.append(
            Row(
                *common, times[name][0], totals[name], first / totals[name],
                totals.get("torch", math.nan) / totals[name], saved, peak, *errors[name],
            )
        )  # fmt: skip
    return rows


def slopes(rows: Sequence[Row]) -> dict[tuple[str, str, int], float]:
    """Return, by (op, form, threads), the log-log slope of dense time against length, by least
    squares; 1 is linear. Fewer than two lengths give no slope."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in rows:
        if row.tokens == row.length and not row.skipped:
            point = (math.log(row.length), math.log(row.total_ms))
            found.setdefault((row.op, row.form, row.threads), []).append(point)
    return {
        key: statistics.linear_regression(*zip(*points, strict=True)).slope
        for key, points in found.items()
        if len({x for x, _ in points}) > 1
    }


def _against(case: Case, name: str, args: Sequence[Any], device: torch.device) -> str:
    """Return why a form is not measured, or ""."""
    if name == NAIVE and case.op in _PAIRS_FOR_EACH:
        each = _PAIRS_FOR_EACH[case.op](args[0])
        if each * case.tokens**2 * args[0].element_size() > LARGEST_PAIRS:
            return "holds all pairs of tokens: too large"
    if name == LOOP:
        return ""
    form = get_form(case.op, name)
    return unusable(case.op, form, device) or ("" if form.fits_all else form.unsuited(*args) or "")


def _time(
    runs: dict[str, Callable[..., Tensor]], args: Sequence[Any], device: torch.device, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds of forward, and of backward, the forms taking turns."""
    inputs = [_leaf(arg) for arg in args]
    leaves = [arg for arg in inputs if isinstance(arg, Tensor) and arg.requires_grad]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            began = _now(device)
            y = run(*inputs)
            between = _now(device)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
            if turn > 0:  # the first round warms up
                times[name].append((1e3 * (between - began), 1e3 * (_now(device) - between)))
            del y
    medians = {n: [statistics.median(c) for c in zip(*t, strict=True)] for n, t in times.items()}
    return {name: (forward, backward) for name, (forward, backward) in medians.items()}


def _memory(
    run: Callable[..., Tensor], args: Sequence[Any], device: torch.device
) -> tuple[float, float]:
    """Return MiB that autograd keeps, every storage once, and at the peak (NaN but on CUDA)."""
    inputs = [_leaf(arg) for arg in args]
    leaves = [arg for arg in inputs if isinstance(arg, Tensor) and arg.requires_grad]
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    gc.collect()
    before = 0
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


def _errors(
    case: Case, runs: dict[str, Callable[..., Tensor]], device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """Return each form's errors on the first row of the batch."""
    batch = case.args[0].shape[0]
    one = [
        _to(arg[:1] if isinstance(arg, Tensor) and _is_batched(arg, batch, case) else arg, device)
        for arg in case.args
    ]
    rounded = cast(cast(one, dtype), torch.float64)  # what the forms are given, exactly
    truth = _LOOPS.get(case.op, get_form(case.op, NAIVE).run)
    true_out, true_grads = outputs_and_gradients(truth, rounded)
    errors = {}
    for name, run in runs.items():
        out, grads = outputs_and_gradients(run, cast(one, dtype))
        gradient = max(
            float((g.double() - t).abs().max() / t.abs().max().clamp_min(1e-30))
            for g, t in zip(grads, true_grads, strict=True)
        )
        errors[name] = (float((out.double() - true_out).abs().max()), gradient)
    return errors


def _is_batched(arg: Tensor, batch: int, case: Case) -> bool:
    """Return whether the first dimension is the batch: activations are, weights are not."""
    return arg.ndim >= 2 and arg.shape[0] == batch and case.tokens in arg.shape[1:]


def _leaf(arg: Any) -> Any:
    if isinstance(arg, Tensor) and arg.is_floating_point():
        return arg.detach().requires_grad_()
    return arg


def _to(arg: Any, device: torch.device) -> Any:
    return arg.to(device) if isinstance(arg, Tensor) else arg


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
