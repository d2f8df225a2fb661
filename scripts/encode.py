"""Encode images into a table of latents with an autoencoder of diffusers, once, for data=latents.

python scripts/encode.py data=image_folder data.path=photos data.image_size=256 \
    vae=stabilityai/sd-vae-ft-ema out=photos_latents flips=true
python scripts/train.py data=latents data.path=photos_latents backbone=dit_s_2
torchrun --nproc-per-node 4 scripts/encode.py …      # several processes share the parts

Stopped, the same command again encodes the parts that are missing.
"""

import logging
import os
from pathlib import Path

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors

logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="encode")
@clear_errors
def main(config: DictConfig) -> None:
    import torch

    from tread_zoo.data.encode import EncodingConfig, encode
    from tread_zoo.data.vae import load_vae
    from tread_zoo.registry import create
    from tread_zoo.runtime import describe_device, resolve_device, resolve_precision

    settings = as_keywords(config)
    source, name, out = settings.pop("data"), settings.pop("vae"), Path(settings.pop("out"))
    device = resolve_device(settings.pop("device"))
    precision = resolve_precision(settings.pop("precision"), device)
    options = EncodingConfig(**settings)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    rank, num_ranks = (int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    vae = load_vae(name).to(device)
    if rank == 0:
        where = f"{describe_device(device)}; {precision}; {num_ranks} process(es)"
        logger.info("%-9s %s", "device", where)
        logger.info("%-9s %s %s, sha256 %s…", "vae", vae.kind, vae.name, vae.sha256[:12])
    if encode(
        create("data", source), vae, out, options,
        source=source, precision=precision, rank=rank, num_ranks=num_ranks,
    ):  # fmt: skip
        logger.info("%-9s data=latents data.path=%s", "done", out)


if __name__ == "__main__":
    main()
