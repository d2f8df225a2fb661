"""The soak test itself: a short one passes, and what it is there to find, it finds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_run import settings
from tread_zoo.testing.soak import Soak, _compare

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_short_soak(tmp_path):
    """SIGKILL, SIGTERM, and SIGKILL while saving; then tamper with each thing that it compares."""
    done = subprocess.run(
        [
            sys.executable, ROOT / "scripts/soak.py", "rounds=3", "out=soak",
            'overrides=["training.num_steps=60","training.checkpoint_every=3"]',
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "3 kills" in said
    assert "nothing was lost" in said
    assert "while saving" in said
    broken = tmp_path / "soak/broken"
    logs = "".join((broken / f"log_{rank}.txt").read_text() for rank in range(2))
    assert "stopped   by SIGTERM" in logs
    if " to rank " in said.partition("SIGTERM")[0]:
        assert "another process of this run ended or no longer answers" in logs
    assert problems(tmp_path / "soak") == []
    (broken / "read_by_0").write_text((broken / "read_by_0").read_text().replace("59 [", "9 ["))
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 1.0}\n')
    spoil(broken / "checkpoints/step_00000060")
    found = " ".join(problems(tmp_path / "soak"))
    for words in ("optimizer.safetensors of step 60 differs", "twice", "micro-step 59 of rank 0"):
        assert words in found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_process_that_no_longer_answers(tmp_path):
    """It is not dead, so no connection breaks: training.timeout_s ends the wait for it."""
    run = settings("training.num_steps=100000", "training.timeout_s=15")
    test = Soak(run, tmp_path, 2, None)
    ranks = test.start("broken", None)
    try:
        assert test._wait(ranks, 5, while_saving=False)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        ranks[0].join(60)
        assert ranks[0].exitcode == 1
    finally:
        test.close()
    said = (tmp_path / "broken/log_0.txt").read_text()
    assert "rank 0 of 2 stops: another process of this run ended or no longer answers" in said
    assert test.problems == []


def problems(out):
    test = Soak({}, out, 2, None)
    _compare(test)
    return test.problems


def spoil(path):
    """Change one number of the optimizer's state, with a checksum that fits."""
    tensors = load_file(path / "optimizer.safetensors")
    next(iter(tensors.values())).view(-1)[0] += torch.finfo(torch.float32).eps
    save_file(tensors, path / "optimizer.safetensors")
    meta = json.loads((path / "checkpoint.json").read_text())
    del meta["checkpoint_sha256"], meta["sha256"]["optimizer.safetensors"]
    (path / "checkpoint.json").write_text(json.dumps(meta))
