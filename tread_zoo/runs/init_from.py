"""A new run that starts from trained weights: `init_from=CHECKPOINT`.

The backbone is the checkpoint's, except for options that the run sets. If the run also names a
backbone, only options with other values than their defaults count as set. If that is not the
default backbone, the sizes that its name stands for are set, too. Weights are matched by name. If
the condition or the number of outputs differs, the layers that depend on it start fresh, and so do
a routing method's own weights that the checkpoint lacks. All other weights must fit.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tread_zoo.config import RunConfig, make_config
from tread_zoo.contract.backbone import Backbone
from tread_zoo.factory import create_backbone
from tread_zoo.registry import FROM_DATA, complete, get_entry
from tread_zoo.runs.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    has_checkpoints,
)
from tread_zoo.runs.metadata import META_NAME
from tread_zoo.runs.weights import check_finite

_ADDED = "routing."  # weights that are added to a network after it was built
_MOST_LISTED = 6


def resolve_init_from(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Checkpoint | None]:
    """Return the settings of a run, with the backbone filled in from a checkpoint, and the
    checkpoint. `fields` are the settings as given; their `init_from` names the checkpoint. Without
    it, return the settings unchanged and None.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or another architecture is chosen.
        ValueError: the checkpoint needs a plug-in that is not loaded.
    """
    if fields.get("init_from") is None:
        return dict(fields), None
    part = fields.get("backbone", {})
    only_options = isinstance(part, Mapping) and "name" not in part
    if only_options:  # options of the checkpoint's architecture, perhaps none
        name = _find_source(fields, fields.get("run_dir", "auto")).meta["backbone"]["name"]
        fields = {**fields, "backbone": {"name": name, **part}}
    config = make_config(**fields)
    source = _find_source(fields, config.run_dir)
    backbone = _backbone_of(source) | dict(part) if only_options else _merge(config, source)
    resolved = {**fields, "backbone": backbone}
    if config.resume in (None, "latest", "auto"):
        resolved["run_dir"] = config.run_dir  # auto names it after the given settings
    return resolved, source


def _find_source(fields: Mapping[str, Any], run_dir: str) -> Checkpoint:
    """Return the checkpoint that `init_from` in the settings `fields` names. But if the run, whose
    folder is `run_dir`, resumes from a checkpoint with the same `init_from`, return the latter."""
    place, resume = fields["init_from"], fields.get("resume")
    if resume is not None:
        folder = Path(run_dir if resume in ("latest", "auto") else resume)
        if has_checkpoints(folder) or (folder / META_NAME).exists():
            resumed = find_checkpoint(folder)
            if resumed.meta["config"].get("init_from") == place:
                return resumed
    try:
        return find_checkpoint(str(place))
    except CheckpointError as error:
        raise CheckpointError(f"init_from={place!r}: {error}") from error


def _backbone_of(source: Checkpoint) -> dict[str, Any]:
    """Return the setting `backbone` of the run that saved a checkpoint."""
    name, config = source.meta["backbone"]["name"], source.meta["backbone"]["config"]
    options = get_entry("backbone", name).parameters()
    return {"name": name, **{k: v for k, v in config.items() if k in options}}


def _merge(config: RunConfig, source: Checkpoint) -> dict[str, Any]:
    """Return the setting `backbone` of `source`, changed by the options that `config` sets. Raises
    CheckpointError if `config` names another architecture."""
    name, given = config.backbone["name"], config.as_dict()["backbone"]
    entry, before = get_entry("backbone", name), _backbone_of(source)
    defaults = json.loads(json.dumps(entry.defaults()))
    changes = {k: v for k, v in given.items() if k != "name" and v != defaults.get(k)}
    if entry.target is not get_entry("backbone", before["name"]).target:
        raise CheckpointError(
            f"backbone={name}, but init_from={config.init_from} has a {before['name']}: leave out "
            "backbone=…, or start from a checkpoint of that architecture."
        )
    return {**before, **entry.preset, **changes, "name": name}


def load_source(source: Checkpoint, config: RunConfig, backbone: Backbone) -> str:
    """Load the averaged weights of `source`, or the weights of a pushed network, into `backbone`.
    Return a text that says what was loaded, what starts fresh, and whether the objective in
    `config` is another than that of `source`.

    Raises:
        CheckpointError: a weight that must fit has another shape, or any is not finite.
    """
    fresh = backbone.state_dict()
    saved = source.tensors(source.meta.get("weights", "ema"))
    check_finite(saved, source.path)
    _check_body(source, backbone)
    carried = {k: v for k, v in saved.items() if k in fresh and v.shape == fresh[k].shape}
    backbone.load_state_dict({**fresh, **carried})
    total, count = (sum(t.numel() for t in tensors.values()) for tensors in (fresh, carried))
    words = [f"{count / 1e6:.2f} M of {total / 1e6:.2f} M weights from {source.path}"]
    new, left_out = fresh.keys() - carried.keys(), saved.keys() - fresh.keys()
    words += [f"{_layers(new)} start fresh"] if new else []
    words += [f"{_layers(left_out)} left out"] if left_out else []
    before = complete("objective", source.meta["config"]["objective"])
    now = complete("objective", config.as_dict()["objective"])
    if before != now:
        words.append(f"it was trained for {_described(before)}, this run for {_described(now)}")
    return "; ".join(words)


def _check_body(source: Checkpoint, backbone: Backbone) -> None:
    """Raise a `CheckpointError` unless the checkpoint's network has the shapes of `backbone`. Only
    shapes that depend on the condition or on the number of outputs may differ. The error names the
    options that differ."""
    described, config = source.meta["backbone"], backbone.config
    ends = {
        "num_classes": backbone.num_classes,
        "context_length": backbone.context_length,
        "context_size": backbone.context_size,
        **{k: config[k] for k in ("learn_sigma",) if k in config},
    }
    with torch.device("meta"):
        like = create_backbone(described["name"], **{**described["config"], **ends})
    if _shapes(like) == _shapes(backbone):
        return
    now, before = ({**n.config, "input_size": n.input_size} for n in (backbone, like))
    wrong = [
        f"{k if k in FROM_DATA else f'backbone.{k}'}={now.get(k)!r}, not {v!r}"
        for k, v in before.items()
        if json.dumps(now.get(k)) != json.dumps(v)
    ]
    raise CheckpointError(
        f"the weights of init_from, {source.path}, do not fit this network: "
        f"{'; '.join(wrong)}. Leave the option out, or take data of the same channels and size."
    )


def _shapes(backbone: Backbone) -> dict[str, torch.Size]:
    tensors = backbone.state_dict().items()
    return {name: tensor.shape for name, tensor in tensors if not name.startswith(_ADDED)}


def _layers(names: Iterable[str]) -> str:
    """Return as text the first few layers to which the tensors called `names` belong."""
    layers = sorted({name.rpartition(".")[0] or name for name in names})
    return ", ".join([*layers[:_MOST_LISTED], *(["…"] if len(layers) > _MOST_LISTED else [])])


def _described(part: dict[str, Any]) -> str:
    return " ".join([part["name"], *(f"{k}={v}" for k, v in part.items() if k != "name")])
