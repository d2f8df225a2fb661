"""Names of scores for trackers, which keep one number a name and nothing beside it.

    score / what the number depends on / name in the record

    score/digits-cnn-64/train/500/fid             extractor, reference, number of samples
    score/digits-cnn-64/train-100/500/fid         of a part, 100 images alone (num_reference)
    score/faces-1b2c3d4e/photos-5f6a7b8c/500/kid  what is a file has 8 digits of its hash
    score/svm/500/agreement                       who reads the labels, number of samples
    score/8-draws/held_out_loss                   draws of level and noise for each held-out image

The name is the same in every run on the same data that measures the same; which data a part is of,
sampler, guidance and the rest of the protocol are in the record. Characters are those that every
tracker takes: letters, digits, `_.-/`.
"""

import re
from collections.abc import Mapping
from typing import Any

from tread_zoo.evaluation.extractors import EXTRACTORS
from tread_zoo.evaluation.references import PARTS


def score_names(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a record of `evaluate` by their names for trackers."""
    protocol = record["protocol"]
    return {
        f"score/{_depends_on(name, protocol)}/{name}": value
        for name, value in record["values"].items()
    }


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
