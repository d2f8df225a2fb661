"""Run by `accelerate launch`: scripts one after the other in the same processes, each as __main__.

Each process then writes `closed_<rank>` into the folder if its connections were closed at exit.
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist


def main(file):
    """Do the commands of a file: lists of a script and its arguments; the folder is the file's."""
    folder = Path(file).resolve().parent

    def tell():
        if not dist.is_initialized():
            (folder / f"closed_{os.environ['RANK']}").touch()

    atexit.register(tell)  # last in, first out: after what the scripts register
    os.chdir(folder)
    for command in json.loads(Path(file).read_text()):
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        assert dist.is_initialized(), "the next one would have to make them again"


if __name__ == "__main__":
    main(*sys.argv[1:])
