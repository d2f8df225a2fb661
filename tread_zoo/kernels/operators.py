"""Operations as custom operators of torch: one node of a graph, differentiable, FLOPs counted.

`forward(*args)` returns the output, or it and what only the backward pass reads. `backward(grad,
*kept, *args)` returns the gradients of the first arguments, an empty tensor for one that is None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("tread_zoo", "FRAGMENT")


def make_operator(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    empty: Callable[..., Any],
    flops: tuple[Callable[..., int], Callable[..., int]],
    num_gradients: int,
    num_kept: int = 0,
) -> Any:
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
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    run, run_backward = _define(name, forward), _define(f"{name}_backward", backward)

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

    qualified = f"{LIBRARY.ns}::{name}"
    torch.library.register_fake(qualified, empty, lib=LIBRARY)
    torch.library.register_fake(f"{qualified}_backward", fake_backward, lib=LIBRARY)
    torch.library.register_autograd(qualified, differentiate, setup_context=save, lib=LIBRARY)
    for operator, formula in zip((run, run_backward), flops, strict=True):
        register_flop_formula(operator)(formula)
    return run


def _define(name: str, function: Callable[..., Any]) -> Any:
    """Return an operator of all devices.

    `torch.library.custom_op` would import the compiler at the first call, which takes 1.6 s.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, LIBRARY.ns), name)


def empty_like(x: Tensor) -> Tensor:
    """Return contiguous memory for a tensor like `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
