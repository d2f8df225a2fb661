import os
import signal
import socket
from pathlib import Path

import pytest

# A shell that runs this in the background has it ignored, and so would all processes started here.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one thread each
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)


# What the product does, however it is built: `pytest -m golden`.
GOLDEN = (
    "backbones", "diffusion", "kernels", "published", "routing", "test_contract.py",
    "test_golden.py", "testing/test_planted_faults.py", "training/test_distributed.py",
    "training/test_kills.py", "training/test_resume.py", "scripts/test_command_line.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Mark the golden tests, and put files with slow ones first: at the end one worker would be at
    such a file, and the others idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    here = Path(__file__).parent
    for item in items:
        place = os.path.relpath(item.path, here)  # the kit's tests lie elsewhere
        if Path(place).as_posix().startswith(GOLDEN):
            item.add_marker(pytest.mark.golden)


def pytest_configure(config):
    """Make pytest started by tests use one process, but not the workers of this run."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        os.environ["PYTEST_ADDOPTS"] = "-n 0"


@pytest.fixture
def own_registry(monkeypatch):
    """Forget after the test what it registers."""
    from tread_zoo import registry

    for kind in registry.KINDS:  # all are there before the registry is copied
        registry.available(kind)
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture(scope="session")
def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
