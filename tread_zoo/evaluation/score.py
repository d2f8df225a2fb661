"""Scores of images against a reference, with the protocol: all that the scores depend on.

    score(images, reference, ["fid", "kid"])         tensors, folders, .npz files or `Images`

Features are computed batch by batch. Their mean and covariance are summed on the way; the features
themselves are kept only for metrics that compare images one by one. If torch.distributed is
initialized, every rank must call `score`, and rank 0 has the result. Each batch is computed on one
rank, so features are equal to the bit for any number of ranks.

Dimensions: N images, B images in a batch, C channels, H height, W width, D features.
"""

import fnmatch
import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tread_zoo.data.files import atomic_file, checksum, open_npz
from tread_zoo.evaluation.features import DIGITS, INCEPTION, Extractor, Network, find_extractor
from tread_zoo.evaluation.frechet import RunningStatistics, Statistics
from tread_zoo.evaluation.images import Images, open_images
from tread_zoo.evaluation.metrics import FeatureSet, Metric, build_metrics
from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.process_group import rank_and_number
from tread_zoo.progress import progress

# features -> arrays of an .npz of statistics, as ADM's evaluator names them
_STATISTICS = {"pooled": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}


# References ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """The real images that scores compare with, statistics of their features, or both.

    Args:
        name: name for records.
        images: the images, or None.
        statistics: mean and covariance by name of the features.
        file: file with the statistics.
        extractor: name or label of the extractor that the statistics are from.
    """

    name: str
    images: Images | None
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    file: Path = Path()
    extractor: str = INCEPTION

    def statistics_of(self, extractor: Extractor) -> Mapping[str, Statistics]:
        """Return the stored statistics if they are from this extractor, else an empty mapping."""
        return self.statistics if self.extractor in (extractor.name, extractor.label) else {}


def open_reference(reference: "Reference | Images | Tensor | str | Path") -> Reference:
    """Return a reference from anything that `open_images` accepts, or from an .npz with statistics.

    Statistics have the names of ADM's files: `mu`, `sigma`, and `mu_s`, `sigma_s` for spatial
    features. If a file has images, too, distances use the statistics. Raises ValueError if it has
    neither."""
    if isinstance(reference, Reference):
        return reference
    path = Path(reference).expanduser() if isinstance(reference, str | Path) else Path()
    if path.suffix != ".npz" or not path.is_file():
        real = open_images(reference, "evaluation.reference")
        return Reference(real.name, real)
    with open_npz(path, "evaluation.reference") as archive:
        names = set(archive.files)
        extractor = str(archive["extractor"]) if "extractor" in names else INCEPTION
        count = int(archive["num_images"]) if "num_images" in names else None
        statistics = {}
        for name, arrays in _STATISTICS.items():
            if set(arrays) <= names:
                mean, covariance = (torch.from_numpy(archive[a]).double() for a in arrays)
                statistics[name] = Statistics(mean, covariance, count)
    if not statistics and "arr_0" not in names:
        raise ValueError(
            f"{reference} has {', '.join(sorted(names))}, but needs images as arr_0, uint8 "
            "[N,H,W,C], or statistics as mu and sigma: tread-zoo make-reference writes them."
        )
    images = open_images(path, "evaluation.reference") if "arr_0" in names else None
    return Reference(path.name, images, statistics, path, extractor)


def write_statistics(path: Path, features: FeatureSet, extractor: Extractor) -> None:
    """Write the statistics in `features`, computed by `extractor`, to an .npz file for
    `open_reference`, atomically."""
    arrays: dict[str, Any] = {"extractor": extractor.label, "num_images": features.count}
    arrays["images_sha256"] = features.sha256
    for name, statistics in features.statistics.items():
        mean, covariance = _STATISTICS[name]
        arrays |= {mean: statistics.mean.numpy(), covariance: statistics.covariance.numpy()}
    with atomic_file(path) as stream:
        np.savez(stream, **arrays)


# Scores -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """The metrics, extractor and reference of a score.

    Args:
        metrics: the metrics to compute.
        extractor: the feature extractor; None if no features are needed.
        reference: the real images, or their statistics.
        not_scored: why metrics are left out; "" if none are.
        auto: leave out metrics that do not fit, instead of raising an error.
    """

    metrics: tuple[Metric, ...]
    extractor: Extractor | None
    reference: Reference
    not_scored: str = ""
    auto: bool = False

    def fit(self, count: int, shape: tuple[int, ...], num_classes: int) -> "Evaluation":
        """Return this evaluation, checked for `count` images of `shape` [C,H,W] with `num_classes`
        classes. No images are read. Metrics that cannot be computed are left out if `auto` is set;
        else they raise ValueError, as a wrong shape always does."""
        extractor, real = self.extractor, self.reference.images
        if extractor is None:
            return self
        shapes: dict[str, tuple[int, ...] | None] = {"the extractor": extractor.shape}
        if self.metrics and real is not None:
            shapes[f"the reference {self.reference.name}"] = real.shape
        for name, other in shapes.items():
            if other is not None and tuple(shape) != other:
                raise ValueError(
                    f"the images [C,H,W] are {tuple(shape)}, but {name} has {other}: "
                    f"resize one of them, or set evaluation.extractor={INCEPTION}."
                )
        compared, left_out = self._compared(extractor), dict[str, str]()
        for metric in self.metrics:
            why = _misfit(metric, extractor, self.reference, num_classes)
            why = why or _too_few(metric, extractor, count, "evaluation.num_images")
            if not why and real is not None and metric in compared:
                why = _too_few(metric, extractor, len(real), "the reference")
            if why and not self.auto:
                raise ValueError(f"evaluation.metrics: {metric.name!r} {why}, or leave it out.")
            if why:
                left_out[metric.name] = why
        metrics = tuple(metric for metric in self.metrics if metric.name not in left_out)
        reasons = "; ".join(f"{name} {why}" for name, why in left_out.items())
        return replace(
            self, metrics=metrics, not_scored=reasons or self.not_scored,
            extractor=extractor if metrics else None,
        )  # fmt: skip

    def _compared(self, extractor: Extractor) -> list[Metric]:
        """Return the metrics that need the reference's images, not only stored statistics."""
        stored = self.reference.statistics_of(extractor)
        return [
            metric
            for metric in self.metrics
            if metric.uses_real and not (metric.statistics and metric.features in stored)
        ]

    def run(
        self,
        images: Images,
        *,
        held_out: Images | None = None,
        batch_size: int,
        device: torch.device,
        cache: dict[str, Any] | None = None,
        **metadata: Any,
    ) -> dict[str, Any]:
        """Return what `score` returns for `images`, with the scores of `held_out` as `real`.

        Args:
            images, held_out: the images to score, and real ones to score for comparison.
            batch_size: images per batch.
            device: where the extractor runs, if that is a CUDA device; else it runs on the CPU.
            cache: keeps the reference's features and `real`, which do not depend on `images`, for
                later calls.
            metadata: further fields of `Protocol`.
        """
        cache = {} if cache is None else cache
        extractor, metrics, network = self.extractor, self.metrics, None
        if extractor is not None:
            device = device if device.type == "cuda" else torch.device("cpu")
            network = extractor.load({metric.features for metric in metrics}, device)
            metadata |= {"extractor": extractor.label, "extractor_sha256": extractor.sha256}
            metadata |= {"resize": extractor.resize, "device": device.type}

        def features(source: Images, some: Collection[Metric]) -> FeatureSet:
            statistics = {metric.features for metric in some if metric.statistics}
            rows = {metric.features for metric in some if not metric.statistics}
            return extract(source, network, statistics=statistics, rows=rows, batch_size=batch_size)

        generated = features(images, metrics)
        if "reference" not in cache:
            cache["reference"] = self._read_reference(features)
        reference = cache["reference"]
        if held_out is not None and "real" not in cache and extractor is not None:
            some = [m for m in metrics if not _too_few(m, extractor, len(held_out), "")]
            cache["real"], _ = _values(features(held_out, some), reference, some)
        values, notes = _values(generated, reference, metrics)
        protocol = Protocol(
            metrics=[metric.options for metric in metrics],
            num_generated=len(images),
            image_size=list(images.shape[1:]),
            channels=images.shape[0],
            samples_sha256=generated.sha256,
            reference=self.reference.name if metrics else None,
            num_reference=reference.count,
            reference_sha256=reference.sha256,
            torch=str(torch.__version__),
            torch_fidelity=version("torch-fidelity"),
            notes=notes,
            **metadata,
        )
        record = {"values": values, "real": dict(cache.get("real", {}))}
        record["protocol"] = protocol.as_dict()
        return record | ({"not_scored": self.not_scored} if self.not_scored else {})

    def _read_reference(self, features: Callable[..., FeatureSet]) -> FeatureSet:
        """Return the reference's features. Where a metric needs no more than the statistics stored
        in the reference's file, these are returned; else `features(images, metrics)` is called."""
        compared = self._compared(self.extractor) if self.extractor else []
        computed, real = FeatureSet(), self.reference.images
        if compared and real is not None:
            computed = features(real, compared)
        names = {m.features for m in self.metrics if m.uses_real and m not in compared}
        stored = {name: self.reference.statistics[name] for name in names}
        if not stored:
            return computed
        count = computed.count or next(iter(stored.values())).count
        sha256 = checksum(self.reference.file)
        return FeatureSet(count, sha256, computed.statistics | stored, computed.rows)


