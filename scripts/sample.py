"""Sample images from a checkpoint: numbered PNG files, a grid, and an .npz with images and labels.

python scripts/sample.py checkpoint=runs/digits_dit_tiny_tread_flow_seed0 num_images=64
python scripts/sample.py checkpoint=… guidance.scale=2 label=3 sampler.name=heun
python scripts/sample.py checkpoint=… guidance=sparse guidance.weak_rate=0.8 sampler=dpmpp_2m

A network on latents is decoded with the autoencoder of its data; vae=path where that has moved, or
for an imported network; without one, and with vae=none, it gives latents.npz.
"""

import logging
from pathlib import Path

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

logger = logging.getLogger(__name__)

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="sample")
@clear_errors
def main(config: DictConfig) -> None:
    import numpy as np
    import torch

    from tread_zoo.diffusion import default_labels, generate
    from tread_zoo.evaluation.evaluate import describe_sampling, sampling_record
    from tread_zoo.evaluation.pictures import save_grid, save_png
    from tread_zoo.kernels import set_forms
    from tread_zoo.runtime import describe_device
    from tread_zoo.training.restore import restore

    settings = as_keywords(config)
    set_forms(settings["kernels"])
    if settings["num_images"] < 1:
        raise ValueError(f"num_images={settings['num_images']} must be at least 1.")
    run = restore(
        settings["checkpoint"],
        weights=settings["weights"],
        device=settings["device"],
        precision=settings["precision"],
    )
    sampling = run.sampling(settings["sampler"], settings["guidance"])
    weak = run.weak(sampling)
    codec, device = run.codec(settings["vae"]), next(run.backbone.parameters()).device
    codec.prepare(device)
    indices = range(settings["first_index"], settings["first_index"] + settings["num_images"])
    labels = default_labels(indices, run.backbone.num_classes)
    if settings["label"] is not None:
        labels = torch.full((len(indices),), settings["label"])
    place = describe_device(device)
    words = describe_sampling(sampling_record(run.backbone, run.objective, sampling, weak=weak))
    logger.info("%s, step %d, on %s; %s", run.backbone.name, run.checkpoint.step, place, words)
    x = generate(
        run.backbone,
        run.objective,
        sampling,
        indices=indices,
        labels=labels,
        seed=settings["seed"],
        batch_size=settings["batch_size"],
        precision=run.precision,
        weak=weak,
    )
    out = Path(settings["out"] or run.run_dir / "generated")
    out.mkdir(parents=True, exist_ok=True)
    if not codec.has_pixels:
        arrays = {"arr_0": codec.to_latents(x).numpy()}
        if labels is not None:
            arrays["arr_1"] = labels.numpy()
        np.savez(out / "latents.npz", **arrays)
        logger.info("%d latents %s in %s", len(x), list(x.shape[1:]), out / "latents.npz")
        return
    images = codec.to_pixels(x, device=device)
    for index, image in zip(indices, images, strict=True):
        save_png(image, out / f"{index:06d}.png")
    save_grid(images, out / "grid.png")
    arrays = {"arr_0": images.permute(0, 2, 3, 1).numpy()}
    if labels is not None:
        arrays["arr_1"] = labels.numpy()
    np.savez(out / "samples.npz", **arrays)
    logger.info("%d images, grid.png and samples.npz in %s", len(images), out)


if __name__ == "__main__":
    main()
