"""A comparison finds an effect that is there, and none where there is none."""

import json

import pytest

from tests.small_run import train_small
from tread_zoo.comparison import read_curves, read_runs, write_report

SEEDS = (0, 1, 2)


def pose_as_routed(folder, seed):
    """Write a dense run down as a routed one of this seed."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "seed": seed, "routing": {"name": "tread"}}))


def train(folder, seed, steps):
    train_small(
        folder, "routing=none", "backbone.hidden_size=32", "training.batch_size=32",
        "optimizer.learning_rate=1e-2", "training.ema_decay=0.9", "lr_schedule=constant",
        f"training.num_steps={steps}", f"seed={seed}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    place = tmp_path_factory.mktemp("dense")
    for seed in SEEDS:
        train(place / f"dense{seed}", seed, 40)
    return place


def verdict(dense, tmp_path, steps, seeds):
    """Return what is said of dense runs and of others, of these steps and seeds, that pose as
    routed."""
    for seed, other in zip(SEEDS, seeds, strict=True):
        train(tmp_path / f"posing{seed}", other, steps)
        pose_as_routed(tmp_path / f"posing{seed}", seed)
    folders = [str(dense / "*"), str(tmp_path / "posing*")]
    runs, curves = read_runs(folders), read_curves(folders)
    runs["steps"], runs["flops"] = 40, 1e9  # what they pretend to have spent
    text = write_report(runs, curves, tmp_path / "out", title="Planted", metric="held_out_loss")
    return next(line for line in text.splitlines() if line.startswith("| dit_tiny | routed"))


@pytest.mark.slow
def test_twice_the_training_posing_as_routing_is_found(dense, tmp_path):
    assert verdict(dense, tmp_path, steps=80, seeds=SEEDS).count(" ahead ") >= 2


@pytest.mark.slow
def test_other_seeds_posing_as_routing_are_not(dense, tmp_path):
    row = verdict(dense, tmp_path, steps=40, seeds=(3, 4, 5))
    assert " not settled " in row
    assert not {"ahead", "behind"} & set(row.split())
