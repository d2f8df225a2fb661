"""The training run, read top to bottom.

    images -> objective draws levels and noise, routing draws kept ids -> backbone -> loss -> AdamW
           -> averaged weights -> samples, held-out loss, checkpoints, scores

What image i of step k draws depends on (seed, k, i) and on the size of the step's batch alone: a
resumed run equals an unbroken one, on another number of processes but for rounding.
"""

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.data import told_of_dead_workers
from tread_zoo.kernels import set_forms
from tread_zoo.kinds import check_keywords
from tread_zoo.process_group import leave_connections, take_connections
from tread_zoo.routing import resolve_routes
from tread_zoo.runtime import autocast, resolve_device, resolve_precision
from tread_zoo.training.agreement import (
    IMAGES_PER_STEP,
    check_ranks_agree,
    images_per_step,
    warn_of_another_batch,
)
from tread_zoo.training.averaging import WeightAverage
from tread_zoo.training.checkpoints import (
    Checkpoint,
    check_same_run,
    find_checkpoint,
    has_checkpoints,
    load_optimizer,
    load_weights,
    optimizer_tensors,
    save_checkpoint,
)
from tread_zoo.training.compiling import check_compiler, compile_blocks
from tread_zoo.training.corruption import CorruptItems
from tread_zoo.training.folder import RunFolder, check_folder, is_in
from tread_zoo.training.options import TrainingOptions
from tread_zoo.training.parts import Parts, StepDraw, build_parts, draw_step
from tread_zoo.training.ranks import failing_together, largest, told_when_one_is_lost
from tread_zoo.training.reporting import Reporter
from tread_zoo.training.saving import SaveAttempts
from tread_zoo.training.scoring import Scorer
from tread_zoo.training.sharding import place, prepare, sharding_asked_for, whole_tensors
from tread_zoo.training.skipping import StepGuard, gradient_norm, spoil, whole_norm
from tread_zoo.training.slurm import join_slurm_step
from tread_zoo.training.stopping import StopSignals
from tread_zoo.training.trackers import check_tracker
from tread_zoo.training.window import Clock, Window, forget_peak_memory, peak_memory

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


def train(
    *,
    backbone: dict[str, Any],
    routing: dict[str, Any],
    objective: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    sampler: dict[str, Any],
    guidance: dict[str, Any],
    evaluation: dict[str, Any],
    tracker: dict[str, Any],
    seed: int,
    device: str,
    run_dir: str,
    resume: str | None,
    overwrite: bool,
    kernels: Mapping[str, str] | None = None,
) -> Path:
    """Train, and leave checkpoints, pictures, metrics and a score in `run_dir`, which is returned.

    Args:
        backbone: `name` and keywords of `create_backbone`; sizes, channels, classes and contexts
            come from the data.
        routing: keywords of `build_routing`, with its `name`.
        objective, data: `name` and options; keywords of `build_data`.
        training: fields of `TrainingOptions`.
        sampler, guidance: see `tread_zoo.diffusion.build_sampling`.
        evaluation: fields of `EvaluationOptions`.
        tracker: `name` and, for wandb, `project`.
        seed: of weights, data order and every draw.
        device: auto, cpu, cuda.
        run_dir: the run's folder; see `tread_zoo.training.folder`.
        resume: None starts afresh; `latest` continues from the newest checkpoint in `run_dir`, if
            there is one; anything else is a path to a checkpoint.
        overwrite: replace a run that is already in `run_dir`.
        kernels: form by operation, "auto" for those that are not named; None leaves what is set.

    Raises:
        ValueError: a setting that cannot work, before anything is written.
        CheckpointError: a checkpoint cannot be read, or not be written time and again.
        FloatingPointError: the loss is no longer finite.
        ConnectionError: another process of the run is gone.
        Stopped: a signal asked to stop; the run was saved.
    """
    check_keywords("", train, locals())
    check_tracker(tracker["name"])
    if kernels is not None:
        set_forms(kernels)
    options = TrainingOptions(**training)
    on = resolve_device(device)
    take_connections(on, timedelta(seconds=options.timeout_s))
    forget_peak_memory(on)
    precision = resolve_precision(options.precision, on)
    sharding_asked_for()  # its errors come before any work
    if options.compile:
        check_compiler(on)
    checkpoint = _checkpoint_to_resume(Path(run_dir), resume, overwrite, options.num_steps)
    check_folder(run_dir, checkpoint, overwrite=overwrite)
    parts = build_parts(
        backbone=backbone, routing=routing, objective=objective, data=data, training=training,
        sampler=sampler, guidance=guidance, evaluation=evaluation, seed=seed,
    )  # fmt: skip
    if checkpoint is not None:
        check_same_run(checkpoint, parts.settings)

    accelerator = make_accelerator(
        on,
        precision,
        options,
        blocks_may_idle=parts.routing.path_drop_probability > 0,
    )
    folder = RunFolder(run_dir, checkpoint, overwrite=overwrite)
    with StopSignals() as stop, folder, told_when_one_is_lost(accelerator):
        check_ranks_agree(accelerator, checkpoint, parts.settings)
        run, step = _start(parts, accelerator, folder, checkpoint, precision, tracker)
        with stop.deferred():
            _run_steps(run, step, stop)
        if run.reporter:
            run.reporter.trained()
        _score(run, options.num_steps)
        if run.reporter:
            run.reporter.close()
        accelerator.wait_for_everyone()
        leave_connections()
    return folder.path


