"""A new run that starts from trained weights: `init_from=CHECKPOINT`.

The backbone is the checkpoint's, but for options that the run sets: those that differ from the
defaults, and the sizes of a name other than the default one. Weights go by name. What depends on
the condition or the number of outputs starts fresh where these differ, and so do fusions and mask
tokens that the checkpoint lacks; the body must fit.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tread_zoo.config import RunConfig, make_config
from tread_zoo.contract.backbone import Backbone
from tread_zoo.factory import create_backbone
from tread_zoo.fields import default_fields
from tread_zoo.registry import FROM_DATA, check_plugins, get_entry
from tread_zoo.runs.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    has_checkpoints,
)
from tread_zoo.runs.metadata import META_NAME

_ADDED = ("fusions.", "mask_tokens.")  # to a network, after it was built
_SHOWN = 6


def resolve_initial(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Checkpoint | None]:
    """Return the fields of a run with the backbone of its `init_from`, and that checkpoint; without
    one the fields as they are, and None.

    Raises:
        CheckpointError, ValueError: as of `find_initial` and `initial_backbone`.
    """
    if fields.get("init_from") is None:
        return dict(fields), None
    config = make_config(**fields)
    source = find_initial(config)
    resolved = {**fields, "backbone": initial_backbone(config, source)}
    if config.resume in (None, "latest", "auto"):
        resolved["run_dir"] = config.run_dir  # whose name is of what was given
    return resolved, source


def find_initial(config: RunConfig) -> Checkpoint:
    """Return the checkpoint of `init_from`; of a run that is resumed its own one, which makes the
    other dispensable.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ValueError: it is of a plug-in that is not loaded.
    """
    if config.resume is not None:
        place = config.run_dir if config.resume in ("latest", "auto") else config.resume
        if has_checkpoints(Path(place)) or (Path(place) / META_NAME).exists():
            resumed = find_checkpoint(place)
            if resumed.meta["config"].get("init_from") == config.init_from:
                return resumed
    try:
        source = find_checkpoint(str(config.init_from))
    except CheckpointError as error:
        raise CheckpointError(f"init_from={config.init_from!r}: {error}") from error
    check_plugins(source.meta["plugins"], str(source.path))
    return source


def initial_backbone(config: RunConfig, source: Checkpoint) -> dict[str, Any]:
    """Return the field `backbone` of a run that starts from `source`.

    Raises:
        CheckpointError: another architecture is chosen.
    """
    chosen, given = config.backbone["name"], config.as_dict()["backbone"]
    name, described = source.meta["backbone"]["name"], source.meta["backbone"]["config"]
    entry, initial = get_entry("backbone", chosen), get_entry("backbone", name)
    defaults = json.loads(json.dumps(entry.defaults()))
    changes = {k: v for k, v in given.items() if k != "name" and v != defaults.get(k)}
    if chosen != default_fields(RunConfig)["backbone"]:
        if entry.target is not initial.target:
            raise CheckpointError(
                f"backbone={chosen}, but init_from={config.init_from} has a {name}: leave out "
                "backbone=…, or start from a checkpoint of that architecture."
            )
        name, changes = chosen, {**entry.preset, **changes}
    options = {k: v for k, v in described.items() if k in initial.parameters()}
    return {"name": name, **options, **changes}


def load_initial(source: Checkpoint, config: RunConfig, backbone: Backbone) -> str:
    """Load the weights of `source`, the averaged ones, and return in one line what was carried.

    Raises:
        CheckpointError: the body does not fit; the fields are named.
    """
    saved, fresh = source.tensors(source.meta.get("weights", "ema")), backbone.state_dict()
    _check_body(source, backbone)
    carried = {k: v for k, v in saved.items() if k in fresh and v.shape == fresh[k].shape}
    backbone.load_state_dict({**fresh, **carried})
    total, count = (sum(t.numel() for t in tensors.values()) for tensors in (fresh, carried))
    words = [f"{count / 1e6:.2f} M of {total / 1e6:.2f} M weights from {source.path}"]
    new, left_out = fresh.keys() - carried.keys(), saved.keys() - fresh.keys()
    words += [f"{_layers(new)} start fresh"] if new else []
    words += [f"{_layers(left_out)} left out"] if left_out else []
    before, now = source.meta["config"]["objective"], config.as_dict()["objective"]
    if before != now:
        words.append(f"it was trained for {_named(before)}, and this run is for {_named(now)}")
    return "; ".join(words)


def _check_body(source: Checkpoint, backbone: Backbone) -> None:
    """Check that the backbone has the shapes of the checkpoint's with the same head and condition
    as it has itself."""
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


def _shapes(backbone: Backbone) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(tensor.shape)
        for name, tensor in backbone.state_dict().items()
        if not name.startswith(_ADDED)
    }


def _layers(names: Iterable[str]) -> str:
    """Return the layers of tensors, the first few."""
    layers = sorted({name.rpartition(".")[0] or name for name in names})
    return ", ".join([*layers[:_SHOWN], *(["…"] if len(layers) > _SHOWN else [])])


def _named(part: dict[str, Any]) -> str:
    return " ".join([part["name"], *(f"{k}={v}" for k, v in part.items() if k != "name")])
