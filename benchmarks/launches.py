"""How many kernels does a training step launch? A count by the part of the step.

python benchmarks/launches.py                                    # every backbone's tiny size
python benchmarks/launches.py dit_tiny mamba_tiny --base 'optimizer=muon training.precision=bf16'
python benchmarks/launches.py dit_tiny --by-name                 # the most frequent ones

A launch is a call of an ATen kernel that computes or copies. Views, shapes and empty memory do not
count, and operations compiled from C are not seen. On a GPU each launch takes the host some
microseconds, so many small ones set a lower bound on the time of a step. Counted is the second step
of a run of scripts/train.py on a CPU, without compilation.

    draws      noise, levels, dropped labels, kept tokens          routes     entering and leaving
    embed, blocks, head    of the network, forward                 loss       around the network
    backward, optimizer    clipping counts as "other"              averages   of the weights
"""

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tread_zoo.cli import compose_settings
from tread_zoo.config import make_config
from tread_zoo.registry import available
from tread_zoo.training import loop
from tread_zoo.training.meters import Window
from tread_zoo.training.setup import build_setup, make_accelerator, to_devices

PARTS = ("draws", "embed", "blocks", "head", "routes", "loss", "backward", "optimizer", "averages")
IDLE = (  # beginnings of names that compute nothing on a device
    "empty", "_unsafe_view", "lift_fresh", "is_same_size", "promote_types", "_has_compatible",
    "sym_", "_local_",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts launches by (part, name of the kernel) while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.part = "other"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not func.is_view and not name.startswith(IDLE):
            self.counts[self.part, name] += 1
        return func(*args, **(kwargs or {}))

    def within(self, part: str, function: Callable) -> Callable:
        """Return `function`, its launches counted for `part` unless inner ones have their own."""

        def counted(*args, **kwargs):
            outer, self.part = self.part, part
            try:
                return function(*args, **kwargs)
            finally:
                self.part = outer

        return counted

    def by_part(self) -> dict[str, int]:
        """Return the number of launches by part; `other` is outside of all parts, `all` the sum."""
        sums = dict.fromkeys((*PARTS, "other"), 0)
        for (part, _), count in self.counts.items():
            sums[part] += count
        return {**sums, "all": sum(sums.values())}


def count_step(overrides: list[str]) -> Launches:
    """Return the launches in the second step of a run, given overrides of scripts/train.py."""
    config = make_config(**compose_settings("train", ["device=cpu", *overrides]))
    setup = build_setup(config)
    device, precision = torch.device("cpu"), config.training.precision
    state = to_devices(setup, make_accelerator(setup, device, precision), None)
    network, batches, launches = setup.backbone, setup.batches(), Launches()
    window = Window(state)
    with ExitStack() as patches:
        for owner, method, part in (
            (loop, "draw_step", "draws"), (loop, "step_loss", "loss"),
            (network, "forward", "routes"), (network, "embed", "embed"),
            (network, "run_block", "blocks"), (network, "head", "head"),
            (state.accelerator, "backward", "backward"), (state.stepper, "step", "optimizer"),
        ):  # fmt: skip
            counted = launches.within(part, getattr(owner, method))
            patches.enter_context(mock.patch.object(owner, method, counted))
        for _ in range(2):
            launches.counts.clear()
            with launches:
                skipped = loop.optimize(state, batches, window)
                state.step += 1
                for average in state.averages.values():
                    launches.within("averages", average.update)(network, state.step, skipped)
    return launches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backbones", nargs="*", default=available("backbone", "*_tiny"))
    parser.add_argument("--base", default="", help="overrides of scripts/train.py")
    parser.add_argument("--by-name", action="store_true", help="list the kernels of each part")
    args = parser.parse_args()
    print("| backbone | " + " | ".join((*PARTS, "other", "all")) + " |")
    print("|---" * (len(PARTS) + 3) + "|")
    for name in args.backbones:
        launches = count_step([f"backbone={name}", *args.base.split()])
        print(f"| {name} | " + " | ".join(map(str, launches.by_part().values())) + " |", flush=True)
        for (part, kernel), count in launches.counts.most_common(60 if args.by_name else 0):
            print(f"    {count:5} {part:10} {kernel}")


if __name__ == "__main__":
    main()
