"""Sample images from a checkpoint: numbered PNG files, a grid, and an .npz with images and labels.

python scripts/sample.py checkpoint=runs/digits_dit_tiny_tread_flow_seed0 num_images=64
python scripts/sample.py checkpoint=… guidance.scale=2 label=3 sampler.name=heun
python scripts/sample.py checkpoint=… guidance=sparse guidance.weak_rate=0.8 sampler=dpmpp_2m
python scripts/sample.py checkpoint=… contexts=prompts.npy

A network on latents is decoded with the autoencoder of its data; vae=path where that has moved, or
for an imported network; without one, and with vae=none, it gives latents.npz. A network that takes
contexts is given those of held-out images, or those of a file.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

if TYPE_CHECKING:
    from tread_zoo.evaluation.conditions import Conditions
    from tread_zoo.training.restore import Restored

logger = logging.getLogger(__name__)

register_configs()


class Settings(TypedDict):
    """The kinds of configs/sample.yaml's own fields."""

    checkpoint: str
    out: str | None
    num_images: int
    first_index: int
    label: int | None
    contexts: str | None
    seed: int
    batch_size: int
    weights: str
    vae: str | None
    device: str
    precision: str


@hydra.main(version_base="1.3", config_path="../configs", config_name="sample")
@clear_errors
def main(config: DictConfig) -> None:
    import numpy as np
    import torch

    from tread_zoo.diffusion import generate
    from tread_zoo.evaluation.evaluate import describe_sampling, sampling_record
    from tread_zoo.evaluation.pictures import save_grid, save_png
    from tread_zoo.kernels import set_forms
    from tread_zoo.kinds import check_typed
    from tread_zoo.runtime import describe_device
    from tread_zoo.training.restore import restore

    settings = as_keywords(config)
    check_typed(settings, Settings)
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
    labels = _conditions(run, settings).of(indices)
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
        if run.backbone.num_classes and labels is not None:
            arrays["arr_1"] = labels.numpy()
        np.savez(out / "latents.npz", **arrays)
        logger.info("%d latents %s in %s", len(x), list(x.shape[1:]), out / "latents.npz")
        return
    images = codec.to_pixels(x, device=device)
    for index, image in zip(indices, images, strict=True):
        save_png(image, out / f"{index:06d}.png")
    save_grid(images, out / "grid.png")
    arrays = {"arr_0": images.permute(0, 2, 3, 1).numpy()}
    if run.backbone.num_classes and labels is not None:
        arrays["arr_1"] = labels.numpy()
    np.savez(out / "samples.npz", **arrays)
    logger.info("%d images, grid.png and samples.npz in %s", len(images), out)


def _conditions(run: "Restored", settings: dict[str, Any]) -> "Conditions":
    """Return the labels, or the contexts of a file or of the data that the run was trained on."""
    from tread_zoo.evaluation.conditions import conditions_of, contexts_in, label_conditions

    if settings["contexts"] is not None:
        return contexts_in(settings["contexts"], run.backbone)
    if not run.backbone.context_size:
        return label_conditions(run.backbone)
    if settings["label"] is not None:
        raise ValueError(
            f"label={settings['label']}, but {run.backbone.name} was trained with contexts; give "
            "contexts=FILE.npy."
        )
    try:
        return conditions_of(run.backbone, run.data({}))
    except ValueError as error:
        raise ValueError(
            f"{error} The contexts are those of held-out images; for others: contexts=FILE.npy"
        ) from error


if __name__ == "__main__":
    main()
