"""What a score depends on that is known before anything is measured: every record has it.

    drawn_record      the samples: how many, from which seed, which size, how they became bytes
    decoder_record    what decoded them, for networks on latents
    held_out_record   the held-out loss: the objective, the draws, and which images

What distances depend on beside these is `tread_zoo.evaluation.metrics.scoring_record`. Tables do
not mix what differs (`SAME_PROTOCOL` in `tread_zoo.comparison.markdown`).

Dimensions: N images, C channels, H height, W width.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tread_zoo.data import Codec, ImageData
from tread_zoo.diffusion import Objective, describe_part
from tread_zoo.evaluation.held_out import HELD_OUT_IMAGES, stack_part

UINT8_RULE = "clamp to [-1, 1], then the nearest of 256 values"
# Of an objective's fields, those that only say where sampling begins and steps: no loss knows them.
_OF_SAMPLING = ("sigma_min", "sigma_max", "rho")


def drawn_record(
    count: int, shape: Sequence[int] | None, *, seed: int, uint8: str, decoder: Any
) -> dict[str, Any]:
    """Return what is known of samples, whatever is measured of them.

    Args:
        count: N.
        shape: [C,H,W]; None where they are latents that nothing decodes: there are no images then.
        seed: of the samples, of kid's subsets and isc's parts.
        uint8: the rule by which they became bytes.
        decoder: see `decoder_record`.
    """
    record: dict[str, Any] = {"seed": seed, "decoder": decoder, "torch": str(torch.__version__)}
    if shape is None:
        return record
    size = {"image_size": list(shape[1:]), "channels": shape[0]}
    return {"num_generated": count, "uint8": uint8, **size, **record}


def decoder_record(codec: Codec) -> dict[str, Any] | None:
    """Return class and sha256 of the autoencoder that decodes latents, and their normalisation;
    None for pixels, and for latents that stay what they are."""
    known = codec.decoded_by
    if known is None:
        return None
    return {**known, **{key: codec.facts[key] for key in ("normalization", "shift", "scale")}}


def held_out_record(
    objective: Objective, data: ImageData, *, seed: int, num_draws: int
) -> dict[str, Any]:
    """Return what the held-out loss depends on beside the network; {} if nothing was held out.

    `held_out_sha256` is of what the network is given: the images as stored, in their order, their
    labels or contexts, and how latents are normalised.

    Args:
        objective, data, seed, num_draws: as for `tread_zoo.evaluation.held_out.held_out_loss`.
    """
    if data.held_out is None:
        return {}
    images, conditions = stack_part(data.held_out, HELD_OUT_IMAGES)
    return {
        "held_out_objective": loss_record(objective),
        "held_out_images": len(images),
        "held_out_draws": num_draws,
        "held_out_seed": seed,
        "held_out_sha256": _sha256(images, conditions, data.codec.facts),
    }


def loss_record(objective: Objective) -> dict[str, Any]:
    """Return an objective's name, and its fields that its loss depends on."""
    fields = asdict(objective)  # type: ignore[call-overload]
    return {
        "name": describe_part("objective", objective)["name"],
        **{name: value for name, value in fields.items() if name not in _OF_SAMPLING},
    }


def _sha256(images: Tensor, conditions: Tensor, facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for tensor in (images, conditions):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        # as bytes, for numpy has no bfloat16
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
