"""Kill a training run again and again, resume it, and compare its end with an unbroken run's.

python scripts/soak.py                    # 20 kills
python scripts/soak.py rounds=5 seed=1

Exit status 0 if nothing was lost, else 1. docs/faults.md says what is compared.
"""

import os
import sys
from pathlib import Path

import hydra
from hydra import compose
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="soak")
@clear_errors
def main(config: DictConfig) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes, before they load torch
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # what was killed put nothing away
    from tread_zoo.testing.soak import soak

    settings = as_keywords(config)
    overrides = settings.pop("small") + settings.pop("overrides")
    settings["run"] = as_keywords(compose("train", overrides=overrides))
    settings["out"] = Path(settings["out"])
    if not soak(**settings):
        sys.exit(1)


if __name__ == "__main__":
    main()
