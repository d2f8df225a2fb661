"""From a checkpoint back to what samples and scores need."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tread_zoo.config import GRID_FIELDS
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import PIXELS, Codec, ImageData
from tread_zoo.data.latents import imported_codec, restore_codec
from tread_zoo.diffusion import Objective, SamplingOptions, build_sampling, check_weak
from tread_zoo.registry import create, get_entry
from tread_zoo.routing import Routing
from tread_zoo.runs.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_same_data,
    data_metadata,
    find_checkpoint,
    load_backbone,
)
from tread_zoo.runtime import resolve_device, resolve_precision, set_float32_products


@dataclass(frozen=True)
class Restored:
    """A trained backbone on its device, with the objective that gives its output a meaning."""

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
        """The configuration of the run, as plain values; of an imported network a few fields."""
        config: dict[str, Any] = self.checkpoint.meta["config"]
        return config

    def sampling(self, sampler: Mapping[str, Any], guidance: Mapping[str, Any]) -> SamplingOptions:
        """Return the run's own sampling options, with the values that are not None in place.

        Another `name` keeps what both the run's and the new one have. A run without guidance takes
        a scale alone as that of classifier-free guidance.

        Raises:
            ValueError: an unknown name or field, or options that do not fit the network or how it
                was trained.
        """
        default = self.config["guidance"]
        if "none" in (default["name"], guidance.get("name")):
            default = {"name": default["name"]}  # its scale of 1 is no other kind's
        scale_alone = guidance.get("name") is None and guidance.get("scale") is not None
        if default["name"] == "none" and scale_alone:
            guidance = {**guidance, "name": "cfg"}
        options = build_sampling(
            overlay("sampler", self.config["sampler"], sampler),
            overlay("guidance", default, guidance),
        )
        training, routing = (self.config.get(name, {}) for name in ("training", "routing"))
        if options.selection_rate:
            options = replace(options, routing=self.routing)
        options.check(self.backbone, self.objective)
        options.check_training(  # an imported network does not say: the usual
            conditional=self.backbone.is_conditional,
            label_dropout=training.get("label_dropout", 0.1),
            has_routes=routing.get("name") != "none"
            and routing.get("reconstruction_weight") is None,
        )
        return options

    @property
    def routing(self) -> Routing:
        """The routing that it was trained by; the default one of an imported network."""
        return self.backbone.build_routing(**self.config.get("routing", {}))

    def weak(self, options: SamplingOptions) -> Backbone | None:
        """Return the weak network of the guidance in `options`, on the same device, or None."""
        weak = load_weak(options, self.backbone, self.objective)
        return None if weak is None else weak.to(next(self.backbone.parameters()).device)

    @property
    def has_data(self) -> bool:
        """Whether it names the data that it was trained on: an imported checkpoint does not."""
        return "data" in self.checkpoint.meta

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; none where they have none but their numbers."""
        return tuple(self.checkpoint.meta.get("data", {}).get("class_names", ()))

    def data(self, changes: Mapping[str, Any]) -> ImageData:
        """Return the data that it was trained on, with some options changed.

        Raises:
            CheckpointError: the data are of another kind, or the checkpoint was imported, and
                names none.
        """
        if not self.has_data:
            raise CheckpointError(
                f"{self.checkpoint.path} was imported, and names no data to compare with. It can "
                "be sampled: tread-zoo sample."
            )
        data: ImageData = create("data", {**self.config["data"], **changes})
        check_same_data(self.checkpoint, data_metadata(data))
        return data

    def codec(self, vae: str | None) -> Codec:
        """Return what makes images of what the network makes.

        Args:
            vae: where the autoencoder is, if not where the run had it; `none` leaves latents. An
                imported network on latents has none but the one that is named here.

        Raises:
            ValueError: an autoencoder is named for a network on pixels.
        """
        data = self.checkpoint.meta.get("data", {})
        if "codec" in data:
            return restore_codec(data["codec"], vae or data["decoder"])
        channels = self.backbone.in_channels
        if not self.has_data and channels not in (1, 3):
            return imported_codec(vae or "none", channels)
        if vae is not None:
            raise ValueError(
                f"vae={vae!r}, but {self.checkpoint.path} works on pixels; leave it out."
            )
        return PIXELS


def restore(path: str | Path, *, weights: str, device: str, precision: str) -> Restored:
    """Return the checkpoint at `path`, a run's folder or a checkpoint's own, ready to sample.

    Args:
        weights: `ema`, `model` or `ema:<width>`.
        device, precision: see `tread_zoo.runtime`.

    Raises:
        CheckpointError: there is none, it is damaged or does not fit.
        ValueError: an unknown weights, device or precision, or a plug-in that is not loaded.
    """
    place = resolve_device(device)
    checkpoint = find_checkpoint(path)
    backbone = load_backbone(checkpoint, weights).to(place)
    objective = create("objective", checkpoint.meta["config"]["objective"])
    resolved = resolve_precision(precision, place)
    set_float32_products(place, resolved)
    return Restored(checkpoint, backbone, objective, resolved)


def load_weak(
    options: SamplingOptions, backbone: Backbone, objective: Objective
) -> Backbone | None:
    """Return the network of the guidance's `weak_checkpoint`, on the CPU; None without.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ValueError: it is of other data or another objective than `backbone`.
    """
    path = getattr(options.guidance, "weak_checkpoint", None)
    if path is None:
        return None
    weak = restore(path, weights="ema", device="cpu", precision="fp32")
    check_weak(backbone, objective, weak.backbone, weak.objective)
    return weak.backbone


def overlay(kind: str, part: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `part` with the changes that are not None.

    Under another name, the options that both parts have are kept.
    """
    given = {field: value for field, value in changes.items() if value is not None}
    name = given.get("name", part["name"])
    if name == part["name"]:
        return {**part, **given}
    options = {"name", *get_entry(kind, name).parameters()}
    if kind == "sampler":
        options |= set(GRID_FIELDS)
    return {**{k: v for k, v in part.items() if k in options}, **given}
