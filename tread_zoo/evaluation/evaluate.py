"""Scoring of a backbone's samples, during training or from a checkpoint.

Samples are made batch by batch, scored by `tread_zoo.evaluation.score`, and kept only if
`evaluation.keep_images` is set.

Dimensions: B batch, C channels, H height, W width.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.config import EvaluationConfig
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import ImageData
from tread_zoo.diffusion import Objective, SamplingOptions, generate
from tread_zoo.diffusion.conditions import conditions_of
from tread_zoo.evaluation.contribution import data_contributions, describe_contributions, ranges_of
from tread_zoo.evaluation.features import DIGITS, FASHION, INCEPTION, SHIPPED, find_extractor
from tread_zoo.evaluation.flops import count_sampling
from tread_zoo.evaluation.images import Images, open_images, part_images, pixel_shape
from tread_zoo.evaluation.metrics import build_metrics
from tread_zoo.evaluation.pictures import save_numbered
from tread_zoo.evaluation.score import Evaluation, Reference, open_reference
from tread_zoo.routing import Method
from tread_zoo.routing.methods.none import NO_ROUTING

UINT8_RULE = "clamp to [-1, 1], then the nearest of 256 values"
# the shipped classifier of some data
_OWN = {("digits", (8, 8)): DIGITS, ("fashion_mnist", (32, 32)): FASHION}
_NO_DECODER = "latents are not images: name their autoencoder with data.vae=…"


def evaluate(
    backbone: Backbone,
    objective: Objective,
    data: ImageData,
    sampling: SamplingOptions,
    options: EvaluationConfig,
    *,
    precision: str = "fp32",
    weak: Backbone | None = None,
    routing: Method = NO_ROUTING,
    cache: dict[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """Return the record of a network's scores; every rank must call this.

    `values` has the scores of samples. `real` has the scores of held-out images if the reference is
    the training images. `protocol` has all that scores depend on, and `contributions` the effect
    of each block. `not_scored` is there if metrics are missing, and says why.

    Args:
        backbone, objective, data: the network, its objective in training, and its data.
        sampling, options: how images are sampled and scored.
        precision: a resolved precision, see `tread_zoo.runtime`.
        weak: the second network of the guidance, from its `weak_checkpoint`; None if it has none.
        routing: the routing method used in training.
        cache: a dict, empty at the first call, that keeps what does not depend on the weights.
        metadata: further fields of `Protocol`, such as `weights` and `step`.
    """
    cache = {} if cache is None else cache
    device, codec = next(backbone.parameters()).device, data.codec
    evaluation = check_evaluation(options, data, num_classes=backbone.num_classes, device=device)
    if "sampling" not in cache:
        cache["sampling"] = sampling_record(backbone, objective, sampling, weak=weak)
    protocol = {**cache["sampling"], "weights": "ema", "precision": precision, **metadata}
    label_seed = options.seed if options.labels == "random" else None
    conditions = conditions_of(backbone, data, label_seed)
    protocol |= {"data": data.name, "seed": options.seed, "labels": conditions.rule}
    blocks = data_contributions(
        backbone, objective, data, ranges=options.block_ranges or ranges_of(backbone, routing),
        precision=precision, batch_size=options.batch_size,
    )  # fmt: skip
    if not codec.has_pixels or not (evaluation.metrics or options.keep_images):
        why = {"not_scored": evaluation.not_scored} if evaluation.not_scored else {}
        return {"values": {}, "real": {}, "protocol": protocol, **why, "contributions": blocks}

    def draw(numbers: range) -> tuple[Tensor, Tensor | None]:
        conditioned = conditions.of(numbers)
        x = generate(
            backbone, objective, sampling, indices=numbers, labels=conditioned,
            seed=options.seed, batch_size=options.batch_size, precision=precision, weak=weak,
        )  # fmt: skip
        images = codec.to_pixels(x, device=device)
        if options.keep_images is not None:
            save_numbered(images, numbers, Path(options.keep_images).expanduser())
        return images, conditioned if backbone.num_classes else None

    decoder = codec.decoded_by
    if decoder is not None:
        decoder = decoder | {n: codec.metadata[n] for n in ("normalization", "shift", "scale")}
    shape, count = pixel_shape(data, device), options.num_images
    protocol |= {"uint8": UINT8_RULE, "decoder": decoder}
    record = evaluation.run(
        Images("samples", shape, count, draw, backbone.num_classes),
        held_out=_held_out(data, options, device),
        batch_size=options.batch_size,
        device=device,
        cache=cache,
        **protocol,
    )
    return {**record, "contributions": blocks}


def evaluate_images(
    place: str | Path, data: ImageData | None, options: EvaluationConfig, device: torch.device
) -> dict[str, Any]:
    """Return the scores of all images in a folder or .npz file `place`, as a record like that of
    `evaluate`. `options` names the reference: a path or a split of `data`. Features are computed
    on `device` if that is CUDA, else on the CPU. Raises ValueError if no metric can be computed."""
    images = open_images(place)
    evaluation = make_evaluation(options, data, num_classes=images.num_classes, device=device)
    evaluation = evaluation.fit(len(images), images.shape, images.num_classes)
    if evaluation.not_scored and not evaluation.metrics:
        raise ValueError(f"samples={place} cannot be scored: {evaluation.not_scored}")
    return evaluation.run(
        images,
        held_out=None if data is None else _held_out(data, options, device),
        batch_size=options.batch_size,
        device=device,
        data=None if data is None else data.name,
        uint8="as given",
    )


def _held_out(data: ImageData, options: EvaluationConfig, device: torch.device) -> Images | None:
    """Return the held-out images, whose scores show what real images reach. Stored latents are
    decoded on `device`. Return None if there are none or no decoder, or if the reference is not
    the training images."""
    if data.held_out is None or options.reference != "train" or not data.codec.has_pixels:
        return None
    return part_images(data, data.held_out, "held_out", count=options.num_reference, device=device)


def check_evaluation(
    options: EvaluationConfig,
    data: ImageData,
    *,
    num_classes: int | None = None,
    device: torch.device | None = None,
) -> Evaluation:
    """Return an `Evaluation` for samples of the size of `data`, checked before any sample is made.
    `num_classes` is the number of the samples' classes, by default that of the data. Stored latents
    are decoded on `device`, by default the CPU. Raises ValueError for an option that does not
    fit."""
    num_classes = data.num_classes if num_classes is None else num_classes
    evaluation = make_evaluation(options, data, num_classes=num_classes, device=device)
    if evaluation.extractor is not None:
        shape = pixel_shape(data, device or torch.device("cpu"))
        evaluation = evaluation.fit(options.num_images, shape, num_classes)
    return evaluation


def check_kept_images(options: EvaluationConfig) -> None:
    """Raise `ValueError` if the folder for kept samples holds any file, which may be of another
    network. `evaluate` does not ask, so that an interrupted run can be scored again."""
    folder = options.keep_images and Path(options.keep_images).expanduser()
    if folder and folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"evaluation.keep_images={options.keep_images!r} is not empty, and samples of several "
            "networks must not mix: name another folder."
        )


def make_evaluation(
    options: EvaluationConfig,
    data: ImageData | None,
    *,
    num_classes: int = 0,
    device: torch.device | None = None,
) -> Evaluation:
    """Return an `Evaluation` for images of `num_classes` classes (0: no labels). `Evaluation.fit`
    checks later whether the metrics can be computed. `options` names the reference: a path or a
    split of `data`, whose stored latents are decoded on `device`. Raises ValueError for unknown
    names or missing files."""
    if data is not None and not data.codec.has_pixels:
        return Evaluation((), None, Reference(options.reference, None), not_scored=_NO_DECODER)
    reference = _open_reference(options, data, device)
    metrics, not_scored, extractor = build_metrics(options.metrics), "", None
    name, own = options.extractor, data and _OWN.get((data.name, data.image_size))
    if name == "auto":
        name = own or INCEPTION
    try:
        extractor = find_extractor(name, options.inception_weights, options.dinov2_weights)
    except ValueError as error:
        if options.extractor != "auto":
            raise
        metrics, not_scored = (), str(error) if metrics else ""
    # a shipped classifier knows only the classes of its own images
    known = extractor.num_classes if extractor and (name == own or name not in SHIPPED) else 0
    names = [metric.name for metric in metrics]
    if names and 0 < num_classes <= known and "label_accuracy" not in names:
        metrics = (*build_metrics(["label_accuracy"]), *metrics)
    auto = options.metrics == "auto"
    return Evaluation(metrics, extractor if metrics else None, reference, not_scored, auto)


def _open_reference(
    options: EvaluationConfig, data: ImageData | None, device: torch.device | None
) -> Reference:
    """Return the reference that `options` names: what is at a path, or the training or held-out
    images of `data`. Stored latents are decoded on `device`."""
    name = options.reference
    if name not in ("train", "held_out"):
        return open_reference(name)
    part = getattr(data, name, None)
    if data is None or part is None:
        missing = "no data are named: add data=…" if data is None else f"{data.name} has none"
        raise ValueError(f"evaluation.reference={name} is a part of the data, and {missing}.")
    images = part_images(data, part, name, count=options.num_reference, device=device)
    return Reference(name, images)


def sampling_record(
    backbone: Backbone,
    objective: Objective,
    sampling: SamplingOptions,
    *,
    weak: Backbone | None = None,
) -> dict[str, Any]:
    """Return three fields of `Protocol`: `sampling`, the settings of sampler and guidance; `nfe`,
    the network evaluations per image; `flops_per_image`. The last two include `weak`, the second
    network of a guidance that has one."""
    cost = count_sampling(backbone, objective, sampling, weak=weak)
    settings = sampling.as_dict()
    return {"sampling": settings, "nfe": cost.evaluations, "flops_per_image": cost.flops}


def score_names(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a record of `evaluate`, under names for trackers such as `score/fid`."""
    return {f"score/{name}": value for name, value in record["values"].items()}


