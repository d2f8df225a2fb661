"""Joining and leaving the processes of a run that a launcher started.

`accelerate launch` and torchrun set torch's variables (RANK, WORLD_SIZE, …). `srun python
scripts/train.py` sets SLURM's alone, which are translated here:

    SLURM_PROCID, SLURM_STEP_NUM_TASKS   -> RANK, WORLD_SIZE
    SLURM_LOCALID                        -> LOCAL_RANK
    SLURM_NTASKS_PER_NODE                -> LOCAL_WORLD_SIZE, where the job sets it
    SLURM_STEP_NODELIST, its first host  -> MASTER_ADDR
    SLURM_JOB_ID                         -> MASTER_PORT, one of 20000 … 59999
"""

import atexit
import logging
import os
import re
import subprocess
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


def prepare_process_group(device: torch.device) -> None:
    """Prepare this process for accelerate, which connects the processes of a run. SLURM's variables
    are translated into those that torch reads. If `device` has an index, as in cuda:1, it becomes
    torch's current device."""
    atexit.unregister(_close)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    join_slurm_step()


def log_waiting(timeout_s: float) -> None:
    """Log that this process waits up to `timeout_s` seconds for the others to connect, if there are
    others. A process that failed before it could connect leaves no other sign."""
    environment = os.environ
    if (others := int(environment.get("WORLD_SIZE", "1")) - 1) > 0:
        logger.info(
            "rank      %s waits up to %d s for %d other processes at %s:%s; if one is missing, its "
            "output says why", environment.get("RANK"), timeout_s, others,
            environment.get("MASTER_ADDR"), environment.get("MASTER_PORT"),
        )  # fmt: skip


def rank_and_number() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    alone = not (dist.is_available() and dist.is_initialized())
    return (0, 1) if alone else (dist.get_rank(), dist.get_world_size())


def wait_for_all() -> None:
    """Wait until all processes of the run have called this."""
    if rank_and_number()[1] > 1:
        dist.barrier()


def close_process_group_at_exit() -> None:
    """Close the connections to other processes when this one exits. Call this only where every
    process is about to end.

    An open group may abort the interpreter's shutdown, and the exit status is lost. A process that
    fails alone must not close the group: closing would wait for processes that wait for this one.
    """
    atexit.unregister(_close)
    atexit.register(_close)


def join_slurm_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables where they are missing, if this process is one of several tasks of a
    SLURM step. The shell of a batch script is not a step.

    Raises:
        ValueError: the first host cannot be determined.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks < 2 or "RANK" in environment:
        return
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(hosts),
        "MASTER_PORT": str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 40000),
    }
    if "SLURM_NTASKS_PER_NODE" in environment:
        variables["LOCAL_WORLD_SIZE"] = environment["SLURM_NTASKS_PER_NODE"]
    for name, value in variables.items():
        environment.setdefault(name, value)


def _close() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _first_host(hosts: str) -> str:
    """Return the first host in SLURM's list of hosts; a single name is returned unchanged."""
    if re.fullmatch(r"[\w.-]+", hosts):
        return hosts
    try:
        command = ["scontrol", "show", "hostnames", hosts]
        listed = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=30, check=True
        )
        return listed.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, UnicodeError, IndexError) as error:
        raise ValueError(
            f"SLURM_STEP_NODELIST={hosts!r}: the first host is not known ({error}). "
            "Set MASTER_ADDR to it: export MASTER_ADDR=$(scontrol show hostnames | head -n 1)."
        ) from error
