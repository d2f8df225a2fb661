"""The condition of each sample: a label, a context, or none.

    sample i    label      i mod num_classes, or a random one that depends on (seed, i)
                context    the context of held-out image order[i mod n] of n; `order` is
                           bit-reversed, so that every prefix is spread evenly

Sample i has the same condition in every run on the same data, however many samples are drawn.
Dimensions: n contexts, T embeddings per context, S width of an embedding.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import ImageData, read_items
from tread_zoo.data.contexts import as_context, load_npy
from tread_zoo.data.labels import nfc
from tread_zoo.data.text import TextEncoder
from tread_zoo.diffusion import default_labels
from tread_zoo.errors import unknown_name
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conditions:
    """The rule that gives each sample its condition.

    `rule` describes it. `of` is a function from the numbers of B samples to their labels [B], to
    their contexts [B, T, S] of T vectors each, or to None if the network takes no condition.
    """

    rule: str
    of: Callable[[Sequence[int]], Tensor | None]


def conditions_of(backbone: Backbone, data: ImageData, label_seed: int | None = None) -> Conditions:
    """Return the conditions for samples of `backbone`, which was trained on `data`.

    A network that takes contexts gets those of evenly spaced images of the data, held-out ones if
    there are any. A network that takes labels gets label i mod num_classes for sample i, or random
    labels if `label_seed` is set. Any other network gets no condition.
    """
    num_classes = backbone.num_classes
    if backbone.context_size:
        return _evenly_spaced_contexts(data)
    if not num_classes or label_seed is None:
        rule = "i mod num_classes" if num_classes else "none"
        return Conditions(rule, lambda indices: default_labels(indices, num_classes))

    def draw(indices: Sequence[int]) -> Tensor:
        generators = (make_generator("sample label", label_seed, index) for index in indices)
        return torch.cat([torch.randint(num_classes, (1,), generator=g) for g in generators])

    return Conditions("at random", draw)


def _evenly_spaced_contexts(data: ImageData) -> Conditions:
    kind, part = ("training", data.train) if data.held_out is None else ("held-out", data.held_out)
    size = len(part)  # type: ignore[arg-type]
    bits = max(size - 1, 0).bit_length()
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    order = [index for index in reversed_bits if index < size]

    def read(indices: Sequence[int]) -> Tensor:
        return read_items(part, [order[index % size] for index in indices])[1]

    return Conditions(f"contexts of {kind} images, evenly spaced", read)


def class_number(label: int | str, names: Sequence[str]) -> int:
    """Return the number of a class, given as a number or as a name in `names`.

    Raises:
        ValueError: the name is unknown; the error suggests the nearest.
    """
    if not isinstance(label, str):
        return label
    if not names:
        raise ValueError(
            f"label={label!r}: the classes of this network have no names; use numbers, 0, 1, …"
        )
    known = [nfc(name) for name in names]  # typed and stored names may differ in Unicode form
    if nfc(label) not in known:
        raise unknown_name("label", label, names)
    return known.index(nfc(label))


def contexts_in(file: str, backbone: Backbone) -> Conditions:
    """Return `Conditions` that give sample i context i mod n of the n contexts in an .npy file.

    The file is [n, t, S], or [t, S] for n = 1. S is the network's context width, and t is at most
    its context length.

    Raises:
        ValueError: the network takes no contexts, or the file's contexts do not fit it.
    """
    if not backbone.context_size:
        raise ValueError(f"contexts={file!r} is set, but {backbone.name} takes no contexts.")
    array = load_npy(Path(file).expanduser())
    shape = (backbone.context_length, backbone.context_size)
    rows = array if array.ndim == 3 else array[None]
    contexts = torch.stack([as_context(r, f"{file!r}, row {i}", shape) for i, r in enumerate(rows)])
    return _in_turn(f"contexts of {file}", contexts)


def contexts_of(prompts: Sequence[str], encoder: TextEncoder, backbone: Backbone) -> Conditions:
    """Return `Conditions` that give sample i the context that `encoder` makes of prompt i mod n of
    the n `prompts`. A prompt with too many tokens for the network is cut, with a warning."""
    length = backbone.context_length
    contexts = encoder.encode(prompts, length)
    for prompt, count in zip(prompts, encoder.count_tokens(prompts), strict=True):
        if count > length:
            logger.warning(
                "prompt %r has %d tokens, of which the network takes %d", prompt, count, length
            )
    return _in_turn(f"prompts, by {encoder.name}", contexts)


def _in_turn(rule: str, contexts: Tensor) -> Conditions:
    """Return `Conditions` described as `rule`: sample i gets context i mod n of `contexts`
    [n, T, S]."""
    return Conditions(rule, lambda indices: contexts[[i % len(contexts) for i in indices]])
