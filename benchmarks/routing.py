"""Does routing pay? Time of a routed training step over a dense one, beside the ratio of FLOPs.

python benchmarks/routing.py
python benchmarks/routing.py dit hidden_size=256 num_heads=4
python benchmarks/routing.py mamba --routing selection_rate=0.75 'selector={name: blocks, size: 4}'

A step is forward, backward and AdamW. "time over FLOPs" of the routed step is 1 where routing saves
as much time as it saves FLOPs. A routing with a schedule is timed at its first rate; the FLOPs over
the whole schedule stand below.
"""

from collections.abc import Sequence

import torch
from turns import as_options, make_parser, parse, report, take_turns

from tread_zoo.contract.crossing import Crossing
from tread_zoo.diffusion import default_labels
from tread_zoo.evaluation.flops import count_flops, training_flops
from tread_zoo.factory import add_routing
from tread_zoo.registry import create
from tread_zoo.routing import Stack, Step
from tread_zoo.routing.method import counted_images
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_image_generator

SCHEDULE_STEPS = 10000  # of the run over which a schedule is averaged


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--routing", nargs="*", default=[], help="fields of the group routing")
    args, backbone = parse(parser)
    routing = create("routing", {"name": "tread", **as_options(args.routing)})
    add_routing(backbone, routing)
    backbone.to(args.device)
    stack, batch = Stack.of(backbone), args.batch_size
    images = make_image_generator("benchmark", images=range(batch), device=args.device)
    routes = routing.route(stack, images, Step(0, SCHEDULE_STEPS, 0))
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

    print(routing.describe(stack))
    steps = {"dense": lambda: step(()), "routed": lambda: step(routes)}
    seconds = take_turns(steps, args.rounds, args.device)
    flops = {
        "dense": count_flops(backbone, backward=True),
        "routed": count_flops(
            backbone,
            routes=routing.route(stack, counted_images(), Step(0, SCHEDULE_STEPS, 0)),
            backward=True,
        ),
    }
    report(seconds, flops)
    if len(list(routing.variants(stack, SCHEDULE_STEPS))) > 1:
        average = training_flops(backbone, routing, SCHEDULE_STEPS) / flops["dense"]
        print(f"over the whole schedule FLOPs / dense is {average:.3f} on average")


if __name__ == "__main__":
    main()
