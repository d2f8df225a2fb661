"""Scores on the way: of the weights of their step, by one protocol, and nothing else changes.

Several processes: tests/training/test_scoring_together.py.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch
from tread_zoo.training.options import TrainingOptions
from tread_zoo.training.scoring import HELD_OUT_DRAWS, Scorer, Scores, read_scores
from tread_zoo.training.stopping import Stopped

from tests.small_run import counting_once, parts_of, settings, train_small
from tread_zoo.comparison import read_run
from tread_zoo.evaluation import evaluate as evaluate_module
from tread_zoo.evaluation.evaluate import evaluate
from tread_zoo.evaluation.naming import score_names
from tread_zoo.training import loop as module
from tread_zoo.training.checkpoints import find_checkpoint, load_backbone
from tread_zoo.training.trackers import read_metrics

SCORED = (
    "training.score_every=2", "training.checkpoint_every=2", "training.keep_checkpoints=9",
    "evaluation.metrics=[fid,kid]", "evaluation.num_images=70", "sampler.num_steps=1",
)  # fmt: skip
FID = "score/digits-cnn-64/train/70/fid"


def values(folder):
    return {step: record["values"] for step, record in read_scores(folder).items()}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Return a run that was scored at steps 2, 4 and 6, and how often images were extracted."""
    extracted = []
    globals_ = evaluate_module.reference_features.__globals__
    originals = (globals_["extract"], evaluate_module.extract)

    def counted(source, *given, **more):
        extracted.append(len(source))
        return originals[0](source, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals_, "extract", counted)
        patch.setattr(evaluate_module, "extract", counted)
        folder = train_small(tmp_path_factory.mktemp("scored") / "run", *SCORED)
    return folder, extracted


def test_each_score_is_that_of_the_weights_of_its_step(scored):
    """The records say what `evaluate` says of the checkpoints, by the protocol of the end."""
    folder, _ = scored
    parts, records = parts_of(settings(*SCORED)), read_scores(folder)
    assert list(records) == [2, 4, 6]
    ended = json.loads((folder / "score.json").read_text())
    assert records[6] == ended
    for step, record in records.items():
        checkpoint = find_checkpoint(folder / "checkpoints" / f"step_{step:08d}")
        with counting_once():
            again = evaluate(
                load_backbone(checkpoint, "ema"), parts.objective, parts.data, parts.sampling,
                parts.evaluation,
            )  # fmt: skip
        assert {name: record["values"][name] for name in again["values"]} == again["values"]
        assert {"fid", "kid", "agreement"} < set(again["values"])
        assert record["real"] == again["real"]
        assert {**record["protocol"], "step": 6} == ended["protocol"]
        assert record["protocol"]["step"] == step
    assert len({record["values"]["fid"] for record in records.values()}) == 3


def test_a_comparison_reads_the_curves(scored):
    result = read_run(scored[0])
    assert result.scores["fid"][-1] == (6, result.values["fid"])
    for name, curve in result.scores.items():
        assert dict(curve) == {step: found[name] for step, found in values(scored[0]).items()}


def test_real_images_are_seen_once_in_a_run(scored):
    data = parts_of(settings()).data
    assert scored[1] == [len(data.train), len(data.held_out)]


def test_a_run_with_scores_equals_one_without_to_the_bit(scored, run):
    """Weights, averages, optimizer state, and every number of a step."""
    plain = run("plain", *SCORED, "training.score_every=0")
    first, second = find_checkpoint(scored[0]), find_checkpoint(plain)
    for part in ("model", "ema", "optimizer"):
        left, right = first.tensors(part), second.tensors(part)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)

    def steps(folder):
        rows = [row for row in read_metrics(folder) if "loss" in row]
        return [{k: v for k, v in row.items() if k not in VARYING} for row in rows]

    assert steps(scored[0]) == steps(plain)
    assert values(plain) == {6: values(scored[0])[6]}


VARYING = ("images_per_s", "peak_memory")


def test_trackers_get_names_that_say_what_a_number_depends_on(scored):
    rows = [row for row in read_metrics(scored[0]) if FID in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    for row in rows:
        assert row[FID] == values(scored[0])[row["step"]]["fid"]
        assert {"score/svm/70/agreement", "score/digits-cnn-64/train/70/kid"} < set(row)
        assert f"score/{HELD_OUT_DRAWS}-draws/held_out_loss" in row


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        ({"extractor": "faces@1b2c3d4e", "reference": "photos/"},
         "score/faces-1b2c3d4e/photos-5f6a7b8c/9/fid"),
        ({"extractor": "inception-v3-compat@00000000", "reference": "train, decoded latents"},
         "score/inception-v3-compat/train-decoded-latents/9/fid"),
        ({"extractor": "a b@1b2c3d4e", "reference": "ref é.npz"},
         "score/a-b-1b2c3d4e/ref-.npz-5f6a7b8c/9/fid"),
        ({"extractor": "digits-cnn-64@1", "reference": "train", "num_reference": 1438},
         "score/digits-cnn-64/train/9/fid"),
        ({"extractor": "digits-cnn-64@1", "reference": "train", "num_reference": 100,
          "num_reference_asked": 100}, "score/digits-cnn-64/train-100/9/fid"),
        ({"extractor": "digits-cnn-64@1", "reference": "held_out", "num_reference": 359,
          "num_reference_asked": 500}, "score/digits-cnn-64/held_out/9/fid"),
        ({"extractor": "digits-cnn-64@1", "reference": "train/"},
         "score/digits-cnn-64/train-5f6a7b8c/9/fid"),
    ],
)  # fmt: skip
def test_names(protocol, name):
    protocol = {**protocol, "num_generated": 9, "reference_sha256": "5f6a7b8c" + 56 * "0"}
    assert score_names({"values": {"fid": 1.0}, "protocol": protocol}) == {name: 1.0}


