"""Is the loader fast enough? Images per second of a data source, and of a network's training.

python benchmarks/loader.py --data '{name: image_folder, path: photos, image_size: 64}'
python benchmarks/loader.py dit_s_4 --data '{name: latents, path: latents}' --workers 0 2 4

A source has the options of the group data. Each round loads some batches, and runs one training
step (forward, backward, AdamW; dense, fixed input). `ratio` is the loader's speed over training's
speed: above 1, training waits for its first batch only. `cpu us` is the processor time of the main
process per image, without workers; other programs change it little. Files that were read before
come from memory, so a cold disk or a network takes longer.
"""

import argparse
import time
from statistics import median

import torch
from omegaconf import OmegaConf
from timing import make_parser, parse, take_turns

from tread_zoo import create
from tread_zoo.data import StepBatches, make_loader
from tread_zoo.runtime import autocast


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", default="digits", help="a source's name, or {name: …, path: …}")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--num-batches", type=int, default=40, help="loaded in each round")
    part = OmegaConf.to_container(OmegaConf.from_dotlist([f"data={parser.parse_args().data}"]))
    data = create("data", part["data"])
    parser.set_defaults(
        input_size=data.image_size[0], in_channels=data.channels, num_classes=data.num_classes
    )
    args, backbone = parse(parser)
    train = training_step(args, backbone)
    print(f"{'workers':>7} {'images/s':>9} {'cpu us':>8} {'ratio':>8}")
    for workers in args.workers:
        speeds, cpu_us, ratios = measure(data.train, train, workers, args)
        print(f"{workers:7} {speeds:9.0f} {cpu_us:8.0f} {ratios:8.2f}")


def training_step(args: argparse.Namespace, backbone: torch.nn.Module):
    """Return a function that does one dense training step on a fixed batch."""
    shape = (args.batch_size, args.in_channels, *backbone.input_size)
    x, t = torch.randn(shape, device=args.device), torch.rand(args.batch_size, device=args.device)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-4)

    def step() -> None:
        with autocast(args.device, args.precision):
            out = backbone(x, t)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(dataset, train, workers: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Return three medians: images per second of the loader, its processor time per image in
    microseconds, and its speed over that of `train`, which does a training step."""
    ahead = 2 * workers  # batches read in advance, so not counted
    batches = StepBatches(
        dataset,
        args.batch_size,
        seed=0,
        num_steps=1 + (args.rounds + 2) * (ahead + args.num_batches),
    )
    loader, cpu_seconds = make_loader(dataset, batches, workers), []
    next(loader)  # starts the workers

    def skip() -> None:
        for _ in range(ahead):
            next(loader)

    def load() -> None:
        began = time.process_time()
        for _ in range(args.num_batches):
            next(loader)
        cpu_seconds.append(time.process_time() - began)

    seconds = take_turns({"train": train, "skip": skip, "load": load}, args.rounds, args.device)
    count = args.num_batches * args.batch_size
    return (
        median(count / each["load"] for each in seconds),
        median(1e6 * spent / count for spent in cpu_seconds[2:]),
        median(args.num_batches * each["train"] / each["load"] for each in seconds),
    )


if __name__ == "__main__":
    main()
