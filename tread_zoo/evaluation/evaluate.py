"""Score a backbone's samples against real images, with the protocol beside each number.

Samples become features batch by batch, and are not kept; several processes share them by their
numbers (`tread_zoo.evaluation.sharing`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.data import ImageData
from tread_zoo.data.codec import PixelCodec
from tread_zoo.diffusion import Objective, SamplingOptions, default_labels, generate
from tread_zoo.evaluation.agreement import digits_agreement, digits_agreement_reference
from tread_zoo.evaluation.conditions import conditions_of
from tread_zoo.evaluation.extraction import ALONE, Collector, FeatureSet, Needs, extract
from tread_zoo.evaluation.extractors import (
    LOGITS,
    Extractor,
    Weights,
    check_extractor,
    find_weights,
    is_file,
    open_extractor,
)
from tread_zoo.evaluation.features import (
    DIGITS_EXTRACTOR,
    INCEPTION_EXTRACTOR,
    find_inception_weights,
    load_features,
)
from tread_zoo.evaluation.flops import count_sampling
from tread_zoo.evaluation.kept_images import check_empty, save_images
from tread_zoo.evaluation.known import Known
from tread_zoo.evaluation.metrics import (
    check_counts,
    check_few,
    check_metrics,
    needs_of,
    possible_metrics,
    score_features,
    scoring_record,
)
from tread_zoo.evaluation.protocol import UINT8_RULE, decoder_record, drawn_record
from tread_zoo.evaluation.references import (
    ALL_THE_SAME,
    Reference,
    check_reference,
    check_reference_name,
    open_reference,
    reference_features,
)
from tread_zoo.evaluation.sharing import Share
from tread_zoo.evaluation.sources import PartImages, labels_of, pixel_shape
from tread_zoo.kinds import check_fields

UNKNOWN = "unknown"  # in records: what images do not tell of themselves


@dataclass(frozen=True)
class EvaluationOptions:
    """What to score.

    Args:
        num_images: samples to draw; image i has label i mod num_classes, or the context of a
            held-out image.
        extractor: `digits-cnn-64`, `inception-v3-compat`, `dinov2-vit-l-14`, a file of
            `scripts/make_features.py`, or `auto`: the first for digits, else the second.
        metrics: among fid, sfid, fd_dinov2, kid, precision, recall, isc.
        reference: the real images to compare with: `train`, `held_out`, or a path, see
            `tread_zoo.evaluation.references`.
        num_reference: real images of a part, evenly spaced, at most as many as it has; null takes
            all of them.
        seed: of the samples.
        batch_size: images at a time.
        inception_weights: file of the Inception weights; null looks in torch's hub folder.
        dinov2_weights: file of DINOv2's weights; null looks in torch's hub folder.
        keep_images: a folder, new or empty, for the samples as PNG files; null keeps none.
        allow_few_images: take Fréchet distances of no more images than features, too, and note it.

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
    dinov2_weights: str | None = None
    keep_images: str | None = None
    num_reference: int | None = None
    allow_few_images: bool = False

    def __post_init__(self) -> None:
        check_fields("evaluation", self)
        check_extractor("evaluation.extractor", self.extractor, ("auto",))
        check_metrics("evaluation.metrics", self.metrics, self.extractor)
        check_reference_name(self.reference)
        for name in ("num_images", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation.{name}={getattr(self, name)} must be at least 1.")
        if self.num_reference is not None and self.num_reference < 1:
            raise ValueError(f"evaluation.num_reference={self.num_reference} must be at least 1.")
        if self.keep_images is not None:
            check_empty(self.keep_images)


def evaluation_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `EvaluationOptions` by which a run, or a record of a study, is known.

    `allow_few_images` is named where it is set: those from before it was there are without it.
    """
    usual = {"allow_few_images": False}
    return {k: v for k, v in given.items() if k not in usual or v != usual[k]}


def evaluate(
    backbone: Backbone,
    objective: Objective,
    data: ImageData,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    *,
    precision: str = "fp32",
    weak: Backbone | None = None,
    share: Share = ALONE,
    real: Mapping[str, float] | None = None,
    cache: Path | None = None,
    known: Known | None = None,
) -> dict[str, Any]:
    """Sample, score, and return `{"values": …, "real": …, "protocol": …}`.

    `real` has what real images that were not trained on score in the same place: the best that a
    sampler can hope for. For digits, `agreement` is the share of samples that a classifier trained
    on real digits reads as the label they were asked for. Without Inception's weights,
    `extractor=auto` leaves the distances of other data out and says why in `not_scored`. Where the
    model works on latents, samples and real latents are decoded, and images are compared.

    `protocol["sampling"]` is what `sampling_record` returns. `weak` is the weak network of
    guidance=auto. With `share`, every process of a group calls this, and the main one's record has
    the values; without it, nothing is communicated. Scoring the same data again, `real` is what an
    earlier record says of real images, which is then not measured anew, and `cache` a folder for
    the reference's features (see `reference_features`). `known` keeps both in memory instead, for
    who scores one network time and again: the first call fills it, the others take what it has.

    Raises:
        ValueError: the reference is missing, there are too few images, or weights are absent.
    """
    device = next(backbone.parameters()).device
    shape = pixel_shape(data, device) if data.codec.has_pixels else None
    plan = check_evaluation(
        options, data, labelled=bool(backbone.num_classes), shape=shape, device=device
    )
    known = Known() if known is None else known
    if known.sampling is None:
        known.sampling = sampling_record(backbone, objective, sampling, weak=weak)
    real = known.real if real is None else real
    conditions = conditions_of(backbone, data)
    labels = default_labels(range(options.num_images), backbone.num_classes)
    extractor = plan.open(device)
    share.wait()  # all have seen that options.keep_images is empty

    def draw(chosen: range) -> Tensor:
        return data.codec.to_pixels(
            generate(
                backbone,
                objective,
                sampling,
                indices=chosen,
                labels=conditions.of(chosen),
                seed=options.seed,
                batch_size=options.batch_size,
                precision=precision,
                weak=weak,
            ),
            device=device,
        )

    samples, right = _collect(plan, extractor, draw, labels, share)
    reference, held_out = real_sets(
        plan, extractor, share, known, with_held_out=real is None, cache=cache
    )
    record: dict[str, Any] = {"values": {}, "real": dict(real or {})}
    record["protocol"] = {
        "data": data.name,
        "reference": plan.reference.name,
        "labels": conditions.rule,
        "sampling": dict(known.sampling),
        "precision": precision,
        **drawn_record(
            options.num_images,
            plan.shape,
            seed=options.seed,
            uint8=UINT8_RULE,
            decoder=decoder_record(data.codec),
        ),
    }
    if plan.not_scored:
        record["not_scored"] = plan.not_scored
    if share.is_main:
        add_agreement(record, plan, extractor, samples, held_out, labels, right)
        add_distances(record, plan, extractor, samples, reference, held_out)
    known.real = dict(record["real"])
    return record


@dataclass(frozen=True)
class Plan:
    """What an evaluation will do, checked.

    Args:
        options, data: that it was made of.
        reference: opened.
        weights: of the extractor; None where nothing is to be extracted.
        metrics: those that will be scored.
        shape: [C,H,W] of the images; None for latents that cannot be decoded, or are not yet.
        judge: who reads the samples' labels: `svm`, `classifier` or nobody, "".
        not_scored: why there are no distances, or "".
    """

    options: EvaluationOptions
    data: ImageData
    reference: Reference
    weights: Weights | None
    metrics: Sequence[str]
    shape: tuple[int, int, int] | None
    judge: str
    not_scored: str

    def needs(self, *, generated: bool) -> Needs:
        """Return what is to be extracted of samples, or of the reference."""
        needs = needs_of(self.metrics, generated=generated)
        judged = generated and self.judge == "classifier"
        return needs | Needs(rows=frozenset({LOGITS} if judged else ()))

    def open(self, device: torch.device) -> Extractor | None:
        """Load the extractor, onto the GPU if networks are on one."""
        if self.weights is None:
            return None
        place = device if device.type == "cuda" else torch.device("cpu")
        return open_extractor(self.weights, self.needs(generated=True).names, place)


def check_evaluation(
    options: EvaluationOptions,
    data: ImageData,
    *,
    labelled: bool | None = None,
    shape: tuple[int, int, int] | None = None,
    device: torch.device | None = None,
) -> Plan:
    """Return what an evaluation will do; no image is drawn or read.

    Args:
        labelled: samples are asked for by label; None: where the data have classes.
        shape: [C,H,W] of the images; None: as they are stored. Of latents it is known once one is
            decoded: what depends on it is then not checked.
        device: where latents are decoded.

    Raises:
        ValueError: samples like `data` cannot be scored so.
    """
    not_scored = ""
    if shape is None and isinstance(data.codec, PixelCodec):
        shape = (data.channels, *data.image_size)
    labelled = data.num_classes > 0 if labelled is None else labelled
    reference = open_reference(
        options.reference, data, shape=shape, count=options.num_reference, device=device
    )
    if not data.codec.has_pixels:
        why = "latents are not images: name their autoencoder with data.vae=…"
        return Plan(options, data, reference, None, (), None, "", why)
    judge = ""
    if labelled and data.name == "digits" and shape == (1, 8, 8):
        judge = "svm"
    elif labelled and is_file(options.extractor):
        judge = "classifier"
    metrics, name = options.metrics, options.extractor
    if name == "auto":
        name, not_scored = _choose_extractor(options, data)
        metrics = () if not_scored else metrics
    weights = None
    if metrics or judge == "classifier":
        weights = find_weights(
            name,
            inception_weights=options.inception_weights,
            dinov2_weights=options.dinov2_weights,
        )
        if shape is not None:
            weights.check_shape(shape)
    if weights is not None and metrics:
        check_metrics("evaluation.metrics", metrics, name)
        check_counts("evaluation.num_images", options.num_images, metrics, generated=True)
        if not options.allow_few_images:
            check_few(
                f"evaluation.num_images={options.num_images}", options.num_images, metrics, weights,
                ways="Set evaluation.num_images={enough} or more (papers have 50000), or "
                f"evaluation.metrics=[{{others}}]; {ALL_THE_SAME}",
            )  # fmt: skip
        check_reference(
            reference, weights, metrics, shape, allow_few_images=options.allow_few_images
        )
    if judge == "classifier":
        _check_classes(name, data.num_classes)
    if options.keep_images is not None:
        check_empty(options.keep_images)
    return Plan(options, data, reference, weights, metrics, shape, judge, not_scored)


def _collect(
    plan: Plan,
    extractor: Extractor | None,
    draw: Callable[[range], Tensor],
    labels: Tensor | None,
    share: Share,
) -> tuple[FeatureSet | None, int | None]:
    """Return the features of the samples that `draw` gives by number, and how many of them the SVM
    reads as their labels; None for what nobody asked for."""
    options = plan.options
    collector = None
    if extractor is not None:
        collector = Collector(extractor, plan.needs(generated=True))
    right = 0
    if plan.shape is None:
        return None, None
    for chosen in share.batches(options.num_images, options.batch_size):
        images = draw(chosen)
        if options.keep_images is not None:
            save_images(images, chosen, options.keep_images)
        if collector is not None:
            collector.add(images)
        if plan.judge == "svm" and labels is not None:
            part = labels[chosen.start : chosen.stop]
            right += round(digits_agreement(images, part) * len(images))
    counts = share.gather(torch.tensor([right])) if plan.judge == "svm" else []
    found = None
    if collector is not None:
        found = collector.finish(options.num_images, options.batch_size, plan.shape, share)
    return found, int(torch.cat(counts).sum()) if counts else None


def real_sets(
    plan: Plan,
    extractor: Extractor | None,
    share: Share,
    known: Known,
    *,
    with_held_out: bool,
    cache: Path | None,
) -> tuple[FeatureSet | None, FeatureSet | None]:
    """Return the features of the reference, and of the images held out, where they are asked for.

    Args:
        known: has the reference's from a call before, or gets them.
        with_held_out: what real images score is not known yet.
    """
    reference = held_out = None
    batch_size = plan.options.batch_size
    if extractor is None:
        return None, None
    if plan.metrics and known.reference is None:
        needs = plan.needs(generated=False)
        reference = reference_features(
            plan.reference, extractor, needs, batch_size=batch_size, share=share, cache=cache
        )
        known.keep_reference(reference, share)
    elif plan.metrics:
        reference = known.reference
    unseen = plan.data.held_out
    if unseen is not None and with_held_out:
        # Other references may have these images among them.
        metrics = plan.metrics if plan.options.reference == "train" else ()
        needs = replace(plan, metrics=_of_real(plan, metrics)).needs(generated=True)
        if needs.names:
            assert plan.shape is not None, "an extractor was opened for images of some shape"
            count = plan.options.num_reference
            source = PartImages(
                plan.data, unseen, plan.shape, count, extractor.device, replace=True
            )
            held_out = extract(source, extractor, needs, batch_size=batch_size, share=share)
    return reference, held_out


def add_agreement(
    record: dict[str, Any],
    plan: Plan,
    extractor: Extractor | None,
    samples: FeatureSet | None,
    held_out: FeatureSet | None,
    labels: Tensor | None,
    right: int | None,
) -> None:
    """Add the share of samples, and of real images, that are read as their labels."""
    if right is not None:
        record["protocol"]["judge"] = "svm"
        record["values"]["agreement"] = right / plan.options.num_images
        record["real"].setdefault("agreement", digits_agreement_reference())
    if plan.judge != "classifier" or extractor is None or samples is None or labels is None:
        return

    def agreement(features: FeatureSet, labels: Tensor) -> float:
        return float((features.rows[LOGITS].argmax(dim=1) == labels).double().mean())

    record["protocol"]["judge"] = extractor.label
    record["values"]["agreement"] = agreement(samples, labels)
    if held_out is not None and plan.data.held_out is not None:
        true = labels_of(plan.data.held_out, plan.options.num_reference)
        record["real"]["agreement"] = agreement(held_out, true)


def add_distances(
    record: dict[str, Any],
    plan: Plan,
    extractor: Extractor | None,
    samples: FeatureSet | None,
    reference: FeatureSet | None,
    held_out: FeatureSet | None,
) -> None:
    """Add the metrics of the samples, and of real images, and what they depend on."""
    if extractor is None or samples is None or reference is None:
        return
    seed, metrics = plan.options.seed, plan.metrics
    values, notes = score_features(samples, reference, metrics, seed=seed)
    record["values"] |= values
    record["protocol"] |= scoring_record(
        samples, reference, extractor, metrics, seed=seed, notes=notes
    )
    if plan.options.num_reference is not None:
        record["protocol"]["num_reference_asked"] = plan.options.num_reference
    if held_out is not None and plan.options.reference == "train":
        possible = _of_real(plan, metrics)
        record["real"] |= score_features(held_out, reference, possible, seed=seed)[0]


def _of_real(plan: Plan, metrics: Sequence[str]) -> list[str]:
    """Return the metrics that the images held out are enough for."""
    assert plan.data.held_out is not None
    assert plan.weights is not None
    count, asked = len(plan.data.held_out), plan.options.num_reference  # type: ignore[arg-type]
    sizes = None if plan.options.allow_few_images else plan.weights.sizes
    return possible_metrics(count if asked is None else min(count, asked), metrics, sizes)


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
        count = protocol["num_reference"]
        real = f"{count} images" if count is not None else "statistics"
        digest = protocol.get("reference_sha256", "")[:8]
        digest = f", sha256 {digest}" if digest else ""
        lines.append(
            f"features {protocol['extractor']}, {protocol['num_generated']} samples against {real} "
            f"of {protocol['data']} ({protocol['reference']}{digest}), "
            f"{describe_sampling(protocol['sampling'])}"
        )
        lines += [f"note: {text}" for text in protocol.get("notes", ())]
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
    if sampling.get("sampler") == UNKNOWN:
        return "sampler unknown"
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


def _choose_extractor(options: EvaluationOptions, data: ImageData) -> tuple[str, str]:
    """Return what `auto` is for these data, and "" or why it cannot be: Inception is passed over
    without its weights."""
    if data.name == "digits":
        return DIGITS_EXTRACTOR, ""
    try:
        find_inception_weights(options.inception_weights)
    except ValueError as error:
        return INCEPTION_EXTRACTOR, str(error)
    return INCEPTION_EXTRACTOR, ""


def _check_classes(extractor: str, num_classes: int) -> None:
    known = load_features(Path(extractor)).classify.out_features
    if known < num_classes:
        raise ValueError(
            f"extractor={extractor!r} knows {known} classes, and the data have {num_classes}; make "
            "features from this data."
        )
