"""The loss on held-out images. Noise and noise levels are fixed, so runs can be compared."""

import hashlib
import json
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import ImageData, read_items
from tread_zoo.data.dataset import as_bytes
from tread_zoo.data.split import evenly_spaced
from tread_zoo.diffusion import Objective
from tread_zoo.diffusion.objective import Draw
from tread_zoo.registry import describe_part
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_image_generator

HELD_OUT_IMAGES = 512
# Fields of objectives that only matter in sampling, or only in training.
_OF_SAMPLING = (
    "sigma_min", "sigma_max", "rho", "second_level_fraction", "equal_fraction", "loss_power",
    "derivative", "step", "guidance_scale", "guidance_mix",
)  # fmt: skip


@torch.no_grad()
def held_out_loss(
    backbone: Backbone,
    objective: Objective,
    data: ImageData,
    *,
    seed: int,
    precision: str,
    num_draws: int = 1,
    batch_size: int = HELD_OUT_IMAGES,
) -> tuple[float, list[float]] | None:
    """Return the mean loss on held-out images, without routing, and a list of means over quarters
    of all losses: the quarter with the lowest noise levels first, the highest last. Return None
    without held-out images.

    Each image is noised `num_draws` times. Levels and noise depend only on the seed, so steps and
    networks can be compared. `precision` is a resolved one, see `tread_zoo.runtime`.
    """
    if data.held_out is None:
        return None
    images, labels = stack_part(data.held_out, HELD_OUT_IMAGES)
    device = next(backbone.parameters()).device
    y = labels.to(device) if backbone.is_conditional else None

    losses, levels = [], []
    for number in range(num_draws):
        generator = make_image_generator("held_out", seed, number, images=range(len(images)))
        draw = objective.draw(data.codec.model_shape(images.shape), generator).to(device)
        noise = data.codec.draw(images.shape, generator)
        x = data.codec.to_model(images, device=device, noise=noise)
        for first in range(0, len(x), batch_size):
            rows = slice(first, first + batch_size)
            network = partial(backbone, y=None if y is None else y[rows])
            part = Draw(draw.noise[rows], draw.level[rows])
            with autocast(device, precision):
                losses.append(objective.loss(network, x[rows], part)[0].float().cpu())
        levels.append(draw.level.cpu())
    by_level = torch.cat(losses)[torch.cat(levels).argsort()]
    fourths = [float(part.mean()) for part in by_level.tensor_split(4)]
    return float(by_level.double().mean()), fourths


def held_out_record(
    objective: Objective, data: ImageData, *, seed: int, num_draws: int
) -> dict[str, Any]:
    """Return what the held-out loss depends on besides the network; {} without held-out images.

    `seed` and `num_draws` are those of `held_out_loss`. `held_out_sha256` is a hash of the stored
    images in order, their labels or contexts, and the normalization of latents.
    """
    if data.held_out is None:
        return {}
    digest = hashlib.sha256(json.dumps(data.codec.metadata, sort_keys=True).encode())
    images, conditions = stack_part(data.held_out, HELD_OUT_IMAGES)
    for tensor in (images, conditions):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(as_bytes(tensor))
    options = asdict(objective)  # type: ignore[call-overload]
    scored = {name: value for name, value in options.items() if name not in _OF_SAMPLING}
    return {
        "held_out_objective": {"name": describe_part("objective", objective)["name"], **scored},
        "held_out_images": len(images),
        "held_out_draws": num_draws,
        "held_out_seed": seed,
        "held_out_sha256": digest.hexdigest(),
    }


def stack_part(dataset: Dataset[Any], count: int) -> tuple[Tensor, ...]:
    """Return n items of a data set, `count` or all if it has fewer: images as stored [n, …], and
    labels [n] or contexts [n, T, S], T embeddings of width S. The items are evenly spaced, because
    the first ones of a sorted data set have few classes."""
    return read_items(dataset, evenly_spaced(len(dataset), count))  # type: ignore[arg-type]
