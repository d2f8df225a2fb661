"""Train a backbone; samples, scores and checkpoints go to the run's own folder in runs/.

tread-zoo train backbone=mamba routing=tread
tread-zoo train backbone=dit routing=none objective=edm sampler=heun seed=1
tread-zoo train experiment=fashion_mnist backbone=rwkv optimizer=muon
tread-zoo train resume=latest
"""

from tread_zoo.training.signals import imported, requeue_from_the_start

requeue_from_the_start()  # the imports below take their time

import gc  # noqa: E402
from typing import Any  # noqa: E402

from tread_zoo.cli import command  # noqa: E402
from tread_zoo.config import RunConfig  # noqa: E402
from tread_zoo.fields import check  # noqa: E402


@command("train", RunConfig)
def main(settings: dict[str, Any]) -> None:
    check(RunConfig, settings)  # before torch is imported, which takes seconds
    gc.disable()  # it would search all imported modules for garbage, again and again
    from tread_zoo.training.loop import train

    imported()
    gc.freeze()
    gc.enable()
    train(**settings)


if __name__ == "__main__":
    main()
