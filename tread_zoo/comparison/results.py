"""What a run left behind, read from its folder as plain numbers."""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tread_zoo.comparison.markdown import NEWER, SAME_PROTOCOL, check_same
from tread_zoo.evaluation.flops import count_flops, stage_flops
from tread_zoo.routing import build_routing
from tread_zoo.training.checkpoints import build_described
from tread_zoo.training.files import FAILED
from tread_zoo.training.scoring import FILE, read_scores
from tread_zoo.training.trackers import read_metrics

Curve = tuple[tuple[int, float], ...]  # (step, value), by step


@dataclass(frozen=True)
class RunResult:
    """The numbers of a run.

    Args:
        values: scores of the averaged weights, `held_out_loss` among them; `real` has what real
            images score.
        parameters: of the network.
        flops: of a training step, forward and backward, an image, as it was routed: the mean over
            the run where a schedule changes the routing.
        flops_dense: the same without routes.
        seconds: of all training steps at the median speed; sampling, saving and scoring excluded.
        images_per_s: the median over the lines of the log.
        protocol: how the scores were made.
        machine: what the run ran on; newer runs add the speed of a plain matrix product on one
            device there, `matmul_flops_per_s`, and `peak_memory_bytes` of the process that used
            most (of the main one in earlier runs; those before have a `peak_memory` that takes in
            the runs before them in one process, and is not read).
        by_level: the held-out loss of each fourth of the noise levels, the lowest first.
        failed: why it did not end, or "".
        num_steps, images: optimizer steps, and the images that they saw.
        stages: (step, FLOPs of a training step an image up to it, from the stage before), as the
            routing changes; () where it does not.
        curve: (step, held-out loss) on the way, one draw of level and noise an image.
        scores: (step, value) of each score on the way and at the end, made as `values` are.
        phases: seconds by what they went into (training, data, samples, score, saving).
        phases_since: the step after which they were counted; beyond 0 in a run that was resumed
            from a checkpoint without them.
        picture: the last grid of samples, from the same seeds in every run; "" if there is none.
    """

    values: dict[str, float]
    real: dict[str, float]
    parameters: int
    flops: int
    flops_dense: int
    seconds: float
    images_per_s: float
    protocol: dict[str, Any]
    machine: dict[str, Any]
    by_level: tuple[float, ...] = ()
    failed: str = ""
    num_steps: int = 0
    images: int = 0
    stages: Curve = ()
    curve: Curve = ()
    scores: dict[str, Curve] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    phases_since: int = 0
    picture: str = ""

    @property
    def num_processes(self) -> int:
        """How many trained together; older runs do not say, and were one."""
        return self.machine.get("num_processes", 1)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of the process that used most; None if the run does not say."""
        return self.machine.get("peak_memory_bytes")

    @property
    def flops_per_sample(self) -> int | None:
        """FLOPs of all evaluations from noise to data; None if the run does not say."""
        return self.protocol.get("sampling", {}).get("flops_per_image")

    def flops_by(self, step: int) -> float:
        """Return the FLOPs of training of all images up to a step, as they were routed."""
        total, begin = 0.0, 0
        for end, flops in self.stages or ((self.num_steps, self.flops),):
            total += flops * max(0, min(step, end) - begin)
            begin = end
        return total * self.images / self.num_steps


def read_run(folder: Path) -> RunResult:
    """Read the folder of a run that has ended.

    Raises:
        ValueError: the run has not ended, or was scored by different protocols on its way.
    """
    failed = folder / FAILED
    if not failed.exists() and not (folder / "score.json").exists():
        raise ValueError(
            f"{folder} holds no run that has ended: score.json is missing. Let it end, by the "
            "command that began it and resume=latest, or leave it out."
        )
    settings = json.loads((folder / "config.json").read_text())
    score: dict[str, Any] = {"values": {}, "real": {}, "protocol": {}, "run": {}}
    if not failed.exists():
        score = json.loads((folder / "score.json").read_text())
    rows = read_metrics(folder)
    speeds = [row["images_per_s"] for row in rows if "images_per_s" in row]
    speed = statistics.median(speeds) if speeds else math.nan  # it may fail before its first line
    training = settings["training"]
    images = seen_images(training, score["run"])
    parameters, stages, flops_dense = _cost(settings)
    pictures = sorted((folder / "samples").glob("step_*.png"))
    return RunResult(
        values=score["values"],
        real=score["real"],
        parameters=parameters,
        flops=round(_mean(stages)),
        flops_dense=flops_dense,
        seconds=images / speed,
        images_per_s=speed,
        protocol=score["protocol"],
        machine=score["run"],
        by_level=tuple(score.get("held_out_loss_by_level", ())),
        failed=failed.read_text() if failed.exists() else "",
        num_steps=training["num_steps"],
        images=images,
        stages=stages,
        curve=tuple((r["step"], r["held_out_loss"]) for r in rows if "held_out_loss" in r),
        scores=score_curves(folder),
        phases=score["run"].get("seconds", {}),
        phases_since=score["run"].get("seconds_since_step", 0),
        picture=str(pictures[-1]) if pictures else "",
    )


def seen_images(training: Mapping[str, Any], machine: Mapping[str, Any]) -> int:
    """Return the images that the steps of a run see; older runs do not say of how many processes,
    and had one."""
    batch = training["batch_size"] * training["gradient_accumulation_steps"]
    return batch * training["num_steps"] * machine.get("num_processes", 1)


def score_curves(folder: Path) -> dict[str, Curve]:
    """Return the curve of each score of a run, by its name in `score.json`; {} without records.

    Raises:
        ValueError: a line that is no record, or scores by different protocols, as a run has that
            was resumed with another sampler or evaluation.
    """
    records = read_scores(folder)
    keys = [key for key in SAME_PROTOCOL if key != "step"]
    try:
        check_same([(f"step {s}", r["protocol"]) for s, r in records.items()], keys, NEWER)
    except ValueError as error:
        raise ValueError(
            f"{folder / FILE}: {error} Of a run that is there: keep the lines of one setting."
        ) from error
    names = dict.fromkeys(name for record in records.values() for name in record["values"])
    return {
        name: tuple(
            (step, record["values"][name])
            for step, record in records.items()
            if math.isfinite(record["values"].get(name, math.nan))
        )
        for name in names
    }


def _cost(settings: dict[str, Any]) -> tuple[int, Curve, int]:
    """Return parameters, and the FLOPs of a step an image as routed (by stage) and dense."""
    with torch.device("meta"):
        network = build_described(settings["backbone"])
    routing = build_routing(
        **settings["routing"],
        num_blocks=network.num_blocks,
        default_selector=network.default_selector,
        default_range=network.default_range,
    )
    return (
        sum(p.numel() for p in network.parameters()),
        tuple(
            (steps.stop, flops)
            for steps, flops in stage_flops(network, routing, settings["training"]["num_steps"])
        ),
        count_flops(network, backward=True),
    )


def _mean(stages: Curve) -> float:
    """Return the mean over the steps of all stages."""
    begins = [0, *(end for end, _ in stages)]
    total = sum((end - begin) * flops for begin, (end, flops) in zip(begins, stages, strict=False))
    return total / begins[-1]
