import os
import socket

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one thread each
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)


def pytest_configure(config):
    """Let tests that run pytest do so in one process, but not this run's own workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        os.environ["PYTEST_ADDOPTS"] = "-n 0"


@pytest.fixture(scope="session")
def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
