"""What a run computes on: device, precision, and a line that says so."""

import ctypes
import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from tread_zoo.errors import unknown_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of autocast
TRIM_THRESHOLD, MMAP_THRESHOLD = (-1, 2**30), (-3, 2**25)  # (option, bytes) for glibc's mallopt


def resolve_device(device: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.

    Raises:
        ValueError: the device is unknown, or this machine does not have it.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    present, kind = {"cuda": cuda, "mps": mps, "cpu": True}, device.partition(":")[0]
    if device == "auto":
        return torch.device(next(kind for kind in present if present[kind]))
    try:
        index = torch.device(device).index or 0
    except RuntimeError:
        raise unknown_name("device", device, ("auto", *present)) from None
    if index >= {"cuda": torch.cuda.device_count()}.get(kind, 1) or not present.get(kind):
        raise ValueError(f"device={device!r} is not available here; use device=auto or device=cpu.")
    return torch.device(device)


def local_device(device: str = "auto") -> torch.device:
    """Return the device of this process, as `resolve_device` does. Where `device` (`auto` or
    `cuda`) stands for any of several GPUs, it is the GPU that a launcher assigned."""
    resolved = resolve_device(device)
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return resolved


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision of autocast: `fp32`, `bf16` or `fp16`. `auto` is bf16 if the hardware
    supports it, else fp16 on a CUDA GPU and fp32 elsewhere. Weights are always float32.

    Raises:
        ValueError: fp16 without a CUDA GPU.
    """
    if precision == "fp16" and device.type != "cuda":
        raise ValueError(f"precision=fp16 needs a CUDA GPU, not {device.type}; use bf16 or fp32.")
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "cpu" and _cpu_computes_bf16() else "fp32"


def set_float32_products(device: torch.device, precision: str) -> None:
    """Let a GPU multiply float32 matrices in TF32, unless `precision` is fp32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def keep_freed_memory(device: torch.device) -> None:
    """Let a process that computes on the CPU keep what it frees, as torch does on a GPU.

    glibc returns large blocks to the system, and each step asks for them again page by page: 7,000
    page faults per step of `mamba_tiny`. Blocks above 32 MiB, the largest threshold that all glibc
    versions accept, are still returned. Without glibc nothing changes.
    """
    if device.type != "cpu" or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(*TRIM_THRESHOLD)
        mallopt(*MMAP_THRESHOLD)


def _cpu_computes_bf16() -> bool:
    """Return whether the CPU has bf16 instructions; without them bf16 is slower than float32."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in names)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the context of a precision: none for `fp32`, torch.autocast for `bf16` or `fp16`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def describe_device(device: torch.device) -> str:
    """Return the hardware's name for the log."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} (CUDA {torch.version.cuda})"
    if device.type == "mps":
        return "Apple GPU (mps)"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}; no GPU is used"
