"""Several processes train as one does: averaged gradients, DDP against FSDP2, resuming."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.small_run import SMALL, settings
from tests.training.worker import first_draw, join, make_parts
from tread_zoo.training import train
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.loop import losses_of
from tread_zoo.training.trackers import read_metrics

ROOT = Path(__file__).parents[2]
EACH_STEP = ("training.log_every=1", "training.schedule=constant", "evaluation.num_images=1")
FUSED = ("backbone=mamba", "routing.rejoin=project", "routing.path_drop_probability=0.5")
# Each with an option that sharding has to get right, too.
EVERY_ARCHITECTURE = {
    "dit": ["backbone=dit", "training.gradient_accumulation_steps=2"],
    "uvit": ["backbone=uvit"],
    "mamba": [*FUSED, "training.activation_checkpointing=2"],
    "mamba2": ["backbone=mamba2", "backbone.head_size=16", "training.compile=true"],
    "rwkv": ["backbone=rwkv", "backbone.depth=5", "routing.selector=norm"],
    "half": ["backbone=dit", "backbone.depth=2", "routing=none", "training.precision=bf16"],
}


def start(*command, port, config="cpu"):
    """Run a script in two CPU processes; return its status and what it printed."""
    launched = subprocess.Popen(
        [
            sys.executable, "-m", "accelerate.commands.launch",
            "--config_file", f"configs/accelerate/{config}.yaml",
            "--num_cpu_threads_per_process", "1", "--main_process_port", str(port), *command,
        ],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        said, _ = launched.communicate(timeout=600)
    finally:
        launched.terminate()  # it ends its processes, which a kill would leave behind
    return launched.returncode, said


def launch(*command, port, config="cpu"):
    """Run a script in two CPU processes to its end; return what it printed."""
    status, said = start(*command, port=port, config=config)
    assert status == 0, said[-3000:]
    return said


def work(jobs, folder, port):
    """Have two processes do the jobs of `worker.main`."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    launch("-m", "tests.training.worker", str(folder / "jobs.json"), port=port)


def both_ways(folder, name, overrides, num_steps):
    """Return two jobs: a run under DDP, and the same under FSDP2."""
    more = [*EACH_STEP, f"training.num_steps={num_steps}"]
    return [
        {"train": [*more, *overrides, f"run_dir={folder / name / kind}"], "sharded": kind == "fsdp"}
        for kind in ("ddp", "fsdp")
    ]


def numbers(folder):
    """Return (loss, gradient's norm) of each step of a run."""
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(folder) if "loss" in row]


def assert_same_weights(one, other, share=1e-3):
    """Check that two checkpoints hold the same tensors, but for rounding, by their distance.

    Not number by number: the bias of keys has no gradient but rounding, which Adam scales up.
    """
    first, second = find_checkpoint(one), find_checkpoint(other)
    for part in ("model", "ema", "optimizer"):
        left, right = first.tensors(part), second.tensors(part)
        assert left.keys() == right.keys()
        assert {k: v.shape for k, v in left.items()} == {k: v.shape for k, v in right.items()}
        apart = sum(float((left[key] - right[key]).double().square().sum()) for key in left)
        size = sum(float(tensor.double().square().sum()) for tensor in left.values())
        assert apart**0.5 < share * size**0.5, f"{part}: {apart**0.5} of {size**0.5}"


def assert_same_run(folder, num_steps, atol=1e-5):
    """Check that the runs of `both_ways` went the same way, and left the same.

    In bf16 one rounding of a sum more or less shows after some steps: `atol` is larger there, and
    the first loss, which no sum of ranks has touched but its own mean, is the same all the same.
    """
    ddp, fsdp = numbers(folder / "ddp"), numbers(folder / "fsdp")
    assert len(ddp) == num_steps
    assert len({loss for loss, _ in ddp}) == num_steps
    torch.testing.assert_close(torch.tensor(ddp), torch.tensor(fsdp), atol=atol, rtol=0)
    assert ddp[0][0] == pytest.approx(fsdp[0][0], abs=1e-6)
    assert_same_weights(folder / "ddp", folder / "fsdp", 100 * atol)
    scores = [json.loads((folder / kind / "score.json").read_text()) for kind in ("ddp", "fsdp")]
    first, second = (score["values"]["held_out_loss"] for score in scores)
    assert first == pytest.approx(second, abs=atol)


@pytest.fixture(scope="module")
def together(tmp_path_factory, free_port):
    """Return the folder of what two processes did, started once."""
    folder = tmp_path_factory.mktemp("two")
    sharded = both_ways(folder, "fused", FUSED, 4)[1]
    work([{"gradient": "mamba", "out": str(folder)}, sharded], folder, free_port)
    return folder


