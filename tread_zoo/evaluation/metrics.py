"""Distances between generated and real images, with the protocol that makes them comparable.

fid: Fréchet distance of two Gaussians, |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)) (Heusel et al.
  2017), in the extractor's features; fd_dinov2: the same in DINOv2's (Stein et al. 2023); sfid: in
  features that keep where in the image they were found (Nash et al. 2021), as ADM's evaluator has
  them.
kid, kid_std: squared kernel distance, cubic kernel, mean and deviation over 100 subsets
  (Bińkowski et al. 2018). Unbiased, so it may fall below 0; between sets that share images, or
  that have each class in one proportion, it does.
precision, recall: fraction of generated images that lie in the ball of some real one, out to its
  3rd nearest neighbour, and the reverse (Kynkäänniemi et al. 2019).
isc, isc_std: exp of the mean KL of the class given an image from the class at large, over 10
  parts (Salimans et al. 2016).

Dimensions: N generated images, M reference images, C channels, H height, W width.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.dinov2 import DINOV2_EXTRACTORS
from tread_zoo.evaluation.extraction import FeatureSet, Needs, extract
from tread_zoo.evaluation.extractors import (
    EXTRACTORS,
    FEATURES,
    LOGITS,
    SPATIAL,
    Extractor,
    Weights,
    check_extractor,
    find_weights,
    is_file,
    open_extractor,
)
from tread_zoo.evaluation.features import DIGITS_EXTRACTOR, INCEPTION_EXTRACTOR
from tread_zoo.evaluation.frechet import frechet_distance
from tread_zoo.evaluation.protocol import UINT8_RULE
from tread_zoo.evaluation.sources import TensorImages
from tread_zoo.registry import register

__all__ = [
    "EXTRACTORS",
    "FRECHET",
    "METRICS",
    "check_counts",
    "check_extractor",
    "check_few",
    "check_metrics",
    "is_file",
    "needs_of",
    "possible_metrics",
    "score",
    "score_features",
    "scoring_record",
]

FRECHET = {"fid": FEATURES, "sfid": SPATIAL, "fd_dinov2": FEATURES}  # metric -> its features
METRICS = (*FRECHET, "kid", "precision", "recall", "isc")
KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000
_ISC_PARTS = 10
_NEIGHBOURS = 3
_ROWS_AT_ONCE = 10_000  # of the distances between all pairs

# The fewest images with which each is defined.
_FEWEST = {
    **dict.fromkeys((*FRECHET, "kid"), 2),
    **dict.fromkeys(("precision", "recall"), _NEIGHBOURS + 1),
}
_FEWEST_GENERATED = {**_FEWEST, "isc": _ISC_PARTS}


def score(
    generated: Tensor,
    reference: Tensor,
    *,
    extractor: str = DIGITS_EXTRACTOR,
    metrics: Sequence[str] = ("fid", "kid", "precision", "recall"),
    seed: int = 0,
    batch_size: int = 64,
    inception_weights: str | None = None,
    dinov2_weights: str | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    allow_few_images: bool = False,
) -> dict[str, object]:
    """Return a record: the values and all that they depend on.

    generated uint8 [N,C,H,W], reference uint8 [M,C,H,W]; grey images (C = 1) are repeated to 3
    channels. `seed` chooses the subsets of kid and the parts of isc. kid's subsets have 1000
    images, or all of the smaller set where it has fewer: the size is in the record. Nothing is
    cached on disk, and the global random numbers are left as they were. `allow_few_images` takes
    Fréchet distances of no more images than features, too, and notes it.

    The record: values {name: float}, and what `scoring_record` returns.

    Raises ValueError for unknown names, images that do not fit, too few of them, or weights that
    are not there.
    """
    if not metrics:
        raise ValueError(f"metrics={metrics!r} names none; use some of {', '.join(METRICS)}.")
    check_extractor("extractor", extractor)
    check_metrics("metrics", metrics, extractor)
    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    _check_images(generated, reference, metrics)
    weights = find_weights(
        extractor, inception_weights=inception_weights, dinov2_weights=dinov2_weights
    )
    weights.check_shape(tuple(generated.shape[1:]))
    for name, images in (("generated", generated), ("reference", reference)):
        if not allow_few_images:
            check_few(
                f"{name} has {len(images)} image(s)", len(images), metrics, weights,
                ways="Give {enough} images or more, or metrics=[{others}]; allow_few_images=True "
                "takes the distance all the same, and notes it.",
            )  # fmt: skip
    needs = [needs_of(metrics, generated=own) for own in (True, False)]
    opened = open_extractor(weights, (needs[0] | needs[1]).names, torch.device(device))
    one, other = (
        extract(TensorImages(images), opened, need, batch_size=batch_size)
        for images, need in zip((generated, reference), needs, strict=True)
    )
    values, notes = score_features(one, other, metrics, seed=seed)
    return {"values": values, **scoring_record(one, other, opened, metrics, seed=seed, notes=notes)}


def _name_only(generated: Tensor, real: Tensor) -> float:
    raise NotImplementedError("see score_features")


for _name in METRICS:
    register("metric", _name)(_name_only)


def needs_of(metrics: Collection[str], *, generated: bool) -> Needs:
    """Return what metrics ask for on the side of the generated images, or of the reference."""
    rows = {FEATURES} if {"kid", "precision", "recall"} & set(metrics) else set()
    if generated and "isc" in metrics:
        rows.add(LOGITS)
    return Needs(frozenset(FRECHET[m] for m in metrics if m in FRECHET), frozenset(rows))


def score_features(
    generated: FeatureSet, reference: FeatureSet, metrics: Collection[str], *, seed: int
) -> tuple[dict[str, float], list[str]]:
    """Return the values, and notes on what makes them doubtful.

    Args:
        generated, reference: with what `needs_of` says.
        metrics: names in `METRICS`.
        seed: of kid's subsets and isc's parts.
    """
    from torch_fidelity import metric_isc, metric_kid, metric_prc

    values: dict[str, float] = {}
    notes: list[str] = []
    for metric in metrics:
        if metric in FRECHET:
            pair = [s.statistics[FRECHET[metric]] for s in (generated, reference)]
            said: list[str] = []
            values[metric] = frechet_distance(*pair, names=("samples'", "reference"), notes=said)
            notes += [f"{metric}: {text}" for text in said]
    if "kid" in metrics:
        found = metric_kid.kid_features_to_metric(
            generated.rows[FEATURES],
            reference.rows[FEATURES],
            kid_subsets=KID_SUBSETS,
            kid_subset_size=kid_subset_size(generated, reference),
            rng_seed=seed,
            verbose=False,
        )
        values["kid"] = found["kernel_inception_distance_mean"]
        values["kid_std"] = found["kernel_inception_distance_std"]
    if {"precision", "recall"} & set(metrics):
        precision, recall = metric_prc.calculate_precision_recall_part(
            generated.rows[FEATURES], reference.rows[FEATURES], _NEIGHBOURS, _ROWS_AT_ONCE
        )
        both = {"precision": precision, "recall": recall}
        values |= {name: value for name, value in both.items() if name in metrics}
    if "isc" in metrics:
        found = metric_isc.isc_features_to_metric(
            generated.rows[LOGITS], splits=_ISC_PARTS, rng_seed=seed
        )
        values["isc"] = found["inception_score_mean"]
        values["isc_std"] = found["inception_score_std"]
    return values, notes


def scoring_record(
    generated: FeatureSet,
    reference: FeatureSet,
    extractor: Extractor,
    metrics: Collection[str],
    *,
    seed: int,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what values depend on.

    extractor (name@hash of its weights), extractor_sha256, resize, uint8 (the rule by which samples
    become bytes), num_generated, num_reference (None: a file of statistics that does not say),
    reference_sha256, image_size [H, W], channels, seed, kid_subset_size (None without kid),
    torch, torch_fidelity (versions), device (its kind), and notes, if there are any.
    """
    import torch_fidelity

    assert generated.shape is not None, "samples have a shape"
    record = {
        "extractor": extractor.label,
        "extractor_sha256": extractor.sha256,
        "resize": extractor.weights.resize,
        "uint8": UINT8_RULE,
        "num_generated": generated.count,
        "num_reference": reference.count,
        "reference_sha256": reference.sha256,
        "image_size": list(generated.shape[1:]),
        "channels": generated.shape[0],
        "seed": seed,
        "kid_subset_size": kid_subset_size(generated, reference) if "kid" in metrics else None,
        "torch": torch.__version__,
        "torch_fidelity": torch_fidelity.__version__,
        "device": extractor.device.type,
    }
    notes = list(notes)
    if reference.num_replaced:
        notes.append(
            f"{reference.num_replaced} of {reference.count} reference images could not be read, "
            "and others of their part were taken in their place; the log has their names."
        )
    return record | ({"notes": notes} if notes else {})


