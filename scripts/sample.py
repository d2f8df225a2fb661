"""Sample images from a checkpoint: numbered PNG files, a grid, and an .npz with images and labels.

They lie in <run>/generated, in a folder for each kind of settings, or in out=folder. A set is
continued by first_index=…; images of other settings are never mixed in.

python scripts/sample.py checkpoint=runs/digits_dit_tiny_tread_flow_seed0 num_images=64
python scripts/sample.py checkpoint=… guidance.scale=2 label=3 sampler.name=heun
python scripts/sample.py checkpoint=… guidance=sparse guidance.weak_rate=0.8 sampler=dpmpp_2m
python scripts/sample.py checkpoint=… first_index=64 out=samples    # images 64 … 127 of the set
python scripts/sample.py checkpoint=… contexts=prompts.npy

A network on latents is decoded with the autoencoder of its data; vae=path where that has moved, or
for an imported network; without one, and with vae=none, it gives latents.npz. A network that takes
contexts is given those of held-out images, or those of a file.
"""

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

if TYPE_CHECKING:
    from tread_zoo.data import Codec
    from tread_zoo.evaluation.conditions import Conditions
    from tread_zoo.evaluation.sample_folder import SampleFolder
    from tread_zoo.training.restore import Restored

logger = logging.getLogger(__name__)

register_configs()


class Settings(TypedDict):
    """The kinds of configs/sample.yaml's own fields."""

    checkpoint: str
    out: str | None
    overwrite: bool
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
    import torch

    from tread_zoo.diffusion import generate
    from tread_zoo.evaluation.evaluate import describe_sampling, sampling_record
    from tread_zoo.evaluation.sample_folder import check_request
    from tread_zoo.kernels import set_forms
    from tread_zoo.kinds import check_typed
    from tread_zoo.runtime import describe_device
    from tread_zoo.training.restore import restore

    settings = as_keywords(config)
    check_typed(settings, Settings)
    set_forms(settings["kernels"])
    check_request(settings)
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
    record = sampling_record(run.backbone, run.objective, sampling, weak=weak)
    folder = _open_folder(run, codec, settings, record)
    indices = range(settings["first_index"], settings["first_index"] + settings["num_images"])
    labels = _conditions(run, settings).of(indices)
    if settings["label"] is not None:
        labels = torch.full((len(indices),), settings["label"])
    place, words = describe_device(device), describe_sampling(record)
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
    labels = labels if run.backbone.num_classes else None
    if not codec.has_pixels:
        folder.save_latents(indices, codec.to_latents(x), labels)
        logger.info("%d latents %s: latents.npz in %s", len(x), list(x.shape[1:]), folder.path)
        return
    folder.save(indices, codec.to_pixels(x, device=device), labels)
    logger.info("%d images and samples.npz in %s", len(x), folder.path)
    logger.info("a grid of them is %s", folder.grid_path)


def _open_folder(
    run: "Restored", codec: "Codec", settings: dict[str, Any], record: dict[str, Any]
) -> "SampleFolder":
    """Return the folder of the images, `out` or one of the run's that these settings name."""
    from tread_zoo.evaluation.sample_folder import SampleFolder, folder_name

    cost = {name: record[name] for name in ("nfe", "flops_per_image")}
    made_with = {name: value for name, value in record.items() if name not in cost}
    made_with |= {name: settings[name] for name in ("seed", "label", "contexts", "weights")}
    if settings["contexts"] is not None:
        content = Path(settings["contexts"]).expanduser().read_bytes()
        made_with["contexts"] = hashlib.sha256(content).hexdigest()
    file = f"{settings['weights']}.safetensors"
    made_with |= {
        "weights_sha256": run.checkpoint.meta["sha256"].get(file),
        "step": run.checkpoint.step,
        "precision": run.precision,
        "decoded_by": codec.decoded_by,
    }
    facts = {"checkpoint": str(run.checkpoint.path), "backbone": run.backbone.name, **cost}
    out = settings["out"] or run.run_dir / "generated" / folder_name(made_with)
    return SampleFolder(out, made_with, facts, overwrite=settings["overwrite"])


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
