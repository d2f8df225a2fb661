"""Sample images from a checkpoint: numbered PNG files, a grid, and an .npz with images and labels.

The images go to out=folder, or to a folder in <run>/generated for each combination of settings.
first_index=… continues a set; images of other settings are never mixed in. A command that was
stopped continues if it is given again.

tread-zoo sample checkpoint=runs/digits_dit_tiny_tread_flow_seed0 num_images=64
tread-zoo sample checkpoint=… guidance.scale=2 label=3 sampler=heun
tread-zoo sample checkpoint=… guidance=sparse guidance.weak_rate=0.8 sampler=dpmpp_2m
tread-zoo sample checkpoint=… sampler.selection_rate=0.5     # fewer FLOPs: docs/routing.md
tread-zoo sample checkpoint=… first_index=64 out=samples    # images 64 … 127 of the set
tread-zoo sample checkpoint=… label=hopper                  # a class by the name of its folder
tread-zoo sample checkpoint=… prompt="a red fox" guidance.scale=4
tread-zoo sample checkpoint=… "prompt=['a red fox', 'a blue fox']"
tread-zoo sample checkpoint=… gif=true                      # how the images come out of the noise
tread-zoo sample checkpoint=… contexts=prompts.npy
tread-zoo sample checkpoint=… image_size=[32,64]            # another size than in training
accelerate launch -m tread_zoo sample checkpoint=… num_images=50000   # the same images, by all GPUs

Latents are decoded with the autoencoder of the data, or vae=path; without one, or with vae=none,
they are written as latents.npz. Contexts are made from prompts by the text encoder of training,
read from a file, or taken from held-out images.
"""

import hashlib
import logging
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.checkpoint_config import CheckpointConfig
from tread_zoo.cli import command
from tread_zoo.fields import OPTIONS, check

if TYPE_CHECKING:
    from torch import Tensor

    from tread_zoo.contract.backbone import Backbone
    from tread_zoo.data import Codec
    from tread_zoo.evaluation.sample_folder import SampleFolder
    from tread_zoo.runs.restore import Restored

logger = logging.getLogger(__name__)

GIF_IMAGES = 50


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class SampleConfig(CheckpointConfig):
    """Settings of tread-zoo sample.

    Args:
        sampler, guidance: settings that replace the run's; `name` chooses another kind.
        out: folder of the images; null: <run>/generated/<step and digest of the settings>.
        overwrite: replace images in `out` that were made with other settings.
        num_images: number of images.
        first_index: number of the first image. Image i of a seed is the same in every call.
        label: one class for all, by number or by the name of its folder; null is i mod num_classes
            for image i.
        prompt: a text, or n texts; image i gets text i mod n. A run without guidance is then guided
            by `cfg`, if it was trained with label dropout.
        text_encoder: folder of the text encoder; null is the run's.
        image_size: side of the images, or height and width, as in [32,64]; null is the size of
            training, the only one for networks with learned positions. For latents that are not
            decoded, it is the size of the latents.
        contexts: an .npy file of n contexts [n, T, S], T embeddings of width S each; image i gets
            context i mod n. null takes contexts of held-out images.
        seed: seed of the images.
        batch_size: images per batch.
        vae: folder of the autoencoder; null is the run's autoencoder; `none` writes latents.
        gif: also write an animation of up to 50 images as they come out of the noise.
    """

    sampler: dict[str, Any] = field(default_factory=dict)
    guidance: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    num_images: PositiveInt = 64
    first_index: NonNegativeInt = 0
    label: NonNegativeInt | str | None = None
    prompt: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    text_encoder: str | None = None
    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    contexts: str | None = None
    seed: int = 0
    batch_size: PositiveInt = 64
    vae: str | None = None
    gif: bool = False

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts of `prompt` as a tuple, which is empty if there are none."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt or ()


