"""The Fréchet distance between two Gaussians, from means and covariances in float64.

    d^2 = |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1^(1/2) S2 S1^(1/2))^(1/2)   (Dowson, Landau 1982)

S1^(1/2) S2 S1^(1/2) is symmetric and has the eigenvalues of S1 S2, so only symmetric eigenproblems
are solved: real at any rank, and free of the general matrix square root, which fails where S1 S2 is
singular. An eigenvalue within rounding of 0 is 0; one that lies below it by more says that what was
given is no covariance, and is noted.

Means and covariances of more rows than fit in memory are gathered batch by batch. Of two parts with
n and k rows, means p and q and sums of squares P and Q about them (Chan, Golub, LeVeque 1979),

    mean p + k / (n + k) (q - p),    squares P + Q + n k / (n + k) (q - p)(q - p)^T

Dimensions: N rows (images), D features.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

SYMMETRY = 1e-4  # of sigma: what float32 arithmetic leaves


@dataclass(frozen=True)
class Statistics:
    """Mean float64 [D] and covariance float64 [D, D] (over N - 1) of N rows; N None: not known."""

    mean: Tensor
    covariance: Tensor
    count: int | None


class RunningStatistics:
    """Mean and covariance of rows that come in batches; kept on the device of the first batch."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.empty(0)

    def add(self, rows: Tensor) -> None:
        """Take in `rows` [N, D]; they are summed in float64."""
        rows = rows.double()
        mean = rows.mean(dim=0)
        centred = rows - mean
        self.merge(len(rows), mean, centred.T @ centred)

    def merge(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Take in a part: its rows, their mean [D] and their sum of squares about it [D, D]."""
        if count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        gap = mean - self.mean
        self.squares = self.squares + squares
        self.squares.addr_(gap, gap, alpha=self.count * count / total)
        self.mean = self.mean + gap * (count / total)
        self.count = total

    def finish(self) -> Statistics:
        """Return the statistics of all rows so far, on the CPU.

        Raises:
            ValueError: fewer than 2 rows, which have no covariance.
        """
        if self.count < 2:
            raise ValueError(f"{self.count} row(s) of features have no covariance; give 2 or more.")
        covariance = self.squares.cpu() / (self.count - 1)
        return Statistics(self.mean.cpu(), covariance, self.count)


def frechet_distance(
    first: Statistics,
    second: Statistics,
    *,
    names: tuple[str, str] = ("first", "second"),
    notes: list[str] | None = None,
) -> float:
    """Return d^2 above, what FID means by a distance.

    Args:
        first, second: of the same features.
        names: of the two, for notes and errors.
        notes: what makes the number doubtful is appended here; None: it is warned of.

    Raises:
        ValueError: statistics of different sizes, of wrong shapes, or not finite.
    """
    found: list[str] = []
    for name, statistics in zip(names, (first, second), strict=True):
        _check(name, statistics, found)
    if len(first.mean) != len(second.mean):
        raise ValueError(
            f"the {names[0]} statistics are of {len(first.mean)} features, the {names[1]} ones of "
            f"{len(second.mean)}: take both with one extractor."
        )
    one, other = (_symmetric(s.covariance) for s in (first, second))
    values, vectors = torch.linalg.eigh(one)
    root = vectors * _clipped(values, f"the {names[0]} covariance", found).sqrt() @ vectors.T
    product = torch.linalg.eigvalsh(_symmetric(root @ other @ root))
    cross = _clipped(product, "the product of the covariances", found).sqrt().sum()
    gap = (first.mean.double() - second.mean.double()).square().sum()
    if notes is not None:
        notes += found
    else:
        for text in found:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return float(gap + one.trace() + other.trace() - 2 * cross)


def _symmetric(matrix: Tensor) -> Tensor:
    matrix = matrix.double()
    return (matrix + matrix.T) / 2


def _clipped(values: Tensor, name: str, notes: list[str]) -> Tensor:
    """Return eigenvalues [D] with those below rounding, and those below 0, set to 0."""
    level = len(values) * torch.finfo(torch.float64).eps * values.abs().max()
    negative = -values.clamp(max=0).sum()
    # float32 statistics, as some files have them, are off by this much at most
    if negative > 1e-4 * values.abs().sum():
        notes.append(
            f"{name} has negative eigenvalues, which sum to {negative / values.abs().sum():.2g} of "
            "all: what was given is no covariance. They count as 0."
        )
    return torch.where(values > level, values, torch.zeros_like(values))


def _check(name: str, statistics: Statistics, notes: list[str]) -> None:
    mean, covariance = statistics.mean, statistics.covariance
    size = len(mean) if mean.ndim == 1 else 0
    if not size or tuple(covariance.shape) != (size, size):
        raise ValueError(
            f"the {name} statistics have a mean of shape {tuple(mean.shape)} and a covariance of "
            f"shape {tuple(covariance.shape)}; [D] and [D, D] are wanted."
        )
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise ValueError(
            f"the {name} statistics are not finite: the features that they were taken from had NaN "
            "or infinite values, or the file is damaged. Make them again."
        )
    skew = (covariance - covariance.T).abs().max() / covariance.abs().max().clamp_min(1e-300)
    if skew > SYMMETRY:
        notes.append(
            f"the {name} covariance is not symmetric (by {skew:.2g} of its largest entry): it may "
            "be damaged. The mean of it and its transpose is taken."
        )
    if statistics.count is not None and statistics.count <= size:
        notes.append(
            f"the {name} covariance, of {size} features, is singular: it is of {statistics.count} "
            "images. The distance depends strongly on how many; take more images than features."
        )
