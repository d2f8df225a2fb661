"""What all tables share: rows in markdown, a mean with its range, how each metric is shown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

QUALITY: dict[str, tuple[str, float, str]] = {  # name -> title, factor, format
    "agreement": ("agreement, %", 100, ".1f"),
    "fid": ("Fréchet distance", 1, ".2f"),
    "sfid": ("spatial Fréchet distance", 1, ".2f"),
    "fd_dinov2": ("Fréchet distance in DINOv2's features", 1, ".1f"),
    "kid": ("kernel distance", 1, ".4f"),
    "precision": ("precision", 1, ".3f"),
    "recall": ("recall", 1, ".3f"),
    "isc": ("inception score", 1, ".2f"),
    "held_out_loss": ("held-out loss", 1, ".4f"),
}
# What numbers in one table must agree in. Of the sampling, what it costs is left out: that is the
# network's.
SAME_PROTOCOL = (
    "data", "reference", "labels", "sampling", "extractor", "weights", "step", "held_out_draws",
    "num_generated", "num_reference", "reference_sha256", "resize", "uint8", "judge", "decoder",
    "seed", "image_size", "channels", "extractor_sha256", "torch_fidelity", "held_out_objective",
    "held_out_images", "held_out_seed", "held_out_sha256",
)  # fmt: skip
# Older records do not say, and are believed. (Those without distances said nothing of the samples.)
# Precision, device and torch differ by rounding: they are shown, not refused.
NEWER = (
    "reference_sha256", "resize", "uint8", "judge", "num_generated", "decoder", "seed",
    "image_size", "channels", "extractor_sha256", "torch_fidelity", "held_out_objective",
    "held_out_images", "held_out_seed", "held_out_sha256",
)  # fmt: skip
LOWER_IS_BETTER = ("fid", "sfid", "fd_dinov2", "kid", "held_out_loss")


def row(texts: Sequence[str]) -> str:
    """Return one row of a table."""
    return "| " + " | ".join(texts) + " |"


def spread(values: Sequence[float], scale: float, form: str) -> str:
    """Return the mean of `scale * values`, and smallest … largest where they differ as printed."""
    if not values:
        return ""
    scaled = [scale * value for value in values]
    low, high = (format(v, form) for v in (min(scaled), max(scaled)))
    mean = format(statistics.mean(scaled), form)
    return mean if low == high else f"{mean} ({low} … {high})"


def check_same(
    protocols: Sequence[tuple[str, Mapping[str, Any]]],
    keys: Sequence[str],
    newer: Sequence[str] = (),
) -> None:
    """Raise `ValueError` if numbers that stand in one table were made by different protocols.

    Args:
        protocols: what made the numbers, each with its name for the message.
        keys: what must be equal; of entries that are mappings, `flops_per_image` may differ.
        newer: keys that older records lack; all records that have one must agree in it.
    """
    for key in keys:
        having = [(n, p) for n, p in protocols if key in p or key not in newer]
        for name, protocol in having[1:]:
            first_name, first_protocol = having[0]
            own, first = (settings_of(p, key) for p in (protocol, first_protocol))
            if own != first:
                raise ValueError(
                    f"{name} was scored with {key}={own}, {first_name} with {key}={first}: such "
                    "numbers do not belong in one table; give all runs the same setting."
                )


def describe_notes(protocols: Sequence[Mapping[str, Any]]) -> str:
    """Return what makes the numbers of a table doubtful, as sentences that begin with a blank, and
    how many of the records say so; "" if none does."""
    found = [note for protocol in protocols for note in dict.fromkeys(protocol.get("notes", ()))]
    counts = {note: found.count(note) for note in found}
    told = [
        f"{note}{'' if count == len(protocols) else f' ({count} of {len(protocols)} runs)'}"
        for note, count in counts.items()
    ]
    return f" Note: {' '.join(told)}" if told else ""


def settings_of(protocol: Mapping[str, Any], key: str) -> Any:
    """Return what `protocol` says of `key`, without costs."""
    value = protocol.get(key)
    if not isinstance(value, dict):
        return value
    return {name: entry for name, entry in value.items() if name != "flops_per_image"}
