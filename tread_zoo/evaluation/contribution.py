"""Contributions of blocks: how much a trained network's output changes without them.

    c_l = |F - F_without| / |F|        over all images at noise level l; the mean over three levels

F is the raw output, whose scaling the objective sets. The levels are the quantiles .2, .5 and .8 of
the objective's training levels: t = .2, .5, .8 if t is uniform. Streams pass a skipped block
unchanged. If routed blocks contribute nothing, the network is only as deep as the others.

B batch, C channels, H height, W width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import ImageData
from tread_zoo.diffusion import Objective
from tread_zoo.diffusion.objective import Draw
from tread_zoo.evaluation.held_out import stack_part
from tread_zoo.routing import Method, Skip, Stack
from tread_zoo.routing.method import leave_out
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator, make_image_generator, per_image_generator

NUM_IMAGES = 64
QUANTILES = (0.2, 0.5, 0.8)
IDLE = 0.1  # a range that changes the output by less is reported as idle
Ranges = Sequence[tuple[int, int]]


def data_contributions(
    backbone: Backbone,
    objective: Objective,
    data: ImageData,
    *,
    ranges: Ranges,
    precision: str,
    batch_size: int = 250,
    num_images: int = NUM_IMAGES,
) -> dict[str, Any]:
    """Return `contributions` on held-out images, or on training images if none are held out."""
    part = data.train if data.held_out is None else data.held_out
    images, labels = stack_part(part, num_images)
    device = next(backbone.parameters()).device
    generator = make_image_generator("contribution", 1, images=range(len(images)))
    noise = data.codec.draw(images.shape, generator)
    x = data.codec.to_model(images, device=device, noise=noise)
    y = labels.to(device) if backbone.is_conditional else None
    return contributions(
        backbone, objective, x, y, ranges=ranges, precision=precision, batch_size=batch_size
    )


@torch.no_grad()
def contributions(
    backbone: Backbone,
    objective: Objective,
    x: Tensor,
    y: Tensor | None,
    *,
    ranges: Ranges,
    precision: str,
    batch_size: int = 250,
) -> dict[str, Any]:
    """Return the contribution of each block and each range, as a fraction of the output.

    `blocks` has c of each block, `ranges` has [start, end, c] of each range. Noise and levels are
    the same in every call.

    Args:
        backbone, objective: a trained network and its objective.
        x, y: clean images [B,C,H,W] in the model's range; labels [B], contexts, or None.
        ranges: of blocks, [start, end).
        precision: resolved, see `tread_zoo.runtime`.
        batch_size: rows per batch; an image has a row for each level.
    """
    generator = make_generator("worth")

    def draw(*shape: int) -> Draw:
        return objective.draw(shape, per_image_generator(generator, shape[0]))

    levels = draw(100_000, 1, 1, 1).level.quantile(torch.tensor(QUANTILES))
    noise = draw(*x.shape).noise.to(x.device)
    left_out = [*leave_out(range(backbone.num_blocks)), *(Skip(*span) for span in ranges)]
    squares = torch.zeros(1 + len(left_out), len(x) * len(levels), dtype=torch.float64)
    rows = torch.arange(squares.shape[1])

    for some in rows.split(batch_size):
        image = some // len(levels)

        def predict(x_t: Tensor, t: Tensor, some: Tensor = some, image: Tensor = image) -> Tensor:
            labels = None if y is None else y[image]
            with autocast(x.device, precision):
                output: Tensor = backbone(x_t, t, labels)
                changes = [output - backbone(x_t, t, labels, routes=[each]) for each in left_out]
            for index, values in enumerate((output, *changes)):
                data = values[:, : x.shape[1]].double()  # without a learned variance
                squares[index, some] += data.square().sum(dim=(1, 2, 3)).cpu()
            return output

        level = levels[some % len(levels)].to(x.device)
        objective.loss(predict, x[image], Draw(noise[image], level))

    whole, *changes = squares.view(len(squares), len(x), len(levels)).sum(dim=1)
    tiny = torch.finfo(torch.float64).tiny
    fractions = [float((each / whole.clamp_min(tiny)).sqrt().mean()) for each in changes]
    by_range = zip(ranges, fractions[backbone.num_blocks :], strict=True)
    return {
        "num_images": len(x),
        "levels": levels.tolist(),
        "blocks": fractions[: backbone.num_blocks],
        "ranges": [[start, end, value] for (start, end), value in by_range],
    }


def ranges_of(backbone: Backbone, routing: Method) -> Ranges:
    """Return the ranges of the routes; for a dense network its default range, if deep enough."""
    default = range(backbone.num_blocks)[slice(*backbone.default_range)]
    ranges = routing.ranges(Stack.of(backbone))
    return ranges or ([(default.start, default.stop)] if default else [])


def contribution_names(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of `contributions` by name: `contribution_3` of a block, `contribution_2_8`
    of the range [2, 8)."""
    blocks = {f"contribution_{i}": value for i, value in enumerate(record.get("blocks", ()))}
    return blocks | {f"contribution_{a}_{b}": value for a, b, value in record.get("ranges", ())}


def describe_contributions(record: Mapping[str, Any]) -> list[str]:
    """Return the values of `contributions` as lines of text, with a warning of idle ranges."""
    values = "  ".join(f"{i} {value:.3f}" for i, value in enumerate(record["blocks"]))
    lines = [f"output changes without block: {values}"]
    for start, end, value in record["ranges"]:
        text = f"blocks {start} … {end - 1} change the output by {100 * value:.2g} %"
        rest = len(record["blocks"]) - (end - start)
        idle = f": this network may be little more than its {rest} other blocks"
        lines.append(text + (idle if value < IDLE else ""))
    return lines
