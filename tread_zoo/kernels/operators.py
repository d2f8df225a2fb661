"""Operations as custom operators of torch: one node of a graph, differentiable, FLOPs counted.

`forward(*args)` returns the output, or it and what only the backward pass reads. `backward(grad,
*kept, *args)` returns the gradients of the first arguments, an empty tensor for one that is None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "tread_zoo"


def make_operator(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    empty: Callable[..., Any],
    flops: tuple[Callable[..., int], Callable[..., int]],
    num_gradients: int,
    num_kept: int = 0,
) -> Callable[..., Any]:
    """Return the operator `tread_zoo::name`; its backward pass is `tread_zoo::name_backward`.

    Args:
        name: of the operator.
        forward, backward: see above; their annotations are the schemas. Arguments that are no
            tensors come last. Neither changes its arguments.
        empty: (*args) -> memory for what `forward` returns.
        flops: of forward and backward, from the shapes of their arguments.
        num_gradients: how many arguments, the first ones, have a gradient.
        num_kept: how many of what `forward` returns, the last ones, `backward` takes.
    """
    run = torch.library.custom_op(f"{NAMESPACE}::{name}", forward, mutates_args=())
    run_backward = torch.library.custom_op(
        f"{NAMESPACE}::{name}_backward", backward, mutates_args=()
    )

    def fake_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        inputs = args[num_kept : num_kept + num_gradients]
        return tuple(empty_like(grad.new_empty(0) if x is None else x) for x in inputs)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        made = output if isinstance(output, tuple) else (output,)
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        ctx.rest = inputs[len(tensors) :]
        ctx.save_for_backward(*made[len(made) - num_kept :], *tensors)
        ctx.mark_non_differentiable(*made[1:])

    def differentiate(ctx: Any, grad: Tensor, *unused: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: recomputation in the backward pass allows no more
        grads = run_backward(grad, *saved, *ctx.rest)
        inputs = saved[num_kept:]
        given = [
            None if x is None else g for x, g in zip(inputs[:num_gradients], grads, strict=True)
        ]
        return *given, *[None] * (len(inputs) + len(ctx.rest) - num_gradients)

    run.register_fake(empty)
    run_backward.register_fake(fake_backward)
    run.register_autograd(differentiate, setup_context=save)
    operators = getattr(torch.ops, NAMESPACE)
    for each, formula in zip((name, f"{name}_backward"), flops, strict=True):
        register_flop_formula(getattr(operators, each))(formula)
    return run


def empty_like(x: Tensor) -> Tensor:
    """Return contiguous memory for a tensor like `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
