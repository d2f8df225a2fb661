"""Which settings make two runs the same training, and which recipe a run follows.

    recipe (keywords of `train`) -> the settings that a run of it has in its config.json
    settings, settings           -> the fields that differ, those that decide what is learnt

Where the data lie, what is logged and saved, and how it is computed (precision, compiled blocks) do
not decide what is learnt, but for rounding.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch

from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.evaluate import evaluation_settings
from tread_zoo.registry import create_backbone
from tread_zoo.routing import build_routing
from tread_zoo.training.checkpoints import describe_backbone
from tread_zoo.training.options import TrainingOptions

COMPARED = ("backbone", "routing", "objective", "data", "training", "sampler", "guidance")
SCORING = ("sampler", "guidance")  # decide about samples, not about what is learnt
FREE = (
    "data.name", "training.precision", "training.compile", "training.activation_checkpointing",
    "training.num_workers", "training.log_every", "training.sample_every",
    "training.score_every", "training.checkpoint_every", "training.keep_checkpoints",
)  # fmt: skip
# Sets that are what they are, wherever they lie: channels, side, classes, images to train on.
KNOWN_DATA = {
    "digits": (1, 8, 10, 1438),
    "fashion_mnist": (1, 28, 10, 60000),
    "cifar10": (3, 32, 10, 50000),
}


def wanted_settings(keywords: Mapping[str, Any], run_data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run of a recipe must have in its `config.json`.

    Args:
        keywords: of `train`, composed from the recipe.
        run_data: what a run says of its data (`data` in its settings): taken for what the recipe
            leaves open, which is all of data that only the user has.
    """
    known = _known_data(keywords["data"])
    data = {**run_data, **known}
    if known or not any(keywords["data"].get(name) for name in ("context", "context_column")):
        data.pop("context", None)
    contexts = dict(zip(("context_length", "context_size"), data.get("context", ()), strict=False))
    with torch.device("meta"):
        network = create_backbone(
            input_size=tuple(data["image_size"]),
            in_channels=data["channels"],
            num_classes=data["num_classes"],
            **{**contexts, **keywords["backbone"]},
        )
    routing = build_routing(
        **keywords["routing"],
        num_blocks=network.num_blocks,
        default_selector=network.default_selector,
        default_range=network.default_range,
    )
    network.add_fusions(routing.fused_ranges)
    settings = {
        "backbone": describe_backbone(network),
        "data": data,
        "training": TrainingOptions(**keywords["training"]).as_settings(),
        "evaluation": evaluation_settings(keywords["evaluation"]),
        **{name: keywords[name] for name in ("routing", "objective", *SCORING)},
    }
    return json.loads(json.dumps(settings))


def _known_data(options: Mapping[str, Any]) -> dict[str, Any]:
    name = options["name"]
    changed = name != "digits" and options.get("held_out") is not None
    if name not in KNOWN_DATA or changed:
        return {}
    channels, side, classes, images = KNOWN_DATA[name]
    pad_to, num_classes = options.get("pad_to") or side, options.get("num_classes")
    return {
        "image_size": [pad_to, pad_to] if isinstance(pad_to, int) else list(pad_to),
        "channels": channels,
        "num_classes": classes if num_classes is None else num_classes,
        "num_images": images,
    }


def differences(
    given: Mapping[str, Any], wanted: Mapping[str, Any], *, scoring: bool = False
) -> list[str]:
    """Return how `given` differs from `wanted` in what is learnt, a phrase for each field.

    Fields that only one of them has are passed over: an older version did not have them. But that
    one has contexts, which the other has not, is a difference.

    Args:
        given, wanted: settings of a run, or of a recipe.
        scoring: count sampler and guidance too.
    """
    groups = [name for name in COMPARED if scoring or name not in SCORING]
    ours, theirs = (
        _flat({name: settings[name] for name in groups if name in settings})
        for settings in (given, wanted)
    )
    if "data.context" in {**ours, **theirs}:
        ours, theirs = ({"data.context": None, **values} for values in (ours, theirs))
    return [
        f"{field} is {value}, not {theirs[field]}"
        for field, value in ours.items()
        if field in theirs and value != theirs[field] and field not in FREE
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted name, `backbone.depth` for `backbone.config.depth`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, prefix if name == "config" else f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def find_recipe(
    settings: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]], *, named: str | None = None
) -> tuple[str, list[str]]:
    """Return the recipe that a run follows, and how it differs from it.

    Args:
        settings: of the run.
        known: settings by recipe, of those that have a curve.
        named: the recipe to take, whatever the run's settings.

    Raises:
        ValueError: `named` has no curve; or it is None and no recipe has these settings.
    """
    if named is not None:
        if named not in known:
            raise unknown_name("compare.recipe", named, known)
        return named, differences(settings, known[named])
    found = {name: differences(settings, recipe) for name, recipe in known.items()}
    nearest = min(found, key=lambda name: len(found[name]), default=None)
    if nearest is None:
        raise ValueError(
            "no recipe has a curve yet; make one with scripts/make_curve.py (docs/recipes.md)."
        )
    if found[nearest]:
        raise ValueError(
            f"the run follows no recipe that has a curve. {nearest} is nearest: here "
            f"{'; '.join(found[nearest][:3])}{_more(len(found[nearest]) - 3)}. Name a recipe with "
            "compare.recipe=… to compare all the same."
        )
    return nearest, []


def _more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""
