"""Run by `accelerate launch`: several runs one after the other, in the same processes.

Starting the processes takes longer than a small run, so that a test which needs many asks for all
of them at once.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from tests.small_run import settings
from tread_zoo.diffusion import FlowMatching
from tread_zoo.diffusion.samplers import Euler
from tread_zoo.registry import register
from tread_zoo.training import setup
from tread_zoo.training.loop import train


@register("sampler", "euler_that_ends")
@dataclass(frozen=True, kw_only=True)
class EulerThatEnds(Euler):
    """Euler's rule, during which rank `rank` receives a signal; signal 9, SIGKILL, ends it at
    once."""

    rank: int = 0
    number: int = signal.SIGTERM

    def __call__(self, problem, x, levels):
        if len(x) > 1 and int(os.environ["RANK"]) == self.rank:  # one is for counting FLOPs
            os.kill(os.getpid(), self.number)
        return super().__call__(problem, x, levels)


losses = []  # of the images of a batch, of the job that is done


@register("objective", "flow_that_ends")
@dataclass(frozen=True)
class FlowThatEnds(FlowMatching):
    """Flow matching in whose third step rank 1 gets a signal, or with 0 a loss that is NaN."""

    number: int = 0

    def loss(self, predict, x, draw):
        own, values = super().loss(predict, x, draw)
        losses.append(own)
        if len(losses) == 3 and os.environ["RANK"] == "1":
            if self.number:
                os.kill(os.getpid(), self.number)
            else:
                own = own * torch.nan
        return own, values


def main(jobs):
    """Do the jobs of a file: `{"train": overrides, "sharded": bool}`, a run with or without FSDP2.

    Rank 1 takes the overrides "of_rank_1", too. A run that "ends" by an error or a signal says how,
    in a line of JSON. Graphs are captured, not translated.
    """
    setup.COMPILE_BACKEND = "eager"
    os.environ["FSDP_VERSION"] = "2"
    for job in json.loads(Path(jobs).read_text()):
        AcceleratorState._reset_state()  # a run is a process; here are several
        losses.clear()
        os.environ["ACCELERATE_USE_FSDP"] = str(job["sharded"]).lower()
        own = job.get("of_rank_1", []) if os.environ["RANK"] == "1" else []
        try:
            train(**settings(*job["train"], *own))
        except (ValueError, FloatingPointError, SystemExit) as error:
            if not job.get("ends"):
                raise
            print(json.dumps({"status": getattr(error, "code", 1), "text": str(error)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
