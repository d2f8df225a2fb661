"""Train a backbone.

python scripts/train.py backbone=mamba routing=tread
python scripts/train.py backbone=dit routing=none objective=edm sampler=heun seed=1
python scripts/train.py experiment=fashion_mnist backbone=rwkv optimizer=muon
python scripts/train.py resume=latest
"""

from tread_zoo.cli import GROUPS, command
from tread_zoo.config import RunConfig


@command("train", RunConfig, GROUPS)
def main(settings: dict) -> None:
    from tread_zoo.training import train

    train(**settings)


if __name__ == "__main__":
    main()
