"""Test that a block may be routed: reordering its tokens only reorders its output.

    f(P x, P a) = P f(x, a)   f the block, P a reordering, x the tokens, a the arguments per token

This fails for convolutions, windows, scans, causal masks, and positions that are not reordered with
the tokens.

B batch, K image tokens, L tokens of the sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tread_zoo.routing.others.arguments import take
from tread_zoo.seeding import make_image_generator

FAILURES = (RuntimeError, TypeError, AttributeError, IndexError, ValueError, AssertionError)


@dataclass(frozen=True)
class Verdict:
    """The result of testing whether a class of blocks may be routed.

    Args:
        form: how blocks of the class get tables that have no batch dimension, see `Adapter`.
        output: index of the tokens among a block's outputs; None: they are the only output.
        error: distance of the output for reordered tokens from the reordered output, relative to
            the block's update of the tokens, or the relative change of another output if that is
            larger; None: the block does not change the tokens yet.
    """

    form: str
    output: int | None
    error: float | None


def cycle(num_tokens: int, batch: int, device: torch.device, shared: bool) -> Tensor:
    """Return random reorderings of K = `num_tokens` tokens that leave no token in its place, int64
    [B, K]; if `shared`, the same for all images."""
    numbers = make_image_generator("order", images=range(batch), device=device)
    order = numbers.rand(num_tokens).argsort(dim=1)
    order = order[:1].expand(batch, -1) if shared else order
    return torch.empty_like(order).scatter_(1, order, order.roll(1, dims=1))


@torch.no_grad()
def examine(
    block: nn.Module,
    call: Callable[[str, bool], dict[str, Any]],
    key: str,
    reorder: Tensor,
    forms: tuple[str, ...],
) -> Verdict:
    """Test whether a class of blocks may be routed, and return the `Verdict`.

    Args:
        block: a block of the class.
        call: function of (form, whether to reorder the tokens) that returns the block's arguments.
        key: name of the argument that has the tokens.
        reorder: int64 [B, L], for each place in the new order of L tokens the token that goes
            there.
        forms: ways to pass tables without a batch dimension, see `Adapter`. The verdict has the
            first form with which the block passes the test.

    Raises:
        ValueError: the block's output depends on the order of tokens.
    """
    inner = getattr(block, "_orig_mod", block)
    modes = [(module, module.training) for module in inner.modules()]
    reasons: dict[str, str] = {}
    try:
        inner.eval()
        for form in forms:
            try:
                verdict = _compare(inner, call(form, False), call(form, True), key, reorder, form)
            except FAILURES as error:
                reasons[form] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            if verdict.error is None or verdict.error <= _limit(call(form, False)[key]):
                return verdict
            reasons[form] = f"reordered tokens change its update by {verdict.error:.1%}"
    finally:
        for module, training in modes:
            module.training = training
    raise ValueError(
        f"{type(inner).__name__} uses the place of a token in the sequence, so its tokens cannot "
        f"be routed ({'; '.join(dict.fromkeys(reasons.values()))})."
    )


def _compare(
    block: nn.Module,
    plain: Mapping[str, Any],
    turned: Mapping[str, Any],
    key: str,
    reorder: Tensor,
    form: str,
) -> Verdict:
    # call without compilation, which would not pay for two calls
    first, second = block._call_impl(**plain), block._call_impl(**turned)
    x = plain[key]
    if isinstance(first, Tensor):
        return Verdict(form, None, _error(first, second, x, reorder)[0])
    fits: dict[int, tuple[float | None, float]] = {}
    for i, (one, two) in enumerate(zip(first, second, strict=True)):
        if isinstance(one, Tensor) and one.shape == x.shape:
            fits[i] = _error(one, two, x, reorder)
    if not fits:
        raise TypeError("none of its outputs has the shape of the tokens")
    # if image and other tokens are equally many, the image is the output that follows the new order
    output = min(fits, key=lambda i: fits[i][1])
    error = fits[output][0]
    for i, (one, two) in enumerate(zip(first, second, strict=True)):
        if i != output and isinstance(one, Tensor) and error is not None:
            error = max(error, float((two - one).norm() / one.norm().clamp_min(1e-12)))
    return Verdict(form, output, error)


def _error(one: Tensor, two: Tensor, x: Tensor, reorder: Tensor) -> tuple[float | None, float]:
    """Return the distance of `two`, the output for reordered tokens, from the reordered `one`, the
    output for x. The first number is relative to the norm of the block's update one - x (None if
    that is 0), the second absolute. For `reorder` see `examine`."""
    gap = float((two - take(one, reorder, 1)).float().norm())
    update = float((one - x).float().norm())
    return (gap / update if update > 0 else None), gap


def _limit(tokens: Tensor) -> float:
    half = torch.is_autocast_enabled(tokens.device.type) or tokens.dtype.itemsize < 4
    return 5e-2 if half else 1e-3


@torch.no_grad()
def most_similar(output: Any, named: Mapping[str, Any]) -> list[str | None]:
    """Return for each output of a block which argument is nearest to it: its name in `named`, or
    None if no argument has the output's shape."""
    names: list[str | None] = []
    for out in (output,) if isinstance(output, Tensor) else output:
        near = {
            name: float((out - value).float().norm())
            for name, value in named.items()
            if isinstance(out, Tensor) and isinstance(value, Tensor) and value.shape == out.shape
        }
        names.append(min(near, key=lambda name: near[name]) if near else None)
    return names
