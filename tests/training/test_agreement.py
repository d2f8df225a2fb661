"""Ranks that would train together from different weights or on different data are stopped."""

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.processes import run_python
from tests.small_run import SMALL, parts_of, settings, train_small
from tests.training.test_sweeps import connected
from tread_zoo.training import agreement, train
from tread_zoo.training.agreement import (
    IMAGES_PER_STEP,
    check_ranks_agree,
    images_per_step,
    warn_of_another_batch,
)
from tread_zoo.training.checkpoints import Checkpoint, find_checkpoint, has_checkpoints
from tread_zoo.training.options import TrainingOptions
from tread_zoo.training.reporting import Reporter

__all__ = ["connected"]
EACH = ["training.checkpoint_every=1", "training.num_steps=2", "routing=none", "backbone.depth=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps, each saved."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("samples", "finish"):
            patch.setattr(Reporter, name, lambda *args: None)
        return train_small(tmp_path_factory.mktemp("trained"), *EACH)


@pytest.fixture(scope="module")
def own():
    return parts_of(settings(*EACH)).settings


def check_together(monkeypatch, *ranks):
    """Let each rank, given as (checkpoint, settings), check; return what each of them raised."""
    facts = [agreement._facts(*rank) for rank in ranks]
    monkeypatch.setattr(agreement, "_from_all_ranks", lambda accelerator, own: facts)
    closed, raised = [], []
    monkeypatch.setattr(agreement, "leave_connections", lambda: closed.append(True))
    for index, rank in enumerate(ranks):
        try:
            check_ranks_agree(SimpleNamespace(num_processes=len(ranks), process_index=index), *rank)
            raised.append(None)
        except ValueError as error:
            raised.append(str(error))
    assert len(closed) == len([each for each in raised if each]), "the group was left open"
    return raised


def test_ranks_that_agree_start(monkeypatch, trained, own, tmp_path):
    one = find_checkpoint(trained)
    copied = find_checkpoint(shutil.copytree(trained, tmp_path / "elsewhere"))
    assert check_together(monkeypatch, (None, own), (None, own)) == [None, None]
    workers = {**own, "training": {**own["training"], "num_workers": 7}}
    assert check_together(monkeypatch, (one, own), (copied, workers)) == [None, None]


def test_a_checkpoint_that_one_rank_does_not_find_stops_all(monkeypatch, trained, own):
    checkpoint = find_checkpoint(trained)
    said = check_together(monkeypatch, (checkpoint, own), (None, own), (checkpoint, own))
    assert len(set(said)) == 1, "each rank says the same"
    assert (
        f"ranks 0, 2 (on {os.uname().nodename} in {os.getcwd()}) would go on at step 2" in said[0]
    )
    assert str(checkpoint.path.resolve()) in said[0]
    assert "rank 1 (on " in said[0]
    assert "found none and would start at step 0" in said[0]
    assert "file system that all machines share" in said[0]


def test_a_rank_that_fell_back_to_an_older_checkpoint_stops_all(monkeypatch, trained, own):
    newest = find_checkpoint(trained)
    older = find_checkpoint(trained / "checkpoints/step_00000001")
    said = check_together(monkeypatch, (newest, own), (older, own))
    assert "at step 2 from " in said[0]
    assert "at step 1 from " in said[0]
    assert said[0] == said[1]


def test_the_same_step_of_another_run_is_not_the_same_checkpoint(monkeypatch, trained, own):
    one = find_checkpoint(trained)
    meta = {**one.meta, "sha256": {**one.meta["sha256"], "ema.safetensors": "0" * 64}}
    said = check_together(monkeypatch, (one, own), (Checkpoint(one.path, meta), own))
    assert "do not continue from the same checkpoint" in said[1]


@pytest.mark.parametrize(
    ("section", "changed", "told"),
    [
        ("data", {"num_images": 3}, "data.num_images=1438 and seed=0, not 1"),
        ("training", {"batch_size": 3}, "seed=0, not 1 and training.batch_size=8, not 3"),
    ],
)
def test_other_data_or_settings_stop_all(monkeypatch, own, section, changed, told):
    other = {**own, section: {**own[section], **changed}, "seed": 1}
    told = told.replace("1438", f"{own['data']['num_images']}, not 3")
    said = check_together(monkeypatch, (None, own), (None, other))
    assert said[0] == said[1]
    assert f"rank 0 has {told}, as rank 1 (on " in said[0]


def test_ranks_are_asked_before_anything_is_written(connected, monkeypatch, tmp_path):
    """Through `train`, in a group of one that is told it were two."""

    def gathered(accelerator, own):
        return [own, {**own, "digest": "another", "step": 8, "path": "elsewhere"}]

    monkeypatch.setattr(agreement, "_from_all_ranks", gathered)
    whole = agreement.check_ranks_agree
    monkeypatch.setattr(
        "tread_zoo.training.loop.check_ranks_agree",
        lambda accelerator, *more: whole(SimpleNamespace(num_processes=2), *more),
    )
    with pytest.raises(ValueError, match=r"rank 1 .*would go on at step 8 from elsewhere"):
        train(**{**settings(*EACH), "run_dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def test_facts_come_from_each_rank(connected, own):
    facts = agreement._facts(None, own)
    assert agreement._from_all_ranks(SimpleNamespace(num_processes=1), facts) == [facts]


@pytest.mark.slow
def test_two_processes_in_two_folders_both_stop(tmp_path, trained, free_port):
    """Rank 0 finds the run's checkpoint, rank 1 has a folder of its own: no launcher ends it."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    shutil.copytree(trained, tmp_path / "one/run")
    script = os.path.abspath("scripts/train.py")
    command = [script, *SMALL, *EACH, "training.num_steps=4", "run_dir=run", "resume=latest"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}

    def start(rank):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": os.getcwd()}
        return run_python(
            *command, cwd=tmp_path / ("one", "other")[rank], env={**os.environ, **place, **own}
        )

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(start, range(2)))
    for each in done:
        said = each.stdout + each.stderr
        assert each.returncode == 1, said
        assert "error: the ranks of this run do not continue from the same checkpoint" in said
        assert "would go on at step 2" in said
        assert "Traceback" not in said
    assert not has_checkpoints(tmp_path / "other/run")
    assert find_checkpoint(tmp_path / "one/run").step == 2


def options(batch_size, accumulation=1):
    return TrainingOptions(
        **{
            **settings()["training"],
            "batch_size": batch_size,
            "gradient_accumulation_steps": accumulation,
        }
    )


def test_a_checkpoint_knows_the_images_of_a_step(trained):
    assert find_checkpoint(trained).meta[IMAGES_PER_STEP] == 8
    assert images_per_step(options(3, 5), num_ranks=2) == 30


@pytest.mark.parametrize(
    ("before", "batch_size", "accumulation", "ranks", "told"),
    [
        (256, 32, 1, 8, None),
        (256, 64, 1, 4, None),
        (256, 32, 1, 4, "with 128 images a step (4 rank(s) x batch_size 32 x 1 accumulated)"),
        (256, 32, 1, 4, "had 256: "),
        (256, 32, 1, 4, "training.batch_size=64 keeps it"),
        (256, 16, 2, 4, "training.batch_size=32 keeps it"),
        (256, 32, 1, 3, "no training.batch_size on 3 rank(s) would keep it"),
        (None, 32, 1, 4, None),  # a checkpoint of an earlier version
    ],
)
def test_another_number_of_images_a_step_is_told(
    caplog, tmp_path, before, batch_size, accumulation, ranks, told
):
    meta = {} if before is None else {IMAGES_PER_STEP: before}
    with caplog.at_level(logging.WARNING):
        warn_of_another_batch(Checkpoint(tmp_path, meta), options(batch_size, accumulation), ranks)
    assert told in caplog.text if told else not caplog.text


def test_a_resumed_run_tells_of_its_other_batch(trained, monkeypatch, caplog, tmp_path):
    for name in ("samples", "finish"):
        monkeypatch.setattr(Reporter, name, lambda *args: None)
    folder = shutil.copytree(trained, tmp_path / "run")
    more = ["training.num_steps=3", "training.batch_size=4", "resume=latest"]
    train_small(folder, *EACH, *more)
    assert "training.batch_size=8 keeps it" in caplog.text
    assert find_checkpoint(folder).meta[IMAGES_PER_STEP] == 4