def test_the_averaged_gradient_equals_that_of_the_double_batch(together):
    ranks = [torch.load(together / f"rank_{r}.pt", weights_only=True) for r in range(2)]
    assert ranks[0]["world"] == 2
    parts = make_parts("mamba")
    draws = [first_draw(parts, rank, 2) for rank in range(2)]
    assert not torch.equal(draws[0].images, draws[1].images)
    assert not torch.equal(draws[0].routes[0].ids, draws[1].routes[0].ids)
    losses_of(parts.backbone, parts, join(draws)).mean().backward()
    for one, other, parameter in zip(
        ranks[0]["grads"], ranks[1]["grads"], parts.backbone.parameters(), strict=True
    ):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, parameter.grad, atol=1e-6, rtol=1e-4)


def test_sharded_training_equals_one_process_with_the_double_batch(together, tmp_path):
    """With fusions and dropped paths; draws belong to the image, not to the rank that sees it."""
    alone = [*EACH_STEP, *FUSED, "training.num_steps=4", "training.batch_size=16"]
    train(**settings(*alone, f"run_dir={tmp_path}"))
    two, one = numbers(together / "fused" / "fsdp"), numbers(tmp_path)
    assert len({loss for loss, _ in one}) == 4
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), atol=1e-5, rtol=0)
    assert_same_weights(together / "fused" / "fsdp", tmp_path)


def test_the_main_process_alone_writes(together):
    by_rank = [json.loads((together / f"written_by_{rank}.json").read_text()) for rank in range(2)]
    runs = [[path for path in paths if "/fused/" in path] for paths in by_rank]
    assert any("checkpoints" in path for path in runs[0])
    assert runs[1] == []


@pytest.mark.slow
def test_sharded_training_equals_ddp_for_every_architecture(tmp_path, free_port):
    jobs = [
        job
        for name, options in EVERY_ARCHITECTURE.items()
        for job in both_ways(tmp_path, name, options, 20)
    ]
    work(jobs, tmp_path, free_port)
    for name in EVERY_ARCHITECTURE:
        assert_same_run(tmp_path / name, 20, atol=1e-3 if name == "half" else 1e-5)


@pytest.mark.slow
def test_a_run_goes_on_under_ddp_fsdp2_and_alone(tmp_path, free_port):
    """Steps 1-3 under DDP, 4-6 under FSDP2, 7-9 in one process, against nine in one process."""
    again = [*EACH_STEP, f"run_dir={tmp_path / 'run'}", "resume=latest"]
    jobs = [
        {"train": [*again, f"training.num_steps={n}"], "sharded": sharded}
        for n, sharded in ((3, False), (6, True))
    ]
    work(jobs, tmp_path, free_port)
    alone = ["training.num_steps=9", "training.batch_size=16"]
    train(**settings(*again, *alone))
    train(**settings(*EACH_STEP, *alone, f"run_dir={tmp_path / 'unbroken'}"))
    broken, unbroken = numbers(tmp_path / "run"), numbers(tmp_path / "unbroken")
    assert len(broken) == 9
    torch.testing.assert_close(torch.tensor(broken), torch.tensor(unbroken), atol=1e-5, rtol=0)
    assert_same_weights(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.slow
def test_two_processes_train_and_resume_in_one_folder(tmp_path, free_port):
    """Through the command line, first as DDP, then as FSDP2."""
    folder = tmp_path / "run"
    small = [*SMALL, f"run_dir={folder}", "training.schedule=constant"]
    said = launch("scripts/train.py", *small, "training.num_steps=4", port=free_port)
    assert "2 process(es)" in said
    assert said.count("saved     ") == 1
    again = [*small, "resume=latest"]
    said = launch("scripts/train.py", *again, port=free_port, config="cpu_fsdp2")
    assert "resumes" in said
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6]


@pytest.mark.slow
def test_a_rank_that_cannot_start_ends_the_run(tmp_path, free_port):
    """Data that one rank does not find: all end, the cause is told, nothing is written."""
    np.savez(tmp_path / "data_0.npz", images=np.zeros((40, 8, 8, 1), np.uint8))
    path = f"data.path={tmp_path}/data_${{oc.env:RANK}}.npz"
    small = [o for o in SMALL if not o.startswith("data")]
    status, said = start(
        "scripts/train.py", *small, "data=npz", path, "backbone.patch_size=2",
        f"run_dir={tmp_path / 'run'}", port=free_port,
    )  # fmt: skip
    assert status != 0
    assert "data_1.npz" in said
    assert not (tmp_path / "run").exists()
