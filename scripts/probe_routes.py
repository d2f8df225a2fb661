"""Where to route: how much each block of a trained network changes its tokens.

tread-zoo probe checkpoint=runs/digits_dit_tiny_none_flow_seed0
tread-zoo probe checkpoint=… measure=cka selection_rate=0.75

Prints how similar the states between blocks are, how much the output changes without each block,
and a proposed route with the FLOPs that it saves; placement.json has every number. The rule is at
the top of tread_zoo/routing/placement.py. Use a dense run: a routed one has adapted to its route.
"""

import json
import logging
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from tread_zoo.cli import command
from tread_zoo.config import CheckpointConfig
from tread_zoo.diffusion import Draw, build_sampling, default_labels, generate, initial_noise
from tread_zoo.evaluation.contribution import (
    data_contributions,
    describe_contributions,
    ranges_of,
)
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.evaluation.held_out import stack_part
from tread_zoo.factory import create_backbone
from tread_zoo.fields import OPTIONS, Fraction, check
from tread_zoo.kernels import set_forms
from tread_zoo.routing.placement import propose_route, recording, similarity
from tread_zoo.runs.restore import Restored, restore
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ProbeConfig(CheckpointConfig):
    """What tread-zoo probe measures.

    Args:
        out: folder of placement.json; null is <run>/placement.
        data: options that differ from the run's, as in data={path: …}.
        measure: cosine counts a rotated state as changed, cka does not.
        num_images: held-out images; without data, as of an imported checkpoint, samples on their
            way from noise.
        num_levels: noise levels, over the objective's range.
        max_tokens: most tokens, all images together; their places are the same in each image.
        batch_size: images per batch.
        selection_rate: of the route whose saving is counted.
        seed: of the noise and of the places.
    """

    data: dict[str, Any] = field(default_factory=dict)
    measure: Literal["cosine", "cka"] = "cosine"
    num_images: PositiveInt = 64
    num_levels: PositiveInt = 5
    max_tokens: PositiveInt = 4096
    batch_size: PositiveInt = 64
    selection_rate: Fraction = 0.5
    seed: int = 0


