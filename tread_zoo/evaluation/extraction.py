"""From images to what metrics are computed of, batch by batch: statistics, or all features.

A set of images is seen once. Statistics (mean, covariance) take D^2 numbers, however many images
there are; rows [N, D] are kept for the metrics that compare images with images, and for no others.

Dimensions: N images, B of a batch, C channels, H height, W width, D features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tread_zoo.evaluation.extractors import Extractor
from tread_zoo.evaluation.frechet import RunningStatistics, Statistics
from tread_zoo.evaluation.sharing import Share
from tread_zoo.evaluation.sources import ImageSource, combine, read_ahead

ALONE = Share()


@dataclass(frozen=True)
class Needs:
    """Names of the features whose statistics, and whose rows, a metric asks for."""

    statistics: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.statistics | self.rows

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(self.statistics | other.statistics, self.rows | other.rows)


@dataclass(frozen=True)
class FeatureSet:
    """What is known of a set of images.

    Args:
        count: N, or None where a file of statistics does not say.
        shape: [C,H,W], or None likewise.
        sha256: of the images, see `tread_zoo.evaluation.sources`, or of a file of statistics; ""
            for samples.
        statistics: by name of the features.
        rows: float32 [N, D] by name.
        num_replaced: of the N, how many stand for images that could not be read.
    """

    count: int | None
    shape: tuple[int, ...] | None
    sha256: str
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    num_replaced: int = 0


class Collector:
    """Takes in this process's batches, and becomes the feature set of all images.

    Args:
        extractor: gives all that `needs` names.
        needs: what to gather.
    """

    def __init__(self, extractor: Extractor, needs: Needs) -> None:
        self.extractor, self.needs = extractor, needs
        self._running = {name: RunningStatistics() for name in needs.statistics}
        self._rows: dict[str, list[Tensor]] = {name: [] for name in needs.rows}
        self._digests: list[Tensor] = []

    def add(self, images: Tensor, digests: Tensor | None = None) -> dict[str, Tensor]:
        """Take in images uint8 [B,C,H,W], and return their features by name."""
        found = self.extractor(images) if self.needs.names else {}
        for name, running in self._running.items():
            running.add(found[name])
        for name, rows in self._rows.items():
            rows.append(found[name].cpu())
        if digests is not None:
            self._digests.append(digests)
        return found

    def finish(
        self, num_images: int, batch_size: int, shape: tuple[int, ...], share: Share = ALONE
    ) -> FeatureSet:
        """Return the features of the images of all processes.

        Args:
            num_images, batch_size: of the batches that `share` dealt out.
            shape: [C,H,W].

        Raises:
            ValueError: features that are not finite.
        """

        def joined(parts: list[Tensor]) -> Tensor:
            own = torch.cat(parts) if parts else None
            return share.in_order(own, num_images, batch_size)

        # Sorted: every process must communicate in the same order.
        rows = {name: joined(self._rows[name]) for name in sorted(self._rows)}
        for name, values in rows.items():
            if not values.isfinite().all():
                raise ValueError(
                    f"extractor={self.extractor.label!r} gave {name} that are not finite; its "
                    "weights are damaged, or its arithmetic overflows. Make or get them again."
                )
        statistics = {
            name: _merge(self._running[name], share).finish() for name in sorted(self._running)
        }
        hashed = share.gather(torch.ones(1) if self._digests else None)
        sha256 = combine(shape, joined(self._digests)) if hashed else ""
        return FeatureSet(num_images, shape, sha256, statistics, rows)


def extract(
    source: ImageSource,
    extractor: Extractor,
    needs: Needs,
    *,
    batch_size: int,
    share: Share = ALONE,
) -> FeatureSet:
    """Return the features of all images of a source; one batch, and the next, are in memory.

    Raises:
        ValueError: an image cannot be read or has another size.
    """
    collector = Collector(extractor, needs)
    for images, digests in read_ahead(source, share.batches(len(source), batch_size)):
        collector.add(images, digests)
    found = collector.finish(len(source), batch_size, source.shape, share)
    replaced = share.gather(torch.tensor([len(getattr(source, "replaced", ()))]))
    return replace(found, num_replaced=int(torch.cat(replaced).sum()))


def _merge(running: RunningStatistics, share: Share) -> RunningStatistics:
    """Return the statistics of all processes, merged in the order of their ranks."""
    if share.num_processes == 1:
        return running
    own = (torch.tensor(running.count), running.mean, running.squares)
    counts, means, squares = (share.gather(part[None] if running.count else None) for part in own)
    merged = RunningStatistics()
    for count, mean, square in zip(counts, means, squares, strict=True):
        merged.merge(int(count), mean[0], square[0])
    return merged
