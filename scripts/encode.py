"""Encode images into a table of latents with an autoencoder of diffusers, for data=latents.

With text_encoder=… captions become contexts: cat.txt beside cat.png, or a column of a table or of
metadata.csv. With features=… the features of an encoder are stored, too, for alignment=…

tread-zoo encode data=image_folder data.path=photos data.image_size=256 \\
    vae=stabilityai/sd-vae-ft-ema out=photos_latents flips=true
tread-zoo train data=latents data.path=photos_latents backbone=dit_s_2 \\
    training.num_steps=100000
tread-zoo encode data=image_folder data.path=photos data.image_size=64 vae=none out=photos_table \\
    text_encoder=openai/clip-vit-large-patch14
tread-zoo train data=table data.path=photos_table guidance=cfg \\
    training.num_steps=10000
tread-zoo encode data=digits vae=none features=digits-cnn-64 out=digits_table # for data=table
torchrun --nproc-per-node 4 -m tread_zoo encode …      # several processes share the work
RANK=3 WORLD_SIZE=16 tread-zoo encode …                # so do the jobs of a job array

If encoding is interrupted, the same command again encodes the missing files of the table.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread_zoo.checkpoint_config import EncodingConfig
from tread_zoo.cli import command
from tread_zoo.fields import check

if TYPE_CHECKING:
    import torch

    from tread_zoo.data.encode import Extract

logger = logging.getLogger(__name__)


@command("encode", EncodingConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(EncodingConfig, settings)  # before torch is imported, which takes seconds
    from tread_zoo.data.encode import encode
    from tread_zoo.data.text import load_text_encoder
    from tread_zoo.data.vae import load_vae
    from tread_zoo.registry import create
    from tread_zoo.runtime import describe_device, local_device, resolve_precision

    device = local_device(config.device)
    precision = resolve_precision(config.precision, device)
    rank, num_ranks = (int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    data = create("data", config.data)
    vae = None if config.vae == "none" else load_vae(config.vae).to(device)
    text = None if config.text_encoder is None else load_text_encoder(config.text_encoder)
    if text is not None:
        text.network.to(device)
    features = None if config.features is None else _load_extractor(config, device)
    if rank == 0:
        where = f"{describe_device(device)}; {precision}; {num_ranks} process(es)"
        logger.info("%-9s %s", "device", where)
        if vae is not None:
            logger.info("%-9s %s %s, sha256 %s…", "vae", vae.kind, vae.name, vae.sha256[:12])
        if text is not None:
            logger.info("%-9s %s %s", "text", type(text.network).__name__, text.name)
        if features is not None:
            logger.info("%-9s %s", "features", features[0])
    done = encode(
        data, vae, Path(config.out).expanduser(), config, text=text, features=features,
        precision=precision, rank=rank, num_ranks=num_ranks,
    )  # fmt: skip
    if done:
        source = "table" if vae is None else "latents"
        logger.info("%-9s data=%s data.path=%s", "done", source, config.out)


def _load_extractor(config: EncodingConfig, device: "torch.device") -> "tuple[str, Extract]":
    """Return the label of the extractor `config.features`, and a function from images to the
    extractor's feature maps."""
    from tread_zoo.evaluation.features import find_extractor

    weights = (config.inception_weights, config.dinov2_weights)
    extractor = find_extractor(str(config.features), *weights)
    network = extractor.load(["feature_map"], device)
    return extractor.label, lambda images: network(images)["feature_map"]


if __name__ == "__main__":
    main()
