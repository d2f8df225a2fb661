"""Score a backbone's samples against real images, with the protocol beside each number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.backbone import Backbone
from tread_zoo.data import ArrayDataset, ImageData
from tread_zoo.data.codec import PixelCodec
from tread_zoo.data.loader import read_items
from tread_zoo.diffusion import Objective, SamplingOptions, default_labels, generate
from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.agreement import digits_agreement, digits_agreement_reference
from tread_zoo.evaluation.features import (
    DIGITS_EXTRACTOR,
    INCEPTION_EXTRACTOR,
    load_features,
)
from tread_zoo.evaluation.flops import count_sampling
from tread_zoo.evaluation.metrics import (
    METRICS,
    check_extractor,
    check_scoring,
    is_file,
    score,
)
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

HELD_OUT_IMAGES = 512  # of the held-out loss
DECODED_AT_ONCE = 1000  # stored latents that are in memory while a reference is decoded


@dataclass(frozen=True)
class EvaluationOptions:
    """What to score.

    Args:
        num_images: samples to draw; image i has label i mod num_classes.
        extractor: `digits-cnn-64`, `inception-v3-compat`, a file of `scripts/make_features.py`,
            or `auto`: the first for digits.
        metrics: among fid, kid, precision, recall, isc.
        reference: `train` or `held_out`, the real images to compare with.
        seed: of the samples.
        batch_size: images at a time.
        inception_weights: file of the Inception weights; null looks in torch's hub folder.
        num_reference: real images to compare with, evenly spaced in their part; null takes all.

    Raises:
        ValueError: a value that cannot work.
    """

    num_images: int
    extractor: str
    metrics: Sequence[str]
    reference: str
    seed: int
    batch_size: int
    inception_weights: str | None = None
    num_reference: int | None = None

    def __post_init__(self) -> None:
        check_extractor("evaluation.extractor", self.extractor, ("auto",))
        for metric in self.metrics:
            if metric not in METRICS:
                raise unknown_name("evaluation.metrics", metric, METRICS)
        if self.reference not in ("train", "held_out"):
            raise unknown_name("evaluation.reference", self.reference, ("train", "held_out"))
        for name in ("num_images", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation.{name}={getattr(self, name)} must be at least 1.")
        if self.num_reference is not None and self.num_reference < 1:
            raise ValueError(
                f"evaluation.num_reference={self.num_reference} must be at least 1, or null for "
                "every image of the part."
            )


def evaluate(
    backbone: Backbone,
    objective: Objective,
    data: ImageData,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    *,
    precision: str = "fp32",
    weak: Backbone | None = None,
    real: Mapping[str, float] | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Sample, score, and return `{"values": …, "real": …, "protocol": …}`.

    `real` has what real images that were not trained on score in the same place: the best that a
    sampler can hope for. For digits, `agreement` is the share of samples that a classifier trained
    on real digits reads as the label they were asked for. Without Inception's weights,
    `extractor=auto` leaves the distances of other data out and says why in `not_scored`.
    Where the model works on latents, samples and real latents are decoded, and images are compared.

    `protocol["sampling"]` is what `sampling_record` returns. `weak` is the weak network of
    guidance=auto. Scoring the same data again, `real` is what an earlier record says of real
    images, which is then not measured anew, and `cache` a folder for their features (see `score`).

    Raises:
        ValueError: the reference is missing, there are too few images, or weights are absent.
    """
    reference = data.train if options.reference == "train" else data.held_out
    if reference is None:
        raise ValueError(f"evaluation.reference=held_out, but {data.name} has no held-out part.")
    settings = sampling_record(backbone, objective, sampling, weak=weak)
    indices = range(options.num_images)
    labels = default_labels(indices, backbone.num_classes)
    record: dict[str, Any] = {"values": {}, "real": dict(real or {})}
    decoded = "" if isinstance(data.codec, PixelCodec) else ", decoded latents"
    record["protocol"] = {
        "data": data.name,
        "reference": f"{options.reference}{decoded}",
        "labels": "i mod num_classes" if backbone.num_classes else "none",
        "sampling": settings,
        "precision": precision,
    }
    if not data.codec.has_pixels:
        record["not_scored"] = "latents are not images: name their autoencoder with data.vae=…"
        return record
    device = next(backbone.parameters()).device
    samples = data.codec.to_pixels(
        generate(
            backbone,
            objective,
            sampling,
            indices=indices,
            labels=labels,
            seed=options.seed,
            batch_size=options.batch_size,
            precision=precision,
            weak=weak,
        ),
        device=device,
    )
    if data.name == "digits" and labels is not None and samples.shape[1:] == (1, 8, 8):
        record["values"]["agreement"] = digits_agreement(samples, labels)
        record["real"]["agreement"] = digits_agreement_reference()
    elif labels is not None and is_file(options.extractor):
        record["values"]["agreement"] = classifier_agreement(options.extractor, samples, labels)
        if data.held_out is not None and real is None:
            unseen = stack_images(data, data.held_out, options.num_reference, device)
            true = stack_labels(data.held_out, options.num_reference)
            record["real"]["agreement"] = classifier_agreement(options.extractor, unseen, true)
    extractor = _choose_extractor(options, data, record)
    if extractor is not None and options.metrics:
        others = stack_images(data, reference, options.num_reference, device)
        scored = _score(samples, others, extractor, options, cache)
        record["values"] |= scored.pop("values")
        record["protocol"] |= scored
        if options.reference == "train" and data.held_out is not None and real is None:
            unseen = stack_images(data, data.held_out, options.num_reference, device)
            record["real"] |= _score(unseen, others, extractor, options, cache)["values"]
    return record


