"""Restore from a checkpoint what sampling and scoring need."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tread_zoo.config import GRID_FIELDS
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import PIXELS, Codec, ImageData
from tread_zoo.data.latents import imported_codec, restore_codec
from tread_zoo.data.text import TextEncoder, load_text_encoder
from tread_zoo.diffusion import Objective, SamplingOptions, build_sampling, check_weak
from tread_zoo.registry import create, get_entry
from tread_zoo.routing import Method
from tread_zoo.runs.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_same_data,
    data_metadata,
    find_checkpoint,
    load_backbone,
)
from tread_zoo.runs.metadata import as_checkpoint_error
from tread_zoo.runtime import (
    keep_freed_memory,
    resolve_device,
    resolve_precision,
    set_float32_products,
)


@dataclass(frozen=True)
class Restored:
    """A trained backbone on its device, with its objective, its run's settings, and the precision
    in which it computes."""

    checkpoint: Checkpoint
    backbone: Backbone
    objective: Objective
    precision: str

    @property
    def run_dir(self) -> Path:
        """The folder of the run that saved the checkpoint."""
        return self.checkpoint.run_dir

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run as plain values; for an imported network, a few fields."""
        return dict(self.checkpoint.meta["config"])

    def sampling(self, sampler: Mapping[str, Any], guidance: Mapping[str, Any]) -> SamplingOptions:
        """Return the run's sampling options, changed by the values in `sampler` and `guidance`.

        If these name another sampler or guidance, only options of the run that the new one also has
        are kept; the scale is not kept if one of the two guidances is `none`. For a run without
        guidance, a scale alone means classifier-free guidance.

        Raises:
            ValueError: a name or field is unknown, or the options do not fit the network.
        """
        default = self.config["guidance"]
        if "none" in (default["name"], guidance.get("name")):
            default = {"name": default["name"]}  # its scale of 1 does not carry over
        scale_alone = guidance.get("name") is None and guidance.get("scale") is not None
        if default["name"] == "none" and scale_alone:
            guidance = {**guidance, "name": "cfg"}
        options = build_sampling(
            overlay("sampler", self.config["sampler"], sampler),
            overlay("guidance", default, guidance),
        )
        options = replace(options, trained=self.routing)
        options.check(self.backbone, self.objective)
        training = self.config.get("training", {})  # the usual values for an imported network
        options.check_training(self.backbone, training.get("label_dropout", 0.1))
        return options

    @property
    def routing(self) -> Method:
        """The routing method used in training; for an imported network, tread."""
        method: Method = create("routing", self.config.get("routing", "tread"))
        return method

    def weak(self, options: SamplingOptions) -> "Restored | None":
        """Return the second network of the guidance in `options`, which makes the weak prediction,
        on this network's device; None if the guidance has none."""
        weak = load_weak(options, self.backbone, self.objective, self.checkpoint.data)
        if weak is not None:
            weak.backbone.to(next(self.backbone.parameters()).device)
        return weak

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty if they only have numbers."""
        return tuple(self.checkpoint.data.get("class_names", ()))

    def data(self, changes: Mapping[str, Any]) -> ImageData:
        """Return the training data. `changes` replace options of the run's `data`. Raises
        CheckpointError if the data do not match the checkpoint's, or it was imported."""
        if not self.checkpoint.data:
            raise CheckpointError(
                f"{self.checkpoint.path} was imported and names no data to compare with. Sample "
                "it with tread-zoo sample."
            )
        data: ImageData = create("data", {**self.config["data"], **changes})
        check_same_data(self.checkpoint, data_metadata(data))
        return data

    def codec(self, vae: str | None) -> Codec:
        """Return the codec that decodes the network's samples into images.

        Args:
            vae: path of the autoencoder that decodes latents, or `none` to leave them as they are.
                None: the run's autoencoder; for an imported network, the same as `none`.

        Raises:
            ValueError: `vae` is set for a network on pixels.
        """
        data = self.checkpoint.data
        if "codec" in data:
            with as_checkpoint_error(self.checkpoint.path, "does not describe its latents"):
                return restore_codec(data["codec"], vae or data["decoder"])
        channels = self.backbone.in_channels
        if not data and channels not in (1, 3):
            return imported_codec(vae or "none", channels)
        if vae is not None:
            raise ValueError(
                f"vae={vae!r}, but {self.checkpoint.path} works on pixels; leave it out."
            )
        return PIXELS

    def text_encoder(self, name: str | None = None) -> TextEncoder:
        """Return the text encoder of the training captions, on the network's device.

        Args:
            name: a folder or a name on the hub; None: the run's encoder.

        Raises:
            ValueError: the network was not trained on captions, or with another encoder.
        """
        data = self.checkpoint.data
        if "text_encoder" not in data:
            raise ValueError(
                f"{self.checkpoint.path} was not trained on captions (data.text_encoder=…), and "
                "takes no prompt."
            )
        encoder = load_text_encoder(name or data["captions_by"])
        if encoder.metadata != data["text_encoder"]:
            raise ValueError(
                f"text_encoder={encoder.name!r} is another encoder ({encoder.metadata}) than in "
                f"training ({data['text_encoder']})."
            )
        encoder.network.to(next(self.backbone.parameters()).device)
        return encoder


