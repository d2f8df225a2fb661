"""The training run, read from top to bottom.

    images -> objective draws levels and noise, routing draws kept ids -> backbone -> loss
           -> optimizer -> averaged weights -> samples, held-out loss, checkpoints, scores

The random choices of a step do not depend on earlier steps, so a resumed run equals an unbroken
one. With another number of processes, runs are equal up to rounding.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tread_zoo.config import RunFields, TrainingConfig
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import prefetch_to_device
from tread_zoo.evaluation.evaluate import check_kept_images
from tread_zoo.kernels import set_forms
from tread_zoo.process_group import close_process_group_at_exit, prepare_process_group
from tread_zoo.registry import load_plugins
from tread_zoo.runs.checkpoint import check_same_data
from tread_zoo.runs.folder import open_folder, resolve_run
from tread_zoo.runs.init_from import resolve_init_from
from tread_zoo.runtime import (
    keep_freed_memory,
    resolve_device,
    resolve_precision,
    set_float32_products,
)
from tread_zoo.training.log import EarlyRecords, Log, is_due
from tread_zoo.training.meters import Window, timed
from tread_zoo.training.saving import save_snapshot, save_state
from tread_zoo.training.setup import (
    TrainState,
    build_setup,
    check_ranks_agree,
    make_accelerator,
    to_devices,
)
from tread_zoo.training.sharding import full_tensor
from tread_zoo.training.signals import SIGNALS, StopSignals, strongest
from tread_zoo.training.step import affordable_steps, draw_step, step_flops, step_loss

CHECK_EVERY = 8  # micro-steps between two checks for the signals of all processes


def train(**fields: Unpack[RunFields]) -> Path:
    """Train, and return the run's folder, with checkpoints, pictures, metrics and a score.

    Args:
        fields: fields of `tread_zoo.config.RunConfig`; with `resume`, all others come from the run.

    Raises:
        ValueError: a setting is invalid (nothing is written then), memory runs out, too many images
            cannot be read, or another process of the run ends.
        CheckpointError: a checkpoint cannot be read or written.
        FloatingPointError: a loss or a gradient is not finite; the step was not applied.
        Stopped: a signal was received; all steps done are saved.
    """
    load_plugins(fields.get("plugins") or ())
    settings = dict(fields)
    for name in {"run_dir", "init_from", "resume"} & settings.keys():
        settings[name] = settings[name] and os.path.expanduser(str(settings[name]))
    settings, source = resolve_init_from(settings)
    config, checkpoint = resolve_run(settings)
    device = resolve_device(config.device)
    prepare_process_group(device)
    if config.training.num_flops:
        training = replace(config.training, num_steps=affordable_steps(config), num_flops=None)
        settings = {**settings, "training": training, "run_dir": config.run_dir}
        config, checkpoint = resolve_run(settings)
    set_forms(config.kernels)
    precision = resolve_precision(config.training.precision, device)
    set_float32_products(device, precision)
    keep_freed_memory(device)
    with EarlyRecords() as early, StopSignals() as signals, _errors_explained(config.training):
        setup = build_setup(config, source if checkpoint is None else None)
        if checkpoint is None:
            check_kept_images(config.evaluation)
        else:
            check_same_data(checkpoint, setup.data_metadata, images=True)
        accelerator = make_accelerator(setup, device, precision)
        setup.batches(num_ranks=accelerator.num_processes)  # raises if there are too few images
        check_ranks_agree(accelerator, checkpoint, setup)
        state = to_devices(setup, accelerator, checkpoint)
        with (
            open_folder(config, accelerator) as locked_folder,
            Log(state, locked_folder, precision, partial(step_flops, setup), early) as log,
        ):
            with signals.deferred(config.training.max_time_s):
                run_steps(state, log, signals)
            log.score(state, last=True)
        close_process_group_at_exit()
    return Path(config.run_dir)


def run_steps(state: TrainState, log: Log, signals: StopSignals) -> None:
    """Train from `state.step` to the last step, with metrics, samples and checkpoints.

    Steps are queued on the device. Losses and signals are checked where the host waits for it
    anyway. A single process also checks once it has a signal; several check every few steps.
    """
    setup, training, accelerator = state.setup, state.setup.training, state.accelerator
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    batches = prefetch_to_device(setup.batches(rank, num_ranks, state.step), accelerator.device)
    window = Window(state)
    checks = [training.log_every, training.checkpoint_every, training.ema_snapshots_every]
    checks += [training.sample_every, training.score_every]
    if num_ranks > 1:
        checks.append(max(1, CHECK_EVERY // training.gradient_accumulation_steps))
    signal = sample_and_score(state, log, signals, resumed=True) if state.step else 0
    while state.step < setup.num_steps and not signal:
        with timed(state, "training"):
            skipped = optimize(state, batches, window)
            state.step += 1
            for average in state.averages.values():
                average.update(setup.backbone, state.step, skipped)
            last, step = state.step == setup.num_steps, state.step
            alone = num_ranks == 1 and signals.received
            if last or alone or any(is_due(step, every) for every in checks):
                signal = check_steps(state, window, signals.received)

        log.estimate_time(step)
        if last or step % training.log_every == 0:
            log.metrics(state, window)
        if is_due(step, training.ema_snapshots_every):
            save_snapshot(state, log.folder)
        is_saved = last or signal or is_due(step, training.checkpoint_every)
        if is_saved:
            save_state(state, log.folder)
        if not signal:
            signal = sample_and_score(state, log, signals)
            if signal and not is_saved:
                save_state(state, log.folder)
        log.bar.update()
    if signal:
        log.stopped(signal, state.step)
        accelerator.wait_for_everyone()  # a task that ends may end its whole job
        close_process_group_at_exit()
        signals.exit(signal)


def sample_and_score(
    state: TrainState, log: Log, signals: StopSignals, *, resumed: bool = False
) -> int:
    """Write the samples and the score that are due after `state.step`, and return the signal that
    any rank received meanwhile, or 0. A signal interrupts the work. If `resumed`, only samples and
    scores that a signal or a crash prevented are due. Every rank must call this."""
    samples, score = log.due(state.step, resumed=resumed)
    if not (samples or score):
        return 0
    with signals.interrupting(state.average.network):
        if samples:
            log.samples(state)
        if score:
            log.score(state)
    from accelerate.utils import gather_object

    return strongest(gather_object(list(signals.received)))


def check_steps(state: TrainState, window: Window, received: Mapping[int, float]) -> int:
    """Wait for the queued steps, check the losses and gradients in `window`, and return the signal
    of the highest priority that any rank received, or 0. The keys of `received` are the signals of
    this process. Every rank must call this, and gets the same value.

    Raises:
        FloatingPointError: the loss of a rank or the gradient was not finite in a step of the
            window. In fp16 only the loss counts: the scaler skips steps whose gradient overflows.
    """
    accelerator, norms = state.accelerator, torch.stack(window.norms)
    flags = torch.tensor([float(n in received) for n in SIGNALS], device=norms.device)
    shared = accelerator.reduce(torch.cat([window.step_losses(), flags]), reduction="sum")
    values = torch.cat([norms.to(shared), shared]).tolist()
    sizes, totals, signals = (
        values[: len(norms)], values[len(norms) : -len(SIGNALS)], values[-len(SIGNALS) :]
    )  # fmt: skip
    for back, (size, total) in enumerate(zip(sizes, totals, strict=True), -len(sizes)):
        if not math.isfinite(total) or not (math.isfinite(size) or accelerator.scaler):
            close_process_group_at_exit()
            step, loss = state.step + back + 1, total / accelerator.num_processes
            remedy = (
                "lower optimizer.learning_rate or training.max_grad_norm, and continue from the "
                "last checkpoint with resume=latest."
            )
            if step == 1:
                remedy = (
                    "no weight has changed yet, so look at the objective's options, at the values "
                    "of the data and at init_from, and try training.precision=fp32."
                )
            raise FloatingPointError(
                f"step {step}: the loss is {loss:g}, the norm of its gradient {size:g}; both must "
                "be finite. The step was not applied. The same settings would come here again: "
                + remedy
            )
    window.grad_norm = sizes[-1]
    return strongest([number for number, flag in zip(SIGNALS, signals, strict=True) if flag])


def optimize(state: TrainState, batches: Iterator[tuple[Tensor, ...]], window: Window) -> Tensor:
    """Do optimizer step `state.step`, counted from 0, on this rank's next `batches`; `window`
    collects the losses. Return a number on the device, the same on every rank: 1.0 if the step was
    skipped because a loss or the gradient was not finite, else 0.0."""
    setup, accelerator = state.setup, state.accelerator
    factor = setup.lr_schedule(state.step, setup.num_steps)
    for group, rate in zip(state.groups, state.rates, strict=True):
        group["lr"] = rate * factor
    window.learning_rate = state.rates[0] * factor
    micro_steps, skipped = setup.training.gradient_accumulation_steps, torch.zeros(())
    for micro in range(micro_steps):
        with timed(state, "data"):
            batch = next(batches)
        modules = [module for module in (state.model, state.projector) if module is not None]
        with accelerator.accumulate(*modules):
            drawn = draw_step(
                setup, batch, state.step * micro_steps + micro,
                accelerator.process_index, accelerator.device,
            )  # fmt: skip
            result = step_loss(
                setup, drawn,
                model=state.model, projector=state.projector, teacher=_teacher(state),
            )  # fmt: skip
            loss = result.losses.mean()
            window.add(result.losses, result.values, result.levels)
            # A loss that is not finite makes this rank's gradient NaN, and the reduction makes all
            # ranks' NaN.
            accelerator.backward(loss, gradient=1 + 0 * loss.detach())
            if accelerator.sync_gradients:
                limit = setup.training.max_grad_norm or math.inf
                accelerator.unscale_gradients()  # accelerate's clipping would do it twice
                norm = full_tensor(clip_grad_norm_(list(state.parameters.values()), limit))
                window.norms.append(norm)
                skipped = norm.isfinite().logical_not().float()
                _step_unless(state, skipped)
            state.stepper.zero_grad()
    return skipped


def _step_unless(state: TrainState, skipped: Tensor) -> None:
    """Step the optimizer, unless `skipped` is 1.0.

    Torch's fused optimizers skip a step on the device if their `found_inf` is 1.0; in fp16 the
    scaler sets it. For other optimizers the host waits for `skipped`.
    """
    if state.accelerator.scaler is None:
        if getattr(state.optimizer, "_step_supports_amp_scaling", False):
            state.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        elif skipped.item():
            return
    state.stepper.step()


def _teacher(state: TrainState) -> Backbone | None:
    """Return the averaged network if the alignment takes features from it now, else None."""
    setup = state.setup
    taught = setup.is_self_taught and state.step < setup.aligned_steps
    return state.average.network if taught else None


@contextmanager
def _errors_explained(training: TrainingConfig) -> Iterator[None]:
    """Add the remedy to torch's errors when memory runs out or another process is gone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error):
            raise ValueError(
                "another process of this run ended or does not answer; see its output for why "
                f"({str(error).splitlines()[0][:120]}). Continue from the last checkpoint with "
                "resume=latest."
            ) from error
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            raise ValueError(
                f"out of memory ({str(error).splitlines()[0][:200]}): lower "
                f"training.batch_size={training.batch_size} and raise training."
                f"gradient_accumulation_steps={training.gradient_accumulation_steps} as much, or "
                "set training.activation_checkpointing=true. What was saved is kept."
            ) from error
        raise
