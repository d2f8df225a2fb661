"""Measurements between two lines of the log: losses, speed, memory. B batch."""

import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tread_zoo.training.setup import TrainState

NUM_LEVELS = 4  # losses are logged for each quarter of the noise levels, lowest first
# Peak TFLOPS from data sheets, without sparsity: (fp32 without TF32, bf16 or fp16).
PEAK_TFLOPS = {
    "A10": (31.2, 125), "A30": (10.3, 165), "A40": (37.4, 149.7),
    "A100": (19.5, 312), "A100 PCIE": (19.5, 312), "RTX A6000": (38.7, 154.8),
    "L4": (30.3, 121), "L40S": (91.6, 362), "RTX 6000 ADA": (91.1, 364.2),
    "RTX 3090": (35.6, 71), "RTX 4090": (82.6, 165.2),
    "H100": (67, 989), "H100 PCIE": (51, 756), "H100 NVL": (60, 835), "H200": (67, 989),
    "B200": (75, 2250), "MI300X": (163.4, 1307.4),
}  # fmt: skip
_ASIDE = r"NVIDIA|AMD Instinct|GeForce|Generation|SXM\d|\d+GB|HBM\d\w?"  # ignored in a GPU's name


@contextmanager
def timed(state: TrainState, name: str) -> Iterator[None]:
    """Add the seconds that the `with` block takes to `state.seconds[name]`. Blocks may be nested:
    the seconds of `training` include those of `data`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        state.seconds[name] = state.seconds.get(name, 0.0) + time.perf_counter() - began


class Window:
    """Measurements of the optimizer steps since the last line of the log. Only the seconds of
    training count for the speed."""

    def __init__(self, state: TrainState) -> None:
        self.learning_rate = self.grad_norm = math.nan  # at the last step
        self._begin(state)

    def _begin(self, state: TrainState) -> None:
        self._first, self._began = state.step, state.seconds.get("training", 0.0)
        self.norms: list[Tensor] = []  # gradient norm of each step, on the device
        self._losses: list[Tensor] = []
        self._levels: list[Tensor] = []
        self._means: dict[str, list[Tensor]] = {}

    def add(self, losses: Tensor, values: dict[str, Tensor], levels: Tensor) -> None:
        """Add the results of a micro-step of this rank: `losses` and noise `levels`, [B] each, and
        `values`, other tensors by name, of which the means are logged."""
        self._losses.append(losses.detach().float())
        self._levels.append(levels)
        for name, value in {"loss": losses, **values}.items():
            self._means.setdefault(name, []).append(value.detach().float().mean())

    def step_losses(self) -> Tensor:
        """Return the mean loss of each step [steps] on this rank, float32."""
        return torch.stack(self._means["loss"]).view(len(self.norms), -1).mean(dim=1)

    def close(self, state: TrainState) -> dict[str, float]:
        """Return the window's measurements by name, and begin a new window; every rank must call
        this.

        They are the means of `loss` and of the objective's other values; `images_per_s`;
        `loss_level_1` … `loss_level_4`, the mean losses of this rank's images in four quarters of
        rising noise level; `learning_rate` and `grad_norm` at the last step; and `peak_memory` in
        bytes.
        """
        numbers = {
            name: state.accelerator.reduce(torch.stack(means).mean(), reduction="mean").item()
            for name, means in self._means.items()
        }
        num_images = (state.step - self._first) * state.images_per_step
        numbers["images_per_s"] = num_images / (state.seconds["training"] - self._began)
        order = torch.cat(self._levels).argsort()
        fourths = torch.cat(self._losses)[order].tensor_split(NUM_LEVELS)
        numbers |= {f"loss_level_{i}": part.mean().item() for i, part in enumerate(fourths, 1)}
        numbers |= {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}
        numbers["peak_memory"] = float(peak_memory(state.accelerator.device))
        self._begin(state)
        return numbers


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes since the start: of the tensors on `device` if this is a CUDA
    GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # bytes on macOS, KiB elsewhere


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOPs per second of the GPU that torch calls `name`, from its data sheet, at
    `precision`: fp32, bf16 or fp16. None if unknown, as for laptops and partitions (MIG)."""
    words = re.sub(_ASIDE, " ", name).replace("-", " ").upper().split()
    fp32, half = PEAK_TFLOPS.get(" ".join(words), (None, None))
    peak = fp32 if precision == "fp32" else half
    return None if peak is None else peak * 1e12
