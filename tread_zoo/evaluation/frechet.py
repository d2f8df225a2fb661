"""The Fréchet distance between two Gaussians, from means and covariances in float64.

    d^2 = |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1^(1/2) S2 S1^(1/2))^(1/2)   (Dowson, Landau 1982)

S1^(1/2) S2 S1^(1/2) is symmetric and has the eigenvalues of S1 S2, so only symmetric eigenproblems
are solved: real at any rank, and free of the general matrix square root, which fails where S1 S2 is
singular. Some builds of linear algebra return wrong numbers silently, so the root R is checked
against R R = S1, and the eigenvalues l of M = R S2 R against sum l = tr M and sum l^2 = |M|^2.

Means and covariances are summed batch by batch. Of two parts with n and k rows, means p and q and
sums of squares P and Q about them (Chan, Golub, LeVeque 1979),

    mean p + k / (n + k) (q - p),    squares P + Q + n k / (n + k) (q - p)(q - p)^T

Dimensions: N rows (images), D features.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

_EXACT = 1e-9  # relative: eigenvalues in float64 are good to about D 2e-16


@dataclass(frozen=True)
class Statistics:
    """Mean float64 [D] and covariance float64 [D, D] (over N - 1) of N rows; N None: unknown."""

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
        centered = rows - mean
        self.merge(len(rows), mean, centered.T @ centered)

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
        """Return the statistics of all rows so far, on the CPU."""
        covariance = self.squares.cpu() / (self.count - 1)
        return Statistics(self.mean.cpu(), covariance, self.count)


def frechet_distance(generated: Statistics, real: Statistics) -> float:
    """Return d^2 above; what makes it doubtful is a `RuntimeWarning`."""
    for name, of in (("generated", generated), ("real", real)):
        if of.count is not None and of.count <= len(of.mean):
            _warn(
                f"the {name} covariance, of {len(of.mean)} features, is singular: it is of "
                f"{of.count} images, and the distance depends strongly on how many"
            )
    one, other = (_symmetric(s.covariance) for s in (generated, real))
    values, vectors = torch.linalg.eigh(one)
    kept = _clip(values)
    root = vectors * kept.sqrt() @ vectors.T
    error = torch.linalg.matrix_norm(root @ root - one)
    # what was cut off is missing in the root, too
    allowed = _EXACT * torch.linalg.matrix_norm(one) + torch.linalg.vector_norm(values - kept)
    product = _symmetric(root @ other @ root)
    values = torch.linalg.eigvalsh(product)
    square = product.square().sum()
    bound = len(values) ** 0.5 * square.sqrt()  # no trace is larger
    sums_agree = (values.sum() - product.trace()).abs() <= _EXACT * bound
    squares_agree = (values.square().sum() - square).abs() <= _EXACT * square
    if not (error <= allowed and sums_agree and squares_agree):
        _warn(
            "the linear algebra of this machine (BLAS) is broken, and so is the distance; use "
            "another build of torch, or another machine"
        )
    gap = (generated.mean.double() - real.mean.double()).square().sum()
    return float(gap + one.trace() + other.trace() - 2 * _clip(values).sqrt().sum())


def _clip(values: Tensor) -> Tensor:
    """Return eigenvalues [D] with those below rounding, and those below 0, set to 0."""
    level = len(values) * torch.finfo(torch.float64).eps * values.abs().max()
    return torch.where(values > level, values, torch.zeros_like(values))


def _symmetric(matrix: Tensor) -> Tensor:
    matrix = matrix.double()
    return (matrix + matrix.T) / 2


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
