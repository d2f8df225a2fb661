"""Scripts in this process, and processes without the seconds that torch takes to import.

A server imports other people's heavy libraries once and forks for each call (multiprocessing's
forkserver). The process is a real one, with its own arguments, folder, environment, exit status and
output, and imports all of this project anew. Two things differ from `python …`: the modules in
`PRELOADED` are already imported, and atexit handlers do not run; tests of either take a fresh
process.
"""

import gc
import io
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "torch", "torchvision", "accelerate", "hydra", "matplotlib.figure", "pandas", "scipy.stats",
    "pytest",
]  # fmt: skip


def run_script(script, *words, cwd):
    """Do what `python script *words` does, in this process, and return its `CompletedProcess`."""
    out, err, root = io.StringIO(), io.StringIO(), logging.getLogger()
    argv, path, handlers, level = sys.argv, sys.path, root.handlers, root.level
    sys.argv, sys.path = [str(script), *map(str, words)], [str(Path(script).parent), *path]
    root.handlers, status = [], 0
    try:
        with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        err.write(end.code if isinstance(end.code, str) else "")
    finally:
        sys.argv, sys.path, root.handlers = argv, path, handlers
        root.setLevel(level)
    return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), err.getvalue())


def run_python(*arguments, cwd=None, env=None, fresh=False, timeout=240):
    """Do what `python *arguments` does and return its `CompletedProcess`; nothing is on its stdin.

    Args:
        arguments: a script, `-m` and a module, or `-c` and code; then what sys.argv[1:] is to be.
        env: the whole environment; this process's by default.
        fresh: start an interpreter of its own, as a user does.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout` seconds, and was killed.
    """
    command = [str(argument) for argument in arguments]
    env, cwd = dict(os.environ if env is None else env), str(cwd or os.getcwd())
    if fresh or sys.platform != "linux":  # elsewhere libraries may not survive a fork
        return subprocess.run(
            [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True,
            check=False, timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=_run, args=(command, cwd, env, folder))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(command, process.exitcode, *said)


def run_ranks(*arguments, port, num_ranks=2):
    """Do what `torchrun --nproc-per-node=2 *arguments` does on CPUs, and return each rank's end."""
    common = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks),
        "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT),
    }  # fmt: skip

    def run(rank):
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_python(*arguments, env=env, timeout=600)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def _run(command, cwd, env, folder):
    """Become `python *command` in a forked process."""
    gc.freeze()  # what was imported before is never looked through again
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1 if stream is sys.stdout else 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    flag = command[0] if command[0] in ("-m", "-c") else None
    what, *rest = command[1:] if flag else command
    sys.argv = [flag if flag == "-c" else what, *rest]
    listed = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = ["" if flag else str(Path(what).resolve().parent), *listed]
    try:
        if flag == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif flag == "-c":
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(what, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
