"""Functions of optional packages: imported once, and outside of compiled code."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

# Packages that nvcc must compile -> repository of builds: Hugging Face's package `kernels`
# downloads the one for this machine.
PREBUILT = {
    "causal_conv1d": ("kernels-community/causal-conv1d", 1),
    "mamba_ssm": ("kernels-community/mamba-ssm", 1),
}


class LibraryFunction:
    """A callable that stands for a function of an optional module, imported at its first use.

    Args:
        module, name: the module, and the function's name in it.
        install: the command that installs the module.
    """

    device = "cuda"

    def __init__(self, module: str, name: str, install: str) -> None:
        self.module, self.name, self.install = module, name, install
        self.function: Callable[..., Any] | None = None
        self._problem: str | None = None
        package = module.split(".")[0]
        sources = {package, "kernels"} if package in PREBUILT else {package}
        if not any(map(importlib.util.find_spec, sources)):
            self._problem = f"no module named {package!r}"
        elif module in sys.modules:  # triton, which torch imports
            self.problem()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:  # `problem` was not called before
            self.function = getattr(load_module(self.module), self.name)
        return self.function(*args, **kwargs)

    def problem(self) -> str | None:
        """Return why the function is not available, or None. The first call imports its module."""
        if self.function is None and self._problem is None:
            self._problem = import_problem(self.module)
            if self._problem is None:
                self.function = getattr(load_module(self.module), self.name)
        return self._problem if self.function is None else None


def import_problem(module: str) -> str | None:
    """Return why `module` cannot be imported or fetched, or None."""
    try:
        load_module(module)
    except ModuleNotFoundError as error:
        return f"no module named {error.name!r}"
    except Exception as error:  # a broken extension raises anything: OSError, RuntimeError, …
        return f"its import failed, {type(error).__name__}: {error}"
    return None


@lru_cache
def load_module(module: str) -> ModuleType:
    """Return an optional module: the installed one, or else the build that Hugging Face's package
    `kernels` downloads, which has the functions at its top level."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if package not in PREBUILT or error.name != package:
            raise
    repository, version = PREBUILT[package]
    fetched: ModuleType = importlib.import_module("kernels").get_kernel(repository, version=version)
    return fetched
