"""Turn a checkpoint that another project published into one of ours.

python scripts/import_checkpoint.py format=sit in=SiT-XL-2-256x256.pt out=runs/sit_xl_2
python scripts/sample.py checkpoint=runs/sit_xl_2 label=207 num_images=4
"""

import logging

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors

logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="import_checkpoint")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo.training.importing import import_checkpoint

    settings = as_keywords(config)
    done = import_checkpoint(settings.pop("in"), settings.pop("out"), **settings)
    sizes = ", ".join(f"{key}={value}" for key, value in done.config.items())
    logger.info("%s, %.1fM parameters: %s", done.backbone, done.num_parameters / 1e6, sizes)
    for note in done.notes:
        logger.info("- %s", note)
    logger.info("every tensor has found its place; written to %s", done.path)


if __name__ == "__main__":
    main()
