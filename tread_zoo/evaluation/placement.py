"""Where in the depth to route: how alike the token states between the blocks of a trained network.

    state s_i    what block i is given, s_depth what the last one gives: all streams side by side
    cosine       S_ij = mean over tokens of  s_i . s_j / (|s_i| |s_j|)
    linear CKA   S_ij = |X_i^T X_j|^2 / (|X_i^T X_i| |X_j^T X_j|), Frobenius norms, the columns of
                 X_i [n, D] centred over tokens                     (arXiv 1905.00414, section 3)
    change       c_i = 1 - S_{i,i+1}, of block i, averaged over noise levels

A bypassed token carries s_start past the blocks of a route to where s_end is expected, so that
blocks which change their tokens little lose little. Cosine holds a turned state for a change, which
it is for plain rejoining; CKA does not, as a fusion at rejoining can turn it back.

The rule of the proposal: of all ranges [start, end) without the first and the last block, which
no long skip enters or leaves, take the one with the greatest gain, the sum over its blocks of
(m - c_i), where m is the mean of c without the first and the last block; of equals the longest. So
it takes in blocks that change their tokens less than the average one, and one that changes them
more only where its neighbours on both sides make up for it. It says where states change little,
and no more: whether a network trains better so is for a run to tell.

B batch, N tokens of the grid, n tokens measured, D channels of all streams, S = depth + 1 states.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.backbone import Backbone, Layout, Streams
from tread_zoo.data import PIXELS, Codec, ImageData
from tread_zoo.diffusion import Draw, Objective, default_labels
from tread_zoo.diffusion.samplers import Euler, Problem, initial_noise
from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.evaluation.held_out import stack_part
from tread_zoo.kinds import check_fields
from tread_zoo.registry import create_backbone
from tread_zoo.routing import build_routing, num_kept_tokens
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

MEASURES = ("cosine", "cka")


@dataclass(frozen=True)
class PlacementOptions:
    """How to measure, and for which routing.

    Args:
        measure: `cosine` or `cka`.
        num_images: images or, without data, samples.
        num_levels: noise levels, of the objective's own grid, which falls to its last one above 0.
        max_tokens: measured at most, all images together; the same places in each.
        batch_size: images at a time.
        selection_rate: of the route whose saving is counted.
        seed: of the noise and of the places.

    Raises:
        ValueError: a value that cannot work, with its name.
    """

    measure: str
    num_images: int
    num_levels: int
    max_tokens: int
    batch_size: int
    selection_rate: float
    seed: int

    def __post_init__(self) -> None:
        check_fields("probe", self)
        if self.measure not in MEASURES:
            raise unknown_name("measure", self.measure, MEASURES)
        for name in ("num_images", "num_levels", "max_tokens", "batch_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        num_kept_tokens(1, self.selection_rate)


@dataclass(frozen=True)
class Proposal:
    """A range of blocks, and how much less they change their tokens than as many average ones."""

    start: int
    end: int
    gain: float


def probe_placement(
    backbone: Backbone,
    objective: Objective,
    data: ImageData | None,
    options: PlacementOptions,
    *,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Measure a trained network's states, propose a route, and return all numbers as plain values.

    Args:
        backbone: trained; on the device to run on.
        objective: the one it was trained with.
        data: what it was trained on, whose held-out images are taken, or training ones where none
            are held out; None measures along the network's own sampling, from noise to samples.
        options: how.
        precision: resolved, see `tread_zoo.runtime`.

    Raises:
        ValueError: a depth of less than 3 blocks, or an option that cannot work.
    """
    part, source = None, "samples on their way from noise"
    if data is not None:
        held_out = data.held_out is not None
        part, kind = (data.held_out, "held-out") if held_out else (data.train, "training")
        source = f"{kind} images of {data.name}"
    levels, num_images, states = token_states(
        backbone, objective, part, options,
        precision=precision, codec=PIXELS if data is None else data.codec,
    )  # fmt: skip
    each = torch.stack([similarity(found, options.measure) for found in states])
    mean = each.mean(dim=0)
    changes = (1 - mean.diagonal(offset=1)).tolist()
    proposal = propose_route(changes, backbone.skips)
    return {
        "backbone": backbone.name,
        "source": source,
        "measure": options.measure,
        "num_images": num_images,
        "num_tokens": states[0].shape[1],
        "seed": options.seed,
        "precision": precision,
        "levels": levels,
        "similarity": each.tolist(),
        "mean_similarity": mean.tolist(),
        "changes": changes,
        **_costs(backbone, mean, options, proposal),
    }


