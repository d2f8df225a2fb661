"""Run by `accelerate launch`: several runs one after the other, in the same processes.

Starting the processes takes longer than a small run, so that a test which needs many asks for all
of them at once.
"""

import json
import os
import sys
from pathlib import Path

from accelerate.state import AcceleratorState

from tests.small_run import settings
from tread_zoo.training import setup
from tread_zoo.training.loop import train


def main(jobs):
    """Do the jobs of a file: `{"train": overrides, "sharded": bool}`, a run with or without FSDP2.

    Graphs are captured, not translated.
    """
    setup.COMPILE_BACKEND = "eager"
    os.environ["FSDP_VERSION"] = "2"
    for job in json.loads(Path(jobs).read_text()):
        AcceleratorState._reset_state()  # a run is a process; here are several
        os.environ["ACCELERATE_USE_FSDP"] = str(job["sharded"]).lower()
        train(**settings(*job["train"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