def describe_record(record: Mapping[str, Any]) -> list[str]:
    """Return a record of `evaluate` as lines of text. Each score is shown beside that of real
    images, if that is known."""
    heading = f"{'':14s} {'samples':>10s} {'real' if record['real'] else '':>10s}".rstrip()
    lines = [heading] if record["values"] else []
    for name, value in record["values"].items():
        real = f"{record['real'][name]:10.4f}" if name in record["real"] else ""
        lines.append(f"{name:14s} {value:10.4f} {real}".rstrip())
    if "not_scored" in record:
        lines.append(f"not scored: {record['not_scored']}")
    protocol = record["protocol"]
    if protocol.get("extractor"):
        count, against = protocol["num_reference"], ""
        if protocol["reference_sha256"]:  # absent if no metric needs real images
            against = f" against {count or 'statistics of'} {protocol['reference']}"
        lines.append(
            f"{protocol['num_generated']} images{against}, features {protocol['extractor']}"
        )
    if protocol.get("sampling") and protocol.get("num_generated"):
        lines.append(describe_sampling(protocol))
    if "contributions" in record:
        lines += describe_contributions(record["contributions"])
    return [*lines, *(f"note: {text}" for text in protocol.get("notes", ()))]


def describe_sampling(protocol: Mapping[str, Any]) -> str:
    """Return a short text on the settings and the cost of sampling, from the protocol of a
    score."""
    sampling = protocol["sampling"]
    words = [f"{sampling['sampler']} {sampling['num_steps']} steps"]
    defaults = {"grid": "auto", "shift": 1.0, "rho": "auto", "selection_rate": 0.0}
    words += [f"{k} {sampling[k]}" for k, v in defaults.items() if sampling.get(k, v) != v]
    kind = sampling["guidance"]
    scale = sampling.get("guidance_scale", "")
    words.append("no guidance" if kind == "none" else f"{kind} guidance {scale}")
    megaflops = protocol["flops_per_image"] / 1e6
    return ", ".join([*words, f"{protocol['nfe']} evaluations, {megaflops:.1f} MFLOPs per image"])