def test_tensorboard_keeps_the_names(tmp_path, scored):
    """It replaces characters that it does not take."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tread_zoo.training.trackers import TensorboardTracker

    names = score_names(read_scores(scored[0])[6])
    tracker = TensorboardTracker(tmp_path, 0)
    tracker.log(6, names)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(names)


def stop_at(monkeypatch, step):
    """Send this process SIGTERM while optimizer step `step`, counted from 0, is computed."""
    original = module.draw_step

    def draw(*given, micro_step, **more):
        if micro_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given, micro_step=micro_step, **more)

    monkeypatch.setattr(module, "draw_step", draw)


def assert_scored_once(folder, unbroken):
    assert values(folder) == values(unbroken)
    steps = [row["step"] for row in read_metrics(folder) if FID in row]
    assert steps == [2, 4, 6]


def test_a_run_that_is_stopped_is_scored_once_at_each_step(scored, run, monkeypatch, tmp_path):
    """A score that is due when the signal comes is made up for after the resume."""
    stop_at(monkeypatch, 3)
    with pytest.raises(Stopped):
        run("run", *SCORED)
    monkeypatch.undo()
    assert list(read_scores(tmp_path / "run")) == [2]
    assert find_checkpoint(tmp_path / "run").step == 4
    assert_scored_once(run("run", *SCORED, "resume=latest"), scored[0])


def test_a_finished_run_that_is_resumed_repeats_nothing(scored, copy_of, run):
    folder = copy_of(scored[0])
    before = (folder / "metrics.jsonl").read_text()
    run("run", *SCORED, "resume=latest")
    assert_scored_once(folder, scored[0])
    rows = [json.loads(line) for line in before.splitlines()]
    assert [row for row in read_metrics(folder) if FID in row] == [r for r in rows if FID in r]


@pytest.mark.slow
def test_a_crash_while_scoring_loses_nothing_that_was_saved(scored, run, monkeypatch):
    original = Scorer.score

    def crash(self, network, step, *, last):
        if step == 4:
            raise RuntimeError("power cut")
        return original(self, network, step, last=last)

    monkeypatch.setattr(Scorer, "score", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        run("run", *SCORED)
    monkeypatch.undo()
    folder = run("run", *SCORED, "resume=latest")
    assert_scored_once(folder, scored[0])


def test_what_a_resumed_run_does_again_is_dropped(tmp_path):
    def record(step, fid):
        return {"values": {"fid": fid}, "protocol": {"step": step}}

    first = Scores(tmp_path, 0)
    for step in (2, 4, 6):
        first.add(record(step, float(step)))
    second = Scores(tmp_path, 4)
    assert (2 in second, 4 in second, 6 in second) == (True, True, False)
    assert list(read_scores(tmp_path)) == [2, 4]
    second.add(record(4, 40.0))
    assert values(tmp_path) == {2: {"fid": 2.0}, 4: {"fid": 40.0}}
    with (tmp_path / "scores.jsonl").open("a") as stream:
        stream.write('{"values": {}}\n')
    with pytest.raises(ValueError, match=r"scores.jsonl, line 3 is no record"):
        read_scores(tmp_path)


def test_images_are_kept_of_the_last_score(run, tmp_path):
    """The folder must be empty, which it would not be at the second score."""
    kept = tmp_path / "kept"
    few = ("training.num_steps=4", "training.warmup_steps=1", "evaluation.num_images=7")
    run("run", *SCORED, *few, "evaluation.metrics=[]", f"evaluation.keep_images={kept}")
    assert len(list(kept.iterdir())) == 7


def test_time_goes_into_its_phase(scored):
    records = read_scores(scored[0])
    spent = [record["run"]["seconds"]["score"] for record in records.values()]
    assert spent == sorted(spent)
    assert spent[0] > 0


def test_scores_that_cannot_be_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # no weights there
    file = tmp_path / "grey.npz"
    np.savez(file, images=np.zeros((40, 8, 8), np.uint8))
    data = ("data=npz", f"data.path={file}", "evaluation.metrics=[fid]")
    with pytest.raises(ValueError, match=r"score_every=2 asks .*inception-v3.*score_every=0"):
        train_small(tmp_path / "run", *data, "training.score_every=2")
    with pytest.raises(ValueError, match=r"evaluation.metrics=\[\] leaves none"):
        train_small(tmp_path / "run", *data, "evaluation.metrics=[]", "training.score_every=2")
    assert not (tmp_path / "run").exists()
    parts_of(settings(*data))
    parts_of(settings("evaluation.metrics=[]", "training.score_every=2"))  # agreement is scored


def test_settings_of_runs_without_scores_are_those_of_before():
    def options(score_every):
        return TrainingOptions(**{**settings()["training"], "score_every": score_every})

    assert "score_every" not in options(0).as_settings()
    assert options(2).as_settings()["score_every"] == 2
