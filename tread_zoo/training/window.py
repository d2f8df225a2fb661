"""What is counted between two lines of the log, and what a run's time goes into.

The levels of noise are told apart as the held-out loss does: the images of a window, from the
lowest level to the highest, in fourths. B batch.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator

NUM_LEVELS = 4
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


class Clock:
    """The seconds of a process by what they went into: training, data, samples, saving, score.

    On a GPU the host runs ahead: `data` is what it waits for the loader, which only costs time
    where it is long.

    Attributes:
        seconds: by what they went into, of a resumed run since its first start.
        since: the step after which they were counted: 0, or that of a checkpoint from before
            checkpoints had them.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.since = 0
        self._inside = 0.0  # seconds of activities within the one that is being timed

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint remembers."""
        return {"seconds": dict(self.seconds), "since": self.since}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Go on from the `state` that the checkpoint of a step has, None if it has none."""
        state = state or {"seconds": {}, "since": step}
        self.seconds, self.since = dict(state["seconds"]), state["since"]

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Count the time inside for `name`, less what is timed within."""
        before, self._inside, began = self._inside, 0.0, time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inside
            self._inside = before + elapsed


class Window:
    """Mean losses and speed since the last line of the log; waits for the device once a line."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.levels: list[Tensor] = []
        self.restart()

    def restart(self) -> None:
        """Forget the time and images so far: sampling and saving do not count as training."""
        self.images, self.began = 0, time.perf_counter()

    def add(self, losses: Tensor, levels: Tensor, images: int) -> None:
        """Take in a micro-step: losses and noise levels [B] of this rank, images of all ranks."""
        self.losses.append(losses.detach())
        self.levels.append(levels)
        self.images += images

    def close(self, accelerator: "Accelerator") -> dict[str, float]:
        """Return the numbers of the window, and begin another.

        Returns:
            `loss`: the mean over all ranks and over the micro-steps where it was finite; nan if it
            never was. `images_per_s`. `loss_level_1` … `loss_level_4`: this rank's mean by fourths
            of the levels, the lowest first.
        """
        means = torch.stack([losses.mean() for losses in self.losses]).float()
        finite = means.isfinite()
        sums = torch.stack((means.where(finite, 0).sum(), finite.sum().float()))
        total, count = accelerator.reduce(sums, reduction="sum").tolist()
        speed = self.images / (time.perf_counter() - self.began)
        order = torch.cat(self.levels).argsort()
        fourths = torch.cat(self.losses).float()[order].tensor_split(NUM_LEVELS)
        by_level = torch.stack([part.mean() for part in fourths]).tolist()
        self.losses, self.levels = [], []
        self.restart()
        named = {f"loss_level_{index}": loss for index, loss in enumerate(by_level, start=1)}
        return {"loss": total / count if count else math.nan, "images_per_s": speed, **named}


def forget_peak_memory(device: torch.device) -> None:
    """Begin to watch anew, so that the peak of a run is not that of another before it in the same
    process. On a CPU this is possible on Linux alone; elsewhere earlier peaks stay."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        CLEAR_REFS.write_text("5")  # see proc(5): the resident set's peak becomes what it is now


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were used since `forget_peak_memory`: on a GPU what tensors took
    there, else what all of the process did."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    with suppress(OSError, StopIteration):
        lines = STATUS.read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # bytes there, KiB elsewhere
