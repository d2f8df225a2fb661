"""Which guidance is best at equal network cost? Sweep kinds and scales for trained networks.

run=runs/digits_dit_tiny_tread_flow_seed0
python scripts/compare_guidance.py "runs=[$run]" plan_only=true      # steps and cost, no samples
python scripts/compare_guidance.py "runs=[$run]" 'scales=[1.5,2,3]'
python scripts/compare_guidance.py 'runs=[runs/a_seed0,runs/a_seed1]' \
    'guidances=[none,cfg,{name: sparse, weak_rate: 0.5},{name: interval, high: 0.5, scales: [2,4]}]'

Each setting takes as many steps as the budget of FLOPs an image pays. The same command again
continues where it stopped: finished records are read, not repeated. The folder `out` then holds
report.md, results.csv, results.json, two pictures for each group of runs, and records/.
"""

import logging
import shlex
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

logger = logging.getLogger(__name__)

register_configs()

STUDY = ("runs", "guidances", "scales", "samplers", "num_steps", "flops")
SCORING = ("weights", "device", "precision", "data", "num_pictures")


@hydra.main(version_base="1.3", config_path="../configs", config_name="compare_guidance")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo.comparison.guidance_study import Scoring, Study, compare_guidance
    from tread_zoo.evaluation.evaluate import EvaluationOptions
    from tread_zoo.kernels import set_forms

    settings = as_keywords(config)
    set_forms(settings["kernels"])
    report = compare_guidance(
        Study(**{name: settings[name] for name in STUDY}),
        Scoring(
            options=EvaluationOptions(**settings["evaluation"]),
            **{name: settings[name] for name in SCORING},
        ),
        Path(settings["out"]),
        title=settings["title"],
        command=shlex.join(["python", "scripts/compare_guidance.py", *sys.argv[1:]]),
        plan_only=settings["plan_only"],
    )
    logger.info("%s", report)
    if not settings["plan_only"]:
        logger.info("written to %s", settings["out"])


if __name__ == "__main__":
    main()