@torch.no_grad()
def token_states(
    backbone: Backbone,
    objective: Objective,
    dataset: Dataset | None,
    options: PlacementOptions,
    *,
    precision: str = "fp32",
    codec: Codec = PIXELS,
) -> tuple[list[float], int, list[Tensor]]:
    """Return the noise levels, the number of images, and for each level the states [S, n, D],
    float32 on the CPU.

    Extra tokens are left out: they are never routed. `dataset` None starts from noise. `codec` is
    the data's; latents with moments are taken at their mean.
    """
    device = next(backbone.parameters()).device
    levels = objective.levels(options.num_levels)
    images, labels = None, default_labels(range(options.num_images), backbone.num_classes)
    if dataset is not None:
        images, found = stack_part(dataset, options.num_images)
        labels = found if backbone.is_conditional else None
    count = options.num_images if images is None else len(images)
    shape = (backbone.in_channels, *backbone.input_size)
    places, batches = _places(backbone, count, options), []
    for first in range(0, count, options.batch_size):
        indices = range(first, min(first + options.batch_size, count))
        noise = initial_noise(shape, options.seed, indices).to(device)
        y = None if labels is None else labels[first : indices.stop].to(device)

        network = functools.partial(_call, backbone, y)
        with autocast(device, precision), recording(backbone, places) as seen:
            if images is None:
                dx_dt = functools.partial(objective.dx_dt, network)
                problem = Problem(dx_dt, objective, lambda step, own=noise: own)  # type: ignore[misc]
                Euler()(problem, noise * objective.initial_std, levels)
            else:
                x = codec.to_model(images[first : indices.stop], device=device)
                for level in levels[:-1].tolist():
                    objective.loss(network, x, Draw(noise, noise.new_full((len(x),), level)))
        batches.append(seen)
    by_level = zip(*batches, strict=True)
    return levels[:-1].tolist(), count, [torch.cat(found, dim=1) for found in by_level]


