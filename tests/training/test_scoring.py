"""Scores on the way: of the weights of their step, by one protocol, and nothing else changes."""

import json
import signal

import pytest
import torch

from tests.small_run import parts_of, settings, train_small
from tread_zoo.evaluation.evaluate import evaluate
from tread_zoo.runs.checkpoint import find_checkpoint, load_backbone
from tread_zoo.training.log import read_scores
from tread_zoo.training.trackers import read_metrics

SCORED = (
    "training.score_every=2", "training.checkpoint_every=2", "training.keep_checkpoints=9",
    "evaluation.metrics=[fid,kid]", "evaluation.num_images=70", "sampler.num_steps=1",
)  # fmt: skip


def values(folder):
    return {step: record["values"] for step, record in read_scores(folder).items()}


def scored_steps(folder):
    return [row["step"] for row in read_metrics(folder) if "score/fid" in row]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Return a run that was scored at steps 2, 4 and 6."""
    return train_small(tmp_path_factory.mktemp("scored") / "run", *SCORED)


@pytest.mark.slow
def test_each_score_is_that_of_the_weights_of_its_step(scored):
    """The records say what `evaluate` says of the checkpoints, by the protocol of the end."""
    setup, records = parts_of(settings(*SCORED)), read_scores(scored)
    assert list(records) == [2, 4, 6] == scored_steps(scored)
    ended = json.loads((scored / "score.json").read_text())
    assert records[6] == ended
    for step, record in records.items():
        checkpoint = find_checkpoint(scored / "checkpoints" / f"step_{step:08d}")
        again = evaluate(
            load_backbone(checkpoint, "ema"), setup.objective, setup.data, setup.sampling,
            setup.config.evaluation,
        )  # fmt: skip
        assert {name: record["values"][name] for name in again["values"]} == again["values"]
        assert {"fid", "kid", "label_accuracy"} <= set(again["values"])
        assert record["real"] == again["real"]
        assert record["protocol"]["step"] == step
    assert len({record["values"]["fid"] for record in records.values()}) == 3


@pytest.mark.slow
def test_a_run_with_scores_equals_one_without_to_the_bit(scored, run):
    """Weights, averages, optimizer state, and every number of a step."""
    plain = run("plain", *SCORED, "training.score_every=0")
    first, second = find_checkpoint(scored), find_checkpoint(plain)
    for part in ("model", "ema", "optimizer"):
        left, right = first.tensors(part), second.tensors(part)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    losses = [[row["loss"] for row in read_metrics(f) if "loss" in row] for f in (scored, plain)]
    assert losses[0] == losses[1]
    assert values(plain) == {6: values(scored)[6]}


@pytest.mark.slow
def test_a_run_that_is_stopped_is_scored_once_at_each_step(scored, run, stopped_run, tmp_path):
    """A score that is due when the signal comes is made up for after the resume."""
    stopped_run("run", 3, signal.SIGTERM, 128 + signal.SIGTERM, *SCORED)
    assert list(read_scores(tmp_path / "run")) == [2]
    folder = run("run", *SCORED, "resume=latest")
    assert values(folder) == values(scored)
    assert scored_steps(folder) == [2, 4, 6]
    longer = (*SCORED, "training.num_steps=9", "resume=latest")
    stopped_run("run", 7, signal.SIGTERM, 128 + signal.SIGTERM, *longer)
    assert not (folder / "score.json").exists(), "the longer run has not ended"


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_repeats_nothing(scored, copy_of):
    folder = copy_of(scored)
    train_small(folder, *SCORED, "resume=latest")
    assert values(folder) == values(scored)
    assert scored_steps(folder) == [2, 4, 6]


@pytest.mark.slow
def test_images_are_kept_of_the_last_score(run, tmp_path):
    """The folder must be empty, which it would not be at the second score. A run that ended while
    it scored ends its score."""
    kept = tmp_path / "kept"
    few = ("training.num_steps=4", "evaluation.num_images=7", "evaluation.metrics=[]")
    given = [*SCORED, *few, f"evaluation.keep_images={kept}"]
    folder = run("run", *given)
    assert len(list(kept.iterdir())) == 7
    with pytest.raises(ValueError, match="keep_images"):
        run("other", *given)
    (folder / "score.json").unlink()
    run("run", *given, "resume=auto")
    assert (folder / "score.json").exists()
