import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.processes import run_python
from tests.small_run import SMALL
from tests.training.worker import first_draw, join, make_parts
from tread_zoo.training.loop import loss_of

ROOT = Path(__file__).parents[2]


def launch(*command, port):
    """Run a script in two CPU processes; return what it printed."""
    finished = subprocess.run(
        [
            sys.executable, "-m", "accelerate.commands.launch",
            "--config_file", "configs/accelerate/cpu.yaml",
            "--num_cpu_threads_per_process", "1", "--main_process_port", str(port), *command,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout + finished.stderr


def run_ranks(*command, port):
    """Run `python *command` as two ranks: what accelerate's launcher sets, without the launcher."""
    shared = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def run_rank(rank):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_python(*command, cwd=ROOT, env={**os.environ, **shared, **own})

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run_rank, range(2)):
            assert done.returncode == 0, done.stderr[-3000:]


def test_the_averaged_gradient_equals_that_of_the_double_batch(tmp_path, free_port):
    run_ranks("-m", "tests.training.worker", "mamba", tmp_path, port=free_port)
    ranks = [torch.load(tmp_path / f"rank_{r}.pt", weights_only=True) for r in range(2)]
    assert ranks[0]["world"] == 2
    parts = make_parts("mamba")
    draws = [first_draw(parts, rank, 2) for rank in range(2)]
    assert not torch.equal(draws[0].images, draws[1].images)
    assert not torch.equal(draws[0].routes[0].ids, draws[1].routes[0].ids)
    loss_of(parts.backbone, parts, join(draws)).backward()
    for one, other, parameter in zip(
        ranks[0]["grads"], ranks[1]["grads"], parts.backbone.parameters(), strict=True
    ):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_two_processes_train_and_resume_in_one_folder(tmp_path, free_port):
    folder = tmp_path / "run"
    small = [*SMALL, f"run_dir={folder}", "training.schedule=constant"]
    said = launch("scripts/train.py", *small, "training.num_steps=4", port=free_port)
    assert "2 process(es)" in said
    assert said.count("saved     ") == 1
    said = launch("scripts/train.py", *small, "resume=latest", port=free_port)
    assert "resumes" in said
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6]


@pytest.mark.slow
def test_two_processes_train_with_dropped_paths(tmp_path, free_port):
    """Blocks that did not run have no gradient, and no rank waits for it."""
    small = [*SMALL, f"run_dir={tmp_path / 'run'}", "training.num_steps=8"]
    said = launch(
        "scripts/train.py", *small, "routing.rejoin=project", "routing.path_drop_probability=0.5",
        port=free_port,
    )  # fmt: skip
    assert "2 process(es)" in said
    assert said.count("saved     ") == 1
