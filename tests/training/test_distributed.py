"""Several processes train as one does; FSDP2 as DDP; and each takes up what the other left."""

import json
import re

import numpy as np
import pytest
import torch

from tests.data.tables import write_features
from tests.processes import run_ranks
from tests.small_run import settings, train_small
from tests.training import worker  # noqa: F401  (its sampler)
from tread_zoo.runs.checkpoint import find_checkpoint
from tread_zoo.training.trackers import read_metrics

pytestmark = pytest.mark.slow

EACH_STEP = ("training.log_every=1", "lr_schedule=constant", "evaluation.num_images=1")
FUSED = (
    "backbone=mamba", "routing=sprint", "routing.path_drop=0.5",
    "training.activation_checkpointing=2",
)  # fmt: skip
# Each with an option that sharding has to get right, too.
EVERY_ARCHITECTURE = {
    "uvit": ["backbone=uvit", "training.gradient_accumulation_steps=2"],
    "mamba2": [
        "backbone=mamba2", "backbone.head_size=16", "training.compile=true",
        "optimizer.weight_decay=1",
    ],
    "rwkv": ["backbone=rwkv", "backbone.depth=5", "routing.selector=norm"],
    "half": ["backbone=dit", "backbone.depth=2", "routing=none", "training.precision=bf16"],
    "muon": ["backbone=dit", "optimizer=muon", "optimizer.learning_rate=1e-3"],
}  # fmt: skip


