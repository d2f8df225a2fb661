"""Operations as custom operators of torch: one node of a graph, differentiable, FLOPs counted.

`forward(*args)` returns the output, or a tuple of the output and of tensors that only the backward
pass reads. `backward(grad, *kept, *args)` gets the gradient of the output, the last `num_kept`
results of `forward` (`kept`) and the arguments. It returns the gradients of the first
`num_gradients` arguments, with an empty tensor for an argument that is None.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("tread_zoo", "FRAGMENT")


def make_operator(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    empty: Callable[..., Any],
    flops: Callable[..., tuple[int, int]],
    num_gradients: int,
    num_kept: int = 0,
) -> Callable[..., Tensor]:
    """Return a function that calls the operator `tread_zoo::name` and returns its first output.
    The backward pass is `tread_zoo::name_backward`.

    `torch.library.custom_op` would import the compiler at the first call, which takes 1.6 s.

    Args:
        name: the operator's name.
        forward, backward: see the module. Forward's annotations, without defaults, are the schema.
            Arguments that are not tensors come last. Neither function changes its arguments.
        empty: (*args) -> uninitialised outputs of `forward`.
        flops: (*shapes of the arguments) -> FLOPs of forward and of backward.
        num_gradients: how many arguments have a gradient; they come first.
        num_kept: how many outputs of `forward` the backward pass takes; they come last.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    arguments = schema[1 : schema.index(") ->")]
    kept = "".join(f"Tensor kept{i}, " for i in range(num_kept))
    grads = ", ".join(["Tensor"] * num_gradients)
    run = _define(name, schema, forward)
    run_backward = _define(
        f"{name}_backward", f"(Tensor grad, {kept}{arguments}) -> ({grads})", backward
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

    qualified = f"{LIBRARY.ns}::{name}"
    torch.library.register_fake(qualified, empty, lib=LIBRARY)
    torch.library.register_fake(f"{qualified}_backward", fake_backward, lib=LIBRARY)
    torch.library.register_autograd(qualified, differentiate, setup_context=save, lib=LIBRARY)
    register_flop_formula(run)(lambda *shapes, **_: flops(*shapes)[0])
    register_flop_formula(run_backward)(lambda *shapes, **_: flops(*shapes[1 + num_kept :])[1])

    def call(*args: Any) -> Tensor:
        if has_tangents(args):  # torch would silently leave them out
            raise RuntimeError(f"{qualified} has no forward-mode derivative")
        out = run(*args)
        return out[0] if isinstance(out, tuple) else out

    return call


def _define(name: str, schema: str, function: Callable[..., Any]) -> Any:
    """Define the operator `name`, which runs `function` on every device, and return it. `schema`
    is its signature in torch's notation."""
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, LIBRARY.ns), name)


def has_tangents(args: Iterable[Any]) -> bool:
    """Return whether one of the arguments carries a tangent of forward-mode differentiation."""
    return not torch.compiler.is_compiling() and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args
    )


def empty_like(x: Tensor) -> Tensor:
    """Return an uninitialised, contiguous tensor like `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