def kid_subset_size(generated: FeatureSet, reference: FeatureSet) -> int:
    """Return the images of each of kid's subsets."""
    return min(KID_SUBSET_SIZE, len(generated.rows[FEATURES]), len(reference.rows[FEATURES]))


def check_metrics(field: str, metrics: Collection[str], extractor: str) -> None:
    """Raise ValueError for an unknown metric, or one that has no meaning in these features.

    What `extractor=auto` will be is not known here; it fits all but fd_dinov2.
    """
    for metric in metrics:
        if metric not in METRICS:
            raise unknown_name(field, metric, METRICS)
    transformer = extractor in DINOV2_EXTRACTORS
    if "fd_dinov2" in metrics and not transformer:
        raise ValueError(
            f"{field} has 'fd_dinov2', which is a distance in DINOv2's features, and "
            f"extractor={extractor!r}: set extractor={next(iter(DINOV2_EXTRACTORS))!r}, or leave "
            "it out."
        )
    if "sfid" in metrics and extractor not in ("auto", INCEPTION_EXTRACTOR):
        raise ValueError(
            f"{field} has 'sfid', which is defined on layers of Inception, and "
            f"extractor={extractor!r}: set extractor={INCEPTION_EXTRACTOR!r}, or leave it out."
        )
    for metric in ("fid", "isc"):
        if metric in metrics and transformer:
            remedy = "call it 'fd_dinov2'" if metric == "fid" else "leave it out: it has no classes"
            raise ValueError(
                f"{field} has {metric!r}, and extractor={extractor!r}: {remedy}. "
                "fd_dinov2, kid, precision and recall go with it."
            )


