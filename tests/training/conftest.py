import pytest

from tests.small_run import settings


@pytest.fixture
def run(tmp_path):
    """Train in `tmp_path/<name>` with overrides; return the run's folder."""
    from tread_zoo.training import train

    def start(name, *overrides):
        return train(**settings(*overrides, f"run_dir={tmp_path / name}"))

    return start
