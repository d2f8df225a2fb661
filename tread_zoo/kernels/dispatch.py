"""The choice of an operation's implementation: automatic or by hand, with an explanation.

An operation registers its implementations in the order in which "auto" tries them. An
implementation may need a package and a CUDA device, or a C compiler and a CPU (`unavailable`), and
may refuse a call (`refuses`). "auto" runs the first one without a reason against it, but never the
naive one. An implementation that is set by hand runs or raises.

When an implementation from a package or in C is first used on a device in a precision, its output
and gradients on the operation's small example are compared with those of the torch implementation.
If it differs or fails, it is refused from then on.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tread_zoo.errors import unknown_name
from tread_zoo.kernels.compiled import CompiledSource
from tread_zoo.kernels.operators import has_tangents
from tread_zoo.kernels.packages import LibraryFunction
from tread_zoo.kernels.verify import TOLERANCE, compare

logger = logging.getLogger(__name__)

AUTO, NAIVE, TORCH = "auto", "naive", "torch"

Example = Callable[[Callable[..., Tensor], int, int, int, int], tuple[Any, ...]]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Args:
        name: what `set_form` takes.
        run: the function.
        needs: what `run` calls: an optional package's function, which needs a CUDA device, or a C
            file, which needs a CPU. None: plain torch. Unless it is None, the implementation takes
            neither float64 nor forward-mode derivatives.
        unsuited: (the call's arguments) -> why `run` cannot or should not take them, or None.
        limits: in words, the calls that `unsuited` accepts; "" for all calls.
        fits_all: `unsuited` concerns only speed: set by hand, the implementation takes every call.
        tf32: float32 is multiplied in TF32, whatever torch's own setting is.
    """

    name: str
    run: Callable[..., Tensor]
    needs: LibraryFunction | CompiledSource | None = None
    unsuited: Callable[..., str | None] = lambda *args: None
    limits: str = ""
    fits_all: bool = False
    tf32: bool = False

    def unavailable(self, device: torch.device) -> str | None:
        """Return why this implementation cannot run on `device`, or None."""
        if self.needs is None:
            return None
        if device.type != self.needs.device:
            return f"no {self.needs.device.upper()} device"
        return self.needs.problem()

    def refuses(self, *args: Any) -> str | None:
        """Return why this implementation does not take a call with `args`, or None."""
        if self.needs is not None and any(
            isinstance(x, Tensor) and x.dtype == torch.float64 for x in args
        ):
            return "float64"
        if self.needs is not None and has_tangents(args):
            return "a forward-mode derivative"
        return self.unsuited(*args)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the largest allowed difference from the torch form for inputs in `dtype`, relative
        to the torch form's largest value."""
        return TOLERANCE[torch.bfloat16 if self.tf32 else dtype]


Place = tuple[str, torch.dtype]  # kind of device (cuda and cuda:0 are one), precision


@dataclass
class Operation:
    """An operation's implementations, and the results of their comparisons.

    Args:
        implementations: in the order in which "auto" tries them; one is called "torch", one
            "naive".
        example: (normal, batch, length, heads, width of a head) -> the arguments of a call in
            float32, as every `run` takes them; `normal(*sizes)` draws a tensor.
        half: indices of the arguments that are in half precision in a half-precision run; the
            first argument is one of them.
        choice: "auto", or the name of the implementation set by hand.
        refused: {((device, precision), name): why the comparison failed, or None if it did not}.
        logged: messages that were logged, once each.
    """

    implementations: tuple[Implementation, ...]
    example: Example
    half: tuple[int, ...]
    choice: str = AUTO
    refused: dict[tuple[Place, str], str | None] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)


OPERATIONS: dict[str, Operation] = {}
used_ops: set[str] = set()  # operations called since the last `clear()`, outside compiled code


def register(
    op: str, implementations: Iterable[Implementation], example: Example, half: tuple[int, ...]
) -> None:
    """Register an operation under the name `op`; `Operation` documents the other arguments."""
    OPERATIONS[op] = Operation(tuple(implementations), example, half)


