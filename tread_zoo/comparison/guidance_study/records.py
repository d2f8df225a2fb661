"""Sampling and scoring, one record for each trial and run, each made once.

    <out>/records/<name>.json   a record, written beside and renamed
    <out>/records/<name>.npz    the first of its images, uint8 [n, C, H, W]; there before the record

Image i of every record begins from the same noise and label. The first seed of all trials comes
before the second of any, so a study that is cut off has all settings to show.
"""

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tread_zoo.comparison.guidance_study.asked import sampling_options
from tread_zoo.comparison.guidance_study.groups import run_name, seed_of
from tread_zoo.comparison.guidance_study.plan import Plan, Trial
from tread_zoo.data import ImageData, to_uint8
from tread_zoo.diffusion import AutoGuidance, SamplingOptions, generate
from tread_zoo.evaluation.conditions import conditions_of
from tread_zoo.evaluation.evaluate import EvaluationOptions, evaluate, evaluation_settings
from tread_zoo.training.checkpoints import Checkpoint, find_checkpoint
from tread_zoo.training.restore import Restored, restore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """The score of a run's samples with one guidance, scale and sampler.

    setting: all that the numbers depend on; a finished record with another one is refused.
    budget: FLOPs an image that it might cost.
    values, real, protocol: as `tread_zoo.evaluation.evaluate.evaluate` returns them.
    images: file of the first images, beside the record.
    """

    group: str
    run: str
    seed: int
    guidance: str
    sampler: str
    scale: float
    num_steps: int
    nfe: int
    flops: int
    budget: int
    setting: dict[str, Any]
    values: dict[str, float]
    real: dict[str, float]
    protocol: dict[str, Any]
    images: str

    @property
    def key(self) -> tuple[str, str, float]:
        """The `Trial.key` that it is of."""
        return self.guidance, self.sampler, self.scale


@dataclass(frozen=True)
class Scoring:
    """How every record of a study is made.

    options: of `evaluate`.
    weights, device, precision: of `restore`.
    data: options of the data that differ from the runs'.
    num_pictures: images of each record that are kept to be looked at.
    """

    options: EvaluationOptions
    weights: str
    device: str
    precision: str
    data: dict[str, Any]
    num_pictures: int

    def restore(self, checkpoint: Checkpoint) -> Restored:
        """Load a checkpoint's network onto the device."""
        return restore(
            checkpoint.path, weights=self.weights, device=self.device, precision=self.precision
        )


@dataclass(frozen=True)
class Job:
    """One record to be: a trial of a run of a plan, and its file."""

    plan: Plan
    trial: Trial
    checkpoint: Checkpoint
    sampling: SamplingOptions
    setting: dict[str, Any]
    file: Path


def list_jobs(plans: Sequence[Plan], scoring: Scoring, precision: str, out: Path) -> list[Job]:
    """Return every record that the study consists of, in the order in which they are made.

    Args:
        precision: resolved.
    """
    jobs = []
    for place in range(max(len(plan.group.checkpoints) for plan in plans)):
        for plan in plans:
            for checkpoint in plan.group.checkpoints[place : place + 1]:
                for trial in plan.trials:
                    jobs.append(_job(plan, trial, checkpoint, scoring, precision, out))
    return jobs


