import shutil
from pathlib import Path

import pytest

from tests.small_run import train_small


@pytest.fixture
def run(tmp_path):
    """Train in `tmp_path/<name>` with overrides; return the run's folder."""
    return lambda name, *overrides: train_small(tmp_path / name, *overrides)


@pytest.fixture
def copy_of(tmp_path):
    """Return a function that copies a run that several tests share, for one to change."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "run"))
