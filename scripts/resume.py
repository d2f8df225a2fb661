"""Continue a run with the settings that it had, except those given on the command line.

tread-zoo resume runs/digits_mamba_tiny_tread_flow_seed0
tread-zoo resume runs/digits_mamba_tiny_tread_flow_seed0 training.num_steps=2000
"""

import runpy
import sys

from tread_zoo.cli import SCRIPTS, quoted


def main() -> None:
    run, *overrides = sys.argv[1:] or ["--help"]
    if run in ("-h", "--help"):
        print(__doc__)
        return
    sys.argv = [str(SCRIPTS / "train.py"), f"resume={quoted(run)}", *overrides]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
