"""Does routing pay? Time of a routed training step over a dense one, beside the ratio of FLOPs.

python benchmarks/routing.py
python benchmarks/routing.py dit hidden_size=256 num_heads=4
python benchmarks/routing.py mamba --routing selection_rate=0.75 'selector={name: blocks, size: 4}'
python benchmarks/routing.py mamba depth=6 --batch-size 1 --tokens 16 64 256 1024 4096   # growth

A step is forward, backward and AdamW. "time over FLOPs" is 1 where routing saves as much time as it
saves FLOPs. A routing with a schedule is timed at its first rate.

With --tokens, the table has a row for each number of tokens. MiB are what autograd keeps from the
forward to the backward pass, without the weights. With one CPU thread (OMP_NUM_THREADS=1), times
are processor times, so other programs do not count.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from timing import as_options, make_network, make_parser, parse, take_turns
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.crossing import Crossing
from tread_zoo.diffusion import default_labels
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.factory import add_routing
from tread_zoo.registry import create
from tread_zoo.routing import Method, Stack, Step
from tread_zoo.routing.method import counted_images
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_image_generator

FIRST = Step(0, 10000, seed=0)  # the step that is timed
TITLES = (
    "backbone", "tokens", "dense ms", "routed ms", "time routed / dense", "FLOPs routed / dense",
    "time over FLOPs", "dense MiB", "routed MiB",
)  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--routing", nargs="*", default=[], help="fields of the group routing")
    parser.add_argument("--tokens", nargs="*", type=int, help="square numbers")
    args, backbone = parse(parser)
    routing = create("routing", {"name": "tread", **as_options(args.routing)})
    print(f"{routing.describe(Stack.of(backbone))}\n")
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for tokens in args.tokens or [backbone.num_tokens]:
        network = make_network(args, math.isqrt(tokens) * backbone.patch_size)
        cells = measure(network, *make_steps(network, routing, args), args)
        print(f"| {args.backbone} | {tokens:,} | {' | '.join(cells)} |", flush=True)


def make_steps(
    backbone: Backbone, routing: Method, args: argparse.Namespace
) -> tuple[dict[str, Callable[[], None]], float]:
    """Return a dense and a routed training step, and the FLOPs of the second over the first's."""
    add_routing(backbone, routing)
    backbone.to(args.device)
    stack, batch = Stack.of(backbone), args.batch_size
    images = make_image_generator("benchmark", images=range(batch), device=args.device)
    routes = routing.route(stack, images, FIRST)
    x = torch.randn(batch, backbone.in_channels, *backbone.input_size, device=args.device)
    t = torch.rand(batch, device=args.device)
    labels = default_labels(range(batch), backbone.num_classes)
    y = None if labels is None else labels.to(args.device)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-4, fused=args.device.type != "mps")

    def step(routes: Sequence[Crossing]) -> None:
        with autocast(args.device, args.precision):
            out = backbone(x, t, y, routes=routes)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    counted = routing.route(stack, counted_images(), FIRST)
    flops = count_flops(backbone, routes=counted, backward=True)
    ratio = flops / count_flops(backbone, backward=True)
    return {"dense": lambda: step(()), "routed": lambda: step(routes)}, ratio


def measure(
    network: Backbone,
    steps: dict[str, Callable[[], None]],
    flops_ratio: float,
    args: argparse.Namespace,
) -> list[str]:
    """Return the cells of a row after backbone and tokens: times, their ratio, FLOPs and memory."""
    alone = args.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    seconds = take_turns(steps, args.rounds, args.device, clock)
    times = [f"{1e3 * median(each[name] for each in seconds):.1f}" for name in steps]
    ratio = median(each["routed"] / each["dense"] for each in seconds)
    memory = [f"{kept_bytes(network, step) / 2**20:.1f}" for step in steps.values()]
    return [*times, f"{ratio:.2f}", f"{flops_ratio:.2f}", f"{ratio / flops_ratio:.2f}", *memory]


def kept_bytes(network: Backbone, step: Callable[[], None]) -> int:
    """Return the bytes that autograd keeps for the backward pass of a step, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
    kept = dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


if __name__ == "__main__":
    main()
