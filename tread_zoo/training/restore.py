"""From a checkpoint back to what samples and scores need."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread_zoo.backbone import Backbone
from tread_zoo.config import GRID_FIELDS
from tread_zoo.data import PIXELS, Codec, ImageData, build_data
from tread_zoo.data.latents import imported_codec, restore_codec
from tread_zoo.diffusion import Objective, SamplingOptions, build_sampling, check_weak
from tread_zoo.registry import available, create, get_entry
from tread_zoo.runtime import resolve_device, resolve_precision
from tread_zoo.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    load_backbone,
)


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
        return self.checkpoint.path.parent.parent

    def sampling(self, sampler: Mapping[str, Any], guidance: Mapping[str, Any]) -> SamplingOptions:
        """Return the run's own sampling options, with the values that are not None in place.

        Another `name` keeps what both the run's and the new one know. A run without guidance takes
        a scale alone as that of classifier-free guidance.

        Raises:
            ValueError: an unknown name or field, or options that do not fit the network or how it
                was trained.
        """
        own = self.checkpoint.meta["guidance"]
        if own["name"] == "none":
            own = {"name": "none"}
            if guidance.get("name") is None and guidance.get("scale") is not None:
                guidance = {**guidance, "name": "cfg"}
        options = build_sampling(
            _overlay(self.checkpoint.meta["sampler"], sampler, _sampler_fields),
            _overlay(own, guidance, _guidance_fields),
        )
        options.check(self.backbone, self.objective)
        meta = self.checkpoint.meta
        options.check_training(  # of an imported network nobody knows
            conditional=self.backbone.is_conditional,
            label_dropout=meta.get("training", {}).get("label_dropout", 0.1),
            has_routes=meta.get("routing", {}).get("name") != "none",
        )
        return options

    def weak(self, options: SamplingOptions) -> Backbone | None:
        """Return the weak network that `options` guide with, beside this one, or None."""
        weak = load_weak(options, self.backbone, self.objective)
        return None if weak is None else weak.to(next(self.backbone.parameters()).device)

    @property
    def has_data(self) -> bool:
        """Whether it names the data that it was trained on: an imported checkpoint does not."""
        return "data" in self.checkpoint.meta

    def data(self, changed: dict[str, Any]) -> ImageData:
        """Build the data that it was trained on, with `changed` options.

        Raises:
            ValueError: the data has another size, other channels, classes or contexts.
            CheckpointError: the checkpoint was imported, and names no data.
        """
        if not self.has_data:
            raise CheckpointError(
                f"{self.checkpoint.path} was imported, and knows no data of its own to be compared "
                "with. It can be sampled: scripts/sample.py."
            )
        own = self.checkpoint.meta["data"]
        data = build_data(**{**self.checkpoint.meta["data_options"], **changed})
        self._check_codec(data.codec)
        _check_contexts(data.context, own.get("context"))
        facts = (list(data.image_size), data.channels, data.num_classes)
        expected = (own["image_size"], own["channels"], own["num_classes"])
        if facts != expected:
            raise ValueError(
                f"the data has (size, channels, classes) {facts}; the checkpoint was trained on "
                f"{expected}. Set data.path and its options to data of the same kind."
            )
        return data

    def codec(self, vae: str | None) -> Codec:
        """Return what makes images of what the network makes.

        Args:
            vae: where the autoencoder is, if not where the run had it; `none` leaves latents. An
                imported network on latents has none but the one that is named here.

        Raises:
            ValueError: an autoencoder is named for a network on pixels.
        """
        facts = self.checkpoint.meta.get("data", {}).get("codec")
        if facts is not None:
            return restore_codec(facts, vae or self.checkpoint.meta["data_options"]["vae"])
        channels = self.backbone.in_channels
        if not self.has_data and channels not in (1, 3):
            return imported_codec(vae or "none", channels)
        if vae is not None:
            raise ValueError(
                f"vae={vae!r}, but {self.checkpoint.path} works on pixels; leave it out."
            )
        return PIXELS

    def _check_codec(self, codec: Codec) -> None:
        """Raise `ValueError` if the data are seen otherwise than in training."""
        own = self.checkpoint.meta["data"].get("codec", {})
        wrong = [
            f"{key}={own.get(key)!r}, not {codec.facts.get(key)!r}"
            for key in sorted(own.keys() | codec.facts.keys())
            if own.get(key) != codec.facts.get(key)
        ]
        if wrong:
            raise ValueError(
                f"the checkpoint was trained on data with {'; '.join(wrong)}: what it makes means "
                "nothing for others. Set data.path and its options to data of the same kind."
            )


def restore(path: str | Path, *, weights: str, device: str, precision: str) -> Restored:
    """Load the checkpoint at `path`, a run's folder or a checkpoint's own.

    Args:
        weights: `ema` or `model`.
        device, precision: see `tread_zoo.runtime`.

    Raises:
        CheckpointError: there is none, it is damaged or does not fit, or it was imported from a
            project whose objective this version does not have.
        ValueError: an unknown weights, device or precision.
    """
    place = resolve_device(device)
    chosen = resolve_precision(precision, place)
    checkpoint = find_checkpoint(path)
    objective = checkpoint.meta["objective"]
    if "imported" in checkpoint.meta and objective["name"] not in available("objective"):
        raise CheckpointError(
            f"{checkpoint.path} was trained for objective={objective['name']!r}, which this "
            f"version does not have; it has {', '.join(available('objective'))}. From Python: "
            f"load_backbone(find_checkpoint({str(path)!r})) is the network itself."
        )
    backbone = load_backbone(checkpoint, weights).to(place)
    return Restored(checkpoint, backbone, create("objective", objective), chosen)


def _check_contexts(found: Sequence[int] | None, own: Sequence[int] | None) -> None:
    """Raise `ValueError` if the data have other contexts than a checkpoint was trained with."""
    words = [
        "no contexts" if shape is None else "contexts of {} embeddings of width {}".format(*shape)
        for shape in (found, own)
    ]
    if words[0] != words[1]:
        raise ValueError(
            f"the data has {words[0]}; the checkpoint was trained with {words[1]}. Set data.path "
            "and its options (data.context, data.context_length) to data of the same kind."
        )


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


def _sampler_fields(name: str) -> Collection[str]:
    return ("num_steps", *GRID_FIELDS, *get_entry("sampler", name).parameters())


def _guidance_fields(name: str) -> Collection[str]:
    return get_entry("guidance", name).parameters()


def _overlay(
    own: Mapping[str, Any], changed: Mapping[str, Any], known: Callable[[str], Collection[str]]
) -> dict[str, Any]:
    """Return `own` with what `changed` has that is not None; `known` are the fields of a name."""
    given = {field: value for field, value in changed.items() if value is not None}
    name = given.get("name", own["name"])
    if name == own["name"]:
        return {**own, **given}
    return {**{field: own[field] for field in own if field in known(name)}, **given}
