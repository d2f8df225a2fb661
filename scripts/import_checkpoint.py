"""Turn a checkpoint that another project published into one of ours, or one of ours into theirs.

tread-zoo import format=sit in=SiT-XL-2-256x256.pt out=runs/sit_xl_2
tread-zoo sample checkpoint=runs/sit_xl_2 label=207 num_images=4
tread-zoo import export=true format=sit in=runs/sit_xl_2 out=SiT-XL-2.pt
"""

import logging
from dataclasses import asdict

from tread_zoo.cli import command
from tread_zoo.config import ImportConfig, check

logger = logging.getLogger(__name__)


@command("import_checkpoint", ImportConfig)
def main(settings: dict) -> None:
    from tread_zoo.published import export_checkpoint, import_checkpoint

    file = settings.pop("in")  # a word of Python's, so no field of the class
    settings = asdict(check(ImportConfig, settings))
    out = settings.pop("out")
    weights = settings.pop("weights")
    if settings.pop("export"):
        export_checkpoint(file, out, format=settings["format"], weights=weights)
        logger.info("written to %s", out)
        return
    done = import_checkpoint(file, out, **settings)
    sizes = ", ".join(f"{key}={value}" for key, value in done.config.items())
    logger.info("%s, %.1fM parameters: %s", done.backbone, done.num_parameters / 1e6, sizes)
    for note in done.notes:
        logger.info("- %s", note)
    logger.info("every tensor has found its place; written to %s", done.path)


if __name__ == "__main__":
    main()
