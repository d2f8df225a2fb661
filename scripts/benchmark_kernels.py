"""Time every form of a kernel, forward and backward, on this machine's CPU.

    python scripts/benchmark_kernels.py --op selective_scan --threads 1

The forms take turns in every round and medians are compared, so that a busy machine disturbs all
alike. `ratio` is to the baseline of the same run: for the recurrent ones a loop over unbound time
steps under autograd; else the naive form. `error` is the largest absolute one of the
output against the naive form in float64. `saved` is what autograd keeps, inputs included.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.attention.fused import attention_sdpa
from tread_zoo.kernels.attention.naive import attention_naive
from tread_zoo.kernels.attention.torch_form import attention_torch
from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.bidirectional_wkv.torch_form import bidirectional_wkv_torch
from tread_zoo.kernels.causal_conv1d.naive import causal_conv1d_naive
from tread_zoo.kernels.causal_conv1d.torch_form import causal_conv1d_torch
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive
from tread_zoo.kernels.selective_scan.torch_form import selective_scan_torch

Form = Callable[..., Tensor]

# The first form of an operation is its baseline. Shapes: attention B, H, N, Dh;
# bidirectional_wkv B, L, C; causal_conv1d B, L, D, W; selective_scan B, L, D, N, G.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "attention": [(64, 2, 16, 64), (64, 2, 64, 64), (8, 6, 256, 64), (2, 6, 1024, 64)],
    "bidirectional_wkv": [(4, 256, 384), (64, 16, 64), (64, 16, 128), (32, 256, 192)],
    "causal_conv1d": [(64, 18, 384, 4), (4, 256, 768, 4)],
    "selective_scan": [(4, 256, 384, 16, 1), (64, 18, 384, 8, 2), (64, 10, 384, 8, 2)],
}


def scan_loop(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Loop over unbound steps [B, G, N, P], the channels innermost; autograd does the rest."""
    batch, length, width = u.shape
    groups, size = B.shape[2:]
    shape = (batch, length, groups, 1, width // groups)
    now, step = (x.view(shape).transpose(0, 1) for x in (u, delta))
    decays = torch.exp(step * A.view(groups, -1, size).transpose(1, 2).contiguous())
    inputs = step * now * B.transpose(0, 1).unsqueeze(-1)
    h, states = torch.zeros_like(inputs[0]), []
    for decay, driven in zip(decays.unbind(0), inputs.unbind(0), strict=True):
        h = torch.addcmul(driven, decay, h)
        states.append(h)
    y = (torch.stack(states) * C.transpose(0, 1).unsqueeze(-1)).sum(-2)
    return y.transpose(0, 1).reshape(u.shape) + D * u


def wkv_loop(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Loop over unbound steps [B, C] both ways, on a running maximum; autograd does the rest."""
    slope = w / k.shape[1]
    steps = list(zip(k.unbind(1), v.unbind(1), strict=True))
    ways = []
    for path in (steps, steps[::-1]):
        top = bottom = torch.zeros_like(k[:, 0])
        peak = torch.full_like(top, -1e30)
        sums = []
        for key, value in path:
            sums.append((top, bottom, peak))
            higher = torch.maximum(peak - slope, key)
            old, new = torch.exp(peak - slope - higher), torch.exp(key - higher)
            top, bottom, peak = old * top + new * value, old * bottom + new, higher
        ways.append(sums)
    outs = []
    for (key, value), before, after in zip(steps, ways[0], ways[1][::-1], strict=True):
        higher = torch.maximum(torch.maximum(before[2], after[2]), u + key)
        one, other, own = (torch.exp(x - higher) for x in (before[2], after[2], u + key))
        top = one * before[0] + other * after[0] + own * value
        outs.append(top / (one * before[1] + other * after[1] + own))
    return torch.stack(outs, dim=1)


def whole(form: Form) -> Form:
    """Return a form of the WKV that takes all tokens of a sequence."""
    return lambda k, v, w, u: form(k, v, w, u, None, k.shape[1])


FORMS: dict[str, dict[str, Form]] = {
    "attention": {"naive": attention_naive, "torch": attention_torch, "sdpa": attention_sdpa},
    "bidirectional_wkv": {
        "unbind loop": wkv_loop,
        "torch": whole(bidirectional_wkv_torch),
    },
    "causal_conv1d": {"naive": causal_conv1d_naive, "torch": causal_conv1d_torch},
    "selective_scan": {
        "unbind loop": scan_loop,
        "naive": selective_scan_naive,
        "torch": selective_scan_torch,
    },
}

TRUTHS: dict[str, Form] = {
    "attention": attention_naive,
    "bidirectional_wkv": whole(bidirectional_wkv_naive),  # all pairs: too large to be timed here
    "causal_conv1d": causal_conv1d_naive,
    "selective_scan": selective_scan_naive,
}


def make_inputs(op: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the inputs of `op` in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    if op == "attention":
        return [normal(*shape) for _ in range(3)]
    if op == "causal_conv1d":
        batch, length, width, taps = shape
        return [normal(batch, length, width), normal(width, taps), normal(width)]
    if op == "bidirectional_wkv":
        return [normal(*shape), normal(*shape), normal(shape[2]).exp(), normal(shape[2])]
    batch, length, width, size, groups = shape
    delta = F.softplus(normal(batch, length, width) - 2)
    vectors = [normal(batch, length, groups, size) for _ in range(2)]
    A = -torch.exp(normal(width, size))
    return [normal(batch, length, width), delta, A, *vectors, normal(width)]


def measure(forms: dict[str, Form], inputs: list[Tensor], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of forward and backward, the forms taking turns."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for i in range(rounds + 1):
        for name, form in forms.items():
            begin = time.perf_counter()
            y = form(*inputs)
            torch.autograd.grad(y, inputs, torch.ones_like(y))
            if i > 0:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def count_saved(form: Form, inputs: list[Tensor]) -> float:
    """Return the MiB that autograd keeps for the backward pass, every storage counted once."""
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        form(*inputs)
    return sum(x.untyped_storage().nbytes() for x in saved.values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=sorted(FORMS), action="append", help="default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.dtype}")
    header = ("op", "form", "shape", "fwd+bwd ms", "ratio", "error", "saved MiB")
    print("{:<18}{:<13}{:<22}{:>11}{:>7}{:>10}{:>11}".format(*header))
    for op in options.op or sorted(FORMS):
        for shape in SHAPES[op]:
            exact = make_inputs(op, shape)
            with torch.no_grad():
                truth = TRUTHS[op](*exact)
            inputs = [x.to(getattr(torch, options.dtype)).requires_grad_() for x in exact]
            times = measure(FORMS[op], inputs, options.rounds)
            baseline = next(iter(times.values()))
            for name, form in FORMS[op].items():
                error = (form(*inputs) - truth).abs().max().item()
                row = (op, name, str(shape), times[name], times[name] / baseline, error)
                saved = count_saved(form, inputs)
                print(
                    "{:<18}{:<13}{:<22}{:>11.2f}{:>7.2f}{:>10.1e}".format(*row) + f"{saved:11.1f}"
                )


if __name__ == "__main__":
    main()
