"""How a run ends, as whoever started it sees it: docs/distributed.md has the table."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.small_run import SMALL, save_photos
from tread_zoo.runs.checkpoint import find_checkpoint

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
    output, _ = process.communicate(timeout=100)
    return output


LONG = [*SMALL, "training.num_steps=100000", "training.log_every=1", "lr_schedule.warmup_steps=9"]


def test_signals_to_every_process_even_the_loaders_workers(tmp_path):
    """SIGHUP and SIGTERM, which would end a worker and so the run, and the signals that requeue."""
    process = start(
        str(ROOT / "scripts/train.py"), *LONG, *save_photos(tmp_path / "photos"),
        "training.num_workers=1", "run_dir=run", cwd=tmp_path,
    )  # fmt: skip
    output = signal_all_once_it_trains(
        process, tmp_path / "run/metrics.jsonl", signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1
    )
    assert process.returncode == 75, output
    assert "continue with resume=latest" in output
    assert "Traceback" not in output
    assert f"step_{find_checkpoint(tmp_path / 'run').step:08d}" in output


@pytest.mark.nightly
def test_ctrl_c_to_a_launcher_and_all_it_started(tmp_path, free_port):
    """The launcher hands it on to processes that the terminal told already."""
    process = start(
        "-m", "accelerate.commands.launch", "--config_file",
        str(ROOT / "configs/accelerate/cpu.yaml"), "--num_cpu_threads_per_process", "1",
        "--main_process_port", str(free_port), str(ROOT / "scripts/train.py"), *LONG,
        "run_dir=run", cwd=tmp_path,
    )  # fmt: skip
    output = signal_all_once_it_trains(process, tmp_path / "run/metrics.jsonl", signal.SIGINT)
    assert process.returncode != 0
    assert output.count("saved     ") == 1, output
    assert output.count("stopped   by SIGINT") == 1, output
    find_checkpoint(tmp_path / "run")


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    """A finder that sends the signal as the import of torch begins, and goes on."""
    interrupt = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(interrupt)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    process = start(str(ROOT / "scripts/train.py"), "run_dir=run", cwd=tmp_path, PYTHONPATH=path)
    output, _ = process.communicate(timeout=100)
    assert (process.returncode, output) == (130, "stopped by Ctrl-C before anything began\n")
    assert not (tmp_path / "run").exists()