@contextmanager
def recording(backbone: Backbone, places: Tensor) -> Iterator[list[Tensor]]:
    """Record the states of every dense call: a list of float32 [S, B * len(places), D].

    Args:
        backbone: while this lasts its blocks are watched.
        places: int64 raster positions of the tokens to record.
    """
    seen: list[Tensor] = []
    states: list[Tensor] = []
    rows = places + backbone.num_extra_tokens
    original, own = backbone.run_block, vars(backbone).get("run_block")

    def state_of(streams: Streams) -> Tensor:
        picked = [stream[:, rows.to(stream.device)].float() for stream in streams]
        return torch.cat(picked, dim=-1).flatten(0, 1).cpu()

    def watched(
        index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        states.append(state_of(streams))
        after = original(index, streams, condition, layout, skip)
        if index == backbone.num_blocks - 1:
            seen.append(torch.stack([*states, state_of(after)]))
            states.clear()
        return after

    backbone.run_block = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del backbone.run_block
        if own is not None:
            backbone.run_block = own  # type: ignore[method-assign]


def similarity(states: Tensor, measure: str) -> Tensor:
    """Return the likeness float64 [S, S] of states [S, n, D], 1 on the diagonal.

    Raises:
        ValueError: an unknown measure.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    if measure == "cosine":
        flat = F.normalize(states.double(), dim=-1).flatten(1)
        return flat @ flat.T / states.shape[1]
    centred = states - states.mean(dim=1, keepdim=True)
    count = len(states)
    products = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i, count):
            cross = centred[i].T @ centred[j]
            products[i, j] = products[j, i] = cross.double().square().sum()
    norms = products.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return products / (norms[:, None] * norms)


def propose_route(changes: Sequence[float], skips: Mapping[int, int]) -> Proposal:
    """Return the range [start, end) by the rule at the top of this file.

    Args:
        changes: c_i of each block.
        skips: producer by consumer, as in `Backbone.skips`.

    Raises:
        ValueError: fewer than 3 blocks, or skips that every range would cut.
    """
    depth, middle = len(changes), changes[1:-1]
    mean = sum(middle) / max(len(middle), 1)
    proposals = [
        Proposal(start, end, sum(mean - change for change in changes[start:end]))
        for start in range(1, depth - 1)
        for end in range(start + 1, depth)
        if all((start <= c < end) == (start <= p < end) for c, p in skips.items())
    ]
    if not proposals:
        raise ValueError(
            f"no range of the {depth} blocks leaves out the first and the last one and keeps every "
            "long skip whole: a route needs 3 blocks or more."
        )
    return max(proposals, key=lambda found: (round(found.gain, 9), found.end - found.start))


def describe_placement(record: Mapping[str, Any]) -> list[str]:
    """Return a record of `probe_placement` as lines of text."""
    levels = ", ".join(f"{level:.3g}" for level in record["levels"])
    lines = [
        f"{record['measure']} of {record['num_tokens']} token states, {record['num_images']} "
        f"{record['source']}, mean over the levels {levels}",
        "     " + "".join(f"{j:6d}" for j in range(len(record["mean_similarity"]))),
    ]
    for i, row in enumerate(record["mean_similarity"]):
        lines.append(f"{i:5d}" + "".join(f"{value:6.2f}" for value in row))
    changes = "  ".join(f"{i} {change:.3f}" for i, change in enumerate(record["changes"]))
    lines.append(f"change by block: {changes}")
    for name, title in (("default_route", "auto"), ("route", "proposed")):
        route = record[name]
        lines.append(
            f"{title:8s} [{route['start']}, {route['end']}): the states at its ends are "
            f"{route['similarity']:.3f} alike; at selection_rate={record['selection_rate']:g} a "
            f"training step needs {route['saving']:.1%} fewer FLOPs than dense"
        )
    route = record["route"]
    lines.append(f"try: routing=tread routing.start={route['start']} routing.end={route['end']}")
    return lines


def _call(backbone: Backbone, y: Tensor | None, x: Tensor, t: Tensor) -> Tensor:
    return backbone(x, t, y)


def _costs(
    backbone: Backbone, mean: Tensor, options: PlacementOptions, proposal: Proposal
) -> dict[str, Any]:
    """Return the FLOPs of a dense training step an image by torch's counter and, of the proposed
    and of the default route, the likeness at the ends, FLOPs and saving 1 - routed / dense."""
    network = _without_fusions(backbone)
    dense = count_flops(network, backward=True)

    def numbers(start: int | str, end: int | str) -> dict[str, Any]:
        routing = build_routing(
            "tread",
            num_blocks=network.num_blocks,
            default_selector=network.default_selector,
            default_range=network.default_range,
            selection_rate=options.selection_rate,
            start=start,
            end=end,
        )
        (route,) = routing.draw(1, network.grid, make_generator("placement", options.seed))
        routed = count_flops(network, routes=[route], backward=True)
        return {
            "start": route.start,
            "end": route.end,
            "similarity": float(mean[route.start, route.end]),
            "flops_routed": routed,
            "saving": 1 - routed / dense,
        }

    return {
        "selection_rate": options.selection_rate,
        "flops_dense": dense,
        "route": {"gain": proposal.gain, **numbers(proposal.start, proposal.end)},
        "default_route": numbers("auto", "auto"),
    }


def _without_fusions(backbone: Backbone) -> Backbone:
    """Return the network to count FLOPs of: one that can be routed anywhere."""
    if not backbone.fused_ranges:
        return backbone
    assert backbone.name is not None, "the registry names what it builds"
    with torch.device("meta"):
        return create_backbone(backbone.name, **backbone.config)


def _places(backbone: Backbone, num_images: int, options: PlacementOptions) -> Tensor:
    """Return the raster positions to measure: all, or as many as `max_tokens` allows, at random."""
    count = min(backbone.num_tokens, max(1, options.max_tokens // num_images))
    generator = make_generator("placement", options.seed)
    return torch.randperm(backbone.num_tokens, generator=generator)[:count].sort().values
