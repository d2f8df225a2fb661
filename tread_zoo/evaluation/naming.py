"""Names of scores: for trackers, which keep one number a name and nothing beside it, and of the
files that `scripts/evaluate.py` leaves.

    score / what the number depends on / name in the record

    score/digits-cnn-64/train/500/fid             extractor, reference, number of samples
    score/digits-cnn-64/train-100/500/fid         of a part, 100 images alone (num_reference)
    score/faces-1b2c3d4e/photos-5f6a7b8c/500/kid  what is a file has 8 digits of its hash
    score/svm/500/agreement                       who reads the labels, number of samples
    score/8-draws/held_out_loss                   draws of level and noise for each held-out image

The name is the same in every run on the same data that measures the same; which data a part is of,
sampler, guidance and the rest of the protocol are in the record. Characters are those that every
tracker takes: letters, digits, `_.-/`.

    score_00000750.json                                   as the run was scored
    score_00000750_cfg3_5d41ab.json                       what differs: words for what people look
    score_00000750_heun50_model_50000images_0cc175.json   for, and a digest of all of it
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from tread_zoo.evaluation.evaluate import EvaluationOptions
from tread_zoo.evaluation.extractors import EXTRACTORS
from tread_zoo.evaluation.references import PARTS


def score_names(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a record of `evaluate` by their names for trackers."""
    protocol = record["protocol"]
    return {
        f"score/{_depends_on(name, protocol)}/{name}": value
        for name, value in record["values"].items()
    }


# Of the evaluation, what changes no number: where files are, how many images at a time.
_NO_MATTER = ("keep_images", "batch_size", "inception_weights", "dinov2_weights")


def settings_of_score(
    sampling: Mapping[str, Any], evaluation: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """Return what a score of one checkpoint depends on, as plain values by name.

    Args:
        sampling: of `SamplingOptions.as_dict`.
        evaluation: fields of `EvaluationOptions`; those that an older run lacks are as usual.
        others: weights, precision, options of the data, by name.
    """
    usual = {f.name: f.default for f in fields(EvaluationOptions) if f.default is not MISSING}
    told = {k: v for k, v in {**usual, **evaluation}.items() if k not in _NO_MATTER}
    found = {**sampling, **{f"evaluation.{k}": v for k, v in told.items()}, **others}
    return json.loads(json.dumps(found, default=str))


def score_file(step: int, asked: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return the name of the file of a score of a checkpoint: another one for other settings, so
    that no score takes the place of one that is not the same.

    Args:
        step: of the checkpoint.
        asked, own: of `settings_of_score`: what is asked for, and how the run itself is scored.
    """
    changed = {
        key: asked.get(key)
        for key in sorted(asked.keys() | own.keys())
        if asked.get(key) != own.get(key)
    }
    words = [f"score_{step:08d}"]
    if not changed:
        return f"{words[0]}.json"
    if {"sampler", "num_steps"} & changed.keys():
        words.append(f"{asked['sampler']}{asked['num_steps']}")
    if any(key.startswith("guidance") for key in changed):
        scale = "" if asked["guidance"] == "none" else f"{asked.get('guidance_scale', 1):g}"
        words.append("unguided" if asked["guidance"] == "none" else f"{asked['guidance']}{scale}")
    if "weights" in changed:
        words.append(str(asked["weights"]))
    if "evaluation.num_images" in changed:
        words.append(f"{asked['evaluation.num_images']}images")
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
    return "_".join([*words, digest[:6]]) + ".json"


def _depends_on(name: str, protocol: Mapping[str, Any]) -> str:
    if name == "held_out_loss":
        return f"{protocol['held_out_draws']}-draws"
    if name == "agreement":
        return f"{_features(protocol['judge'])}/{protocol['num_generated']}"
    return f"{_features(protocol['extractor'])}/{_reference(protocol)}/{protocol['num_generated']}"


def _features(label: str) -> str:
    """Return the short name of an extractor from its label, name@8 digits of its hash."""
    name, _, digest = label.partition("@")
    return _clean(name if name in EXTRACTORS or not digest else f"{name}-{digest}")


def _reference(protocol: Mapping[str, Any]) -> str:
    name = protocol["reference"]
    if name.partition(",")[0] in PARTS:  # "train, decoded latents", too
        asked = protocol.get("num_reference_asked")
        is_less = asked is not None and asked == protocol["num_reference"]
        return _clean(f"{name}-{asked}" if is_less else name)
    return _clean(f"{name.rstrip('/')}-{protocol['reference_sha256'][:8]}")


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")
