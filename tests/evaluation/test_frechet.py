"""The distance against closed forms and other formulas, and what it warns of."""

import math
import warnings

import pytest
import torch
from scipy.linalg import sqrtm

from tread_zoo.evaluation.frechet import RunningStatistics, Statistics, frechet_distance


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics_of(rows):
    return Statistics(rows.mean(0), torch.cov(rows.T), len(rows))


def test_gaussians_without_common_axes_equal_the_general_square_root():
    one, other = statistics_of(normal(50, 6)), statistics_of(normal(60, 6, seed=1) * 3 + 1)
    s, t = one.covariance.numpy(), other.covariance.numpy()
    expected = float((one.mean - other.mean).square().sum()) + (s + t - 2 * sqrtm(s @ t)).trace()
    assert frechet_distance(one, other) == pytest.approx(expected.real, rel=1e-10)
    assert frechet_distance(other, one) == pytest.approx(expected.real, rel=1e-10)


def test_fewer_images_than_features_give_a_number_and_a_warning():
    """tr (S1^(1/2) S2 S1^(1/2))^(1/2) is the nuclear norm of A B^T for S1 = A^T A, S2 = B^T B."""
    x, y = normal(8, 40), normal(12, 40, seed=1) + 0.3
    a, b = ((z - z.mean(0)) / math.sqrt(len(z) - 1) for z in (x, y))
    cross = torch.linalg.matrix_norm(a @ b.T, "nuc")
    expected = (x.mean(0) - y.mean(0)).square().sum() + a.square().sum() + b.square().sum()
    with pytest.warns(RuntimeWarning, match="40 features, is singular"):
        found = frechet_distance(statistics_of(x), statistics_of(y))
    assert found == pytest.approx(float(expected - 2 * cross), rel=1e-6)


def test_statistics_are_the_same_however_rows_are_parted():
    """Far from 0, where sums of squares would cancel to nothing."""
    rows = normal(101, 5) + 1e7
    expected = torch.cov(rows.T)
    for sizes in ([101], [1, 100], [7] * 14 + [3]):
        running, merged = RunningStatistics(), RunningStatistics()
        for part in rows.split(sizes):
            running.add(part)
            own = RunningStatistics()
            own.add(part)
            merged.merge(own.count, own.mean, own.squares)
        for found in (running.finish(), merged.finish()):
            torch.testing.assert_close(found.covariance, expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-15, atol=0)
            assert found.count == 101


BREAKS = {
    "vectors": ("eigh", lambda found: (found[0], torch.linalg.qr(normal(6, 6, seed=3)).Q)),
    "values": ("eigvalsh", lambda found: 2 * found),
    "no values": ("eigvalsh", lambda found: found * math.nan),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_broken_linear_algebra_is_warned_of(kind, monkeypatch):
    name, breaks = BREAKS[kind]
    pair = statistics_of(normal(50, 6)), statistics_of(normal(60, 6, seed=1) * 3 + 1)
    original = getattr(torch.linalg, name)
    monkeypatch.setattr(torch.linalg, name, lambda matrix: breaks(original(matrix)))
    with pytest.warns(RuntimeWarning, match="BLAS"):
        frechet_distance(*pair)


@pytest.mark.parametrize(("rows", "size", "scale"), [(30, 80, 1e-3), (300, 200, 1e4), (3, 2, 1.0)])
def test_sound_statistics_are_not_called_broken(rows, size, scale):
    """Singular, large, small, in float32, of one image twice: rounding is no fault."""
    x = scale * normal(rows, size) * torch.logspace(-6, 2, size, dtype=torch.float64)
    y = x.float().double() + scale * normal(rows, size, seed=1)
    for pair in ((x, y), (x, x), (y, x), (x[:1].expand(rows, -1), y)):
        for kind in (torch.float64, torch.float32):
            sets = [
                Statistics(rows.mean(0).to(kind), torch.cov(rows.T).to(kind), None) for rows in pair
            ]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                frechet_distance(*sets)
