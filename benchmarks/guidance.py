"""What does guidance cost? The time of a guided sampling step, beside its FLOPs.

python benchmarks/guidance.py
python benchmarks/guidance.py mamba --guidances cfg '{name: sparse, weak_rate: 0.5}'

A step evaluates the guided dx/dt of a batch once, at flow matching's t = 1. Ratios compare with the
first guidance. "time over FLOPs" is 1 where a cheaper weak prediction saves as much time as FLOPs.
"""

from dataclasses import replace

import torch
from omegaconf import OmegaConf
from timing import make_parser, parse, report, take_turns

from tread_zoo.diffusion import FlowMatching, ImageBatch, build_sampling
from tread_zoo.evaluation.flops import count_sampling
from tread_zoo.registry import create
from tread_zoo.runtime import autocast


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--guidances", nargs="*", default=["cfg", "sparse", "none"])
    args, backbone = parse(parser)
    backbone.eval()
    objective, batch = FlowMatching(), args.batch_size
    labels = torch.arange(batch, device=args.device) % backbone.num_classes
    trained = create("routing", "tread")
    images = ImageBatch(
        backbone, objective, labels, range(batch), seed=0, levels=objective.levels(1),
        routing=trained,
    )  # fmt: skip
    x = torch.randn(batch, backbone.in_channels, *backbone.input_size, device=args.device)
    level = torch.ones(batch, device=args.device)
    steps, flops = {}, {}

    def step(dx_dt) -> None:
        with torch.no_grad(), autocast(args.device, args.precision):
            dx_dt(x, level)

    for word in dict.fromkeys(args.guidances):
        part = OmegaConf.to_container(OmegaConf.from_dotlist([f"guidance={word}"]))["guidance"]
        options = build_sampling({"name": "euler", "num_steps": 1}, part)
        options = replace(options, trained=trained)
        flops[word] = count_sampling(backbone, objective, options).flops
        dx_dt = options.guidance.dx_dt(images)
        steps[word] = lambda dx_dt=dx_dt: step(dx_dt)
    report(take_turns(steps, args.rounds, args.device), flops)


if __name__ == "__main__":
    main()