@dataclass(frozen=True)
class Learner:
    """Parts on their devices, and what moves their weights: all that an optimizer step needs."""

    parts: Parts
    accelerator: "Accelerator"
    shown: Backbone  # the network for those who ask what it is made of
    model: torch.nn.Module  # the backbone as accelerate wraps it
    optimizer: torch.optim.Optimizer
    stepper: Any  # the optimizer as accelerate wraps it
    average: WeightAverage
    guard: StepGuard
    clock: Clock


@dataclass(frozen=True)
class Run(Learner):
    """A run on its devices; `reporter` is the main process's alone."""

    saves: SaveAttempts
    folder: RunFolder
    scorer: Scorer
    reporter: Reporter | None


def _start(
    parts: Parts,
    accelerator: "Accelerator",
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    precision: str,
    tracker: dict[str, Any],
) -> tuple[Run, int]:
    """Put the parts onto their devices, restore a checkpoint, and open the run's folder.

    Returns:
        The run, and the optimizer steps that it has done.
    """
    if parts.weak is not None:
        parts.weak.to(accelerator.device)
    step, origin = 0, "starts"
    if checkpoint is not None:
        step, origin = checkpoint.step, f"resumes {checkpoint.path}"
        if accelerator.is_main_process:
            warn_of_another_batch(checkpoint, parts.options, accelerator.num_processes)
    learner = set_up(parts, accelerator, checkpoint, precision)
    saves = SaveAttempts(accelerator)
    parts.check_batches(accelerator.num_processes)
    parts.data.codec.prepare(accelerator.device)
    accelerator.wait_for_everyone()  # all have read what is there; now it may change
    reporter = None
    with failing_together(accelerator):
        if accelerator.is_main_process:
            folder.open()
            parts_shown = replace(parts, backbone=learner.shown)
            reporter = Reporter(
                parts_shown, folder.path, precision=precision, step=step, tracker=tracker
            )
            folder.before_undo = reporter.close
            reporter.begin(accelerator.device, accelerator.num_processes, origin)
    scorer = Scorer(parts, accelerator, precision)
    return Run(**vars(learner), saves=saves, folder=folder, scorer=scorer, reporter=reporter), step


def set_up(
    parts: Parts, accelerator: "Accelerator", checkpoint: Checkpoint | None, precision: str
) -> Learner:
    """Put the network and its optimizer onto their devices, as a checkpoint left them."""
    network = parts.backbone
    average = WeightAverage(network, parts.options.ema_decay)
    if checkpoint is not None:
        load_weights(network, checkpoint, "model")
        load_weights(average.network, checkpoint, "ema")
    if parts.options.compile:
        compile_blocks(network)
    average, shown = place(network, average, accelerator, precision)
    optimizer = _make_optimizer(network, parts.options)
    if checkpoint is not None:
        load_optimizer(optimizer, checkpoint.tensors("optimizer"))
    model, stepper = prepare(network, optimizer, accelerator)
    if checkpoint is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(checkpoint.meta["scaler"])
    guard = StepGuard(
        optimizer,
        accelerator,
        min(parts.options.max_skipped_in_a_row, parts.options.num_steps),
        None if checkpoint is None else checkpoint.meta.get("skipped_steps"),
    )
    clock = Clock()
    if checkpoint is not None:
        clock.restore(checkpoint.meta.get("clock"), checkpoint.step)
    return Learner(parts, accelerator, shown, model, optimizer, stepper, average, guard, clock)


