"""What the benchmarks share: a network from the command line, and steps that take turns.

Every round runs each step once, so a machine that slows down slows all of them.
"""

import argparse
import time
from collections.abc import Callable, Mapping

import torch
from omegaconf import OmegaConf

from tread_zoo import create_backbone
from tread_zoo.contract.backbone import Backbone
from tread_zoo.runtime import describe_device, resolve_device, resolve_precision


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a command-line parser with options for the network, its input and the device."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backbone", nargs="?", default="dit_tiny", help="dit_tiny by default")
    parser.add_argument("options", nargs="*", help="of the backbone: hidden_size=256 depth=8")
    parser.add_argument("--input-size", type=int, default=32)
    parser.add_argument("--in-channels", type=int, default=4)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", type=resolve_device, default="auto")
    parser.add_argument("--precision", default="auto")
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Backbone]:
    """Return the parsed arguments, with a resolved precision, and the network on its device."""
    args = parser.parse_args()
    args.precision = resolve_precision(args.precision, args.device)
    backbone = make_network(args, args.input_size)
    print(
        f"{backbone.name}, {backbone.num_tokens} tokens, batch {args.batch_size}, "
        f"{args.precision}, {describe_device(args.device)}, {args.rounds} rounds"
    )
    return args, backbone


def make_network(args: argparse.Namespace, input_size: int) -> Backbone:
    """Return the network that a command line names, for images of `input_size`, on its device."""
    backbone = create_backbone(
        args.backbone,
        input_size=input_size,
        in_channels=args.in_channels,
        num_classes=args.num_classes,
        **as_options(args.options),
    )
    return backbone.to(args.device)


def as_options(words: list[str]) -> dict:
    """Return `["depth=8", "selector={name: blocks, size: 4}"]` as options."""
    return OmegaConf.to_container(OmegaConf.from_dotlist(words))  # type: ignore[return-value]


def take_turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, float]]:
    """Return the seconds of each step by name for each round, after two that are not counted."""
    seconds = []
    for _ in range(rounds + 2):
        seconds.append({})
        for name, step in steps.items():
            began = clock()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[-1][name] = clock() - began
    return seconds[2:]
