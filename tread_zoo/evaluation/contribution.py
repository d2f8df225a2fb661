"""Contributions of blocks: how much a trained network's output and loss change without a block.

    c = |F - F_without| / |F|       over all images at a noise level; then the mean of three levels
    r = L_without / L - 1           the rise of the loss, over all images and levels

F is the network's output before the objective rescales it, and L is the loss. For F_without and
L_without the block (or a range of blocks) is skipped: all tokens pass it unchanged. The levels are
the quantiles .2, .5 and .8 of the objective's training levels: t = .2, .5, .8 if t is uniform. A
block with a small c need not be idle: the loss may rise by 2 % and samples be far worse.

B batch, C channels, H height, W width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.crossing import Crossing
from tread_zoo.data import ImageData
from tread_zoo.diffusion import Objective, SamplingOptions, default_labels, generate
from tread_zoo.diffusion.objective import Draw
from tread_zoo.evaluation.held_out import stack_part
from tread_zoo.routing import Method, Skip, Stack
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator, make_image_generator, per_image_generator

NUM_IMAGES = 64
QUANTILES = (0.2, 0.5, 0.8)
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
    """Return the record of `contributions` on up to `num_images` evenly spaced held-out images of
    `data`, or training images if none were held out. For the rest see `contributions`."""
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


def own_contributions(
    backbone: Backbone,
    objective: Objective,
    sampling: SamplingOptions,
    *,
    precision: str,
    num_images: int = 16,
) -> dict[str, Any]:
    """Return the record of `contributions` on `num_images` images that the network samples itself,
    as `sampling` says. The ranges are those of `ranges_of` for the routing in training.

    No data are needed. Tests on a network for digits find that the same blocks matter as on real
    images.
    """
    indices, device = range(num_images), next(backbone.parameters()).device
    labels = default_labels(indices, backbone.num_classes)
    x = generate(
        backbone, objective, sampling, indices=indices, labels=labels, seed=0,
        batch_size=num_images, precision=precision,
    )  # fmt: skip
    y, ranges = None if labels is None else labels.to(device), ranges_of(backbone, sampling.trained)
    return contributions(backbone, objective, x.to(device), y, ranges=ranges, precision=precision)


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
    """Return a record of how much each block and each range of blocks contributes.

    `blocks` lists for each block how much the output changes without it, c in the module's
    docstring. `ranges` has an entry [start, end, c] for each range. Both are fractions, not
    percent. `loss_rises` lists by what fraction the loss rises, r, without each block, then without
    each range. `loss` is the loss of the whole network. Noise and levels are the same in every
    call.

    Args:
        backbone, objective: a trained network and its objective.
        x, y: clean images [B,C,H,W] in the model's range; labels [B], contexts, or None.
        ranges: ranges of blocks, [start, end).
        precision: a resolved precision, see `tread_zoo.runtime`.
        batch_size: inputs per batch; each image is one input per level.
    """
    generator = make_generator("worth")

    def draw(*shape: int) -> Draw:
        return objective.draw(shape, per_image_generator(generator, shape[0]))

    levels = draw(100_000, 1, 1, 1).level.quantile(torch.tensor(QUANTILES))
    noise = draw(*x.shape).noise.to(x.device)
    spans = [*((i, i + 1) for i in range(backbone.num_blocks)), *ranges]
    left_out = [Skip(*span) for span in spans]
    squares = torch.zeros(1 + len(left_out), len(x) * len(levels), dtype=torch.float64)
    rows, losses = torch.arange(squares.shape[1]), [0.0] * len(squares)

    for some in rows.split(batch_size):
        image, level = some // len(levels), levels[some % len(levels)].to(x.device)
        labels, whole = None if y is None else y[image], None
        for index, routes in enumerate([(), *((each,) for each in left_out)]):
            outputs = list[Tensor]()
            predict = _recorded(backbone, labels, routes, precision, outputs)
            each, _ = objective.loss(predict, x[image], Draw(noise[image], level))
            losses[index] += float(each.double().sum())
            whole = outputs[0] if whole is None else whole
            change = (whole - outputs[0] if index else whole)[:, : x.shape[1]]  # no variance
            squares[index, some] = change.double().square().sum(dim=(1, 2, 3)).cpu()

    total, *changes = squares.view(len(squares), len(x), len(levels)).sum(dim=1)
    tiny = torch.finfo(torch.float64).tiny
    fractions = [float((each / total.clamp_min(tiny)).sqrt().mean()) for each in changes]
    by_range = zip(ranges, fractions[backbone.num_blocks :], strict=True)
    return {
        "num_images": len(x),
        "levels": levels.tolist(),
        "blocks": fractions[: backbone.num_blocks],
        "ranges": [[start, end, value] for (start, end), value in by_range],
        "loss": losses[0] / len(rows),
        "loss_rises": [without / losses[0] - 1 for without in losses[1:]],
    }


def _recorded(
    backbone: Backbone,
    labels: Tensor | None,
    routes: Sequence[Crossing],
    precision: str,
    outputs: list[Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of (x_t, t) for `Objective.loss`: it runs the network with `labels`, in
    autocast of `precision`, and with the crossings `routes`, which skip blocks. It appends the
    output to `outputs` and returns it."""

    def predict(x_t: Tensor, t: Tensor) -> Tensor:
        with autocast(x_t.device, precision):
            outputs.append(backbone(x_t, t, labels, routes=routes))
        return outputs[-1]

    return predict


def ranges_of(backbone: Backbone, routing: Method) -> Ranges:
    """Return the ranges [start, end) of blocks that `routing` routes. If it routes none, return the
    backbone's default range, or [] if that is empty."""
    default = range(backbone.num_blocks)[slice(*backbone.default_range)]
    ranges = routing.ranges(Stack.of(backbone))
    return ranges or ([(default.start, default.stop)] if default else [])


def contribution_names(record: Mapping[str, Any]) -> dict[str, float]:
    """Return by name how much each block and range changes the output, from a record of
    `contributions`: `contribution_3` for block 3, `contribution_2_8` for the range [2, 8)."""
    blocks = {f"contribution_{i}": value for i, value in enumerate(record.get("blocks", ()))}
    return blocks | {f"contribution_{a}_{b}": value for a, b, value in record.get("ranges", ())}


def describe_contributions(record: Mapping[str, Any]) -> list[str]:
    """Return a record of `contributions` as lines of text."""
    values = "  ".join(f"{i} {value:.3f}" for i, value in enumerate(record["blocks"]))
    lines = [f"output changes without block: {values}"]
    rises = record.get("loss_rises", [])[len(record["blocks"]) :]  # earlier records have none
    for number, (start, end, value) in enumerate(record["ranges"]):
        text = f"blocks {start} … {end - 1} change the output by {100 * value:.2g} %"
        if number < len(rises):
            text += f"; without them the loss rises by {100 * rises[number]:.2g} %"
        lines.append(text)
    return lines