def restore(path: str | Path, *, weights: str | None, device: str, precision: str) -> Restored:
    """Return the network of the checkpoint at `path`, its objective and its run's settings, ready
    to sample.

    Args:
        path: see `find_checkpoint`.
        weights: `ema`, `model` or `ema:<width>`. None: `ema`, or those of a pushed network.
        device, precision: see `RunConfig` and `TrainingConfig`.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged or does not fit.
        ValueError: a plug-in is not loaded, or the device is not available.
    """
    place = resolve_device(device)
    checkpoint = find_checkpoint(path)
    weights = weights or checkpoint.meta.get("weights", "ema")
    backbone = load_backbone(checkpoint, weights).to(place)
    with as_checkpoint_error(checkpoint.path, "has settings that this version cannot use"):
        objective = create("objective", checkpoint.meta["config"]["objective"])
    resolved = resolve_precision(precision, place)
    set_float32_products(place, resolved)
    keep_freed_memory(place)
    return Restored(checkpoint, backbone, objective, resolved)


def load_weak(
    options: SamplingOptions, backbone: Backbone, objective: Objective, data: Mapping[str, Any]
) -> Restored | None:
    """Return on the CPU the network of the `weak_checkpoint` in `options.guidance`, or None if this
    has none.

    Args:
        options: the options of sampling.
        backbone, objective: the guided network, and its objective in training.
        data: metadata of its data, from `data_metadata`; empty if unknown.

    Raises:
        ValueError: the other network predicts another quantity, or other images, than `backbone`,
            or its training does not prepare it for the weak prediction.
    """
    path = getattr(options.guidance, "weak_checkpoint", None)
    if path is None:
        return None
    weak = restore(path, weights=None, device="cpu", precision="fp32")
    check_weak(backbone, objective, weak.backbone, weak.objective)
    for field in ("codec", "class_names"):
        one, other = weak.checkpoint.data.get(field), data.get(field)
        if one and other and one != other:
            raise ValueError(
                f"the network of guidance.weak_checkpoint was trained on data of another {field}: "
                "both need the same classes and scale of latents."
            )
    dropout = weak.config.get("training", {}).get("label_dropout", 0.1)
    replace(options, trained=weak.routing).check_training(weak.backbone, dropout)
    return weak


def overlay(kind: str, part: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options `part` of a sampler or guidance (`kind` says which), with `changes`. If
    these name another sampler or guidance, options of `part` that the other one lacks are left out.
    """
    name = changes.get("name", part["name"])
    if name == part["name"]:
        return {**part, **changes}
    options = {"name", *get_entry(kind, name).parameters()}
    if kind == "sampler":
        options |= set(GRID_FIELDS)
    return {**{k: v for k, v in part.items() if k in options}, **changes}
