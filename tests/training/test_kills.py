"""A run that is killed at random moments and resumed ends like an unbroken run, to the bit."""

import logging
import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import PRELOADED
from tests.small_run import train_small
from tests.training.test_resume import assert_same_end
from tread_zoo.runs.checkpoint import find_checkpoint, has_checkpoints
from tread_zoo.training.signals import Stopped
from tread_zoo.training.trackers import read_metrics

pytestmark = pytest.mark.slow

OPTIONS = (
    "training.checkpoint_every=4", "training.log_every=5",
    "evaluation.num_images=1", "training.horizontal_flip=true",
)  # fmt: skip


def _train(folder, *overrides):
    import torch

    torch.set_num_threads(1)
    logging.disable()
    train_small(folder, *OPTIONS, *overrides, "resume=auto")


def start(*arguments):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_train, args=arguments)
    process.start()
    return process


def kill_at_random(folder, overrides, rounds, seed):
    """Start a run and SIGKILL it a moment after a checkpoint, several times; then train to the
    end."""
    generator = random.Random(seed)
    for _ in range(rounds):
        before = find_checkpoint(folder).step if has_checkpoints(folder) else 0
        process = start(folder, *overrides)
        ahead = before + 4 * generator.randint(0, 1)
        deadline = time.monotonic() + 120
        while process.is_alive() and time.monotonic() < deadline:
            names = [path.name for path in folder.glob("checkpoints/step_*")]
            if names and int(max(names)[5:]) > ahead:
                break
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.06))
        process.kill()
        process.join()
        assert has_checkpoints(folder)
        find_checkpoint(folder / "checkpoints" / max(p.name for p in folder.glob("checkpoints/s*")))
    process = start(folder, *overrides)
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("overrides", "rounds"),
    [
        (("objective=flow",), 1),
        pytest.param(("objective=flow",), 6, marks=pytest.mark.nightly),
        pytest.param(("objective=edm", "backbone=mamba"), 6, marks=pytest.mark.slow),
    ],
)
def test_kills_change_nothing(tmp_path, overrides, rounds):
    overrides = (*overrides, f"training.num_steps={10 + 7 * rounds}")
    unbroken = tmp_path / "unbroken"
    process = start(unbroken, *overrides)  # with as many threads as those that are killed
    process.join(300)
    kill_at_random(tmp_path / "broken", overrides, rounds, seed=rounds)
    assert_same_end(unbroken, tmp_path / "broken")
    steps = [
        [row["step"] for row in read_metrics(folder) if "loss" in row]
        for folder in (unbroken, tmp_path / "broken")
    ]
    assert steps[0] == steps[1]


@pytest.mark.slow
def test_a_run_in_a_thread_ends_when_its_time_is_over(tmp_path):
    """Only the main thread may handle signals: one would end the whole process."""
    given = ["training.num_steps=100000", "training.max_time_s=1", "lr_schedule=constant"]
    with ThreadPoolExecutor(1) as pool, pytest.raises(Stopped) as stopped:
        pool.submit(train_small, tmp_path / "run", *given).result()
    assert stopped.value.code == 75
    assert 0 < find_checkpoint(tmp_path / "run").step < 100000
