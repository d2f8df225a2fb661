"""Compile every variant of the project's Triton kernels for a GPU that need not be there.

python benchmarks/offline.py --targets sm_90
python benchmarks/offline.py --targets sm_80 gfx942 --dtypes bfloat16 --states 16

There is one variant per kernel, type of the inputs and kind of route (positions or segments), and
for a scan per number of states, with and without the skip D. Nothing is run.

    s           seconds to compile it here, without a cache
    registers   registers per thread
    spilled     bytes per thread that did not fit into registers
    shared      bytes of shared memory per program
"""

import argparse
import itertools
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from tread_zoo.kernels.dispatch import get_implementation

TARGETS = {
    **{f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
OPS = ("bidirectional_wkv", "selective_scan")
DTYPES = ("float32", "bfloat16", "float16")
STATES = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (2, 256)  # a launch of few programs, which are made smaller, and one of many


class Variant(NamedTuple):
    """One compiled kernel; the module's docstring explains its sizes."""

    target: str
    op: str
    kernel: str
    seconds: float
    registers: int
    spilled: int
    shared: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["sm_90"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--states", nargs="+", type=int, default=STATES)
    args = parser.parse_args()
    variants = []
    for target in args.targets:
        for op in OPS:
            with compiling(target, op) as compiled:
                for given in list_calls(op, args.dtypes, args.states):
                    differentiate(get_implementation(op, "triton").run, given)
            variants += compiled
            print(f"{target} {op}: {len(variants)} variants so far", file=sys.stderr)
    print(f"```bash\n{shlex.join(['python', 'benchmarks/offline.py', *sys.argv[1:]])}\n```\n")
    print(f"triton {triton.__version__}, torch {torch.__version__}, one CPU thread\n")
    print(table(variants))


def list_calls(op: str, dtypes: Any, states: Any) -> Iterator[list[Any]]:
    """Yield arguments for calls of `op`, shaped as in networks; values do not matter."""
    for dtype in (getattr(torch, name) for name in dtypes):
        if op == "bidirectional_wkv":
            for positions in (None, torch.arange(19).expand(2, -1).contiguous()):
                k, v = (torch.zeros(2, 19, 64, dtype=dtype) for _ in range(2))
                yield [k, v, torch.zeros(64), torch.zeros(64), positions, 38]
            continue
        for size, batch, route in itertools.product(states, BATCHES, (None, "reset", "decay")):
            # with decay over gaps, u is float32, and D u is added outside of the kernel
            u = torch.zeros(batch, 5, 768, dtype=torch.float32 if route == "decay" else dtype)
            B, C = (torch.zeros(batch, 5, 1, size, dtype=dtype) for _ in range(2))
            D = None if route == "decay" else torch.zeros(768)
            segments = torch.zeros(batch, 5, dtype=torch.int64) if route == "reset" else None
            yield [u, torch.zeros(batch, 5, 768), torch.zeros(768, size), B, C, D, None, segments]


def differentiate(run: Any, args: list[Any]) -> None:
    """Call `run` with `args`, and compute the gradient of the sum of its output."""
    for x in args:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    run(*args).sum().backward()


@contextmanager
def compiling(target: str, op: str = "") -> Iterator[list[Variant]]:
    """Within the context, compile kernels for `target` instead of launching them. The list that it
    yields collects the variants."""
    gpu, variants, built = TARGETS[target], [], JITFunction.run
    driver = SimpleNamespace(
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: gpu,
    )

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        known = sum(len(entry[0]) for entry in self.device_caches.values())
        if gpu.backend == "hip":
            options.pop("maxnreg", None)  # the launchers leave it out, too
        began = time.perf_counter()
        binary = built(self, *args, grid=(1,), warmup=True, **options)
        seconds = time.perf_counter() - began
        if sum(len(entry[0]) for entry in self.device_caches.values()) > known:
            sizes = *resources(binary), binary.metadata.shared
            variants.append(Variant(target, op, self.__name__, seconds, *sizes))
        return binary

    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(JITFunction, "run", build),
    ):
        triton.knobs.cache.dir = folder
        yield variants


def resources(binary: Any) -> tuple[int, int]:
    """Return the number of registers per thread, and the bytes that a thread spills."""
    if "amdgcn" in binary.asm:
        text = binary.asm["amdgcn"]
        fields = (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
        registers, spilled = (int(re.search(each, text)[1]) for each in fields)
        return registers, spilled
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return int(registers), int(spilled)


def table(variants: list[Variant]) -> str:
    """Return a Markdown table with a line for each kernel of a target."""
    lines = ["| target | kernel | variants | s, median (most) | registers | spilled | shared |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, group in itertools.groupby(sorted(variants), lambda v: v[:3]):
        *_, seconds, registers, spilled, shared = zip(*group, strict=True)
        times = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"
        most = " | ".join(str(max(sizes)) for sizes in (registers, spilled, shared))
        kernel = f"`{name[1]}`, `{name[2]}`"
        lines.append(f"| {name[0]} | {kernel} | {len(seconds)} | {times} | {most} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