def work(jobs, folder, port):
    """Have two processes do the jobs of `worker.main`."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    for done in run_ranks("-m", "tests.training.worker", folder / "jobs.json", port=port):
        assert done.returncode == 0, done.stderr[-3000:]


def job(folder, overrides, sharded, **more):
    """Return a job: a run with or without FSDP2."""
    overrides = [*EACH_STEP, *overrides, f"run_dir={folder}"]
    settings(*overrides)  # it would fail here, too
    return {"train": overrides, "sharded": sharded, **more}


def numbers(folder):
    """Return (loss, gradient's norm) of each step of a run."""
    rows = [row for row in read_metrics(folder) if "loss" in row]
    return torch.tensor([(row["loss"], row["grad_norm"]) for row in rows])


def assert_same_run(one, other, num_steps, atol=1e-5, more=()):
    """Check that two runs took equal steps, and wrote equal files up to rounding.

    Weights are compared by their distance, not number by number: the bias of keys has no gradient
    but rounding, which Adam scales up.
    """
    assert len({loss for loss, _ in numbers(one).tolist()}) == num_steps
    torch.testing.assert_close(numbers(one), numbers(other), atol=atol, rtol=0)
    first, second = find_checkpoint(one), find_checkpoint(other)
    assert first.step == second.step == num_steps
    for part in (*(path.stem for path in first.path.glob("*.safetensors")), *more):
        left, right = first.tensors(part), second.tensors(part)
        assert {k: v.shape for k, v in left.items()} == {k: v.shape for k, v in right.items()}
        apart = sum(float((left[key] - right[key]).double().square().sum()) for key in left)
        size = sum(float(tensor.double().square().sum()) for tensor in left.values())
        assert apart**0.5 < 100 * atol * size**0.5, part


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_the_double_batch(tmp_path, free_port):
    """Sharded, with fusions and dropped paths; and where a score of the states chooses, with one
    image on each rank. Draws belong to the image, not to the rank that sees it."""
    kept = ["routing.selector=norm"]
    runs = {"fused": (FUSED, 8), "kept": (kept, 1)}
    jobs, alone = [], {}
    for name, (options, size) in runs.items():
        options = [*options, "training.num_steps=3"]
        own = [*options, f"training.batch_size={size}"]
        jobs.append(job(tmp_path / name, own, sharded=name == "fused"))
        double = [*options, f"training.batch_size={2 * size}"]
        alone[name] = train_small(tmp_path / f"{name}_alone", *EACH_STEP, *double)
    work(jobs, tmp_path, free_port)
    for name, one in alone.items():
        assert_same_run(tmp_path / name, one, 3)
        first = [numbers(folder)[0] for folder in (tmp_path / name, one)]
        torch.testing.assert_close(*first, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_ranks_with_other_images_of_the_same_shape_or_other_code_do_not_start(tmp_path, free_port):
    for rank in "01":
        (tmp_path / rank).mkdir()
        images = np.random.default_rng(int(rank)).integers(0, 256, (40, 8, 8), np.uint8)
        np.savez(tmp_path / rank / "x.npz", images=images)
    code = """import os, sys; from tests.small_run import train_small
from tread_zoo import version
version.__version__ = "9." + os.environ["RANK"]
train_small(f"{sys.argv[1]}/run", "data=npz", f"data.path={sys.argv[1]}/{os.environ['RANK']}/x.npz")
"""
    for done in run_ranks("-c", code, tmp_path, port=free_port):
        assert done.returncode == 1
        assert "ranks 0 and 1 of this run differ: data" in done.stderr
        assert re.search("code='9.0.*' and '9.1", done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_ends_one_rank_ends_all(tmp_path, free_port):
    """Settings that differ; a signal to one rank while the main one draws samples, or both draw for
    a score, or between lines of the log; a loss of one rank that is NaN; a rank that is killed."""
    differing = {"of_rank_1": ["optimizer.learning_rate=0.5", "training.log_every=3"]}
    drawing = ["training.checkpoint_every=2", "training.sample_every=2", "sampler=euler_that_ends"]
    scored = ["training.score_every=2", "evaluation.metrics=[kid]", "evaluation.num_images=70"]
    scored += ["training.sample_every=0", "evaluation.batch_size=35"]
    breaks = ["objective=flow_that_ends", "training.num_steps=40", "training.log_every=40"]
    jobs = [
        job(tmp_path / "differing", [], sharded=False, **differing),
        job(tmp_path / "sampled", [*drawing, "sampler.rank=0"], sharded=False),
        job(tmp_path / "scored", [*drawing, *scored, "sampler.rank=1"], sharded=True),
        job(tmp_path / "between", [*breaks, "objective.number=15"], sharded=False),
        job(tmp_path / "nan", [*breaks, "training.log_every=5"], sharded=True),
        job(tmp_path / "killed", [*drawing, "sampler.rank=0", "sampler.number=9"], sharded=False),
    ]
    (tmp_path / "jobs.json").write_text(json.dumps([{**each, "ends": True} for each in jobs]))
    ranks = run_ranks("-m", "tests.training.worker", tmp_path / "jobs.json", port=free_port)
    said = [[json.loads(x) for x in done.stdout.splitlines() if x[:1] == "{"] for done in ranks]
    assert [len(own) for own in said] == [5, 6], [done.stderr[-3000:] for done in ranks]
    for differ, *signalled, nan in (own[:5] for own in said):
        assert nan["text"].startswith("step 3: the loss is nan")
        for words in ("optimizer.learning_rate=0.012 and 0.5", "training.log_every=1 and 3"):
            assert words in differ["text"]
        assert len(differ["text"]) < 250, "the fields alone"
        assert [each["status"] for each in signalled] == [143, 143, 143]
    gone = said[1][5]["text"]
    assert "resume=latest" in gone
    assert "\n" not in gone
    assert not (tmp_path / "differing").exists()
    for name in ("sampled", "scored", "killed"):
        assert find_checkpoint(tmp_path / name).step == 2
    assert find_checkpoint(tmp_path / "between").step in range(3, 20)
    assert not (tmp_path / "nan" / "checkpoints").exists()


@pytest.mark.nightly
def test_alignment_under_ddp_and_fsdp2_equals_one_process(tmp_path, free_port):
    """Inside a route, and past the step where the term stops."""
    table = write_features(tmp_path / "table")
    options = ["data=table", f"data.path={table}", "alignment=repa", "alignment.hidden_size=16"]
    options += ["alignment.stop=0.6", "backbone=mamba", "training.horizontal_flip=true"]
    ways = {"ddp": False, "fsdp": True}
    work([job(tmp_path / name, options, way) for name, way in ways.items()], tmp_path, free_port)
    alone = train_small(tmp_path / "one", *EACH_STEP, *options, "training.batch_size=16")
    assert (find_checkpoint(alone).path / "alignment.safetensors").exists()
    for name in ways:
        assert_same_run(tmp_path / name, alone, 6)


def test_sharded_training_equals_ddp_for_every_architecture(tmp_path, free_port):
    ways = [("ddp", False), ("fsdp", True)]
    jobs = [
        job(tmp_path / name / kind, [*options, "training.num_steps=5"], sharded)
        for name, options in EVERY_ARCHITECTURE.items()
        for kind, sharded in ways
    ]
    work(jobs, tmp_path, free_port)
    for name in EVERY_ARCHITECTURE:  # in bf16 a rounding of a sum shows after some steps
        atol = 1e-3 if name == "half" else 1e-5
        assert_same_run(tmp_path / name / "ddp", tmp_path / name / "fsdp", 5, atol)


@pytest.mark.parametrize(  # Muon leaves a part of the weights to AdamW
    "optimizer",
    [pytest.param("adamw", marks=pytest.mark.nightly),
     pytest.param("muon", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_run_goes_on_under_ddp_fsdp2_and_alone(tmp_path, free_port, optimizer):
    """Steps 1-3 under DDP, 4-6 under FSDP2, 7-9 in one process, against nine in one process."""
    options = [f"optimizer={optimizer}", "optimizer.learning_rate=1e-3"]
    options += ["training.ema_snapshots_every=2"]
    jobs = [
        job(tmp_path / "run", [*options, "resume=auto", f"training.num_steps={n}"], sharded)
        for n, sharded in ((3, False), (6, True))
    ]
    work(jobs, tmp_path, free_port)
    alone = [*EACH_STEP, *options, "training.num_steps=9", "training.batch_size=16"]
    train_small(tmp_path / "run", *alone, "resume=latest")
    train_small(tmp_path / "unbroken", *alone)
    assert_same_run(tmp_path / "run", tmp_path / "unbroken", 9, more=["ema:0.05", "ema:0.07"])
