"""Train a backbone.

python scripts/train.py backbone=mamba routing=tread
python scripts/train.py backbone=dit routing=none objective=edm sampler=heun seed=1
python scripts/train.py resume=latest
"""

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs
from tread_zoo.requeue import answer_requeue_signals

answer_requeue_signals()
register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo.training import train

    train(**as_keywords(config))


if __name__ == "__main__":
    main()
