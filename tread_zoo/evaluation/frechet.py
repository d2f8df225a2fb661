"""The Fréchet distance between two Gaussians, from means and covariances in float64.

    d^2 = |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1^(1/2) S2 S1^(1/2))^(1/2)   (Dowson, Landau 1982)

S1^(1/2) S2 S1^(1/2) is symmetric and has the eigenvalues of S1 S2, so only symmetric eigenproblems
are solved: real at any rank, and free of the general matrix square root, which fails where S1 S2 is
singular. An eigenvalue within rounding of 0 is 0; one that lies below it by more says that what was
given is no covariance, and is noted.

Some builds of linear algebra give wrong numbers without a word. What they gave is checked: the
root R against R R = S1, the eigenvalues l of M = R S2 R against sum l = tr M and sum l^2 = |M|^2,
and the distance against 0. What does not hold is noted.

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
EXACT = 1e-9  # relative: eigenvalues in float64 are good to about D 2e-16
BROKEN = "Use another build of torch, or another machine."
NEGATIVE = 1e-6  # of the traces: what a distance may lie below 0 by rounding


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
    root = _root(one, f"the {names[0]} covariance", found)
    product = _symmetric(root @ other @ root)
    values = torch.linalg.eigvalsh(product)
    _check_values(values, product, found)
    cross = _clipped(values, "the product of the covariances", found).sqrt().sum()
    gap = (first.mean.double() - second.mean.double()).square().sum()
    traces = one.trace() + other.trace()
    distance = float(gap + traces - 2 * cross)
    if distance < -NEGATIVE * traces:
        found.append(
            f"the distance is {distance:.4g}, below 0 by more than rounding, which no distance is: "
            "it is wrong. See the other notes; without any, suspect the linear algebra (BLAS)."
        )
    if notes is not None:
        notes += found
    else:
        for text in found:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return distance


def _root(matrix: Tensor, name: str, notes: list[str]) -> Tensor:
    """Return the symmetric square root [D, D] of a covariance, and note where it is none."""
    values, vectors = torch.linalg.eigh(matrix)
    kept = _clipped(values, name, notes)
    root = vectors * kept.sqrt() @ vectors.T
    error = torch.linalg.matrix_norm(root @ root - matrix)
    size = torch.linalg.matrix_norm(matrix)
    # what was cut off is missing in the root, too
    if not error <= EXACT * size + torch.linalg.vector_norm(values - kept):
        notes.append(
            f"the square root of {name} is wrong by {float(error / size):.2g} of it: the linear "
            f"algebra of this machine (BLAS) is broken, and so is the distance. {BROKEN}"
        )
    return root


def _check_values(values: Tensor, matrix: Tensor, notes: list[str]) -> None:
    """Note where `values` [D] cannot be the eigenvalues of a symmetric matrix [D, D]."""
    square = matrix.square().sum()
    size = len(values) ** 0.5 * square.sqrt()  # no trace is larger
    if not (
        (values.sum() - matrix.trace()).abs() <= EXACT * size
        and (values.square().sum() - square).abs() <= EXACT * square
    ):
        notes.append(
            f"the eigenvalues of the product of the covariances sum to {float(values.sum()):.6g}, "
            f"and its trace is {float(matrix.trace()):.6g}: the linear algebra of this machine "
            f"(BLAS) is broken, and so is the distance. {BROKEN}"
        )


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
