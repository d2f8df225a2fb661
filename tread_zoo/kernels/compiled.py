"""C files that the machine's compiler builds at their first use, called by `ctypes`."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
TIMEOUT = 60  # seconds of a compiler; it takes about one
CPU_FACTS = ("model name", "flags", "CPU part", "Features")  # lines of /proc/cpuinfo


class CompiledSource:
    """The functions of a C file, whose arguments are tensors, None and integers.

    The library is kept in the user's cache folder (`XDG_CACHE_HOME`, or ~/.cache) under a name made
    of the source, the flags and the CPU.
    """

    device = "cpu"
    install = "apt install gcc"

    def __init__(self, source: Path) -> None:
        self.source = source
        self._library: ctypes.CDLL | None = None
        self._tried = False
        self._problem: str | None = "torch.compile came before its first use"

    def problem(self) -> str | None:
        """Return why there is no library, or None; it is built or loaded once."""
        if not self._tried and not torch.compiler.is_compiling():
            self._tried = True
            try:
                self._library, self._problem = ctypes.CDLL(str(self._build())), None
            except subprocess.CalledProcessError as error:
                first = error.stderr.strip().partition("\n")[0]
                self._problem = f"the C compiler failed: {first}"
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                self._problem = str(error)
        return self._problem

    def __call__(self, name: str, *args: Tensor | int | None) -> Any:
        if (problem := self.problem()) is not None:
            raise RuntimeError(f"{self.source.name}: {problem}")
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        return function(*map(_argument, args))

    def _build(self) -> Path:
        """Return the library's file."""
        source = self.source.read_text(encoding="utf-8")
        facts = "\n".join((source, *FLAGS, platform.machine(), _describe_cpu()))
        digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tread_zoo"
        library = folder / f"{self.source.stem}-{digest}.so"
        if library.exists():
            return library
        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            raise RuntimeError(f"no C compiler: {', '.join(COMPILERS)}")
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as own:
            built = Path(own) / library.name
            command = [compiler, *FLAGS, "-o", str(built), str(self.source)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
            built.replace(library)  # another process may have been as quick: both files are right
        logger.info("%s: compiled in %.1f s", library, time.perf_counter() - begin)
        return library


def _argument(value: Tensor | int | None) -> Any:
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if value is None:
        return None
    if value.device.type != "cpu" or value.dtype != torch.float32 or not value.is_contiguous():
        raise ValueError("a compiled form takes contiguous float32 tensors of a CPU.")
    return ctypes.c_void_p(value.data_ptr())


def _describe_cpu() -> str:
    """Return what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.split(":")[0].strip() in CPU_FACTS)
