"""Convert a checkpoint that another project published into one of ours, or back.

tread-zoo import format=sit in=SiT-XL-2-256x256.pt out=runs/sit_xl_2
tread-zoo sample checkpoint=runs/sit_xl_2 label=207 num_images=4
tread-zoo import export=true format=sit in=runs/sit_xl_2 out=SiT-XL-2.pt
"""

import logging
from dataclasses import asdict
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.cli import command
from tread_zoo.config import Weights
from tread_zoo.fields import OPTIONS, check

logger = logging.getLogger(__name__)


# the field `in_` is `in` on the command line: `in` is a keyword of Python
NAMED: ConfigDict = {**OPTIONS, "alias_generator": lambda name: name.rstrip("_")}


@dataclass(frozen=True, kw_only=True, config=NAMED)
class ImportConfig:
    """What tread-zoo import converts.

    Args:
        in: the file as published, or as its training script saved it (.pt, .pth, .safetensors).
        format: format of the file, such as `sit`; docs/sharing.md lists the formats, with the
            projects that publish them.
        out: a new folder, for checkpoint=… of the other commands.
        export: convert in the other direction: `in` is a run's folder, and `out` a file in the
            project's format. Of the fields below, only `weights` applies.
        weights: what to export: `ema`, the averaged weights; `model`, those without averaging; or
            an average of a relative width, as in `ema:0.05`.
        objective: training objective of the network; null is the project's usual one. For
            format=tread, null is `edm`, and the other choice is `flow`.
        num_heads: number of attention heads, which no tensor shows; null is that of the published
            size.
        num_classes: number of classes; null is the number of rows of the label table, less one if
            the table has a row for the null label. A table of 1000 rows has none.
        drop_unknown: skip tensors that our backbone does not have.
    """

    in_: str
    format: str
    out: str
    export: bool = False
    weights: Weights = "ema"
    objective: str | None = None
    num_heads: PositiveInt | None = None
    num_classes: NonNegativeInt | None = None
    drop_unknown: bool = False


@command("import_checkpoint", ImportConfig)
def main(settings: dict[str, Any]) -> None:
    from tread_zoo.published import export_checkpoint, import_checkpoint

    settings = asdict(check(ImportConfig, settings))
    file, out, weights = (settings.pop(name) for name in ("in_", "out", "weights"))
    if settings.pop("export"):
        export_checkpoint(file, out, format=settings["format"], weights=weights)
        logger.info("written to %s", out)
        return
    done = import_checkpoint(file, out, **settings)
    sizes = ", ".join(f"{key}={value}" for key, value in done.config.items())
    logger.info("%s, %.1fM parameters: %s", done.backbone, done.num_parameters / 1e6, sizes)
    for note in done.notes:
        logger.info("- %s", note)
    logger.info("all tensors converted; written to %s", done.path)


if __name__ == "__main__":
    main()
