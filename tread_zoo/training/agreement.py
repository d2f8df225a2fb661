"""What must be the same as a run starts: on all of its ranks, and in the checkpoint it resumes.

Each rank reads the run's folder, the data and the configuration by itself. Folders that are not
shared, a network file system that lags behind or one rank's bad read would let them train together
from different weights, or on different orders of the data, and nothing would show it.
"""

import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread_zoo.process_group import leave_connections
from tread_zoo.training.checkpoints import Checkpoint, differences
from tread_zoo.training.options import TrainingOptions

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

IMAGES_PER_STEP = "images_per_step"  # in a checkpoint's record
# Paths may differ between machines (data_options, evaluation); so may the number of workers.
_SECTIONS = ("backbone", "routing", "objective", "data", "seed", "training")
_OWN = {"num_workers"}
_MOST_NAMED = 4


def check_ranks_agree(
    accelerator: "Accelerator", checkpoint: Checkpoint | None, settings: dict[str, Any]
) -> None:
    """Check that all ranks start the same run; every rank must call this, and waits for all.

    Args:
        accelerator: of the run.
        checkpoint: that this rank continues from, or None.
        settings: `Parts.settings` of this rank.

    Raises:
        ValueError: they differ; on every rank, with what each of them has.
    """
    if accelerator.num_processes == 1:
        return
    ranks = _from_all_ranks(accelerator, _facts(checkpoint, settings))
    error = _other_checkpoints(ranks) or _other_settings(ranks)
    if error:
        leave_connections()
        raise ValueError(error)


def images_per_step(options: TrainingOptions, num_ranks: int) -> int:
    """Return how many images one optimizer step sees, on all ranks together."""
    return num_ranks * options.batch_size * options.gradient_accumulation_steps


def warn_of_another_batch(checkpoint: Checkpoint, options: TrainingOptions, num_ranks: int) -> None:
    """Say so where a resumed run sees another number of images a step than it did.

    Checkpoints of earlier versions do not know theirs.
    """
    before = checkpoint.meta.get(IMAGES_PER_STEP)
    now = images_per_step(options, num_ranks)
    if before is None or before == now:
        return
    micro_batches = num_ranks * options.gradient_accumulation_steps
    if before % micro_batches:
        remedy = f"no training.batch_size on {num_ranks} rank(s) would keep it"
    else:
        remedy = f"training.batch_size={before // micro_batches} keeps it"
    logger.warning(
        "resumed with %d images a step (%d rank(s) x batch_size %d x %d accumulated), where %s had "
        "%d: from here it is another run, on other images, at a learning rate that was chosen for "
        "%d; %s", now, num_ranks, options.batch_size, options.gradient_accumulation_steps,
        checkpoint.path, before, before, remedy,
    )  # fmt: skip


def _facts(checkpoint: Checkpoint | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank starts with, for the others to compare."""
    compared = {section: settings[section] for section in _SECTIONS}
    compared["training"] = {k: v for k, v in compared["training"].items() if k not in _OWN}
    return {
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "digest": checkpoint and checkpoint.digest,
        "step": checkpoint and checkpoint.step,
        "path": checkpoint and str(Path(checkpoint.path).resolve()),
        "settings": compared,
    }


def _from_all_ranks(accelerator: "Accelerator", own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each rank gave, in the order of ranks."""
    import torch.distributed as dist

    gathered: list[dict[str, Any]] = [{}] * accelerator.num_processes
    dist.all_gather_object(gathered, own)
    return gathered


def _other_checkpoints(ranks: list[dict[str, Any]]) -> str | None:
    """Return what is wrong where ranks continue from different checkpoints, or some from none."""
    groups: dict[str | None, list[int]] = {}
    for rank, facts in enumerate(ranks):
        groups.setdefault(facts["digest"], []).append(rank)
    if len(groups) == 1:
        return None
    found = []
    for members in list(groups.values())[:_MOST_NAMED]:
        first = ranks[members[0]]
        where = f"on {first['host']} in {first['folder']}"
        if first["digest"] is None:
            found.append(f"{_named(members)} ({where}) found none and would start at step 0")
        else:
            found.append(f"{_named(members)} ({where}) would go on at step {first['step']} from "
                         f"{first['path']}")  # fmt: skip
    return (
        f"the ranks of this run do not continue from the same checkpoint: {'; '.join(found)}. "
        "Nothing was trained. All ranks must read one run_dir: put it on a file system that all "
        "machines share, give it as an absolute path, and start again; or name one checkpoint that "
        "all of them can read, resume=RUN/checkpoints/step_…"
    )


def _other_settings(ranks: list[dict[str, Any]]) -> str | None:
    """Return what is wrong where ranks have other data, or were told of other settings."""
    expected, wrong = ranks[0]["settings"], []
    for rank, facts in enumerate(ranks):
        values = differences("", expected, facts["settings"])
        if values:
            more = f" and {len(values) - 3} more" if len(values) > 3 else ""
            said = " and ".join(value.lstrip(".") for value in values[:3])
            wrong.append(f"rank 0 has {said}, as rank {rank} (on {facts['host']}) has{more}")
    if not wrong:
        return None
    more = f"; {len(wrong) - _MOST_NAMED} more ranks differ" if len(wrong) > _MOST_NAMED else ""
    return (
        f"the ranks of this run have other data or settings: {'; '.join(wrong[:_MOST_NAMED])}"
        f"{more}. Nothing was trained. Give every rank the same command, the same version of the "
        "configuration, and the same data: copy the data set anew to the machine that differs."
    )


def _named(ranks: list[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1, 2 …`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}{' …' if len(ranks) > 8 else ''}"