def read_record(job: Job) -> Record | None:
    """Return a record that is finished, or None.

    Raises:
        ValueError: its file holds one with other settings, or something else.
    """
    if not job.file.exists():
        return None
    remedy = "choose another out, or remove that file."
    try:
        record = Record(**json.loads(job.file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{job.file} holds no record ({error}); {remedy}") from error
    wanted = json.loads(json.dumps(job.setting))
    for key in sorted(wanted.keys() | record.setting.keys()):
        if wanted.get(key) != record.setting.get(key):
            raise ValueError(
                f"{job.file} holds a record whose {key} is {record.setting.get(key)}, not "
                f"{wanted.get(key)}; {remedy}"
            )
    return record


def run_jobs(jobs: Sequence[Job], scoring: Scoring) -> list[Record]:
    """Make the records that are missing; return all of them, in the order of `jobs`.

    Raises:
        ValueError: a file holds a record with other settings; told before any is made.
    """
    found = {job.file: read_record(job) for job in jobs}
    todo = [job for job in jobs if found[job.file] is None]
    images = scoring.options.num_images
    teraflops = sum(job.trial.cost.flops for job in todo) * images / 1e12
    logger.info(
        "%d records, %d of them done; the others sample %d images each, %.2f TFLOPs in all",
        len(jobs), len(jobs) - len(todo), images, teraflops,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tread_zoo_") as cache:
        _make_all(todo, found, scoring, Path(cache))
    return [one for job in jobs if (one := found[job.file]) is not None]


def _make_all(
    todo: Sequence[Job], found: dict[Path, Record | None], scoring: Scoring, cache: Path
) -> None:
    """Make records and add them to `found`; what real images score is measured once a group."""
    real = {one.group: one.real for one in found.values() if one is not None}
    run, data = None, None
    for number, job in enumerate(todo, start=1):
        if run is None or data is None or run.checkpoint.path != job.checkpoint.path:
            run = scoring.restore(job.checkpoint)
            data = run.data(scoring.data)
        began = time.perf_counter()
        group = job.plan.group.label
        record = _make(job, run, data, scoring, real=real.get(group), cache=cache)
        found[job.file] = record
        real[group] = record.real
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in record.values.items())
        logger.info(
            "%d of %d: %s  %s  (%.0f s)",
            number, len(todo), job.file.stem, numbers, time.perf_counter() - began,
        )  # fmt: skip


def _job(
    plan: Plan, trial: Trial, checkpoint: Checkpoint, scoring: Scoring, precision: str, out: Path
) -> Job:
    sampling = sampling_options(
        checkpoint, trial.guidance, trial.sampler, scale=trial.scale, num_steps=trial.num_steps
    )
    settings = sampling.as_dict()
    if isinstance(sampling.guidance, AutoGuidance):  # by content: folders may move
        weak = find_checkpoint(sampling.guidance.checkpoint)
        settings["guidance_checkpoint"] = _hash(weak, sampling.guidance.weights)
    options = evaluation_settings(asdict(scoring.options))
    setting = {
        "network": _hash(checkpoint, scoring.weights),
        "sampling": settings,
        "evaluation": {**options, "metrics": list(options["metrics"])},
        "data": {**checkpoint.meta["data_options"], **scoring.data},
        "precision": precision,
        "num_pictures": scoring.num_pictures,
    }
    words = [plan.group.label, f"seed={seed_of(checkpoint)}", trial.guidance.label]
    words += [trial.sampler.label, f"scale={trial.scale:g}"]
    name = re.sub(r"[^\w.,=-]+", "_", ",".join(words))
    return Job(plan, trial, checkpoint, sampling, setting, out / "records" / f"{name}.json")


def _make(
    job: Job,
    run: Restored,
    data: ImageData,
    scoring: Scoring,
    *,
    real: dict[str, float] | None,
    cache: Path,
) -> Record:
    """Sample and score; write the images, then the record."""
    options, weak = scoring.options, run.weak(job.sampling)
    scored = evaluate(
        run.backbone,
        run.objective,
        data,
        job.sampling,
        options,
        precision=run.precision,
        weak=weak,
        real=real,
        cache=cache,
    )
    scored["protocol"] |= {"weights": scoring.weights, "step": run.checkpoint.step}
    indices = range(scoring.num_pictures)
    first = generate(
        run.backbone,
        run.objective,
        job.sampling,
        indices=indices,
        labels=conditions_of(run.backbone, data).of(indices),
        seed=options.seed,
        batch_size=options.batch_size,
        precision=run.precision,
        weak=weak,
    )
    record = Record(
        group=job.plan.group.label,
        run=run_name(job.checkpoint),
        seed=seed_of(job.checkpoint),
        guidance=job.trial.guidance.label,
        sampler=job.trial.sampler.label,
        scale=job.trial.scale,
        num_steps=job.trial.num_steps,
        nfe=job.trial.cost.evaluations,
        flops=job.trial.cost.flops,
        budget=job.plan.budget,
        setting=job.setting,
        values=scored["values"],
        real=scored["real"],
        protocol=scored["protocol"],
        images=job.file.with_suffix(".npz").name,
    )
    job.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(job.file.with_suffix(".npz"), images=to_uint8(first).numpy())
    partial = job.file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record), indent=1) + "\n")
    os.replace(partial, job.file)
    return record


def _hash(checkpoint: Checkpoint, weights: str) -> str:
    """Return the checksum of a checkpoint's weights."""
    return checkpoint.meta["sha256"][f"{weights}.safetensors"]
