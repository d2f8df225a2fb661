"""Does routing pay? Time of a routed training step over a dense one, beside the ratio of FLOPs.

python scripts/benchmark_routing.py backbone=dit backbone.hidden_size=256
python scripts/benchmark_routing.py backbone=mamba backbone.hidden_size=192

Dense and routed steps (forward, backward, AdamW) take turns, so that a machine whose speed drifts
slows both; the medians and the ratio of each pair are printed. The last line is JSON.

A routing with a schedule is timed at its first rate; the FLOPs over the whole schedule are printed
beside it. With selector=norm the importance is computed in every routed step, as in training.
"""

import json
import logging
import statistics
import time
from collections.abc import Sequence

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

register_configs()
logger = logging.getLogger(__name__)

SCHEDULE_STEPS = 10000  # of the run over which a schedule is averaged


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark_routing")
@clear_errors
def main(config: DictConfig) -> None:
    import torch

    from tread_zoo import create_backbone
    from tread_zoo.evaluation.flops import count_flops, training_flops
    from tread_zoo.kernels import set_forms
    from tread_zoo.routing import PendingRoute, Route, build_routing, resolve_routes
    from tread_zoo.runtime import autocast, describe_device, resolve_device, resolve_precision
    from tread_zoo.seeding import make_generator

    settings = as_keywords(config)
    set_forms(settings["kernels"])
    device = resolve_device(settings["device"])
    precision = resolve_precision(settings["precision"], device)
    batch = settings["batch_size"]
    network = create_backbone(
        input_size=settings["input_size"],
        in_channels=settings["in_channels"],
        num_classes=settings["num_classes"],
        **settings["backbone"],
    )
    routing = build_routing(
        **settings["routing"],
        num_blocks=network.num_blocks,
        default_selector=network.default_selector,
        default_range=network.default_range,
    )
    network.add_fusions(routing.fused_ranges)
    network.to(device)
    generator = make_generator("benchmark", 0)
    routes = tuple(r.to(device) for r in routing.draw(batch, network.grid, generator))
    x = torch.randn(batch, network.in_channels, *network.input_size, device=device)
    t = torch.rand(batch, device=device)
    y = torch.randint(network.num_classes, (batch,), device=device) if network.num_classes else None
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=device.type != "mps")

    def step(used: Sequence[Route | PendingRoute]) -> float:
        began = time.perf_counter()
        with autocast(device, precision):
            concrete = resolve_routes(used, lambda start: network.importance(x, t, y, start))
            out = network(x, t, y, routes=concrete)
        (out.float() - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for used in (routes, ()) * 2:
        step(used)
    pairs = [(step(()), step(routes)) for _ in range(settings["num_rounds"])]
    dense, routed = (statistics.median(column) for column in zip(*pairs, strict=True))
    time_ratio = statistics.median(r / d for d, r in pairs)
    one = routing.draw(1, network.grid, generator)
    flops = [count_flops(network, routes=used, backward=True) for used in ((), one)]
    flops_ratio = flops[1] / flops[0]
    logger.info("%s on %s, %s", network.name, describe_device(device), precision)
    logger.info(
        "%d tokens, batch %d, %s", network.num_tokens, batch, routing.describe(network.grid)
    )
    logger.info("dense  %8.1f ms a step  %8.1f MFLOPs an image", dense * 1e3, flops[0] / 1e6)
    logger.info("routed %8.1f ms a step  %8.1f MFLOPs an image", routed * 1e3, flops[1] / 1e6)
    logger.info(
        "time ratio %.3f, FLOPs ratio %.3f: %.3f of it",
        time_ratio, flops_ratio, time_ratio / flops_ratio,
    )  # fmt: skip
    schedule_ratio = training_flops(network, routing, SCHEDULE_STEPS) / flops[0]
    if routing.is_scheduled:
        logger.info("over the whole schedule the FLOPs ratio is %.3f on average", schedule_ratio)
    record = {
        "backbone": network.name, "dense_ms": dense * 1e3, "routed_ms": routed * 1e3,
        "time_ratio": time_ratio, "flops_ratio": flops_ratio,
        "schedule_flops_ratio": schedule_ratio,
    }  # fmt: skip
    logger.info("%s", json.dumps(record))


if __name__ == "__main__":
    main()