def check_evaluation(options: EvaluationOptions, data: ImageData) -> None:
    """Raise `ValueError` if samples like `data` cannot be scored so; no image is drawn or read."""
    reference = data.train if options.reference == "train" else data.held_out
    if reference is None:
        raise ValueError(f"evaluation.reference=held_out, but {data.name} has no held-out part.")
    extractor = _choose_extractor(options, data, {})
    if extractor is None or not options.metrics or not isinstance(data.codec, PixelCodec):
        return  # the size of decoded images is known once one is decoded
    one = torch.zeros(1, data.channels, *data.image_size, dtype=torch.uint8)
    generated, real = (
        one.expand(count, -1, -1, -1)
        for count in (options.num_images, len(reference))  # type: ignore[arg-type]
    )
    check_scoring(generated, real, extractor, options.metrics, options.inception_weights)


@torch.no_grad()
def classifier_agreement(extractor: str, images: Tensor, labels: Tensor) -> float:
    """Return the share of images uint8 [N,C,H,W] that a file's classifier reads as `labels` [N].

    Raises:
        ValueError: the classifier knows fewer classes than the labels have.
    """
    network = load_features(Path(extractor))
    if int(labels.max()) >= network.classify.out_features:
        raise ValueError(
            f"extractor={extractor!r} knows {network.classify.out_features} classes, and label "
            f"{int(labels.max())} is asked for; make features from this data."
        )
    right = [
        (network(some)[1].argmax(dim=1) == some_labels).double().sum()
        for some, some_labels in zip(images.split(500), labels.split(500), strict=True)
    ]
    return float(sum(right) / len(images))


def describe_record(record: dict[str, Any]) -> list[str]:
    """Return a record as lines of text: each value, and the real images' own beside it."""
    lines = [f"{'':12s} {'samples':>10s} {'real':>10s}"]
    for name, value in record["values"].items():
        real = f"{record['real'][name]:10.4f}" if name in record["real"] else f"{'':10s}"
        lines.append(f"{name:12s} {value:10.4f} {real}")
    if "not_scored" in record:
        lines.append(f"not scored: {record['not_scored']}")
    protocol = record["protocol"]
    if "extractor" in protocol:
        lines.append(
            f"features {protocol['extractor']}, {protocol['num_generated']} samples against "
            f"{protocol['num_reference']} of {protocol['data']} ({protocol['reference']}), "
            f"{describe_sampling(protocol['sampling'])}"
        )
    return lines


def sampling_record(
    backbone: Backbone,
    objective: Objective,
    sampling: SamplingOptions,
    *,
    weak: Backbone | None = None,
) -> dict[str, Any]:
    """Return every setting of the sampler and the guidance, and what an image costs with them.

    `nfe` counts the evaluations of a network and `flops_per_image` their FLOPs, from noise to data.

    Raises:
        ValueError: options that do not fit the network or the objective.
    """
    cost = count_sampling(backbone, objective, sampling, weak=weak)
    return {**sampling.as_dict(), "nfe": cost.evaluations, "flops_per_image": cost.flops}


def describe_sampling(sampling: dict[str, Any]) -> str:
    """Return the settings and the cost of a record's sampling as a few words.

    What an older record does not have is left out.
    """
    scale = sampling.get("guidance_scale", 1.0)
    words = [f"{sampling.get('sampler')} {sampling.get('num_steps')} steps"]
    grid = {"grid": "auto", "shift": 1.0, "rho": "auto"}
    words += [f"{k} {sampling[k]}" for k, usual in grid.items() if sampling.get(k, usual) != usual]
    kind = sampling.get("guidance", "none" if scale == 1 else "cfg")
    words.append("no guidance" if kind == "none" else f"{kind} guidance {scale:g}")
    if "nfe" in sampling:
        megaflops = sampling["flops_per_image"] / 1e6
        words.append(f"{sampling['nfe']} evaluations, {megaflops:.1f} MFLOPs an image")
    return ", ".join(words)


