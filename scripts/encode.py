"""Encode images into a table of latents with an autoencoder of diffusers, once, for data=latents.

python scripts/encode.py data=image_folder data.path=photos data.image_size=256 \
    vae=stabilityai/sd-vae-ft-ema out=photos_latents flips=true
python scripts/train.py data=latents data.path=photos_latents backbone=dit_s_2 \
    training.num_steps=100000
torchrun --nproc-per-node 4 scripts/encode.py …      # several processes share the parts

Stopped, the same command again encodes the parts that are missing.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from tread_zoo.cli import command
from tread_zoo.config import check
from tread_zoo.data.encode import EncodingConfig, encode
from tread_zoo.data.vae import load_vae
from tread_zoo.registry import create
from tread_zoo.runtime import describe_device, resolve_device, resolve_precision

logger = logging.getLogger(__name__)


@command("encode", EncodingConfig, groups=("data",))
def main(settings: dict[str, Any]) -> None:
    config = check(EncodingConfig, settings)
    device = resolve_device(config.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    precision = resolve_precision(config.precision, device)
    rank, num_ranks = (int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    data, vae = create("data", config.data), load_vae(config.vae).to(device)
    if rank == 0:
        where = f"{describe_device(device)}; {precision}; {num_ranks} process(es)"
        logger.info("%-9s %s", "device", where)
        logger.info("%-9s %s %s, sha256 %s…", "vae", vae.kind, vae.name, vae.sha256[:12])
    place = {"precision": precision, "rank": rank, "num_ranks": num_ranks}
    if encode(data, vae, Path(config.out), config, **place):
        logger.info("%-9s data=latents data.path=%s", "done", config.out)


if __name__ == "__main__":
    main()
