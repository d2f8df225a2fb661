"""How a run ends, as whoever started it sees it: docs/faults.md has the table."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.small_run import SMALL
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.lock import RunLock

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def start(*command, cwd, **environment):
    """Start a command as the leader of a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def signal_all_once_it_trains(process, metrics, *numbers):
    """Send signals to every process of the group, as a terminal or a cluster does."""
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)
    for number in numbers:
        os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=100)
    return said


LONG = [*SMALL, "training.num_steps=100000", "training.log_every=1", "training.warmup_steps=9"]


def test_signals_to_every_process_even_the_loaders_workers(tmp_path):
    """SIGTERM, which would end a worker and with it the run, and the signal that requeues."""
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for index in range(40):
        pixels = rng.integers(0, 255, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{index}.png")
    process = start(
        str(ROOT / "scripts/train.py"), *LONG, "data=image_folder", "data.path=photos",
        "data.image_size=16", "training.num_workers=1", "run_dir=run", cwd=tmp_path,
    )  # fmt: skip
    said = signal_all_once_it_trains(
        process, tmp_path / "run/metrics.jsonl", signal.SIGTERM, signal.SIGUSR1
    )
    assert process.returncode == 75, said
    assert "continue with resume=latest" in said
    assert "Traceback" not in said
    assert f"step_{find_checkpoint(tmp_path / 'run').step:08d}" in said


def test_ctrl_c_to_a_launcher_and_all_it_started(tmp_path, free_port):
    """The launcher hands it on to processes that the terminal told already."""
    process = start(
        "-m", "accelerate.commands.launch", "--config_file",
        str(ROOT / "configs/accelerate/cpu.yaml"), "--num_cpu_threads_per_process", "1",
        "--main_process_port", str(free_port), str(ROOT / "scripts/train.py"), *LONG,
        "run_dir=run", cwd=tmp_path,
    )  # fmt: skip
    said = signal_all_once_it_trains(process, tmp_path / "run/metrics.jsonl", signal.SIGINT)
    assert process.returncode != 0
    assert said.count("saved     ") == 1, said
    assert said.count("stopped   by SIGINT") == 2, said
    find_checkpoint(tmp_path / "run")


def test_errors_are_1(tmp_path):
    process = start(
        str(ROOT / "scripts/train.py"), *SMALL, "training.learning_rate=1e38",
        "training.warmup_steps=0", "training.max_skipped_in_a_row=2", "training.max_grad_norm=0",
        "run_dir=run", cwd=tmp_path,
    )  # fmt: skip
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "error: the loss or its gradient is not finite: " in said
    assert "Traceback" not in said


def test_a_folder_in_which_another_process_trains_is_refused_by_every_rank(tmp_path, free_port):
    """Without a launcher that would end the second process: it must not wait for the first."""
    lock = RunLock(tmp_path)
    lock.take()
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
        ranks.append(
            start(
                str(ROOT / "scripts/train.py"), *SMALL, f"run_dir={tmp_path}", cwd=ROOT,
                **own, **place,
            )
        )  # fmt: skip
    said = [process.communicate(timeout=200)[0] for process in ranks]
    lock.release()
    assert [process.returncode for process in ranks] == [1, 1], said
    assert f"error: another process (process {os.getpid()} on " in said[0]
    assert "another process of this run could not start" in said[1]
    assert not any("Traceback" in each for each in said)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_script_still_imports(tmp_path):
    """The signal comes when torch is being imported, as register_configs does first."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    process = start(str(ROOT / "scripts/train.py"), cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    said, _ = process.communicate(timeout=100)
    assert (process.returncode, said) == (130, "stopped by Ctrl-C\n")


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["train.py"], signal.SIGUSR1),
        (["encode_latents.py", "data=digits", "vae=x", "out=x"], signal.SIGUSR2),
        (["doctor.py"], signal.SIGUSR1),
    ],
)
def test_a_requeue_while_a_script_still_imports(tmp_path, command, number):
    """Other scripts are nothing to requeue, and keep what the system does."""
    (tmp_path / "torch.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(9)\n"
    )
    process = start(
        str(ROOT / "scripts" / command[0]),
        *command[1:],
        cwd=tmp_path,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    said, _ = process.communicate(timeout=100)
    if command == ["doctor.py"]:
        assert (process.returncode, said) == (-number, "")
    else:
        line = f"stopped by {number.name}; run the same command again\n"
        assert (process.returncode, said) == (75, line)
