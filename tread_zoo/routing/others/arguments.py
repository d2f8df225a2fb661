"""Which arguments of a block are per token, and their values for the tokens present.

An argument is per token if a dimension of it has N or N + T entries. If image tokens and other
tokens share one sequence, it is

    [before, image, after]      N tokens of the image from position `first` on, T others

B batch, N image tokens, T other tokens, K image tokens present, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OTHER = ("encoder", "text", "txt", "context", "audio")  # prefixes of names of non-image tokens
TABLES = ("rotary", "rope", "freqs", "rot_emb")  # in names of position tables, maybe unbatched

First = int | Tensor  # int64 [B] where images start at different positions


class PerImage:
    """Stands in for a position table [K, ...] when images keep different tokens. A block that adds
    a batch dimension to it, as by `table[None]`, gets `values` [B, K, ...]: a table for each
    image."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.dtype, self.device = values, values.dtype, values.device

    @property
    def real(self) -> "PerImage":
        return PerImage(self.values.real)

    @property
    def imag(self) -> "PerImage":
        return PerImage(self.values.imag)

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if index[0] is not None:
            raise TypeError("a table of positions is used otherwise than by broadcasting")
        return self.values[(slice(None), *index[1:])]

    def unsqueeze(self, dim: int) -> Tensor:
        return self.values if dim == 0 else self.values.unsqueeze(dim + 1 if dim > 0 else dim)

    def to(self, *args: Any, **kwargs: Any) -> "PerImage":
        return PerImage(self.values.to(*args, **kwargs))

    def float(self) -> "PerImage":
        return PerImage(self.values.float())


def sequence(ids: Tensor, num_tokens: int, others: int, first: First) -> Tensor:
    """Return which tokens of a full sequence to take, [B, K + others]: the positions of the K image
    tokens `ids` [B, K], in that order, with all other tokens before and after them.

    The full sequence has `others` other tokens, and `num_tokens` image tokens from position `first`
    on.
    """
    if others == 0:
        return ids
    kept = ids.shape[1]
    slots = torch.arange(kept + others, device=ids.device).expand(len(ids), -1)
    start = first[:, None] if isinstance(first, Tensor) else first
    image = ids.gather(1, (slots - start).clamp(0, kept - 1)) + start
    rest = torch.where(slots < start, slots, slots + num_tokens - kept)
    return torch.where((slots >= start) & (slots < start + kept), image, rest)


def image_of(tokens: Tensor, count: int, first: First) -> Tensor:
    """Return the `count` image tokens of a sequence [B, L, D], which begin at position `first`."""
    if tokens.shape[1] == count:
        return tokens
    if isinstance(first, int):
        return tokens[:, first : first + count]
    return take(tokens, first[:, None] + torch.arange(count, device=tokens.device), 1)


def with_image(tokens: Tensor, image: Tensor, count: int, first: First) -> Tensor:
    """Return the sequence `tokens` [B, L, D] with `image` [B, M, D] in place of its `count` image
    tokens, which begin at position `first`; M may differ from `count`."""
    if tokens.shape[1] == count:
        return image
    image = image.to(tokens.dtype)
    if isinstance(first, int):
        return torch.cat([tokens[:, :first], image, tokens[:, first + count :]], dim=1)
    length, new = tokens.shape[1], image.shape[1]
    slots = torch.arange(length - count + new, device=tokens.device).expand(len(tokens), -1)
    start = first[:, None]
    rest = torch.where(slots < start, slots, slots - new + count)
    inside = (slots >= start) & (slots < start + new)
    return take(torch.cat([tokens, image], 1), torch.where(inside, length + slots - start, rest), 1)


def take(values: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return each image's entries of `values` at its `rows` [B, K] along the dimension `dim` > 0.
    The batch size of `values` is B or 1."""
    values = values.expand(len(rows), *values.shape[1:])
    shape = (len(rows), *[1] * (dim - 1), rows.shape[1], *[1] * (values.ndim - dim - 1))
    return torch.take_along_dim(values, rows.view(shape), dim)


@dataclass(frozen=True)
class Adapter:
    """Restricts those arguments of a block that are per token to the tokens present.

    Args:
        num_tokens: N, the number of image tokens.
        sizes: {size: (number of other tokens, position of the first image token)} for the sizes
            that a dimension over tokens may have.
        batch: B.
        form: how a table that has no batch dimension, cut to the L = K or K + T tokens present, is
            given to the block: `broadcast`, as a `PerImage`; `plain`, as a tensor [B, L, ...];
            `shared`, as a tensor [L, ...] for the tokens of the first image.
        made: outputs of earlier blocks of the route, which already have only the tokens present.
        text: beginnings of the names of arguments for non-image tokens.
    """

    num_tokens: int
    sizes: Mapping[int, tuple[int, First]]
    batch: int
    form: str
    made: Any
    text: tuple[str, ...] = OTHER

    def __call__(self, named: Mapping[str, Any], key: str, ids: Tensor) -> dict[str, Any]:
        """Return a block's arguments `named`; those that are per token have only the image tokens
        `ids` [B, K], in that order, and all other tokens. The argument `key`, which has the block's
        tokens, and arguments for non-image tokens (`text`) stay as they are."""
        return {
            name: value if name == key else self._any(name, value, ids)
            for name, value in named.items()
        }

    def _any(self, name: str, value: Any, ids: Tensor) -> Any:
        if name.startswith(self.text):
            return value
        if isinstance(value, dict):
            return {k: self._any(f"{name}.{k}", each, ids) for k, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._any(f"{name}.{i}", v, ids) for i, v in enumerate(value))
        if not isinstance(value, Tensor) or value in self.made:
            return value
        for dim in self._dims(name, value):
            rows = sequence(ids, self.num_tokens, *self.sizes[value.shape[dim]])
            if dim > 0:
                value = take(value, rows, dim)
                continue
            if self.form == "shared":
                value = value.index_select(0, rows[0])
            else:
                return PerImage(value[rows]) if self.form == "broadcast" else value[rows]
        return value

    def _dims(self, name: str, value: Tensor) -> list[int]:
        """Return the dimensions of `value`, the argument called `name`, that run over tokens."""
        table = any(word in name for word in TABLES)
        number = value.is_floating_point() or value.is_complex()
        last = value.ndim - 1 if value.ndim > 1 and number and "mask" not in name else None
        dims = [d for d, size in enumerate(value.shape) if size in self.sizes and d != last]
        if dims[:1] != [0]:
            return dims
        # If B = N: the first dimension runs over tokens only in a position table without a batch.
        if value.shape[0] == self.batch and not (table and len(dims) == 1):
            return dims[1:]
        return dims[:1] if table else dims