def set_form(op: str, form: str) -> None:
    """Make every later call of `op` use the implementation `form`; "auto" chooses for each call.

    Raises:
        ValueError: for an unknown operation or form, or a form whose package is missing or broken.
    """
    names = list_forms(op)
    if form not in (AUTO, *names):
        raise unknown_name(f"form of {op}", form, (AUTO, *names))
    needs = None if form == AUTO else get_implementation(op, form).needs
    if needs is not None and (problem := needs.problem()) is not None:
        raise ValueError(
            f"{op}: form {form!r} is not usable: {problem}. Install it with `{needs.install}` "
            f"(it needs a {needs.device.upper()} device), or choose another form."
        )
    OPERATIONS[op].choice = form


def set_forms(forms: Mapping[str, str]) -> None:
    """Set the implementation of each operation by `forms`, {operation: implementation}. Operations
    that are not in `forms` get "auto".

    Raises:
        ValueError: for an unknown operation or form, or a form whose package is missing or broken.
    """
    for op in OPERATIONS.keys() | forms.keys():
        set_form(op, forms.get(op, AUTO))


@contextmanager
def plain_forms() -> Iterator[None]:
    """Run every operation in its torch implementation within the context, whatever is set."""
    before = get_forms()
    for operation in OPERATIONS.values():
        operation.choice = TORCH
    try:
        yield
    finally:
        for op, choice in before.items():
            OPERATIONS[op].choice = choice


def get_forms() -> dict[str, str]:
    """Return the choice for each operation: "auto" or an implementation's name."""
    return {op: operation.choice for op, operation in OPERATIONS.items()}


def list_forms(op: str) -> tuple[str, ...]:
    """Return the names of the implementations of `op`."""
    if op not in OPERATIONS:
        raise unknown_name("op", op, OPERATIONS)
    return tuple(each.name for each in OPERATIONS[op].implementations)


def get_implementation(op: str, name: str) -> Implementation:
    """Return the implementation of `op` that is called `name`."""
    return next(each for each in OPERATIONS[op].implementations if each.name == name)


def get_example(
    op: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int, int] = (2, 71, 2, 32),
) -> list[Any]:
    """Return the arguments of a small example call of `op`, cast as in a run in the precision
    `dtype`. `sizes` are batch, length, heads and width of a head."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    with torch.device("cpu"):  # the CPU draws them, whatever the default device is
        drawn = OPERATIONS[op].example(normal, *sizes)
    args = [x.contiguous().to(device) if isinstance(x, Tensor) else x for x in drawn]
    for place in OPERATIONS[op].half:
        args[place] = args[place].to(dtype)
    return args


def unusable(
    op: str, which: Implementation, device: torch.device, dtype: torch.dtype = torch.float32
) -> str | None:
    """Return why the implementation `which` of `op` cannot be used on a device in a precision (the
    device is of another kind, its package or compiler is missing, or it failed the comparison with
    the torch form), or None."""
    reason = which.unavailable(device)
    if reason is not None or which.needs is None:
        return reason
    refused, key = OPERATIONS[op].refused, ((device.type, dtype), which.name)
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if key not in refused and not transformed:
        with _disable_current_modes():  # for example, the counting of FLOPs
            refused[key] = _difference_to_torch(op, which, device, dtype)
        if refused[key] is not None:
            logger.warning("%s: %s is refused: %s", op, which.name, refused[key])
    return refused.get(key)


def _difference_to_torch(
    op: str, which: Implementation, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return how the implementation `which` fails on the example call of `op`, or by how much it
    differs there from the torch form. None if it differs by no more than its
    tolerance, or refuses the call."""
    args = get_example(op, device, dtype)
    if which.refuses(*args) is not None:
        return None  # it is never chosen for such a call
    try:
        difference = max(compare(which.run, get_implementation(op, TORCH).run, args))
    except Exception as error:  # a kernel built for another GPU or torch raises anything
        return f"it failed on a small input, {type(error).__name__}: {error}"
    if difference <= which.tolerance(dtype):
        return None
    return (
        f"it differs from the torch form by {difference:.1e} of the largest value on a small "
        f"input in {str(dtype).removeprefix('torch.')}"
    )


