"""The version of the project, and how a process was started."""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tread_zoo.credentials import without_credentials

__version__ = "0.1.0"


def describe_start() -> dict[str, Any]:
    """Return how this process was started: time, command, hydra's overrides, and version of the
    code."""
    from hydra.core.hydra_config import HydraConfig

    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(map(without_credentials, sys.orig_argv)),
        "overrides": without_credentials(list(overrides)),
        "code": describe_code(),
    }


def describe_code() -> str:
    """Return the version. In a clone the commit is added, with `-dirty` if files differ from it."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return __version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], check=True, capture_output=True, encoding="utf-8"
        )
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{__version__} {done.stdout.strip()}"
