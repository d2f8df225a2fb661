"""Run by `accelerate launch` in test_sharding.py: the same runs under DDP and under FSDP2.

One process group serves all cases, for starting it takes longer than they do.
"""

import json
import os
import sys
from pathlib import Path

from tests.small_run import parts_of, settings
from tread_zoo.training import loop
from tread_zoo.training.reporting import Window

QUICK = ("training.num_steps=20", "training.log_every=100", "training.schedule=constant")


def losses_of(folder, sharded, options, num_steps, checkpoint=None):
    """Train some steps; return the mean loss of all ranks at each, and the run."""
    os.environ["ACCELERATE_USE_FSDP"] = str(sharded).lower()
    os.environ["FSDP_VERSION"] = "2"
    given = settings(*QUICK, *options)
    parts = parts_of(given)
    accelerator = loop._make_accelerator(
        loop.resolve_device("cpu"), parts.options.precision,
        parts.options.gradient_accumulation_steps,
        blocks_may_idle=parts.routing.path_drop_probability > 0,
    )  # fmt: skip
    run, step = loop._start(
        parts, accelerator, folder, checkpoint, parts.options.precision, given["tracker"]
    )
    batches = parts.batches(accelerator.process_index, accelerator.num_processes, step)
    losses = []
    for k in range(step, step + num_steps):
        window = Window()
        norm = loop._optimize(run, batches, k, parts.options.learning_rate_at(k), window)
        run.average.update(parts.backbone, k + 1)
        losses.append([window.close(accelerator, k)["loss"], float(norm)])
    return losses, run


def main(out, *cases):
    """Write `<out>/<number>.json` with the losses of each case, DDP's and FSDP2's."""
    out = Path(out)
    for number, case in enumerate(json.loads(Path(cases[0]).read_text())):
        found = {}
        for sharded in (False, True):
            folder = out / f"{number}_{'fsdp' if sharded else 'ddp'}"
            found[str(sharded)], run = losses_of(folder, sharded, case, 20)
        if run.accelerator.is_main_process:
            (out / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