def choose(op: str, device: torch.device, *args: Any) -> Implementation:
    """Return the implementation that takes the call of `op` with `args` on `device`.

    Raises:
        ValueError: an implementation was set by hand and cannot take the call.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        used_ops.add(op)
    if OPERATIONS[op].choice != AUTO:
        return _chosen_by_hand(op, device, *args)
    for each in OPERATIONS[op].implementations:
        if each.name == NAIVE or unusable(op, each, device, args[0].dtype) is not None:
            continue
        reason = each.refuses(*args)
        if reason is None:
            return each
        message = f"{op}: {each.name} not used: {reason}"
        if each.needs is not None and not compiling and message not in OPERATIONS[op].logged:
            OPERATIONS[op].logged.add(message)
            logger.info(message)
    raise AssertionError(f"{op} has no form that takes every call")


def run(op: str, *args: Any) -> Tensor:
    """Return the result of `op` on `args`, from the implementation that takes this call."""
    return choose(op, args[0].device, *args).run(*args)


def check_shapes(**given: tuple[Tensor | None, str]) -> dict[str, int]:
    """Return {dimension: size} of tensors, given as in `x=(x, "B L D"), A=(A, "D N")`.

    Raises:
        ValueError: a tensor is empty, has another number of dimensions, or differs in the size of a
            dimension from an earlier tensor.
    """
    sizes: dict[str, int] = {}
    for name, (value, dims) in given.items():
        if value is None:
            continue
        names = dims.split()
        if value.ndim != len(names) or not all(
            size > 0 and sizes.setdefault(dim, size) == size
            for dim, size in zip(names, value.shape, strict=True)
        ):
            wanted = ", ".join(str(sizes.get(dim, dim)) for dim in names)
            raise ValueError(
                f"{name} has shape {list(value.shape)}; it must be [{wanted}], none of them 0."
            )
    return sizes


def _chosen_by_hand(op: str, device: torch.device, *args: Any) -> Implementation:
    chosen = get_implementation(op, OPERATIONS[op].choice)
    reason = unusable(op, chosen, device, args[0].dtype)
    if reason is None and not chosen.fits_all:
        reason = chosen.refuses(*args)
    if reason is not None:
        raise ValueError(
            f"kernels.{op}: form {chosen.name!r} was set but cannot run: {reason}. "
            f"kernels.{op}=auto chooses one that can (from Python: set_form({op!r}, 'auto'))."
        )
    return chosen


def describe(
    device: torch.device,
    ops: Collection[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Return a line for each of `ops` (None: all): the implementation that runs on `device` in the
    precision `dtype`, and the reasons against others. Implementations that were not yet compared
    with torch's are compared first."""
    return [
        f"{op}: {_describe(op, device, dtype)}" for op in OPERATIONS if ops is None or op in ops
    ]


def _describe(op: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return in words which implementation of `op` runs on a device, and why others do not.
    Implementations that take only some calls come before the one that takes all."""
    if OPERATIONS[op].choice != AUTO:
        return f"{OPERATIONS[op].choice} (set by hand)"
    limited, reasons = "", []
    for each in OPERATIONS[op].implementations:
        if each.needs is not None and each.needs.device == "cpu" != device.type:
            continue  # a form for CPUs needs no mention on a GPU
        if (why := unusable(op, each, device, dtype)) is not None:
            reasons.append(f"{each.name} not used: {why}")
        elif each.limits:
            limited += f"{each.name} {each.limits}, else "
        else:
            return limited + each.name + (f" ({'; '.join(reasons)})" if reasons else "")
    raise AssertionError(f"{op} has no form that takes every call")
