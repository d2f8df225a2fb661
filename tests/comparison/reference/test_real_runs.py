"""Runs that were trained: a seed lies on the curve of two others, ten times the rate does not."""

import pytest

from tests.small_run import settings, train_small
from tread_zoo.comparison.reference import compare_run, make_curve, read_trace, wanted_settings

SHORT = ["training.num_steps=60", "training.warmup_steps=4", "training.log_every=3",
         "training.sample_every=10", "training.batch_size=32", "backbone.hidden_size=32",
         "backbone.depth=3", "routing.start=1", "routing.end=2"]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    traces = [
        read_trace(train_small(folder / str(seed), *SHORT, f"seed={seed}")) for seed in (0, 1)
    ]
    wanted = wanted_settings(settings(*SHORT), traces[0].settings["data"])
    return {"small": make_curve("small", wanted, traces)}


def test_a_new_seed_is_on_the_curve(curves, tmp_path):
    comparison = compare_run(train_small(tmp_path / "run", *SHORT, "seed=2"), curves)
    assert not comparison.is_off, comparison.verdicts
    assert not comparison.is_own
    compared = {verdict.name: verdict.points for verdict in comparison.verdicts}
    assert compared["held_out_loss"] == 6
    assert compared["held_out_loss_level_4"] == 6
    assert compared["loss_level_1"] == 10
    assert compared["score: held_out_loss"] == 1


def test_ten_times_the_learning_rate_is_off_it(curves, tmp_path):
    run = train_small(tmp_path / "run", *SHORT, "seed=2", "training.learning_rate=0.06")
    with pytest.raises(ValueError, match=r"training.learning_rate is 0.06, not 0.006"):
        compare_run(run, curves)
    comparison = compare_run(run, curves, "small")
    assert comparison.is_off
    assert comparison.differences == ["training.learning_rate is 0.06, not 0.006"]
    assert any(
        verdict.is_off and verdict.name == "held_out_loss" for verdict in comparison.verdicts
    )