def possible_metrics(
    count: int, metrics: Collection[str], sizes: Mapping[str, int] | None = None
) -> list[str]:
    """Return those of `metrics` that are defined for `count` generated images.

    Args:
        sizes: features by their name: Fréchet distances take more images than these; None: they
            are taken of few, too.
    """
    possible = [metric for metric in metrics if count >= _FEWEST_GENERATED[metric]]
    if sizes is None:
        return possible
    return [m for m in possible if m not in FRECHET or count > sizes[FRECHET[m]]]


def check_few(
    found: str, count: int, metrics: Collection[str], weights: Weights, *, ways: str
) -> None:
    """Raise ValueError where a Fréchet distance would be taken of no more images than features.

    Args:
        found: which setting, or set, has so many images: how the message begins.
        count: images.
        metrics: names.
        weights: whose features.
        ways: out of it, with {enough} images and {others} among the metrics.
    """
    lacking = [m for m in metrics if m in FRECHET and count <= weights.sizes[FRECHET[m]]]
    if not lacking:
        return
    size = max(weights.sizes[FRECHET[metric]] for metric in lacking)
    others = [metric for metric in metrics if metric not in lacking] or ["kid"]
    raise ValueError(
        f"{found}, and {', '.join(map(repr, lacking))} compares covariances of {size} features "
        f"({weights.label}): of no more images than features a covariance is singular, and the "
        f"number says how many images there were. "
        f"{ways.format(enough=size + 1, others=','.join(others))}"
    )


def check_counts(name: str, count: int, metrics: Collection[str], *, generated: bool) -> None:
    """Raise ValueError where a set has fewer images than a metric is defined for."""
    fewest = _FEWEST_GENERATED if generated else _FEWEST
    for metric in metrics:
        if count < fewest.get(metric, 0):
            raise ValueError(
                f"{name} has {count} image(s); {metric} takes at least {fewest[metric]}, and some "
                f"hundreds before it says much. Give more images, or leave {metric!r} out of "
                "metrics."
            )


def _check_images(generated: Tensor, reference: Tensor, metrics: Sequence[str]) -> None:
    """Raise ValueError where the two sets cannot be scored against each other."""
    for name, images in (("generated", generated), ("reference", reference)):
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"{name} has dtype {images.dtype} and shape {tuple(images.shape)}; score wants "
                "uint8 [N,C,H,W] with 1 or 3 channels (tread_zoo.data.to_uint8 converts)."
            )
        check_counts(name, len(images), metrics, generated=name == "generated")
    if generated.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"generated has images [C,H,W] of {tuple(generated.shape[1:])}, reference of "
            f"{tuple(reference.shape[1:])}; bring both to one size before scoring."
        )
