"""Which form of an operation runs: one place that decides, can be overridden, and says why.

An operation registers its forms in the order in which "auto" tries them. A form may need a package
and a CUDA device (`unavailable`), and it may not take every call (`unsuited`). "auto" runs the
first form that has neither reason against it, and never the naive one. A form set by hand runs or
raises: it is not replaced silently.

At its first use on a device a form of a package is compared with the torch form on the operation's
small example, output and gradients; one that differs or fails is refused from then on.
"""

import difflib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.verify import TOLERANCE, cast, compare

logger = logging.getLogger(__name__)

AUTO, NAIVE, TORCH = "auto", "naive", "torch"

Example = Callable[[torch.device], tuple[Any, ...]]


def _anything_suits(*args: object) -> str | None:
    return None


def _no_limits(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Form:
    """One way to compute an operation.

    Args:
        name: what `set_form` takes.
        run: the function.
        module: optional module that `run` imports; such a form needs a CUDA device.
        install: the command that brings `module`.
        unsuited: (the call's arguments) -> why `run` cannot or should not take them, or None.
        limits: (device) -> in words, what `unsuited` lets through there, or None for everything.
        fits_all: `unsuited` is about speed only, so that a form set by hand takes every call.
        check_dtype: in which `run` is compared with the torch form.
    """

    name: str
    run: Callable[..., Tensor]
    module: str | None = None
    install: str = ""
    unsuited: Callable[..., str | None] = _anything_suits
    limits: Callable[[torch.device], str | None] = _no_limits
    fits_all: bool = False
    check_dtype: torch.dtype = torch.float32

    def unavailable(self, device: torch.device) -> str | None:
        """Return why the form cannot run on `device`, or None."""
        if self.module is None:
            return None
        if device.type != "cuda":
            return "no CUDA device"
        return import_problem(self.module)


_FORMS: dict[str, tuple[Form, ...]] = {}
_EXAMPLES: dict[str, Example] = {}
_CHOICE: dict[str, str] = {}
_PROBLEMS: dict[str, str | None] = {}
_FETCHED: dict[str, ModuleType] = {}
# Packages that must be compiled by nvcc, and who has them built: Hugging Face's package `kernels`
# fetches the build for the machine at hand.
_PREBUILT = {
    "causal_conv1d": ("kernels-community/causal-conv1d", 1),
    "mamba_ssm": ("kernels-community/mamba-ssm", 1),
}
_REFUSED: dict[tuple[str, str, str], str | None] = {}
_TOLD: set[tuple[str, str]] = set()
used_ops: set[str] = set()  # that ran since somebody cleared it, outside of compiled code


def register(op: str, forms: Iterable[Form], example: Example) -> None:
    """Register an operation.

    Args:
        op: its name.
        forms: in the order in which "auto" tries them; one is called "torch", one "naive".
        example: (device) -> the arguments of a small call in float32, as every form's `run` takes
            them; the same ones each time.
    """
    _FORMS[op] = tuple(forms)
    _EXAMPLES[op] = example
    _CHOICE[op] = AUTO
    for form in _FORMS[op]:  # known at once, so that compiled code has nothing left to find out
        package = (form.module or "torch").split(".")[0]
        sources = {package, "kernels"} if package in _PREBUILT else {package}
        if form.module is not None and not any(map(importlib.util.find_spec, sources)):
            _PROBLEMS[form.module] = f"no module named {package!r}"
        elif form.module in sys.modules:  # triton: torch imports it
            _PROBLEMS[form.module] = None


def import_problem(module: str) -> str | None:
    """Return why `module` cannot be had, or None; imports or fetches it once."""
    if module not in _PROBLEMS:
        try:
            load_module(module)
            _PROBLEMS[module] = None
        except ModuleNotFoundError as error:
            _PROBLEMS[module] = f"no module named {error.name!r}"
        except Exception as error:  # a broken extension raises anything: OSError, RuntimeError, …
            _PROBLEMS[module] = f"its import failed, {type(error).__name__}: {error}"
    return _PROBLEMS[module]


def load_module(module: str) -> ModuleType:
    """Return an optional module: as it is installed, or else built by Hugging Face's `kernels`,
    which has its functions at the top."""
    if module in _FETCHED:
        return _FETCHED[module]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if package not in _PREBUILT or error.name != package:
            raise
    repository, version = _PREBUILT[package]
    _FETCHED[module] = importlib.import_module("kernels").get_kernel(repository, version=version)
    return _FETCHED[module]


def set_form(op: str, form: str) -> None:
    """Make every later call of `op` use `form`; "auto" gives the choice back.

    Raises:
        ValueError: for an unknown operation or form.
        ImportError: for a form whose package is missing or broken.
    """
    if op not in _FORMS:
        raise _unknown("op", op, _FORMS)
    known = {each.name: each for each in _FORMS[op]}
    if form != AUTO and form not in known:
        raise _unknown(f"form of {op}", form, (AUTO, *known))
    if form != AUTO:
        _require_import(op, known[form])
    _CHOICE[op] = form


def set_forms(forms: Mapping[str, str]) -> None:
    """Set the form of every operation; those that are not named get "auto".

    Raises:
        ValueError: for an unknown operation or form, or a form whose package is missing or broken.
    """
    try:
        for op in _FORMS.keys() | forms.keys():
            set_form(op, forms.get(op, AUTO))
    except ImportError as error:
        raise ValueError(str(error)) from error


@contextmanager
def plain_forms() -> Iterator[None]:
    """Let every operation run its torch form for a while, whatever is set for it."""
    before = get_forms()
    _CHOICE.update(dict.fromkeys(_FORMS, TORCH))
    try:
        yield
    finally:
        _CHOICE.update(before)


def get_forms() -> dict[str, str]:
    """Return what is set for each operation: "auto" or the name of a form."""
    return dict(_CHOICE)


def list_forms(op: str) -> tuple[str, ...]:
    """Return the names of the forms of `op`."""
    if op not in _FORMS:
        raise _unknown("op", op, _FORMS)
    return tuple(form.name for form in _FORMS[op])


def get_form(op: str, name: str) -> Form:
    """Return a form by its name."""
    return next(form for form in _FORMS[op] if form.name == name)


def get_example(op: str, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of the operation's example."""
    with torch.device("cpu"):  # whose generator draws them, whatever the default device is
        return _EXAMPLES[op](device)


def unusable(op: str, form: Form, device: torch.device) -> str | None:
    """Return why a form cannot be used on a device, or None: it is missing, or it was refused."""
    reason = form.unavailable(device)
    if reason is not None or form.module is None:
        return reason
    key = (op, form.name, device.type)  # cuda and cuda:0 are one
    if key not in _REFUSED and not torch.compiler.is_compiling():
        _REFUSED[key] = _difference_to_torch(op, form, device)
        if _REFUSED[key] is not None:
            logger.warning("%s: %s is refused: %s", op, form.name, _REFUSED[key])
    return _REFUSED.get(key)


def _difference_to_torch(op: str, form: Form, device: torch.device) -> str | None:
    """Return in words that the form fails on the example, or differs from the torch form."""
    dtype = form.check_dtype
    args = cast(get_example(op, device), dtype)
    if form.unsuited(*args) is not None:
        return None  # it will not be chosen for such a call
    try:
        found = max(compare(form.run, get_form(op, TORCH).run, args))
    except Exception as error:  # a kernel built for another GPU or torch raises anything
        return f"it failed on a small input, {type(error).__name__}: {error}"
    if found <= TOLERANCE[dtype]:
        return None
    return f"it differs from the torch form by {found:.1e} of the largest value on a small input"


def choose(op: str, device: torch.device, *args: object) -> Form:
    """Return the form that takes this call.

    Raises:
        ValueError: for a form set by hand that cannot take the call.
    """
    if not torch.compiler.is_compiling():
        used_ops.add(op)
    if _CHOICE[op] != AUTO:
        form = get_form(op, _CHOICE[op])
        reason = unusable(op, form, device)
        if reason is None and not form.fits_all:
            reason = form.unsuited(*args)
        if reason is not None:
            raise ValueError(
                f"kernels.{op}: form {form.name!r} was set but cannot run: {reason}. "
                f"kernels.{op}=auto chooses one that can (from Python: set_form({op!r}, 'auto'))."
            )
        return form
    for form in _FORMS[op]:
        if form.name == NAIVE or unusable(op, form, device) is not None:
            continue
        reason = form.unsuited(*args)
        if reason is None:
            return form
        if form.module is not None and not torch.compiler.is_compiling():
            _tell_once(op, f"{form.name} not used: {reason}")
    raise AssertionError(f"{op} has no form that takes every call")


def describe(device: torch.device, ops: Collection[str] | None = None) -> list[str]:
    """Return one line for each of `ops` (None: all): the form that runs on `device`, and why not
    another."""
    return [f"{op}: {_describe(op, device)}" for op in _FORMS if ops is None or op in ops]


def _describe(op: str, device: torch.device) -> str:
    if _CHOICE[op] != AUTO:
        return f"{_CHOICE[op]} (set by hand)"
    limited, reasons = "", []
    for form in _FORMS[op]:
        if (reason := unusable(op, form, device)) is not None:
            reasons.append(f"{form.name} not used: {reason}")
        elif (limits := form.limits(device)) is not None:
            limited += f"{form.name} {limits}, else "
        else:
            return limited + form.name + (f" ({'; '.join(reasons)})" if reasons else "")
    raise AssertionError(f"{op} has no form that takes every call")


def _require_import(op: str, form: Form) -> None:
    problem = import_problem(form.module) if form.module is not None else None
    if problem is not None:
        raise ImportError(
            f"{op}: form {form.name!r} is not usable: {problem}. Install it with "
            f"`{form.install}` (it needs a CUDA device), or choose another form."
        )


def _tell_once(op: str, message: str) -> None:
    if (op, message) not in _TOLD:
        _TOLD.add((op, message))
        logger.info("%s: %s", op, message)


def _unknown(field: str, value: object, known: Iterable[str]) -> ValueError:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{field}={value!r} is unknown.{hint} Known: {', '.join(names)}.")
