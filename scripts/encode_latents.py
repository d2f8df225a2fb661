"""Encode images into a folder of latents with an autoencoder of diffusers, once, for data=latents.

python scripts/encode_latents.py data=image_folder data.path=photos image_size=256 \
    vae=stabilityai/sd-vae-ft-ema out=photos_latents flips=true
python scripts/train.py data=latents data.path=photos_latents backbone=dit_s_2
accelerate launch scripts/encode_latents.py …      # several processes share the shards

Stopped, the same command again encodes the shards that are missing.
"""

import logging
from datetime import timedelta
from pathlib import Path

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors
from tread_zoo.requeue import answer_requeue_signals

answer_requeue_signals()
logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="encode_latents")
@clear_errors
def main(config: DictConfig) -> None:
    from accelerate import PartialState

    from tread_zoo.data import build_data
    from tread_zoo.data.latents.encode import EncodingOptions, encode_latents
    from tread_zoo.data.latents.vae import load_vae
    from tread_zoo.process_group import leave_connections, take_connections
    from tread_zoo.runtime import describe_device, resolve_device, resolve_precision
    from tread_zoo.training.ranks import told_when_one_is_lost

    settings = as_keywords(config)
    source, name, out = settings.pop("data"), settings.pop("vae"), Path(settings.pop("out"))
    place = resolve_device(settings.pop("device"))
    precision = resolve_precision(settings.pop("precision"), place)
    options = EncodingOptions(**settings)
    patience = timedelta(days=1)  # a process may wait long for the others' last shards
    take_connections(place, patience)
    state = PartialState(cpu=place.type == "cpu", timeout=patience)
    vae = load_vae(name).to(state.device)
    if state.is_main_process:
        where = f"{describe_device(state.device)}; {precision}; {state.num_processes} process(es)"
        logger.info("%-9s %s", "device", where)
        logger.info("%-9s %s %s, sha256 %s…", "vae", vae.kind, vae.name, vae.sha256[:12])
    again = "the same command again, for all of them, encodes what is missing"
    with told_when_one_is_lost(state, remedy=again):
        done = encode_latents(
            build_data(**source),
            vae,
            out,
            options,
            source=source,
            precision=precision,
            rank=state.process_index,
            num_ranks=state.num_processes,
            wait=state.wait_for_everyone,
        )
    if done.images and state.is_main_process:
        logger.info(
            "%-9s %d images here, %.1f images/s: %.3f of the speed of the bare autoencoder",
            "encoded", done.images, done.images_per_s, done.vae_share,
        )  # fmt: skip
    if done.manifest is not None:
        m = done.manifest
        logger.info(
            "%-9s %s: %d + %d latents %s, PSNR %.1f dB on %d images", "done", out,
            m.count("train"), m.count("held_out"), list(m.latent_shape), m.psnr_db, m.psnr_images,
        )  # fmt: skip
    leave_connections()


if __name__ == "__main__":
    main()