@told_of_dead_workers()
def _run_steps(run: Run, step: int, stop: StopSignals) -> None:
    """Train from optimizer step `step` to the last, leaving numbers, samples and checkpoints."""
    options, accelerator, reporter = run.parts.options, run.accelerator, run.reporter
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    corrupt = CorruptItems.of_run(run.parts, accelerator, run.folder.path, resumed=step > 0)
    batches = run.parts.batches(rank, num_ranks, step, corrupt.add)
    if run.scorer.is_missing(step, reporter.scores if reporter else None):
        _score(run, step)
    window = Window()
    while step < options.num_steps:
        rate = options.learning_rate_at(step)
        with run.clock.timing("training"):
            norm = optimize(run, batches, step, rate, window)
        run.folder.keep()
        step += 1
        run.average.update(run.parts.backbone, step, run.guard.applied)

        last = step == options.num_steps
        stopping = stop.requested(accelerator, last=last)
        if last or step % options.log_every == 0:
            faults = run.guard.check(step) | corrupt.settle()
            with run.clock.timing("training"):
                values = window.close(accelerator)
            values |= {"learning_rate": rate, "grad_norm": float(norm)}
            values |= {"peak_memory": peak_memory(accelerator.device)}
            if reporter:
                reporter.numbers(step, values | faults)
        if last or _due(step, options.sample_every):
            with run.clock.timing("samples"), run.average.whole() as averaged:
                if reporter and averaged is not None:
                    reporter.samples(averaged, step)
            window.restart()
        if last or stopping or _due(step, options.checkpoint_every):
            with run.clock.timing("saving"):
                run.saves.attempt(partial(_save, run, step), must=last or stopping)
            window.restart()
        if _due(step, options.score_every) and not (last or stopping):
            _score(run, step)
            window.restart()
        if reporter:
            reporter.bar.update(1)
        if stopping:
            if reporter:
                reporter.close()
            stop.leave(
                f"{run.folder.path} at step {step}; continue with resume=latest", accelerator
            )


def optimize(
    run: Learner, batches: Iterator[tuple[Tensor, Tensor]], step: int, rate: float, window: Window
) -> Tensor:
    """Do optimizer step `step`, counted from 0; return the gradient's norm before clipping."""
    options, accelerator, norm = run.parts.options, run.accelerator, torch.tensor(torch.nan)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    for micro in range(options.gradient_accumulation_steps):
        with run.clock.timing("data"):
            batch = next(batches)
        drawn = draw_step(
            run.parts,
            *batch,
            rank=accelerator.process_index,
            num_ranks=accelerator.num_processes,
            micro_step=step * options.gradient_accumulation_steps + micro,
            device=accelerator.device,
        )
        with accelerator.accumulate(run.model):
            losses = losses_of(run.model, run.parts, drawn)
            loss = losses.mean()
            run.guard.see(loss)
            accelerator.backward(spoil(loss))
            if accelerator.sync_gradients:
                norm = _clip(run)
                run.guard.decide(norm)
            run.stepper.step()
            run.stepper.zero_grad()
        window.add(losses, drawn.draw.level, len(drawn.images) * accelerator.num_processes)
    return norm


def _clip(run: Learner) -> Tensor:
    """Clip the gradients, if that is asked for, and return the norm that they had, a scalar."""
    parameters, limit = list(run.model.parameters()), run.parts.options.max_grad_norm
    if limit:
        return whole_norm(run.accelerator.clip_grad_norm_(parameters, limit))
    run.accelerator.unscale_gradients(run.stepper)
    return gradient_norm(parameters)


def losses_of(model: torch.nn.Module, parts: Parts, drawn: StepDraw) -> Tensor:
    """Return the loss of each image of a micro-step, [B]; their mean is what is minimised.

    Routes that keep tokens by importance become concrete here, ahead of the forward pass: the
    importance is computed by the backbone itself, not by what accelerate wrapped around it, in the
    precision of the run.
    """

    def network(x: Tensor, t: Tensor) -> Tensor:
        def importance(start: int) -> Tensor:
            precision = resolve_precision(parts.options.precision, x.device)
            with autocast(x.device, precision):
                return parts.backbone.importance(x, t, drawn.labels, start)

        return model(x, t, drawn.labels, routes=resolve_routes(drawn.routes, importance))

    return parts.objective.loss(network, drawn.images, drawn.draw)[0]