def score(
    images: Images | Tensor | str | Path,
    reference: Reference | Images | Tensor | str | Path,
    metrics: Sequence[str | Mapping[str, Any]] = "auto",
    *,
    extractor: str = DIGITS,
    batch_size: int = 250,
    device: str | torch.device = "cpu",
    inception_weights: str | None = None,
    dinov2_weights: str | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """Return scores of images against a reference as `{"values": {name: float}, "real": {},
    "protocol": …}`; `real`, scores of held-out images, is empty here.

    Args:
        images: uint8 [N,C,H,W], a folder of pictures, an .npz with `arr_0`, or an `Images`.
        reference: the same, or an .npz of statistics. Grey images are repeated to 3 channels if the
            extractor needs colour.
        metrics: names, or mappings with `name` and options. auto is those of fid, kid, precision
            and recall that extractor, reference and number of images allow.
        extractor, inception_weights, dinov2_weights: see `find_extractor`.
        batch_size: images per batch.
        device: where the extractor runs.
        metadata: further fields of `Protocol`.

    Raises:
        ValueError: images, reference, metrics and extractor do not match, or weights are missing.
    """
    source = open_images(images)
    network = find_extractor(extractor, inception_weights, dinov2_weights)
    evaluation = Evaluation(
        build_metrics(metrics), network, open_reference(reference), auto=metrics == "auto"
    )
    evaluation = evaluation.fit(len(source), source.shape, source.num_classes)
    return evaluation.run(source, batch_size=batch_size, device=torch.device(device), **metadata)


def extract(
    images: Images,
    network: Network | None,
    *,
    statistics: Collection[str] = (),
    rows: Collection[str] = (),
    batch_size: int,
) -> FeatureSet:
    """Return features of all images, computed by `network` (from `Extractor.load`; None: no
    features): mean and covariance of those named in `statistics`, and all rows, one per image, of
    those named in `rows`. Only one batch of images is in memory at a time."""
    rank, world = rank_and_number()
    running = {name: RunningStatistics() for name in statistics}
    batches: dict[int, dict[str, Any]] = {}  # by first image
    starts = range(rank * batch_size, len(images), batch_size * world)
    with _leaving_together():
        for first in progress("scoring", starts, " batches"):
            batch, labels = images.read(range(first, min(first + batch_size, len(images))))
            features = network(batch) if network and (statistics or rows) else {}
            for name in statistics:
                running[name].add(features[name])
            digests = [hashlib.sha256(image).digest() for image in batch.contiguous().numpy()]
            batches[first] = {n: features[n].cpu() for n in rows}
            batches[first] |= {"sha256": b"".join(digests), "labels": labels}
    sums = {name: (one.count, one.mean.cpu(), one.squares.cpu()) for name, one in running.items()}
    gathered = _gather((batches, sums))
    if not gathered:
        return FeatureSet()
    for name in statistics:
        running[name] = RunningStatistics()
        for _, part in gathered:
            running[name].merge(*part[name])
    ordered = [batch for _, batch in sorted(p for part, _ in gathered for p in part.items())]
    whole = {name: torch.cat([batch[name] for batch in ordered]) for name in rows}
    for name, values in whole.items():
        if not values.isfinite().all():
            raise ValueError(f"the extractor's {name} features are not finite.")
    digest = hashlib.sha256("x".join(map(str, images.shape)).encode())
    digest.update(b"".join(batch["sha256"] for batch in ordered))
    shown = [batch["labels"] for batch in ordered if batch["labels"] is not None]
    return FeatureSet(
        len(images),
        digest.hexdigest(),
        {name: running[name].finish() for name in statistics},
        whole,
        torch.cat(shown) if shown else None,
    )


def _values(
    generated: FeatureSet, reference: FeatureSet, metrics: Iterable[Metric]
) -> tuple[dict[str, float], list[str]]:
    """Return the values of metrics by name, and their warnings; both are empty except on rank 0."""
    values: dict[str, float] = {}
    notes: list[str] = []
    for metric in metrics if rank_and_number()[0] == 0 else ():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)
            values |= metric.compute(generated, reference)
        notes += [f"{metric.name}: {one.message}" for one in caught]
    return values, list(dict.fromkeys(notes))


