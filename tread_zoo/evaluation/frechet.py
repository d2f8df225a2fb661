"""The Fréchet distance between two Gaussians, from means and covariances in float64.

    d^2 = |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1^(1/2) S2 S1^(1/2))^(1/2)   (Dowson, Landau 1982)

S1^(1/2) S2 S1^(1/2) is symmetric and has the eigenvalues of S1 S2, so symmetric eigenproblems are
enough; the general matrix square root fails if S1 S2 is singular. Some BLAS builds return wrong
numbers silently, so the root R is checked against R R = S1, and the eigenvalues l of M = R S2 R
against sum l = tr M and sum l^2 = |M|^2.

Two sets of n and k rows, with means p and q and sums of squares P and Q about them, are merged by
(Chan, Golub, LeVeque 1979)

    mean p + k / (n + k) (q - p),    squares P + Q + n k / (n + k) (q - p)(q - p)^T

Dimensions: N rows (images), D features.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

_EXACT = 1e-9  # relative error; float64 eigenvalues are accurate to about D * 2e-16


@dataclass(frozen=True)
class Statistics:
    """Mean [D] and covariance [D, D] (divisor N - 1), float64, of N rows of D features. `count` is
    N, or None if unknown."""

    mean: Tensor
    covariance: Tensor
    count: int | None


class RunningStatistics:
    """Mean and covariance of rows that are added batch by batch; computed on the rows' device."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.empty(0)

    def add(self, rows: Tensor) -> None:
        """Add `rows` [N, D], summed in float64."""
        rows = rows.double()
        mean = rows.mean(dim=0)
        centered = rows - mean
        self.merge(len(rows), mean, centered.T @ centered)

    def merge(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Add `count` rows, given by their mean [D] and sum of squares about the mean [D, D]."""
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
        """Return the statistics of all rows so far, on the CPU."""
        covariance = self.squares.cpu() / (self.count - 1)
        return Statistics(self.mean.cpu(), covariance, self.count)


def frechet_distance(generated: Statistics, real: Statistics) -> float:
    """Return the squared Fréchet distance d^2. A `RuntimeWarning` says if the value is doubtful."""
    for name, of in (("generated", generated), ("real", real)):
        if of.count is not None and of.count <= len(of.mean):
            _warn(
                f"the {name} covariance, of {len(of.mean)} features, is singular: the distance of "
                f"only {of.count} images depends strongly on their number"
            )
    one, other = (_symmetric(s.covariance) for s in (generated, real))
    values, vectors = torch.linalg.eigh(one)
    kept = _clip(values)
    root = vectors * kept.sqrt() @ vectors.T
    error = torch.linalg.matrix_norm(root @ root - one)
    # clipped eigenvalues are missing from the root
    allowed = _EXACT * torch.linalg.matrix_norm(one) + torch.linalg.vector_norm(values - kept)
    product = _symmetric(root @ other @ root)
    values = torch.linalg.eigvalsh(product)
    square = product.square().sum()
    bound = len(values) ** 0.5 * square.sqrt()  # no trace is larger
    sums_agree = (values.sum() - product.trace()).abs() <= _EXACT * bound
    squares_agree = (values.square().sum() - square).abs() <= _EXACT * square
    if not (error <= allowed and sums_agree and squares_agree):
        _warn(
            "this machine's linear algebra (BLAS) gives wrong results, so the distance is wrong; "
            "use another build of torch or another machine"
        )
    gap = (generated.mean.double() - real.mean.double()).square().sum()
    return float(gap + one.trace() + other.trace() - 2 * _clip(values).sqrt().sum())


def _clip(values: Tensor) -> Tensor:
    """Return eigenvalues [D]; those that are negative, or too small to tell from rounding, become
    0."""
    level = len(values) * torch.finfo(torch.float64).eps * values.abs().max()
    return torch.where(values > level, values, torch.zeros_like(values))


def _symmetric(matrix: Tensor) -> Tensor:
    matrix = matrix.double()
    return (matrix + matrix.T) / 2


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
