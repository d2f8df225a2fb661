"""Metrics: functions of the features of generated and of real images, registered by name.

    @register("metric", "mean_gap", better="lower")
    def mean_gap(generated, real): ...                 # features [N, D], [M, D] -> float

A metric returns a float, or several by name. Its options are its keyword-only parameters. A metric
that needs no real images, such as isc, has no argument `real`. `RuntimeWarning`s of a metric are
recorded with the score. Further keywords of `register`:

    better        "lower" or "higher"
    features      which features it takes: pooled (the default), spatial or logits
    statistics    True: takes mean and covariance, `Statistics`, instead of features; needs more
                  images than features
    extractor     a shell pattern for the names of allowed extractors
    min_images    least number of images, by default 2
    labels        True: takes the labels [N] of generated images instead of real images

Dimensions: N generated images, M real images, D features.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from tread_zoo.evaluation.frechet import Statistics, frechet_distance
from tread_zoo.registry import complete, get_entry, register

AUTO = ("fid", "kid", "precision", "recall")
_DISTANCES_AT_ONCE = 100_000_000


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of images, by name; filled on the main process only.

    Args:
        count: N; None if a file of statistics does not contain it.
        sha256: hash over all images, or of a file of statistics.
        statistics: mean and covariance by name of the features.
        rows: float32 [N, D] by name of the features.
        labels: int64 [N], or None.
    """

    count: int | None = None
    sha256: str | None = None
    statistics: dict[str, Statistics] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None


@dataclass(frozen=True)
class Metric:
    """A registered metric with its options. The fields after `uses_real` are explained in the
    module's docstring.

    Args:
        options: the options by name, `name` among them.
        function: the metric's function with the options bound.
        uses_real: whether the function takes the features of real images.
    """

    options: Mapping[str, Any]
    function: Callable[..., Any]
    uses_real: bool
    features: str = "pooled"
    statistics: bool = False
    extractor: str = "*"
    min_images: int = 2
    labels: bool = False

    @property
    def name(self) -> str:
        """The registered name."""
        return str(self.options["name"])

    def compute(self, generated: FeatureSet, real: FeatureSet) -> dict[str, float]:
        """Return the metric's values by name, such as `kid` and `kid_std`."""
        sets = (generated, real) if self.uses_real else (generated,)
        inputs = [(s.statistics if self.statistics else s.rows)[self.features] for s in sets]
        result = self.function(*inputs, *([generated.labels] if self.labels else []))
        values = result if isinstance(result, Mapping) else {self.name: result}
        return {name: float(value) for name, value in values.items()}


def build_metrics(parts: Iterable[str | Mapping[str, Any]]) -> tuple[Metric, ...]:
    """Return metrics from names, or from mappings with `name` and options; "auto" means `AUTO`.
    Raises ValueError for an unknown name or option, or a name that occurs twice."""
    metrics = []
    for part in AUTO if parts == "auto" else parts:
        options = complete("metric", part, "evaluation.metrics")
        entry = get_entry("metric", options["name"])
        parameters = inspect.signature(entry.target).parameters.values()
        positional = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        metadata = {name: value for name, value in entry.metadata.items() if name != "better"}
        keywords = {name: value for name, value in options.items() if name != "name"}
        uses_real = len(positional) > 1 and not metadata.get("labels")
        metrics.append(Metric(options, entry.build(keywords), uses_real, **metadata))
    for name, count in Counter(metric.name for metric in metrics).items():
        if count > 1:
            raise ValueError(f"evaluation.metrics has {name!r} twice; score in two calls.")
    return tuple(metrics)


@register("metric", "fid", better="lower", statistics=True)
@register("metric", "sfid", better="lower", statistics=True, features="spatial")
@register("metric", "fd_dinov2", better="lower", statistics=True, extractor="dinov2-*")
def frechet(generated: Statistics, real: Statistics) -> float:
    """Return the Fréchet distance between features: pooled ones for fid (Heusel et al. 2017),
    Inception's spatial ones for sfid (Nash et al. 2021), DINOv2's for fd_dinov2 (Stein et al.
    2023)."""
    return frechet_distance(generated, real)


@register("metric", "kid", better="lower", min_images=10)
def kid(
    generated: Tensor,
    real: Tensor,
    *,
    num_subsets: PositiveInt = 100,
    subset_size: Annotated[int, Field(ge=2)] = 1000,
    seed: int = 0,
) -> dict[str, float]:
    """Return by name the squared kernel distance with a cubic kernel (Bińkowski et al. 2018), and
    its standard deviation over subsets. The distance is unbiased and may be negative.

    Args:
        num_subsets: number of random subsets.
        subset_size: images per subset, at most as many as the smaller set of images has.
        seed: seed of the choice of subsets.
    """
    from torch_fidelity.metric_kid import kid_features_to_metric

    size = min(subset_size, len(generated), len(real))
    values = kid_features_to_metric(
        generated, real, kid_subsets=num_subsets, kid_subset_size=size, rng_seed=seed, verbose=False
    )
    names = {"kid": "kernel_inception_distance_mean", "kid_std": "kernel_inception_distance_std"}
    return {name: values[theirs] for name, theirs in names.items()}


@register("metric", "precision", better="higher", min_images=4)
def precision(generated: Tensor, real: Tensor, *, num_neighbors: PositiveInt = 3) -> float:
    """Return the fraction of generated images within the ball around some real image (Kynkäänniemi
    et al. 2019).

    Args:
        num_neighbors: k; a ball's radius is the distance to the k-th nearest image of the same set.
    """
    return _coverage(generated, real, num_neighbors)


@register("metric", "recall", better="higher", min_images=4)
def recall(generated: Tensor, real: Tensor, *, num_neighbors: PositiveInt = 3) -> float:
    """Return the fraction of real images within the ball around some generated image: `precision`
    with the sets exchanged."""
    return _coverage(real, generated, num_neighbors)


@register("metric", "isc", better="higher", features="logits", min_images=10)
def isc(generated: Tensor, *, num_parts: PositiveInt = 10, seed: int = 0) -> dict[str, float]:
    """Return the inception score of logits [N, classes], exp of the mean KL divergence of
    p(class | image) from p(class) (Salimans et al. 2016), and its standard deviation over parts.

    Args:
        num_parts: number of parts into which the images are divided.
        seed: seed of the division.
    """
    from torch_fidelity.metric_isc import isc_features_to_metric

    values = isc_features_to_metric(generated, splits=num_parts, rng_seed=seed)
    return {"isc": values["inception_score_mean"], "isc_std": values["inception_score_std"]}


@register("metric", "label_accuracy", better="higher", features="logits", min_images=1, labels=True)
def label_accuracy(generated: Tensor, labels: Tensor) -> float:
    """Return the fraction of images whose highest logit [N, classes] is at their label, int64 [N].
    It ignores variety: one good image per class, repeated, scores 1."""
    return float((generated.argmax(dim=1) == labels).double().mean())


def _coverage(points: Tensor, centers: Tensor, num_neighbors: int) -> float:
    # Center first: cdist uses products, which lose float32 digits if the mean is far from 0.
    mean = centers.double().mean(dim=0).to(centers.dtype)
    points, centers = points - mean, centers - mean
    rows = max(1, _DISTANCES_AT_ONCE // len(centers))
    k = num_neighbors + 1  # the nearest is the point itself
    radii = torch.cat([torch.cdist(x, centers).kthvalue(k).values for x in centers.split(rows)])
    inside = [(torch.cdist(x, centers) <= radii).any(dim=1) for x in points.split(rows)]
    return float(torch.cat(inside).double().mean())
