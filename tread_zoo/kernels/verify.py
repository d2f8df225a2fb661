"""Compare two forms of an operation on one call: outputs and every gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}

Results = tuple[Tensor, list[Tensor]]  # an output and the gradients


class Difference(NamedTuple):
    """The largest errors of the output and of any gradient, each relative to the largest value of
    the true output or gradient."""

    output: float
    gradient: float


def compare(
    run: Callable[..., Tensor], truth: Callable[..., Tensor], args: Sequence[Any]
) -> Difference:
    """Return how far the output and gradients of `run(*args)` are from those of `truth(*args)`.

    The floating tensors among the arguments are differentiated. Autocast, no_grad and hooks on
    saved tensors around the call have no effect.
    """
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(_keep, _keep),
    ):
        return difference(outputs_and_gradients(run, args), outputs_and_gradients(truth, args))


def difference(ours: Results, truth: Results) -> Difference:
    """Return how far an output and its gradients are from the true ones."""
    pairs = zip(ours[1], truth[1], strict=True)
    return Difference(_relative(ours[0], truth[0]), max(_relative(a, b) for a, b in pairs))


def outputs_and_gradients(run: Callable[..., Tensor], args: Sequence[Any]) -> Results:
    """Return the output of `run(*args)` and, for each floating tensor in `args`, the gradient of a
    fixed weighted sum of the output."""
    copies = [
        arg.detach().clone().requires_grad_(arg.is_floating_point())
        if isinstance(arg, Tensor)
        else arg
        for arg in args
    ]
    leaves = [arg for arg in copies if isinstance(arg, Tensor) and arg.requires_grad]
    out = run(*copies)
    # without the 0.5, a gradient that is a sum over all tokens may cancel to its rounding errors
    ramp = 0.5 + torch.arange(out.numel(), device=out.device, dtype=torch.float32).cos()
    grads = torch.autograd.grad(out, leaves, ramp.view(out.shape).to(out.dtype))
    return out.detach(), list(grads)


def cast(args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return the arguments with the floating tensors among them in `dtype`."""
    return [
        arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]


def _relative(value: Tensor, truth: Tensor) -> float:
    value, truth = value.double(), truth.double()
    if not bool(torch.isfinite(value).all()):
        return float("inf")
    scale = truth.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((value - truth).abs().max() / scale)


def _keep(x: Tensor) -> Tensor:
    return x