@torch.no_grad()
def held_out_loss(
    backbone: Backbone,
    objective: Objective,
    data: ImageData,
    *,
    seed: int,
    precision: str,
    num_draws: int = 1,
) -> tuple[float, list[float]] | None:
    """Return the dense loss on held-out images at fixed draws of level and noise.

    The draws depend on the seed alone, so the numbers of different steps and networks compare, pair
    by pair.

    Args:
        backbone, objective, data: the network and what it was trained with.
        seed: of the draws.
        precision: resolved, see `tread_zoo.runtime`.
        num_draws: levels and noises for each image; more of them make the numbers less noisy.

    Returns:
        The mean, and the means of the fourths of the draws from the lowest levels to the highest;
        None if nothing was held out.
    """
    if data.held_out is None:
        return None
    images, labels = stack_part(data.held_out, HELD_OUT_IMAGES)
    device = next(backbone.parameters()).device
    y = labels.to(device) if backbone.num_classes else None

    def network(x_t: Tensor, t: Tensor) -> Tensor:
        return backbone(x_t, t, y)

    losses, levels = [], []
    for number in range(num_draws):
        parts = (seed,) if number == 0 else (seed, number)
        generator = make_generator("held_out", *parts)
        draw = objective.draw(data.codec.model_shape(images.shape), generator).to(device)
        noise = data.codec.draw(images.shape, generator)
        x = data.codec.to_model(images, device=device, noise=noise)
        with autocast(device, precision):
            losses.append(objective.loss(network, x, draw).float())
        levels.append(draw.level)
    by_level = torch.cat(losses)[torch.cat(levels).argsort()]
    fourths = [float(part.mean()) for part in by_level.tensor_split(4)]
    return float(by_level.double().mean()), fourths


def stack_part(dataset: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` items of a data set as stored [n, …] and their labels [n]."""
    if isinstance(dataset, ArrayDataset):
        return dataset.images[:count], dataset.labels[:count]
    size = min(count, len(dataset))  # type: ignore[arg-type]
    return read_items(dataset, range(size))


def stack_images(data: ImageData, part: Dataset, count: int | None, device: torch.device) -> Tensor:
    """Return `count` evenly spaced images of a part of `data`, uint8 [n, C, H, W]; None: all.

    Latents are decoded on `device`, some at a time.
    """
    chosen = _spread(len(part), count)  # type: ignore[arg-type]
    if isinstance(part, ArrayDataset):
        return part.images if len(chosen) == len(part) else part.images[chosen]
    if isinstance(data.codec, PixelCodec):
        return read_items(part, chosen)[0]
    groups = [chosen[i : i + DECODED_AT_ONCE] for i in range(0, len(chosen), DECODED_AT_ONCE)]
    stored = (read_items(part, group)[0] for group in groups)
    models = (data.codec.to_model(some, device=device) for some in stored)
    return torch.cat([data.codec.to_pixels(x, device=device) for x in models])


def stack_labels(part: Dataset, count: int | None) -> Tensor:
    """Return the labels [n] of the images that `stack_images` returns."""
    chosen = _spread(len(part), count)  # type: ignore[arg-type]
    labels = getattr(part, "labels", None)
    if labels is None:
        labels = [part[index][1] for index in range(len(part))]  # type: ignore[arg-type]
    return torch.as_tensor(labels)[chosen]


def _spread(size: int, count: int | None) -> list[int]:
    """Return `count` indices, evenly spaced over 0 … size - 1; None or more than there are: all."""
    count = size if count is None else min(count, size)
    return [index * size // count for index in range(count)]


def _choose_extractor(
    options: EvaluationOptions, data: ImageData, record: dict[str, Any]
) -> str | None:
    """Return the extractor; `auto` passes over Inception, and says so, without its weights."""
    if options.extractor != "auto":
        return options.extractor
    if data.name == "digits":
        return DIGITS_EXTRACTOR
    from tread_zoo.evaluation.features import find_inception_weights

    try:
        find_inception_weights(options.inception_weights)
    except ValueError as error:
        record["not_scored"] = str(error)
        return None
    return INCEPTION_EXTRACTOR


def _score(
    samples: Tensor,
    reference: Tensor,
    extractor: str,
    options: EvaluationOptions,
    cache: Path | None,
) -> dict[str, Any]:
    return score(
        samples,
        reference,
        extractor=extractor,
        metrics=options.metrics,
        seed=options.seed,
        batch_size=options.batch_size,
        inception_weights=options.inception_weights,
        device="cuda" if torch.cuda.is_available() else "cpu",
        cache=cache,
    )
