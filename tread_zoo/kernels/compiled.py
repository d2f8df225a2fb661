"""C files, built by the machine's compiler at their first use and called by `ctypes`."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
OPENMP = "-fopenmp"  # Apple's clang, for one, refuses it
TIMEOUT = 60  # seconds that a compiler may take; recurrence.c, the longest, takes 4
RETRY = 3600  # seconds after which a compiler that hung is tried again
HEADER = Path(__file__).with_name("vectors.h")  # headers that the C files include
CPU_INFO = Path("/proc/cpuinfo")
CPU_FACTS = ("model name", "flags", "CPU part", "Features")  # keys of the lines to read


class CompiledSource:
    """The functions of a C file; `vectors.h` describes their arguments.

    The library that is built from the file is kept in the user's cache folder (`XDG_CACHE_HOME`, or
    ~/.cache). Its name is <file>-<hash of sources, flags and CPU>-<checksum>.so. Loading a library
    runs its code, so a folder or file is not used if it is a link, or if another user owns it or
    can write it. If the cache folder cannot be used, each process builds the library in a temporary
    folder.
    """

    device = "cpu"
    install = "apt install gcc"

    def __init__(self, source: Path) -> None:
        self.source = source
        self._library: ctypes.CDLL | None = None
        self._tried = False
        self._problem: str | None = "torch.compile came before its first use"

    def problem(self) -> str | None:
        """Return why there is no library, or None. The first call builds or loads it."""
        if not self._tried and not torch.compiler.is_compiling():
            self._tried = True
            try:
                self._library, self._problem = self._load(), None
            except (OSError, RuntimeError) as error:
                self._problem = str(error)
        return self._problem

    def share(self, name: str, *fields: Tensor | float | None, jobs: int) -> None:
        """Call the C function `name` for the jobs 0 … jobs - 1, split among at most as many
        threads as torch has. Each call gets a struct of `fields`, its first job and the job after
        its last.

        Raises:
            RuntimeError: there is no library.
            MemoryError: there is no memory for intermediate values.
        """
        if (problem := self.problem()) is not None:
            raise RuntimeError(f"{self.source.name}: {problem}")
        library: Any = self._library
        compute = getattr(library, name)
        compute.restype = ctypes.c_int64
        given, num = _pack(fields), min(torch.get_num_threads(), jobs)
        ends = [ctypes.c_int64(jobs * i // num) for i in range(num + 1)]
        if num == 1:
            failed = compute(given, *ends)
        elif hasattr(library, "share"):
            failed = library.share(compute, given, ends[-1], ctypes.c_int64(num))
        else:
            with ThreadPoolExecutor(num) as pool:  # ctypes releases Python's global lock
                failed = any(pool.map(partial(compute, given), ends[:-1], ends[1:]))
        if failed:
            raise MemoryError(f"{self.source.name}: no memory is left")

    def _load(self) -> ctypes.CDLL:
        if os.name != "posix":
            raise RuntimeError("it is for Linux and macOS")
        sources = (file.read_text(encoding="utf-8") for file in (self.source, HEADER))
        facts = "\n".join((*sources, *FLAGS, OPENMP, platform.machine(), _describe_cpu()))
        name = f"{self.source.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
        try:
            folder = _cache_folder()
            whole = (file for file in folder.glob(f"{name}-*.so") if _is_whole(file))
            return ctypes.CDLL(str(next(whole, None) or self._build(folder, name)))
        except OSError as error:
            logger.warning("%s: built in a temporary folder: %s", self.source.name, error)
            with tempfile.TemporaryDirectory() as own:  # a loaded library no longer needs its file
                return ctypes.CDLL(str(self._build(Path(own), name)))

    def _build(self, folder: Path, name: str) -> Path:
        """Build the library and return its path, <folder>/<name>-<checksum>.so. Raises RuntimeError
        if there is no compiler, or if it fails or hangs."""
        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            raise RuntimeError(f"no C compiler: {', '.join(COMPILERS)}")
        hung = folder / f"{name}.hung"
        if hung.exists() and time.time() - hung.stat().st_mtime < RETRY:
            raise RuntimeError(f"the C compiler hung; remove {hung} to try it again")
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as own:
            built = Path(own) / name
            command = [compiler, *FLAGS, "-o", str(built), str(self.source)]
            try:
                try:
                    _compile([*command, OPENMP])
                except RuntimeError:
                    _compile(command)
            except subprocess.TimeoutExpired as error:
                hung.touch()
                raise RuntimeError(f"the C compiler took more than {TIMEOUT} s") from error
            built.chmod(0o700)
            with built.open("rb") as stream:
                os.fsync(stream.fileno())  # a power cut must not lose the bytes
            library = folder / f"{name}-{_checksum(built)}.so"
            built.replace(library)  # another process may have built it: both are valid
        logger.info("%s: compiled in %.1f s", library, time.perf_counter() - begin)
        return library


def _compile(command: list[str]) -> None:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        encoding="utf-8", errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _, message = process.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # also the processes that the compiler started
            raise
    if process.returncode:
        first = message.strip().partition("\n")[0]
        raise RuntimeError(f"the C compiler failed: {first}")


def _cache_folder() -> Path:
    """Return the folder of built libraries, in the user's cache folder. Raises OSError unless this
    user alone can write it."""
    places = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    cache = next(filter(os.path.isabs, places), None)  # the XDG standard ignores relative paths
    if cache is None:
        raise FileNotFoundError("there is no home folder")
    folder = Path(cache, "tread_zoo", "compiled")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (stat.S_ISDIR(folder.lstat().st_mode) and _is_own(folder)):
        raise PermissionError(f"{folder} is a link, or another user owns it or can write it")
    return folder


def _is_own(path: Path) -> bool:
    """Return whether this user alone can write a file or folder."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(library: Path) -> bool:
    """Return whether a library has the checksum that its name states, and this user alone can write
    it. Loading a truncated file would crash."""
    own = stat.S_ISREG(library.lstat().st_mode) and _is_own(library)
    return own and library.stem.endswith(f"-{_checksum(library)}")


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _pack(values: Iterable[Tensor | float | None]) -> bytes:
    """Return `values` as a C struct of pointers (null for None), int64_t and float. Raises
    ValueError for a tensor whose memory C would misread."""
    fields: list[tuple[str, float]] = []
    for value in values:
        if isinstance(value, Tensor):
            on_cpu = value.device.type == "cpu" and value.dtype == torch.float32
            if not (on_cpu and value.is_contiguous()):
                raise ValueError("a compiled form takes contiguous float32 tensors of a CPU.")
            fields.append(("P", value.data_ptr()))
        elif value is None:
            fields.append(("P", 0))
        else:
            fields.append(("q" if isinstance(value, int) else "f", value))
    return struct.pack("".join(kind for kind, _ in fields), *(value for _, value in fields))


def _describe_cpu() -> str:
    """Return as text what `-march=native` depends on, or the machine's name if that is unknown."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.node()
    lines = text.partition("\n\n")[0].splitlines()
    facts = (line for line in lines if line.partition(":")[0].strip() in CPU_FACTS)
    return "\n".join(facts) or platform.node()
