"""Several processes score a run together: the numbers are those of one, and none waits for ever."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.processes import run_python
from tests.small_run import SMALL, counting_once, parts_of, settings
from tests.training.test_distributed import ROOT, work
from tread_zoo.evaluation.evaluate import evaluate
from tread_zoo.training.checkpoints import find_checkpoint, load_backbone
from tread_zoo.training.scoring import read_scores

# 5 batches for 2 processes: the first one has one more.
SCORED = (
    "backbone=mamba", "training.num_steps=2", "training.score_every=1",
    "training.checkpoint_every=1", "training.warmup_steps=1", "evaluation.num_images=70",
    "evaluation.batch_size=15", "evaluation.metrics=[fid,kid,precision,recall]",
    "sampler.num_steps=1",
)  # fmt: skip

FAILS_TO_DRAW = """
import os, sys
from tests.small_run import settings
from tread_zoo.evaluation import evaluate
from tread_zoo.training import train
real = evaluate.generate
def fail(*given, **more):
    if os.environ["RANK"] == sys.argv[1]:
        raise RuntimeError("this rank's pictures are gone")
    return real(*given, **more)
evaluate.generate = fail
train(**settings(*sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory, free_port):
    """Return the folder of two runs of two processes: `ddp` and `fsdp`."""
    folder = tmp_path_factory.mktemp("together")
    jobs = [
        {"train": [*SCORED, f"run_dir={folder / kind}"], "sharded": kind == "fsdp"}
        for kind in ("ddp", "fsdp")
    ]
    work(jobs, folder, free_port)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_score_as_one_does(together, kind):
    """What one process says of the checkpoints: the same features, so the same numbers; the
    distance but for the order of its sums."""
    parts, records = parts_of(settings(*SCORED)), read_scores(together / kind)
    assert list(records) == [1, 2]
    for step, record in list(records.items())[kind == "fsdp" :]:
        assert record["run"]["num_processes"] == 2
        weights = find_checkpoint(together / kind / "checkpoints" / f"step_{step:08d}")
        with counting_once(), torch.random.fork_rng():
            alone = evaluate(
                load_backbone(weights, "ema"), parts.objective, parts.data, parts.sampling,
                parts.evaluation,
            )  # fmt: skip
        for part in ("values", "real"):
            for name, value in alone[part].items():
                told = record[part][name]
                assert told == (pytest.approx(value, rel=1e-9) if name == "fid" else value), name
        stamp = record["protocol"]
        own = {name: value for name, value in stamp.items() if not name.startswith("held_out")}
        assert own == {**alone["protocol"], "weights": "ema", "step": step}
        assert (stamp["held_out_draws"], stamp["held_out_images"]) == (8, len(parts.data.held_out))
        assert len(alone["values"]) == 6


@pytest.mark.slow
def test_the_main_process_alone_writes_scores(together):
    by_rank = [json.loads((together / f"written_by_{rank}.json").read_text()) for rank in range(2)]
    scores = [[path for path in paths if "score" in path] for paths in by_rank]
    assert scores[0]
    assert scores[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_to_score_leaves_no_other_waiting(tmp_path, free_port, failing):
    """Without a launcher, which would end the other one. Only a score has rank 1 draw at all."""
    few = ["training.num_steps=1", "training.score_every=0", "training.timeout_s=600"]
    overrides = [*SMALL, *SCORED, *few, f"run_dir={tmp_path / 'run'}"]

    def start(rank):
        task = {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port), "PYTHONPATH": str(ROOT),
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        return run_python(
            "-c", FAILS_TO_DRAW, failing, *overrides, cwd=ROOT, env={**os.environ, **task},
            timeout=120,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(start, range(2)))
    said = [one.stdout + one.stderr for one in ended]
    assert [one.returncode for one in ended] == [1, 1], said
    assert "this rank's pictures are gone" in said[failing]
    words = f"rank {1 - failing} of 2 stops: another process of this run ended"
    assert words in said[1 - failing]
    assert find_checkpoint(tmp_path / "run").step == 1