@command("probe_routes", ProbeConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(ProbeConfig, settings)
    set_forms(config.kernels)
    run = restore(
        config.checkpoint, weights=config.weights, device=config.device, precision=config.precision
    )
    out = Path(config.out or run.run_dir / "placement").expanduser()
    out.mkdir(parents=True, exist_ok=True)
    record = probe(run, config)
    for line in describe(record):
        logger.info("%s", line)
    (out / "placement.json").write_text(json.dumps(record, indent=2))
    logger.info("written to %s", out / "placement.json")


def probe(run: Restored, config: ProbeConfig) -> dict[str, Any]:
    """Return the similarities, the proposed and the default route, and what they save."""
    levels, states, source = token_states(run, config)
    by_level = torch.stack([similarity(some, config.measure) for some in states])
    mean, backbone, worth = by_level.mean(dim=0), run.backbone, {}
    if run.has_data:
        worth["contributions"] = data_contributions(
            backbone, run.objective, run.data(config.data), ranges=ranges_of(backbone, run.routing),
            precision=run.precision, batch_size=config.batch_size, num_images=config.num_images,
        )  # fmt: skip
    changes = (1 - mean.diagonal(offset=1)).tolist()
    proposal = propose_route(changes, backbone.skips)
    if backbone.fused_ranges or backbone.masked_ranges:  # it accepts no other routes
        with torch.device("meta"):
            backbone = create_backbone(backbone.name, **backbone.config)  # type: ignore[arg-type]
    dense = count_flops(backbone, backward=True)

    def cost(start: int | str, end: int | str) -> dict[str, Any]:
        routing = backbone.build_routing(selection_rate=config.selection_rate, start=start, end=end)
        (route,) = routing.draw(1, backbone.grid, make_generator("placement", config.seed))
        routed = count_flops(backbone, routes=[route], backward=True)
        return {
            "start": route.start,
            "end": route.end,
            "similarity": float(mean[route.start, route.end]),
            "flops_routed": routed,
            "saving": 1 - routed / dense,
        }

    return {
        "backbone": backbone.name,
        "source": source,
        "measure": config.measure,
        "num_tokens": states[0].shape[1],
        "seed": config.seed,
        "precision": run.precision,
        "weights": config.weights,
        "step": run.checkpoint.step,
        "levels": levels,
        "similarity": by_level.tolist(),
        "mean_similarity": mean.tolist(),
        "changes": changes,
        **worth,
        "selection_rate": config.selection_rate,
        "flops_dense": dense,
        "route": {"gain": proposal.gain, **cost(proposal.start, proposal.end)},
        "default_route": cost("auto", "auto"),
    }


def token_states(run: Restored, config: ProbeConfig) -> tuple[list[float], list[Tensor], str]:
    """Return the noise levels, the states [S, n, D] at each, and the source of the tokens: held-out
    images or, without data, samples on their way from noise."""
    backbone, objective, num_images = run.backbone, run.objective, config.num_images
    device, shape = next(backbone.parameters()).device, (backbone.in_channels, *backbone.input_size)
    generator = make_generator("placement", config.seed)
    places = torch.randperm(backbone.num_tokens, generator=generator)
    places = places[: max(1, config.max_tokens // num_images)].sort().values
    levels = objective.levels(config.num_levels)[:-1].tolist()
    if not run.has_data:
        indices = range(num_images)
        with recording(backbone, places) as calls:
            generate(
                backbone, objective,
                build_sampling({"name": "euler", "num_steps": config.num_levels}, {"name": "none"}),
                indices=indices, labels=default_labels(indices, backbone.num_classes),
                seed=config.seed, batch_size=num_images, precision=run.precision,
            )  # fmt: skip
        return levels, calls, f"{num_images} samples on their way from noise"
    data = run.data(config.data)
    part, kind = (data.train, "training") if data.held_out is None else (data.held_out, "held-out")
    images, labels = stack_part(part, num_images)
    batches = []
    for rows in torch.arange(len(images)).split(config.batch_size):
        y = labels[rows].to(device) if backbone.is_conditional else None
        noise = initial_noise(shape, config.seed, rows.tolist()).to(device)
        x = data.codec.to_model(images[rows], device=device)
        with torch.no_grad(), autocast(device, run.precision), recording(backbone, places) as calls:
            for level in levels:
                draw = Draw(noise, noise.new_full((len(x),), level))
                objective.loss(partial(backbone, y=y), x, draw)
        batches.append(calls)
    states = [torch.cat(some, dim=1) for some in zip(*batches, strict=True)]
    return levels, states, f"{len(images)} {kind} images of {data.name}"


def describe(record: dict[str, Any]) -> list[str]:
    """Return a record as lines of text."""
    levels = ", ".join(f"{level:.3g}" for level in record["levels"])
    lines = [
        f"{record['measure']} of {record['num_tokens']} token states, {record['source']}, mean "
        f"over the levels {levels}",
        "     " + "".join(f"{j:6d}" for j in range(len(record["mean_similarity"]))),
    ]
    for i, row in enumerate(record["mean_similarity"]):
        lines.append(f"{i:5d}" + "".join(f"{value:6.2f}" for value in row))
    changes = "  ".join(f"{i} {change:.3f}" for i, change in enumerate(record["changes"]))
    lines.append(f"change by block: {changes}")
    if "contributions" in record:
        lines += describe_contributions(record["contributions"])
    for name, title in (("default_route", "auto"), ("route", "proposed")):
        route = record[name]
        lines.append(
            f"{title:8s} [{route['start']}, {route['end']}): similarity {route['similarity']:.3f} "
            f"of the states at its ends; at selection_rate={record['selection_rate']:g} a training "
            f"step takes {route['saving']:.1%} fewer FLOPs than dense"
        )
    route = record["route"]
    lines.append(f"try: routing=tread routing.start={route['start']} routing.end={route['end']}")
    return lines


if __name__ == "__main__":
    main()
