import os
import shutil
from pathlib import Path

import pytest

from tests.small_run import train_small
from tread_zoo.training import loop
from tread_zoo.training.signals import Stopped


@pytest.fixture
def run(tmp_path):
    """Train in `tmp_path/<name>` with overrides; return the run's folder."""
    return lambda name, *overrides: train_small(tmp_path / name, *overrides)


@pytest.fixture
def copy_of(tmp_path):
    """Return a function that copies a shared run, so that a test can change it."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "run"))


@pytest.fixture
def stopped_run(run, monkeypatch):
    """Train a run that receives signals during a step; it must end with the given status."""

    def train(name, step, numbers, status, *overrides):
        original = loop.draw_step

        def draw(setup, batch, micro_step, *place):
            if micro_step == step * setup.training.gradient_accumulation_steps:
                for number in numbers if isinstance(numbers, tuple) else (numbers,):
                    os.kill(os.getpid(), number)
            return original(setup, batch, micro_step, *place)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "draw_step", draw)
            with pytest.raises(Stopped) as stopped:
                run(name, *overrides)
        assert stopped.value.code == status

    return train
