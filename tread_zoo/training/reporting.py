"""What a run shows and leaves behind: log lines, a progress bar, pictures, numbers, a score."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import torch

from tread_zoo.backbone import Backbone
from tread_zoo.diffusion import generate
from tread_zoo.evaluation.conditions import conditions_of
from tread_zoo.evaluation.evaluate import describe_record
from tread_zoo.evaluation.flops import count_flops, training_flops
from tread_zoo.evaluation.held_out import held_out_loss
from tread_zoo.evaluation.naming import score_names
from tread_zoo.evaluation.pictures import plot_losses, save_grid
from tread_zoo.kernels import describe
from tread_zoo.runtime import describe_device, matmul_speed
from tread_zoo.training.files import CONFIG, FAILED, told_if_not_written, write_text
from tread_zoo.training.parts import Parts
from tread_zoo.training.scoring import HELD_OUT_SEED, Scores
from tread_zoo.training.trackers import build_trackers, read_metrics
from tread_zoo.training.window import Clock

logger = logging.getLogger(__name__)

GRID_IMAGES = 100
GRID_SEED = 0
QUIET = ("loss_level_", "held_out_loss_level_", "peak_memory")  # for the trackers alone


class Reporter:
    """The main process's voice.

    Args:
        parts: the run's.
        folder: the run's; it is there.
        precision: resolved.
        step: optimizer steps done so far.
        tracker: `name`, and `project` for wandb.

    Attributes:
        scores: the records so far.
    """

    def __init__(
        self,
        parts: Parts,
        folder: Path,
        *,
        precision: str,
        step: int,
        tracker: dict[str, str],
    ) -> None:
        from tqdm.auto import tqdm

        self.parts, self.folder, self.precision = parts, folder, precision
        self.machine: dict[str, str | int] = {}
        (folder / FAILED).unlink(missing_ok=True)
        self.scores = Scores(folder, step)
        write_text(folder / CONFIG, json.dumps(parts.settings, indent=2))
        self.trackers = build_trackers(
            tracker["name"], folder, step, parts.settings, tracker.get("project", "tread_zoo")
        )
        self.bar = tqdm(
            total=parts.options.num_steps,
            initial=step,
            unit="step",
            disable=not sys.stderr.isatty(),
        )

    def begin(self, device: torch.device, num_processes: int, origin: str) -> None:
        """Say what runs, on what, and how much of the work routing leaves."""
        parts, network = self.parts, self.parts.backbone
        self.machine = {
            "device": describe_device(device),
            "precision": self.precision,
            "num_processes": num_processes,
            "torch": torch.__version__,
        }
        dense = count_flops(network, backward=True)
        routed = training_flops(network, parts.routing, parts.options.num_steps)
        mean = ", on average over training" if parts.routing.is_scheduled else ""
        facts = parts.settings["data"]
        size = "x".join(map(str, [facts["channels"], *facts["image_size"]]))
        condition = f"{facts['num_classes']} classes"
        if parts.data.context is not None:
            condition = "contexts of {} embeddings of width {}".format(*parts.data.context)
        place = f"{describe_device(device)}; {self.precision}; {num_processes} process(es)"
        millions = sum(p.numel() for p in network.parameters()) / 1e6
        lines = {
            "device": [place],
            "kernel": describe(device),
            "data": [f"{facts['name']}: {facts['num_images']} images {size}, {condition}"],
            "backbone": [f"{network.name}: {millions:.2f} M parameters"],
            "routing": [f"{parts.routing.describe(network.grid)}",
                        f"{routed / 1e6:.1f} MFLOPs an image, forward and backward{mean}; "
                        f"dense {dense / 1e6:.1f}"],
            "run": [f"{self.folder} {origin}, {parts.options.num_steps} steps in all"],
        }  # fmt: skip
        for name, texts in lines.items():
            for text in texts:
                logger.info("%-9s %s", name, text)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Hand numbers that are finite to the trackers, and to the bar or the log."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        for tracker in self.trackers:
            tracker.log(step, values)
        shown = {name: value for name, value in values.items() if not name.startswith(QUIET)}
        text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        if self.bar.disable:
            logger.info("step %5d  %s", step, text)
        elif "loss" in values:
            self.bar.set_postfix_str(
                f"loss {values['loss']:.4f}, {values['images_per_s']:.0f} images/s"
            )

    def samples(self, network: Backbone, step: int) -> None:
        """Leave a grid of samples from fixed seeds, and the held-out loss, of averaged weights."""
        parts, indices = self.parts, range(GRID_IMAGES)
        images = generate(
            network,
            parts.objective,
            parts.sampling,
            indices=indices,
            labels=conditions_of(network, parts.data).of(indices),
            seed=GRID_SEED,
            batch_size=parts.evaluation.batch_size,
            precision=self.precision,
            weak=parts.weak,
        )
        path = self.folder / "samples" / f"step_{step:08d}.png"
        device = next(network.parameters()).device
        with told_if_not_written(path):
            path.parent.mkdir(exist_ok=True)
            save_grid(parts.data.codec.to_pixels(images, device=device), path)
            for tracker in self.trackers:
                tracker.image(step, "samples", path)
        held_out = held_out_loss(
            network, parts.objective, parts.data, seed=HELD_OUT_SEED, precision=self.precision
        )
        if held_out is not None:
            levels = {f"held_out_loss_level_{i}": loss for i, loss in enumerate(held_out[1], 1)}
            self.numbers(step, {"held_out_loss": held_out[0], **levels})

    def score(self, record: dict[str, Any], clock: Clock) -> None:
        """Keep a record of the averaged weights on the way, and hand its numbers to the trackers.

        `clock` has what the run's time went into.
        """
        self._keep(record, clock)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in record["values"].items())
        logger.info("%-9s step %d  %s", "score", record["protocol"]["step"], shown)

    def trained(self) -> None:
        """Plot the losses; the last step is done."""
        self.bar.close()
        with told_if_not_written(self.folder / "loss.png"):
            plot_losses(read_metrics(self.folder), self.folder / "loss.png")

    def finish(
        self, record: dict[str, Any], clock: Clock, device: torch.device, memory: int
    ) -> None:
        """Leave the last score of the run that was trained on `device`.

        `clock` as in `score`; `memory`: bytes, of the process that used most.
        """
        self.machine["peak_memory_bytes"] = memory
        self.machine["matmul_flops_per_s"] = round(matmul_speed(device, self.precision))
        self._keep(record, clock)
        write_text(self.folder / "score.json", json.dumps(record, indent=2))
        for line in describe_record(record):
            logger.info("%-9s %s", "score", line)
        logger.info("%-9s %s: samples/, loss.png, score.json, checkpoints/", "done", self.folder)

    def _keep(self, record: dict[str, Any], clock: Clock) -> None:
        """Add what the record ran on, write it, and log what is not logged yet."""
        step, names = record["protocol"]["step"], score_names(record)
        seconds = {name: round(value, 3) for name, value in clock.seconds.items()}
        record["run"] = {**self.machine, "seconds": seconds}
        if clock.since:
            record["run"]["seconds_since_step"] = clock.since
        before = self.scores.get(step)  # a finished run that is resumed scores its end again
        self.scores.add(record)
        values = {name: value for name, value in names.items() if math.isfinite(value)}
        if values and (before is None or score_names(before) != names):
            for tracker in self.trackers:
                tracker.log(step, values)

    def close(self) -> None:
        """Finish writing."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