@command("sample", SampleConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(SampleConfig, settings)  # before torch is imported, which takes seconds
    from tread_zoo.evaluation.score import distributed
    from tread_zoo.kernels import set_forms
    from tread_zoo.runtime import resolve_device

    set_forms(config.kernels)
    with distributed(resolve_device(config.device)) as is_main:
        _sample(config, is_main)


def _sample(config: SampleConfig, is_main: bool) -> None:
    from tread_zoo.data.latents import LatentCodec
    from tread_zoo.diffusion import generate
    from tread_zoo.evaluation.evaluate import describe_sampling, sampling_record
    from tread_zoo.evaluation.pictures import save_frames
    from tread_zoo.process_group import rank_and_number, wait_for_all
    from tread_zoo.progress import progress
    from tread_zoo.runs.restore import restore
    from tread_zoo.runtime import describe_device

    run = restore(
        config.checkpoint, weights=config.weights, device=config.device, precision=config.precision
    )
    if config.label is not None:
        label = _label(run, config.label)
        config = replace(config, label=label)
        if run.class_names and is_main:
            logger.info("label %d is the class %s", label, run.class_names[label])
    sampling = run.sampling(config.sampler, _guidance(run, config))
    other = run.weak(sampling)
    weak = None if other is None else other.backbone
    codec, device = run.codec(config.vae), next(run.backbone.parameters()).device
    codec.prepare(device)
    if config.image_size is not None:
        run, weak = _at_image_size(run, weak, codec, config.image_size)
    record = sampling_record(run.backbone, run.objective, sampling, weak=weak)
    if other is not None:  # its path may get a newer checkpoint
        record["weak_sha256"] = other.checkpoint.meta["sha256"]
    indices = range(config.first_index, config.first_index + config.num_images)
    labels = _conditions(run, config, indices)
    folder = _open_folder(run, codec, config, record)
    place, words = describe_device(device), describe_sampling(record)
    if is_main:
        step = run.checkpoint.step
        logger.info("%s, step %d, on %s; %s", run.backbone.name, step, place, words)
    draw = partial(
        generate, run.backbone, run.objective, sampling, seed=config.seed,
        batch_size=config.batch_size, precision=run.precision, weak=weak,
    )  # fmt: skip
    recorded = labels if run.backbone.num_classes else None
    if is_main:
        folder.begin()
    if isinstance(codec, LatentCodec) and not codec.has_pixels:
        if is_main:
            x = codec.to_latents(draw(indices=indices, labels=labels))
            folder.save_latents(indices, x, recorded)
            logger.info("%d latents %s: latents.npz in %s", len(x), list(x.shape[1:]), folder.path)
        return
    wait_for_all()
    rank, num_ranks = rank_and_number()
    starts = range(rank * config.batch_size, len(indices), num_ranks * config.batch_size)
    for start in progress("sampling", starts, " batches", shown=len(starts) > 1):
        part = slice(start, start + config.batch_size)
        if not folder.has(indices[part]):
            x = draw(indices=indices[part], labels=None if labels is None else labels[part])
            folder.save(indices[part], codec.to_pixels(x, device=device))
    wait_for_all()
    if is_main:
        names = _names(run, config, indices, recorded)
        folder.finish(indices, recorded, names)
        logger.info("%d images and samples.npz in %s", len(indices), folder.path)
        logger.info("a grid of them is %s", folder.grid_path)
        if config.gif:
            gif, few = folder.grid_path.with_suffix(".gif"), slice(GIF_IMAGES)
            frames = list["Tensor"]()
            x = draw(
                indices=indices[few], labels=None if labels is None else labels[few],
                batch_size=GIF_IMAGES, watch=frames.append,
            )  # fmt: skip
            save_frames([*frames, x], partial(codec.to_pixels, device=device), gif, names)
            logger.info("%d images coming out of the noise are %s", len(x), gif)


def _names(
    run: "Restored", config: SampleConfig, indices: range, labels: "Tensor | None"
) -> list[str]:
    """Return a name for each of the images `indices`: its class's name or number, if `labels` are
    given, or else its prompt. The list is empty if there are neither labels nor prompts."""
    if labels is not None:
        known = run.class_names
        return [known[label] if known else str(label) for label in labels.tolist()]
    prompts = config.prompts
    return [prompts[i % len(prompts)] for i in indices] if prompts else []


def _open_folder(
    run: "Restored", codec: "Codec", config: SampleConfig, record: dict[str, Any]
) -> "SampleFolder":
    """Return the folder of the images: `out`, or one in the run's folder, named by a digest of the
    settings, which include `record` (from `sampling_record`)."""
    from tread_zoo.evaluation.sample_folder import SampleFolder, folder_name

    cost = {name: record[name] for name in ("nfe", "flops_per_image")}
    made_with = {name: value for name, value in record.items() if name not in cost}
    sha256 = run.checkpoint.meta["sha256"]
    made_with |= {
        "seed": config.seed,
        "label": config.label,
        "contexts": config.contexts,
        "weights": config.weights,
        "weights_sha256": sha256.get(f"{config.weights}.safetensors", sha256),
        "step": run.checkpoint.step,
        "precision": run.precision,
        "decoded_by": codec.decoded_by,
    }
    if config.contexts is not None:
        content = Path(config.contexts).expanduser().read_bytes()
        made_with["contexts"] = hashlib.sha256(content).hexdigest()
    if config.prompt is not None:
        made_with["prompt"] = config.prompt
    if config.image_size is not None:
        made_with["input_size"] = list(run.backbone.input_size)
    facts = {"checkpoint": str(run.checkpoint.path), "backbone": run.backbone.name, **cost}
    out = config.out or run.run_dir / "generated" / folder_name(made_with)
    return SampleFolder(out, made_with, facts, overwrite=config.overwrite)


def _at_image_size(
    run: "Restored", weak: "Backbone | None", codec: "Codec", image_size: int | tuple[int, int]
) -> "tuple[Restored, Backbone | None]":
    """Return `run` and `weak` with networks for images of `image_size`: a side, or height and
    width, in pixels or, without a decoder, of latents. `weak` is the network of the guidance's
    `weak_checkpoint`, or None. `codec` shows how much smaller latents are than images. Raises
    ValueError if the size does not fit."""
    import torch

    from tread_zoo.factory import at_size

    network, scale = run.backbone, 1
    if codec.metadata and codec.has_pixels:  # latents: the decoder says how much smaller they are
        blank = torch.zeros(1, network.in_channels, *network.input_size)
        pixels = codec.to_pixels(blank, device=next(network.parameters()).device)
        scale = pixels.shape[-1] // network.input_size[-1]
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    step = scale * network.patch_size
    if any(side % step for side in sides):
        raise ValueError(
            f"image_size={list(sides)}: height and width must be multiples of {step}, the pixels "
            f"of one patch of {network.name}."
        )
    height, width = (side // scale for side in sides)
    try:
        run = replace(run, backbone=at_size(network, height, width))
        return run, None if weak is None else at_size(weak, height, width)
    except ValueError as error:
        raise ValueError(f"image_size={list(sides)}: {error}") from error


def _label(run: "Restored", label: int | str) -> int:
    """Return the number of a class that the network has, given by number or name."""
    from tread_zoo.diffusion.conditions import class_number

    network = run.backbone
    if network.context_size:
        raise ValueError(
            f"label={label}, but {network.name} was trained with contexts; give prompt=… or "
            "contexts=FILE.npy."
        )
    if not network.num_classes:
        raise ValueError(f"label={label}, but this run has no classes: leave it out.")
    named = str(label) in run.class_names  # a folder named 1 is not class number 1
    number = class_number(str(label) if named else label, run.class_names)
    if number >= network.num_classes:
        raise ValueError(
            f"label={label}: this network has the classes 0 … {network.num_classes - 1}."
        )
    return number


def _guidance(run: "Restored", config: SampleConfig) -> dict[str, Any]:
    """Return the fields of guidance that the command sets. If neither the command nor the run has
    guidance, prompts are guided by `cfg`, provided that training dropped some labels."""
    dropout = run.config.get("training", {}).get("label_dropout", 0.0)
    unguided = run.config["guidance"]["name"] == "none" and not config.guidance
    return {"name": "cfg"} if config.prompt and unguided and dropout else config.guidance


def _conditions(run: "Restored", config: SampleConfig, indices: range) -> "Tensor | None":
    """Return the conditions of the images `indices`: labels, or contexts from prompts, a file or
    the data. None if the network takes no condition."""
    import torch

    from tread_zoo.diffusion import default_labels
    from tread_zoo.diffusion.conditions import conditions_of, contexts_in, contexts_of

    network = run.backbone
    if config.prompts:
        if config.contexts is not None:
            raise ValueError(f"prompt and contexts={config.contexts!r} exclude each other.")
        encoder = run.text_encoder(config.text_encoder)
        return contexts_of(config.prompts, encoder, network).of(indices)
    if config.contexts is not None:
        return contexts_in(config.contexts, network).of(indices)
    if isinstance(config.label, int):
        return torch.full((len(indices),), config.label)
    if network.context_size:
        return conditions_of(network, run.data({})).of(indices)
    return default_labels(indices, network.num_classes)


if __name__ == "__main__":
    main()
