"""SLURM's variables become torch's, and the launcher's preset composes and starts a job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_script
from tests.small_run import SMALL
from tread_zoo.process_group import join_slurm_step
from tread_zoo.runs.checkpoint import find_checkpoint

ROOT = Path(__file__).parents[2]
SHARDED = "hydra.launcher.setup=['export ACCELERATE_USE_FSDP=true FSDP_VERSION=2']"
STEP = {
    "SLURM_JOB_ID": "123456", "SLURM_PROCID": "11", "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_TASKS": "12", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Put a `scontrol` on the path that knows one list of hosts."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$3" = "gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_task_becomes_a_rank(scontrol):
    environment = dict(STEP)
    join_slurm_step(environment)
    assert {name: value for name, value in environment.items() if name not in STEP} == {
        "RANK": "11", "WORLD_SIZE": "12", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07", "MASTER_PORT": "23456",
    }  # fmt: skip


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {k: v for k, v in STEP.items() if "STEP" not in k} | {"SLURM_NTASKS": "12"},
        {**STEP, "RANK": "0", "WORLD_SIZE": "2"},
    ],
    ids=["no SLURM", "one task", "a batch script", "a launcher's process"],
)
def test_what_is_no_task_of_several_stays_as_it_is(environment):
    before = dict(environment)
    join_slurm_step(environment)
    assert environment == before


def test_without_scontrol_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="Set MASTER_ADDR to it"):
        join_slurm_step(dict(STEP))
    for given in ({"MASTER_ADDR": "gpu07"}, {"SLURM_STEP_NODELIST": "gpu07"}):
        environment = {**STEP, **given}
        join_slurm_step(environment)
        assert environment["MASTER_ADDR"] == "gpu07"


def test_the_preset_composes():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["--cfg=hydra", "hydra/launcher=slurm", SHARDED, "hydra.launcher.partition=gpu"]
    done = run_script(ROOT / "scripts/train.py", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for words in ("SlurmLauncher", "partition: gpu", "requeue: true", "FSDP_VERSION=2"):
        assert words in done.stdout


@pytest.mark.nightly
def test_tasks_of_a_step_train_together(tmp_path, free_port):
    """What srun starts: the script itself, once for each task."""
    small = [*SMALL, "training.num_steps=2", f"run_dir={tmp_path / 'run'}"]
    step = {
        "SLURM_JOB_ID": str(free_port), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port),
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, "scripts/train.py", *small], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=240)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "2 process(es)" in said[0] + said[1]
    assert find_checkpoint(tmp_path / "run").step == 2