def _misfit(metric: Metric, extractor: Extractor, reference: Reference, num_classes: int) -> str:
    """Return why a metric does not fit the extractor, the reference, or labels of `num_classes`
    classes; "" if it fits."""
    if not fnmatch.fnmatchcase(extractor.name, metric.extractor):
        return f"is for {metric.extractor}: set evaluation.extractor to one, not {extractor.name}"
    if metric.features not in extractor.sizes:
        return f"takes {metric.features} features, which {extractor.name} lacks: use {INCEPTION}"
    if metric.labels and not 0 < num_classes <= extractor.num_classes:
        return (
            f"reads {extractor.num_classes} classes with {extractor.name}, and the labels are of "
            f"{num_classes}: train an extractor with tread-zoo make-features"
        )
    if reference.images is not None or not metric.uses_real:
        return ""
    if not metric.statistics:
        return f"compares images, and {reference.name} has statistics alone: give images"
    if metric.features in reference.statistics_of(extractor):
        return ""
    return (
        f"takes {metric.features} features of {extractor.label}, and {reference.name} has "
        f"statistics of {', '.join(sorted(reference.statistics))} ones of {reference.extractor}: "
        "make it with that extractor (tread-zoo make-reference), give images"
    )


def _too_few(metric: Metric, extractor: Extractor, count: int, name: str) -> str:
    """Return why a metric is not defined for `count` images of the set `name`; "" if it is."""
    parts, neighbors = (metric.options.get(field, 0) for field in ("num_parts", "num_neighbors"))
    least = max(metric.min_images, parts, neighbors + 1)
    if count < least:
        return f"takes {least} images, and {name} has {count}: give more"
    size = extractor.sizes[metric.features]
    if not metric.statistics or count > size:
        return ""
    return (
        f"compares covariances of {size} features, which are singular without more images, and "
        f"{name} has {count}: give {size + 1}, take kid"
    )


# Several processes --------------------------------------------------------------------------------


@contextmanager
def distributed(device: torch.device) -> Iterator[bool]:
    """Connect the processes that a launcher started to compute on `device`, if there are several;
    yield whether this is rank 0."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    from accelerate import PartialState

    PartialState(cpu=device.type == "cpu")
    yield rank_and_number()[0] == 0
    dist.destroy_process_group()


def _gather(part: Any) -> list[Any]:
    """Return on rank 0 a list of the values that the ranks pass as `part`; on other ranks, []."""
    rank, world = rank_and_number()
    if world == 1:
        return [part]
    parts: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(part, parts)
    return parts or []


@contextmanager
def _leaving_together() -> Iterator[None]:
    """If a signal raises `SystemExit` on one rank, raise it on all ranks, so that none waits
    forever for another."""
    ended: SystemExit | None = None
    try:
        yield
    except SystemExit as error:
        ended = error
    world = rank_and_number()[1]
    if world > 1:
        others: list[SystemExit | None] = [None] * world
        dist.all_gather_object(others, ended)
        ended = next((one for one in others if one is not None), None)
    if ended is not None:
        raise ended