def make_accelerator(
    place: torch.device, precision: str, options: TrainingOptions, *, blocks_may_idle: bool
) -> "Accelerator":
    """Return the accelerator; where blocks may idle for a step, ranks that average gradients are
    told not to wait for theirs."""
    from accelerate import (
        Accelerator,
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
    )

    join_slurm_step()
    _warn_if_alone()
    return Accelerator(
        cpu=place.type == "cpu",
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=blocks_may_idle),
            InitProcessGroupKwargs(timeout=timedelta(seconds=options.timeout_s)),
        ],
    )


def _make_optimizer(network: torch.nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """Return AdamW; the step itself is fused into one kernel where torch has one."""
    return torch.optim.AdamW(
        network.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        fused=next(network.parameters()).device.type in ("cpu", "cuda"),
    )


def _checkpoint_to_resume(
    folder: Path, resume: str | None, overwrite: bool, num_steps: int
) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None for a run that starts afresh.

    Raises:
        ValueError: it has done more than `num_steps`, or is to be replaced as well as continued.
        CheckpointError: no checkpoint is there, or none that is sound.
    """
    if resume is None or (resume == "latest" and not has_checkpoints(folder)):
        checkpoint = None
    elif resume == "latest":
        checkpoint = find_checkpoint(folder)
    else:
        if not Path(resume).exists() and difflib.get_close_matches(resume.lower(), ["latest"]):
            raise ValueError(f"resume={resume!r} is no checkpoint. Did you mean 'latest'?")
        checkpoint = find_checkpoint(resume)
    if overwrite and (resume == "latest" or (checkpoint and is_in(checkpoint, folder))):
        raise ValueError(
            f"resume={resume} continues the run in run_dir={str(folder)!r}, and overwrite=true "
            "replaces it: leave one of them out."
        )
    if checkpoint is not None and checkpoint.step > num_steps:
        raise ValueError(
            f"training.num_steps={num_steps}, and {checkpoint.path} has done {checkpoint.step} "
            f"already: set training.num_steps={checkpoint.step} or more, or resume from an earlier "
            "checkpoint, resume=RUN/checkpoints/step_…"
        )
    return checkpoint


def _warn_if_alone() -> None:
    """Say so where `accelerate launch --num_processes 2` started a single process, as it does on a
    CPU unless its configuration asks for several."""
    launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= os.environ.keys()
    if launched and "WORLD_SIZE" not in os.environ:
        logger.warning(
            "accelerate launched one process only. For several on a CPU: "
            "accelerate launch --config_file configs/accelerate/cpu.yaml …"
        )


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _score(run: Run, step: int) -> None:
    """Score the averaged weights on the way or, at the last step, for good; every rank must call
    this. A checkpoint that is due is written first, so that a failure here cannot cost it."""
    last = step == run.parts.options.num_steps
    with run.clock.timing("score"), run.average.whole(everywhere=True) as averaged:
        assert averaged is not None, "asked for everywhere"
        record = run.scorer.score(averaged, step, last=last)
    device = run.accelerator.device
    memory = largest(run.accelerator, peak_memory(device)) if last else 0
    if run.reporter and last:
        run.reporter.finish(record, run.clock, device, memory)
    elif run.reporter:
        run.reporter.score(record, run.clock)


def _save(run: Run, step: int) -> None:
    """Save weights, averages, the optimizer's state and the settings; every rank must call this."""
    scaler, is_main = run.accelerator.scaler, run.accelerator.is_main_process
    skipped = run.guard.state()
    tensors = {
        "model": run.parts.backbone.state_dict(),
        "ema": run.average.network.state_dict(),
        "optimizer": optimizer_tensors(run.optimizer),
    }
    parts = {name: whole_tensors(part, keep=is_main) for name, part in tensors.items()}
    if not is_main:
        return
    path = save_checkpoint(
        run.folder.path,
        parts,
        {
            **run.parts.settings,
            "step": step,
            "scaler": scaler.state_dict() if scaler else None,
            "skipped_steps": skipped,
            "clock": run.clock.state(),
            IMAGES_PER_STEP: images_per_step(run.parts.options, run.accelerator.num_processes),
        },
        keep=run.parts.options.keep_checkpoints,
    )
    run.folder.saved()
    logger.info("%-9s %s", "saved", path)
