"""Features of real images that were kept give the same numbers, and are never another set's."""

import pytest
import torch

from tread_zoo.evaluation.metrics import score


def images(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)


def test_kept_features_change_no_number(tmp_path):
    metrics = ("fid", "precision")
    real, other, samples = images(0, 40), images(1, 40), images(2, 20)
    plain = score(samples, real, metrics=metrics)
    first = score(samples, real, metrics=metrics, cache=tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept
    again = score(samples, real.clone(), metrics=metrics, cache=tmp_path)
    assert first == again == plain
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert score(samples, other, metrics=metrics, cache=tmp_path) == score(
        samples, other, metrics=metrics
    )
    assert len(list(tmp_path.iterdir())) == 2 * len(kept)


def test_samples_are_never_kept(tmp_path):
    """Other samples of the same number against the same reference score differently."""
    real = images(0, 40)
    one, two = (
        score(images(seed, 20), real, metrics=("fid",), cache=tmp_path)["values"]["fid"]
        for seed in (2, 3)
    )
    assert one != pytest.approx(two, rel=1e-6)
