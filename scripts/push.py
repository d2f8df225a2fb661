"""Publish a trained network on Hugging Face's hub: weights, settings, samples, a model card.

tread-zoo push checkpoint=runs/digits_dit_tiny_tread_flow_seed0 out=published  # look first
tread-zoo push checkpoint=runs/digits_dit_tiny_tread_flow_seed0 repo=user/name

The files are written to out, by default <run>/hub. If a repo is given, they are uploaded with the
account of `hf auth login`. Anyone who has this package can then sample with checkpoint=user/name.
"""

import logging
from typing import Any

from pydantic.dataclasses import dataclass

from tread_zoo.cli import command
from tread_zoo.config import Weights
from tread_zoo.fields import OPTIONS, check

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class PushConfig:
    """What tread-zoo push publishes.

    Args:
        plugins, checkpoint, weights: see `CheckpointConfig`.
        half: store the weights as float16, in half the space.
        out: folder of the files; null is <run>/hub.
        repo: user/name of the repository on the hub; null uploads nothing.
        private: whether a new repository is private.
        license: license of the weights by its name on the hub, such as apache-2.0; null: the
            license of the project from which the weights were imported, if any.
    """

    plugins: tuple[str, ...] = ()
    checkpoint: str
    weights: Weights = "ema"
    half: bool = False
    out: str | None = None
    repo: str | None = None
    private: bool = False
    license: str | None = None


@command("push", PushConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(PushConfig, settings)  # before torch is imported, which takes seconds
    from tread_zoo.model_card import write_model_folder
    from tread_zoo.runs.hub import upload

    folder = write_model_folder(
        config.checkpoint, config.out, weights=config.weights, half=config.half,
        license=config.license, repo=config.repo,
    )  # fmt: skip
    logger.info("written to %s", folder)
    if config.repo is not None:
        logger.info("uploaded to %s", upload(folder, config.repo, private=config.private))


if __name__ == "__main__":
    main()
