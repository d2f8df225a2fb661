"""Kernels in Triton: how they are launched, and the line in the log when they are first built."""

import importlib
import logging
from contextlib import nullcontext
from typing import Any

import torch

from tread_zoo.kernels.packages import LibraryFunction

logger = logging.getLogger(__name__)

TRITON = LibraryFunction("triton", "jit", "pip install triton")
_BUILT: set[str] = set()


def launch(
    module: str,
    kernel: str,
    device: torch.device,
    grid: tuple[int, ...],
    *args: Any,
    **options: Any,
) -> None:
    """Run a kernel of a module of device code, which needs triton, once for each point of `grid`.

    Its first launch in a process is logged: to build it takes seconds, where Triton has not kept
    the result of an earlier one.
    """
    if module not in _BUILT:
        _BUILT.add(module)
        logger.info(
            "%s: Triton builds its kernels, or takes them from its cache", _operation(module)
        )
    code = importlib.import_module(module)
    # Triton launches on the current device; on a CPU it interprets.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(code, kernel)[grid](*args, **options)


def _operation(module: str) -> str:
    return module.split(".")[-2]
