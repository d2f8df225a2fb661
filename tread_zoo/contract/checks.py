"""Checks of what a backbone is called with, and of what its methods return.

B batch, N tokens, E extra tokens, D width; a context has T embeddings of width S.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_images(x: Tensor, shape: tuple[int, ...]) -> None:
    """Check that x is [B, *shape].

    Raises:
        ValueError: it has another shape.
    """
    if x.shape[1:] != shape:
        raise ValueError(f"x has shape {list(x.shape)}; expected [batch, *{list(shape)}].")


def check_times(t: Tensor, batch: int, num_tokens: int | None) -> None:
    """Check that t is [B], or [B, N] where `num_tokens` is given: a wrong shape would broadcast.

    Raises:
        ValueError: it has another shape.
    """
    if t.shape != (batch,) and (num_tokens is None or t.shape != (batch, num_tokens)):
        raise ValueError(f"t has shape {list(t.shape)}; expected [{batch}], one per image.")


def check_condition(y: Tensor, batch: int, num_classes: int, context: tuple[int, int]) -> None:
    """Check that y holds labels [B], or contexts [B, T, S] if `context` = (T, S) is not (0, 0).

    Raises:
        ValueError: it has another shape or type, or the network takes no condition.
    """
    length, size = context
    if not (num_classes or size):
        raise ValueError("y was given, but num_classes=0 makes an unconditional network.")
    if size:
        expected = (batch, length, size)
        if y.shape != expected or not y.is_floating_point():
            raise ValueError(
                f"y has shape {list(y.shape)} and dtype {y.dtype}; expected contexts, floats "
                f"{list(expected)}: {length} embeddings per image."
            )
    elif y.shape != (batch,):
        raise ValueError(f"y has shape {list(y.shape)}; expected labels [{batch}].")


def check_skips(skips: Mapping[int, int], num_blocks: int) -> None:
    """Check that each skip leads from an earlier block to a later one.

    Raises:
        ValueError: one does not.
    """
    for consumer, producer in skips.items():
        if not 0 <= producer < consumer < num_blocks:
            raise ValueError(
                f"self.skips has {{{consumer}: {producer}}}; expected {{consumer: producer}}, "
                f"the producer first, among {num_blocks} blocks."
            )


def check_new_context(name: str, takes: bool, num_classes: int, context: tuple[int, int]) -> None:
    """Check that a backbone of class `name` can take contexts of `context` = (T, S).

    Raises:
        ValueError: only one of T and S is given, the backbone has labels or takes no contexts.
    """
    length, size = context
    if bool(length) != bool(size):
        raise ValueError(
            f"context_length={length} and context_size={size} go together: the number of "
            "embeddings of an image, and the width of one."
        )
    if size and not takes:
        raise ValueError(
            f"{name} takes no contexts (context_size). Choose another backbone, or leave the "
            "contexts out: data.context=false for latents, null for images."
        )
    if size and num_classes:
        raise ValueError(
            f"num_classes={num_classes} and context_size={size} exclude each other: the condition "
            "is a label or a context. Set num_classes=0."
        )


def check_streams(method: str, streams: Any) -> None:
    """Check that `method` returned its streams as a tuple of tensors.

    Raises:
        TypeError: it returned something else.
    """
    if not isinstance(streams, tuple) or not all(isinstance(s, Tensor) for s in streams):
        raise TypeError(
            f"{method} returned a {type(streams).__name__} for its streams; expected a tuple of "
            "tensors, as in (tokens,)."
        )


def check_embedded(returned: Any, batch: int, num_tokens: int, num_extra: int) -> None:
    """Check that `embed` returned streams [B, E + N, D] and a condition.

    Raises:
        TypeError: it returned something else.
    """
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
                f"D]: {num_tokens} tokens behind num_extra_tokens={num_extra}."
            )
