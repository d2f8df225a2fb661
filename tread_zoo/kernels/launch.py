"""Launching of Triton kernels."""

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
    """Run the Triton kernel `kernel` of `module` on `args`, once for each point of `grid`.
    `options` are the kernel's compile-time constants and Triton's launch options.

    The first launch of a module is logged, as compilation takes seconds unless Triton has cached
    it.
    """
    if module not in _BUILT:
        _BUILT.add(module)
        operation = module.split(".")[-2]
        logger.info("%s: Triton compiles its kernels or loads them from its cache", operation)
    code = importlib.import_module(module)
    # Triton launches on the current device; on a CPU it interprets.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(code, kernel)[grid](*args, **options)
