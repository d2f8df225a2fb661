"""What does an option cost? The time of a training step, or of sampling, with it and without.

python benchmarks/methods.py alignment=repa routing=maskdit 'objective=edm sampler=heun'
python benchmarks/methods.py --base 'backbone=rwkv routing=none' routing=tread routing=random_ltd
python benchmarks/methods.py --base backbone=kda_tiny kernels.kda=torch
python benchmarks/methods.py --sampling --base backbone=mamba guidance=cfg guidance=sparse

Each argument is a set of overrides of scripts/train.py, added to the overrides of --base. A step is
all that a run repeats: random choices, forward, backward, clipping, the optimizer and the averaged
weights. FLOPs count the loss and its gradient, as a mean over all steps of the run. With
--sampling, a step samples one batch from an untrained network. "time over FLOPs" is 1 where an
option that saves FLOPs saves as much time.
"""

import argparse
from collections.abc import Callable, Mapping
from statistics import median

from timing import take_turns

from tread_zoo.cli import compose_settings
from tread_zoo.config import make_config
from tread_zoo.diffusion import default_labels, generate
from tread_zoo.evaluation.flops import count_sampling, mean_flops
from tread_zoo.kernels import set_forms
from tread_zoo.runtime import describe_device, resolve_device, resolve_precision
from tread_zoo.training.loop import optimize
from tread_zoo.training.meters import Window
from tread_zoo.training.setup import build_setup, make_accelerator, to_devices
from tread_zoo.training.step import step_flops


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="sets of overrides, each one argument")
    parser.add_argument("--base", default="", help="overrides of all")
    parser.add_argument("--sampling", action="store_true", help="time sampling, not training")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    device = resolve_device("auto")
    print(f"base: {args.base or 'the defaults'}; {describe_device(device)}, {args.rounds} rounds")
    steps, flops = dict[str, Callable[[], None]](), dict[str, float]()
    for words in ("", *args.overrides):
        name = words or "base"
        make = make_sampling if args.sampling else make_step
        steps[name], flops[name] = make(f"{args.base} {words}".split())
    report(take_turns(steps, args.rounds, device), flops)


def make_step(overrides: list[str]) -> tuple[Callable[[], None], float]:
    """Return a function that trains one step with these settings, and its FLOPs per image."""
    config = make_config(**compose_settings("train", overrides))
    setup, device = build_setup(config), resolve_device(config.device)
    precision = resolve_precision(config.training.precision, device)
    state = to_devices(setup, make_accelerator(setup, device, precision), None)
    batches, window = setup.batches(), Window(state)

    def step() -> None:
        set_forms(config.kernels)
        skipped = optimize(state, batches, window)
        state.step += 1
        for average in state.averages.values():
            average.update(setup.backbone, state.step, skipped)

    return step, mean_flops(step_flops(setup, setup.backbone))


def make_sampling(overrides: list[str]) -> tuple[Callable[[], None], float]:
    """Return a function that samples a batch with these settings, and its FLOPs per image."""
    config = make_config(**compose_settings("train", overrides))
    setup, device = build_setup(config), resolve_device(config.device)
    precision = resolve_precision(config.training.precision, device)
    backbone, numbers = setup.backbone.to(device).eval(), range(config.training.batch_size)
    labels = default_labels(numbers, backbone.num_classes)

    def sample() -> None:
        set_forms(config.kernels)
        generate(
            backbone, setup.objective, setup.sampling, indices=numbers, labels=labels, seed=0,
            batch_size=len(numbers), precision=precision, weak=setup.weak,
        )  # fmt: skip

    cost = count_sampling(backbone, setup.objective, setup.sampling, weak=setup.weak)
    return sample, cost.flops


def report(seconds: list[dict[str, float]], flops: Mapping[str, float]) -> None:
    """Print time and FLOPs of a step for each set of overrides, and ratios to the first set."""
    first = next(iter(flops))
    titles = ("step", "ms", "MFLOPs an image", f"FLOPs / {first}", f"time / {first}")
    print(f"{titles[0]:24} {titles[1]:>9} {titles[2]:>16} {titles[3]:>15} {titles[4]:>15}", end="")
    print("  time over FLOPs")
    for name in flops:
        milliseconds = 1e3 * median(each[name] for each in seconds)
        time_ratio = median(each[name] / each[first] for each in seconds)
        flops_ratio = flops[name] / flops[first]
        print(
            f"{name:24} {milliseconds:9.1f} {flops[name] / 1e6:16.1f} {flops_ratio:15.3f} "
            f"{time_ratio:15.3f} {time_ratio / flops_ratio:16.3f}"
        )


if __name__ == "__main__":
    main()
