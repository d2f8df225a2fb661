"""Checks of a backbone's inputs (`ValueError`), and of what its methods return (`TypeError`).

B batch, N tokens, E extra tokens, D width; a context has T embeddings of width S.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tread_zoo.errors import unknown_name

DEPENDS_ON = ("order", "ids", "grid")


def check_dependence(names: Iterable[str]) -> tuple[str, ...]:
    """Return `names` without repetitions, in the order of `DEPENDS_ON`. Raises ValueError if a name
    is not in `DEPENDS_ON`."""
    names = tuple(names)
    for name in names:
        if name not in DEPENDS_ON:
            raise unknown_name("depends_on", name, DEPENDS_ON)
    return tuple(name for name in DEPENDS_ON if name in names)


def check_inputs(network: Any, x: Tensor, t: Tensor, y: Tensor | None) -> None:
    """Raise `ValueError` if images x or times t have a wrong shape, which might broadcast without
    an error, if `check_condition` refuses y, or if a long skip of the network does not lead from a
    block to a later one."""
    batch, shape = len(x), (network.in_channels, *network.input_size)
    if x.shape[1:] != shape:
        raise ValueError(f"x has shape {list(x.shape)}; expected [batch, *{list(shape)}].")
    per_token = network.per_token_time and t.shape == (batch, network.num_tokens)
    if t.shape != (batch,) and not per_token:
        raise ValueError(f"t has shape {list(t.shape)}; expected [{batch}], one per image.")
    if y is not None:
        check_condition(network, y, batch)
    for consumer, producer in network.skips.items():
        if not 0 <= producer < consumer < network.num_blocks:
            raise ValueError(
                f"self.skips has {{{consumer}: {producer}}}; expected {{consumer: producer}}, "
                f"the producer first, among {network.num_blocks} blocks."
            )


def check_condition(network: Any, y: Tensor, batch: int) -> None:
    """Raise `ValueError` if the network is unconditional, or if y does not fit it. Labels must have
    the shape [B]; contexts, T embeddings of width S per image, must be floats [B, T, S]."""
    if not network.is_conditional:
        raise ValueError("y was given, but num_classes=0 makes an unconditional network.")
    if not network.context_size:
        if y.shape != (batch,):
            raise ValueError(f"y has shape {list(y.shape)}; expected labels [{batch}].")
        return
    expected = (batch, network.context_length, network.context_size)
    if y.shape != expected or not y.is_floating_point():
        raise ValueError(
            f"y has shape {list(y.shape)} and dtype {y.dtype}; expected contexts, floats "
            f"{list(expected)}: {network.context_length} embeddings per image."
        )


def check_new_context(network: Any, length: int, size: int) -> None:
    """Raise `ValueError` if a network cannot take contexts of `length` embeddings of width `size`.
    If both are 0, there are no contexts."""
    if bool(length) != bool(size):
        raise ValueError(
            f"context_length={length} and context_size={size} go together: the number of "
            "embeddings per image, and the width of each."
        )
    if size and not network.takes_contexts:
        raise ValueError(
            f"{type(network).__name__} takes no contexts (context_size). Choose another backbone, "
            "or leave the contexts out: data.context=false for latents, null for images."
        )
    if size and network.num_classes:
        raise ValueError(
            f"num_classes={network.num_classes} and context_size={size} exclude each other: the "
            "condition is a label or a context. Set num_classes=0."
        )


def check_streams(method: str, streams: Any) -> None:
    """Raise `TypeError` unless `streams`, which a backbone's method `method` returned, is a tuple
    of tensors."""
    if not isinstance(streams, tuple) or not all(isinstance(s, Tensor) for s in streams):
        raise TypeError(
            f"{method} returned a {type(streams).__name__} for its streams; expected a tuple of "
            "tensors, as in (tokens,)."
        )


def check_embedded(returned: Any, batch: int, num_tokens: int, num_extra: int) -> None:
    """Raise `TypeError` unless `returned`, the result of `embed`, is (streams, condition), each
    stream with `num_extra` + `num_tokens` tokens: [B, E + N, D]."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"embed returned a {type(returned).__name__}; expected streams and condition, as "
            "in ((tokens,), condition)."
        )
    streams, length = returned[0], num_extra + num_tokens
    check_streams("embed", streams)
    for stream in streams:
        if stream.shape[:2] != (batch, length):
            raise TypeError(
                f"embed returned a stream {list(stream.shape)}; expected [{batch}, {length}, "
                f"D]: {num_tokens} tokens after num_extra_tokens={num_extra}."
            )
