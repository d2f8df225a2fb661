"""Run by `accelerate launch`: several runs one after the other, in one process group.

Starting the processes takes longer than a small run, so that a test which needs many asks for all
of them at once.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.small_run import parts_of, settings
from tread_zoo.diffusion import Draw
from tread_zoo.routing import Route
from tread_zoo.training import compiling, train
from tread_zoo.training.loop import losses_of
from tread_zoo.training.parts import StepDraw, draw_step


def make_parts(backbone):
    """Return the parts of a small run whose weights give every parameter a gradient."""
    parts = parts_of(settings(f"backbone={backbone}"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in parts.backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return parts


def first_draw(parts, rank, num_ranks):
    """Return what a rank draws for step 0."""
    images, labels = next(parts.batches(rank, num_ranks, 0))
    return draw_step(
        parts, images, labels, rank=rank, num_ranks=num_ranks, micro_step=0,
        device=torch.device("cpu"),
    )  # fmt: skip


def join(draws):
    """Return the draws of several ranks as one batch."""
    routes = zip(*(drawn.routes for drawn in draws), strict=True)
    return StepDraw(
        torch.cat([drawn.images for drawn in draws]),
        torch.cat([drawn.labels for drawn in draws]),
        Draw(
            torch.cat([drawn.draw.noise for drawn in draws]),
            torch.cat([drawn.draw.level for drawn in draws]),
        ),
        tuple(Route(r[0].start, r[0].end, torch.cat([one.ids for one in r])) for r in routes),
    )


def save_gradient(backbone, out):
    """Save the first step's averaged gradient of each rank."""
    accelerator = Accelerator(cpu=True)
    parts = make_parts(backbone)
    model = accelerator.prepare(parts.backbone)
    drawn = first_draw(parts, accelerator.process_index, accelerator.num_processes)
    accelerator.backward(losses_of(model, parts, drawn).mean())
    torch.save(
        {"world": accelerator.num_processes, "grads": [p.grad for p in model.parameters()]},
        Path(out) / f"rank_{accelerator.process_index}.pt",
    )


def watch_writes(folder):
    """Return a list that grows with what this process makes, opens to write, or removes there."""
    seen = []

    def hook(event, args):
        opened = event == "open" and bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if opened or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            path = str(args[0])
            if path.startswith(str(folder)):
                seen.append(path)

    sys.addaudithook(hook)
    return seen


def main(jobs):
    """Do the jobs of a file: `{"gradient": backbone, "out": folder}`, or `{"train": overrides,
    "sharded": bool}`, which is a run with or without FSDP2. Graphs are captured, not translated."""
    compiling.BACKEND = "eager"
    folder, rank = Path(jobs).parent, os.environ["RANK"]
    written = watch_writes(folder)
    os.environ["FSDP_VERSION"] = "2"
    for job in json.loads(Path(jobs).read_text()):
        if "gradient" in job:
            save_gradient(job["gradient"], job["out"])
        else:
            os.environ["ACCELERATE_USE_FSDP"] = str(job["sharded"]).lower()
            train(**settings(*job["train"]))
            (folder / f"written_by_{rank}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
