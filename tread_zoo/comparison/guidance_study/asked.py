"""What a study compares: guidances, each with its scales, and samplers. Read and checked here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tread_zoo.diffusion import (
    GUIDANCE,
    SAMPLERS,
    SamplingOptions,
    build_guidance,
    build_sampling,
    sampler_fields,
)
from tread_zoo.errors import unknown_name
from tread_zoo.training.checkpoints import Checkpoint

AS_RUN = "as_run"  # the sampler that a run was trained with
EARLIEST = "earliest"  # of guidance=auto: the oldest checkpoint that the run kept


@dataclass(frozen=True)
class AskedGuidance:
    """A guidance before its scale.

    label: how tables name it.
    settings: `name` and its own fields.
    scales: to sweep.
    """

    label: str
    settings: Mapping[str, Any]
    scales: tuple[float, ...]


@dataclass(frozen=True)
class AskedSampler:
    """A sampler before its number of steps; `settings` is None for the run's own."""

    label: str
    settings: Mapping[str, Any] | None


def read_guidances(
    entries: Sequence[str | Mapping[str, Any]], scales: Sequence[float]
) -> list[AskedGuidance]:
    """Return the guidances asked for.

    Args:
        entries: names, or mappings with `name`, fields of that guidance, and `scales` in the place
            of the shared ones. `none` has the scale 1 alone; `auto` takes the earliest checkpoint
            unless it names one.
        scales: to sweep for each.

    Raises:
        ValueError: an unknown name or field, a wrong value, or something that comes twice.
    """
    asked = []
    for entry in entries:
        settings = _as_mapping("guidances", entry)
        given = {key: value for key, value in settings.items() if key != "scales"}
        name = settings["name"]
        if name not in GUIDANCE:
            raise unknown_name("guidances: name", name, GUIDANCE)
        if "scale" in settings:
            raise ValueError(
                f"guidances: {name} has scale={settings['scale']}, and a study sweeps scales: "
                f"write scales: [{settings['scale']}]."
            )
        own = list(settings.pop("scales", [1.0] if name == "none" else scales))
        if not own or len(set(own)) < len(own):
            raise ValueError(f"guidances: scales={own} of {name} must list different numbers.")
        if name == "auto":
            settings.setdefault("checkpoint", EARLIEST)
        for scale in own:
            build_guidance(**settings, scale=scale)
        asked.append(AskedGuidance(_label(given), settings, tuple(own)))
    _check_labels("guidances", [one.label for one in asked])
    return asked


def read_samplers(entries: Sequence[str | Mapping[str, Any]]) -> list[AskedSampler]:
    """Return the samplers asked for: `as_run`, names, or mappings with `name` and fields.

    Raises:
        ValueError: an unknown name or field, a wrong value, or something that comes twice.
    """
    asked = []
    for entry in entries:
        settings = _as_mapping("samplers", entry)
        name = settings["name"]
        if name not in (AS_RUN, *SAMPLERS):
            raise unknown_name("samplers: name", name, (AS_RUN, *SAMPLERS))
        if "num_steps" in settings:
            raise ValueError(
                f"samplers: {name} has num_steps={settings['num_steps']}, which follows from the "
                "budget here: set num_steps or flops of the study."
            )
        if name == AS_RUN:
            for field in settings.keys() - {"name"}:
                raise ValueError(
                    f"samplers: {field}={settings[field]} goes with a sampler's name, and "
                    f"{AS_RUN} is the run's own as it is."
                )
            asked.append(AskedSampler(AS_RUN, None))
            continue
        build_sampling({**settings, "num_steps": 1}, {"name": "none"})
        asked.append(AskedSampler(_label(settings), settings))
    _check_labels("samplers", [one.label for one in asked])
    return asked


def sampling_options(
    checkpoint: Checkpoint,
    guidance: AskedGuidance,
    sampler: AskedSampler,
    *,
    scale: float,
    num_steps: int,
) -> SamplingOptions:
    """Return how a checkpoint's network is sampled, whether or not it can be.

    Raises:
        ValueError: guidance by the earliest checkpoint, and there is none before this one.
    """
    return build_sampling(
        {**sampler_settings(checkpoint, sampler), "num_steps": num_steps},
        {**_resolved(checkpoint, guidance.settings), "scale": scale},
    )


def sampler_settings(checkpoint: Checkpoint, sampler: AskedSampler) -> dict[str, Any]:
    """Return the settings of a sampler but for its steps."""
    if sampler.settings is not None:
        return dict(sampler.settings)
    own = checkpoint.meta["sampler"]
    known = ("name", *sampler_fields(own["name"]))
    return {key: own[key] for key in own if key in known and key != "num_steps"}


def _resolved(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a guidance's settings with the path of the earliest checkpoint in its place."""
    if settings["name"] != "auto" or settings["checkpoint"] != EARLIEST:
        return dict(settings)
    folders = sorted(checkpoint.path.parent.glob("step_*"))
    if folders[0] == checkpoint.path:
        raise ValueError(
            f"run {checkpoint.path.parent.parent.name} kept no checkpoint before the one of step "
            f"{checkpoint.step}, to be the weak network; train with a larger "
            "training.keep_checkpoints, or name a smaller run: {name: auto, checkpoint: runs/…}."
        )
    return {**settings, "checkpoint": str(folders[0])}


def _as_mapping(field: str, entry: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"name": entry}
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise ValueError(
            f"{field}: {entry!r} must be a name, or a mapping with a name, such as "
            "{name: …, field: value}."
        )
    return dict(entry)


def _label(given: Mapping[str, Any]) -> str:
    """Return the name, and the fields that were given; of a path its last part."""
    fields = [
        f"{key}={str(value).rstrip('/').rpartition('/')[2]}"
        for key, value in given.items()
        if key != "name"
    ]
    return " ".join([given["name"], *fields])


def _check_labels(field: str, labels: Sequence[str]) -> None:
    if not labels:
        raise ValueError(f"{field}=[] asks for nothing; name at least one.")
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{field}: {label!r} comes twice; each is sampled once.")
