"""Settings that cannot work are one ValueError with the field's name, before anything is made."""

from dataclasses import replace

import pytest

from tests.small_run import parts_of, settings, train_small
from tread_zoo.training.checkpoints import Checkpoint
from tread_zoo.training.restore import restore

UNTRAINED = [
    (["guidance=cfg", "training.label_dropout=0"], r"guidance=cfg .*training.label_dropout=0"),
    (["guidance=interval", "training.label_dropout=0"], r"guidance=interval .*label_dropout=0"),
    (["guidance=sparse", "routing=none"], r"guidance=sparse .*routing=none"),
]


@pytest.mark.parametrize(("overrides", "words"), UNTRAINED)
def test_a_weak_prediction_that_training_never_shows(overrides, words):
    with pytest.raises(ValueError, match=words):
        parts_of(settings(*overrides))


def test_the_same_guidance_where_it_takes_no_weak_prediction_or_a_trained_one():
    for fits in (
        ["guidance=cfg", "guidance.scale=1", "training.label_dropout=0"],
        ["guidance=sparse", "guidance.scale=1", "routing=none"],
        ["guidance=sparse", "training.label_dropout=0"],
    ):
        parts_of(settings(*fits))


def test_a_run_is_not_sampled_with_what_it_never_learnt(tmp_path):
    folder = train_small(tmp_path / "run", "training.num_steps=1", "routing=none")
    run = restore(folder, weights="ema", device="cpu", precision="fp32")
    sampler = {"name": None, "num_steps": None}
    with pytest.raises(ValueError, match=r"guidance=sparse .*routing=none"):
        run.sampling(sampler, {"name": "sparse"})
    assert run.sampling(sampler, {"name": "cfg"}).guidance.name == "cfg"
    meta = {**run.checkpoint.meta, "training": {"label_dropout": 0.0}}
    never = replace(run, checkpoint=Checkpoint(run.checkpoint.path, meta))
    with pytest.raises(ValueError, match=r"guidance=cfg .*label_dropout=0"):
        never.sampling(sampler, {"name": "cfg"})
    imported = {key: value for key, value in meta.items() if key not in ("training", "routing")}
    other = replace(run, checkpoint=Checkpoint(run.checkpoint.path, imported))
    for name in ("cfg", "sparse"):
        assert other.sampling(sampler, {"name": name}).guidance.name == name
