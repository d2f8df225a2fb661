"""What a run prints and leaves in its folder.

    config.json     every setting                    metrics.jsonl   a row each `log_every` steps
    facts.json      data, parameters, FLOPs          scores.jsonl    a record a score
    train.log       what was printed, with times     score.json      the last one
    samples/, loss.png                               corrupt.txt     items that cannot be read
    commands.jsonl  how it was started, each time    checkpoints/, ema_snapshots/

The main process writes; the others have a part in the scores and in corrupt.txt.
"""

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tread_zoo.backbone import Backbone
from tread_zoo.config import RunConfig
from tread_zoo.data import CorruptLog, read_items
from tread_zoo.data.files import write_text
from tread_zoo.diffusion import generate
from tread_zoo.evaluation.conditions import conditions_of
from tread_zoo.evaluation.evaluate import describe_record, evaluate, score_names
from tread_zoo.evaluation.flops import count_flops, training_flops
from tread_zoo.evaluation.held_out import held_out_loss, held_out_record
from tread_zoo.evaluation.pictures import plot_losses, save_grid
from tread_zoo.kernels import describe, used_ops
from tread_zoo.pretrained import describe_backbone
from tread_zoo.runtime import describe_device, describe_start
from tread_zoo.training.checkpoints import (
    SNAPSHOTS,
    Checkpoint,
    check_same_run,
    data_facts,
    drop_snapshots,
    find_checkpoint,
    has_checkpoints,
    optimizer_state,
    save_checkpoint,
)
from tread_zoo.training.ema import TRACKED, WeightAverage
from tread_zoo.training.setup import TrainState
from tread_zoo.training.trackers import Trackers, read_lines, read_metrics

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

CONFIG, FACTS, SCORE, SCORES = "config.json", "facts.json", "score.json", "scores.jsonl"
GRID_IMAGES, GRID_SEED = 100, 0
HELD_OUT_SEED = 0
HELD_OUT_DRAWS = 8  # for each image, of a score
NUM_LEVELS = 4  # losses are logged by fourths of the noise levels, the lowest first
QUIET = ("loss_level_", "held_out_loss_level_", "peak_memory")  # not printed


# The folder ----------------------------------------------------------------------------------


def checkpoint_to_resume(config: RunConfig) -> Checkpoint | None:
    """Return the checkpoint that a run continues from, or None where it starts afresh.

    Nothing is changed yet.

    Raises:
        ValueError: the folder holds what may not be replaced, or the checkpoint has done more steps
            than the run is long.
        CheckpointError: no checkpoint is there, none that is whole, or one of another run.
    """
    folder, num_steps, checkpoint = Path(config.run_dir), int(config.training.num_steps), None
    if config.resume is not None and (config.resume != "latest" or has_checkpoints(folder)):
        if config.overwrite:
            raise ValueError(
                f"resume={config.resume} continues a run, and overwrite=true replaces it: leave "
                "one of them out."
            )
        checkpoint = find_checkpoint(folder if config.resume == "latest" else config.resume)
        if checkpoint.step > num_steps:
            raise ValueError(
                f"training.num_steps={num_steps}, and {checkpoint.path} has done {checkpoint.step} "
                f"already: set training.num_steps={checkpoint.step} or more, or resume from an "
                "earlier checkpoint, resume=RUN/checkpoints/step_…"
            )
        check_same_run(checkpoint, config)
        if checkpoint.run_dir.resolve() == folder.resolve():
            return checkpoint
    paths = folder.iterdir() if folder.exists() else ()
    entries = sorted(path.name for path in paths if not path.name.startswith("."))
    if entries and not {CONFIG, "checkpoints"} & set(entries):
        raise ValueError(
            f"run_dir={config.run_dir!r} holds {', '.join(entries[:3])}, and no run made them. "
            "Choose another run_dir."
        )
    if not config.overwrite and (has_checkpoints(folder) or SCORE in entries):
        raise ValueError(
            f"run_dir={config.run_dir!r} already holds a run. Continue it with resume=latest, "
            "replace it with overwrite=true, or choose another run_dir."
        )
    return checkpoint


@contextmanager
def open_folder(config: RunConfig, accelerator: "Accelerator") -> Iterator[Path]:
    """Lock the run's folder for the main process; a run to be overwritten is moved aside.

    Raises:
        ValueError: another process is training there.
    """
    from filelock import FileLock, Timeout

    folder = Path(config.run_dir)
    lock = FileLock(folder / ".lock", blocking=False)
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            if config.overwrite and (folder / CONFIG).exists():
                aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
                folder.rename(aside)
                lock.release()
                folder.mkdir()
                lock.acquire()
                _say("overwrite", f"the earlier run was moved to {aside}")
        except Timeout:
            raise ValueError(
                f"another process is training in run_dir={config.run_dir!r}. Wait for it or stop "
                "it, or choose another run_dir."
            ) from None
    accelerator.wait_for_everyone()  # all have read what is there; now it may change
    try:
        yield folder
    finally:
        lock.release()


# Numbers -------------------------------------------------------------------------------------


@contextmanager
def timed(state: TrainState, name: str) -> Iterator[None]:
    """Count the seconds inside for `name`; those of `data` lie within `training`, too."""
    began = time.perf_counter()
    try:
        yield
    finally:
        state.seconds[name] = state.seconds.get(name, 0.0) + time.perf_counter() - began


class Window:
    """What is collected between two lines of the log."""

    def __init__(self) -> None:
        self.learning_rate = self.grad_norm = math.nan
        self._step_losses: list[float] = []
        self._micro_steps: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
        self.restart()

    def restart(self) -> None:
        """Forget the time and images so far: sampling and saving do not count as training."""
        self._images, self._began = 0, time.perf_counter()

    def add(
        self, losses: Tensor, values: dict[str, Tensor], levels: Tensor, num_ranks: int
    ) -> None:
        """Add a micro-step of this rank: losses and levels [B], what else the objective names."""
        means = {name: value.detach().float().mean() for name, value in values.items()}
        self._micro_steps.append((losses.detach(), levels, means))
        self._images += len(losses) * num_ranks

    def close_step(self, loss: float, grad_norm: float) -> None:
        """Add the mean loss of all ranks, and the norm of the gradient, of an optimizer step."""
        self._step_losses.append(loss)
        self.grad_norm = grad_norm

    def close(self, accelerator: "Accelerator") -> dict[str, float]:
        """Return the means of the window, and begin another; every rank must call this.

        Returns:
            `loss`, `images_per_s`, `loss_level_1` … `loss_level_4` (of this rank), what the
            objective names, `learning_rate` and `grad_norm` of the last step.
        """
        numbers = {"loss": sum(self._step_losses) / len(self._step_losses)}
        numbers["images_per_s"] = self._images / (time.perf_counter() - self._began)
        losses, levels, values = zip(*self._micro_steps, strict=True)
        order = torch.cat(levels).argsort()
        fourths = torch.cat(losses).float()[order].tensor_split(NUM_LEVELS)
        numbers |= {f"loss_level_{i}": part.mean().item() for i, part in enumerate(fourths, 1)}
        for name in sorted(values[0]):
            mean = torch.stack([value[name] for value in values if name in value]).mean()
            numbers[name] = accelerator.reduce(mean, reduction="mean").item()
        numbers |= {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}
        self._step_losses, self._micro_steps = [], []
        self.restart()
        return numbers


class Log:
    """The log of a run in its folder, as a context; of other processes than the main one it is
    silent. The state is that at its start, as the checkpoint left it if it continues from one."""

    def __init__(
        self, state: TrainState, folder: Path, precision: str, checkpoint: Checkpoint | None
    ) -> None:
        self.setup, self.accelerator = state.setup, state.accelerator
        self.folder, self.precision, self.checkpoint = folder, precision, checkpoint
        self.is_main = state.accelerator.is_main_process
        self.cache: dict[str, Any] = {}  # of the evaluation: what depends on the data alone
        self.first_step, self.began = state.step, time.monotonic()
        train, device = state.setup.data.train, state.accelerator.device
        self.corrupt = CorruptLog(
            folder / "corrupt.txt",
            num_items=len(train),  # type: ignore[arg-type]
            max_share=state.setup.training.max_corrupt_share,
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._stack = ExitStack()
        if not self.is_main:
            return
        if state.step:
            self.corrupt.recheck(train)
        self.settings = state.setup.config.as_dict()
        self.machine = {
            "device": describe_device(device),
            "precision": precision,
            "num_processes": state.accelerator.num_processes,
            "torch": torch.__version__,
        }
        used_ops.clear()  # counting notes those of this backbone
        self.facts: dict[str, Any] = {
            "data": data_facts(state.setup.data),
            "num_parameters": sum(p.numel() for p in state.whole.parameters()),
            "flops_dense": count_flops(state.whole, backward=True),
            "flops_routed": training_flops(state.whole, state.setup.routing, state.setup.num_steps),
            "num_steps": state.setup.num_steps,
        }

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __enter__(self) -> "Log":
        if not self.is_main:
            return self
        from tqdm.auto import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        file = self._file = logging.FileHandler(self.folder / "train.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
        package = logging.getLogger("tread_zoo")
        if not package.isEnabledFor(logging.INFO):
            package.setLevel(logging.INFO)
        package.addHandler(file)
        self._stack.callback(file.close)
        self._stack.callback(package.removeHandler, file)
        write_text(self.folder / CONFIG, json.dumps(self.settings, indent=2))
        write_text(self.folder / FACTS, json.dumps(self.facts, indent=2))
        step = self.first_step
        with (self.folder / "commands.jsonl").open("a") as commands:
            commands.write(json.dumps({"step": step, **describe_start()}) + "\n")
        self.scores = {k: v for k, v in read_scores(self.folder).items() if k <= step}
        self._write_scores()
        drop_snapshots(self.folder, step)
        name = self.setup.config.tracker["name"]
        self.trackers = Trackers(name, self.setup.tracker, self.folder, step, self.settings)
        self._stack.callback(self.trackers.close)
        for topic, text in self._first_lines():
            _say(topic, text)
        total, is_pipe = self.setup.num_steps, not sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=step, unit="step", disable=is_pipe)
        self._stack.callback(self.bar.close)
        if not is_pipe:
            self._stack.enter_context(logging_redirect_tqdm())
        return self

    def _first_lines(self) -> list[tuple[str, str]]:
        setup, facts, data = self.setup, self.facts, self.facts["data"]
        size = "x".join(map(str, [data["channels"], *data["image_size"]]))
        condition = f"{data['num_classes']} classes"
        if "context" in data:
            condition = "contexts of {} embeddings of width {}".format(*data["context"])
        mean = ", on average over training" if setup.routing.is_scheduled else ""
        origin = f"resumes {self.checkpoint.path}" if self.checkpoint else "starts"
        options = ", ".join(f"{k} {v}" for k, v in setup.config.optimizer.items() if k != "name")
        return [
            ("device", "{device}; {precision}; {num_processes} process(es)".format(**self.machine)),
            *(("kernel", line) for line in describe(self.accelerator.device, used_ops)),
            ("data", f"{data['name']}: {data['num_images']} images {size}, {condition}"),
            ("backbone", f"{setup.backbone.name}: {facts['num_parameters'] / 1e6:.2f} M "
                         "parameters"),
            ("routing", setup.routing.describe(setup.backbone.grid)),
            ("flops", f"{facts['flops_routed'] / 1e6:.1f} M per image, forward and backward{mean}; "
                      f"dense {facts['flops_dense'] / 1e6:.1f} M"),
            ("optimizer", f"{setup.config.optimizer['name']}: {options}"),
            *self._alignment_line(),
            ("run", f"{self.folder} {origin}, {setup.num_steps} steps in all"),
        ]  # fmt: skip

    def _alignment_line(self) -> list[tuple[str, str]]:
        projector, name = self.setup.projector, self.setup.config.alignment["name"]
        if projector is None:
            return []
        size = sum(p.numel() for p in projector.parameters()) / 1e6
        until = f"until {self.setup.alignment.stop:.0%} of training"
        text = f"{name} of block {projector.block}, {until}; {size:.2f} M more parameters"
        return [("alignment", text)]

    def numbers(self, state: TrainState, window: Window) -> None:
        """Write the numbers of a window; every rank must call this."""
        numbers = window.close(self.accelerator)
        numbers["peak_memory"] = float(peak_memory(self.accelerator.device))
        if corrupt := self.corrupt.indices:
            numbers["corrupt_items"] = float(len(corrupt))
        if self.is_main:
            self._write_numbers(state.step, numbers)

    def _write_numbers(self, step: int, numbers: dict[str, float]) -> None:
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self.trackers.log(step, numbers)
        text = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if not k.startswith(QUIET))
        done, total = step - self.first_step, self.setup.num_steps
        left = (time.monotonic() - self.began) / max(1, done) * (total - step)
        line = f"step {step}/{total}  {text}  left {self.bar.format_interval(left)}"
        if self.bar.disable:
            logger.info(line)
            return
        self._file.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, line, (), None))
        if "loss" in numbers:
            speed = f"{numbers['images_per_s']:.0f} images/s"
            self.bar.set_postfix_str(f"loss {numbers['loss']:.4f}, {speed}")

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        if self.is_main:
            self.bar.update(step - self.bar.n)

    def stopped(self, signal: int, step: int) -> None:
        """Log that a signal ends the run."""
        if self.is_main:
            self.bar.close()
            _say("stopped", f"by {Signals(signal).name}; saved {self.folder} at step {step}; "
                            "continue with resume=latest")  # fmt: skip

    # Averaged weights --------------------------------------------------------------------------

    def samples(self, state: TrainState) -> None:
        """Leave a grid of samples and the held-out loss; every rank must call this."""
        with timed(state, "samples"):
            network = state.average.whole(self.accelerator.device)
            if self.is_main:
                if self.setup.data.codec.has_pixels:
                    self._save_grids(network, state.step)
                loss = self._held_out_loss(network)
                if loss is not None:
                    levels = {f"held_out_loss_level_{i}": x for i, x in enumerate(loss[1], 1)}
                    self._write_numbers(state.step, {"held_out_loss": loss[0], **levels})
            state.average.release()

    def _held_out_loss(
        self, network: Backbone, num_draws: int = 1
    ) -> tuple[float, list[float]] | None:
        return held_out_loss(
            network, self.setup.objective, self.setup.data, seed=HELD_OUT_SEED,
            num_draws=num_draws, precision=self.precision,
        )  # fmt: skip

    def _save_grids(self, network: Backbone, step: int) -> None:
        """Save samples and, once, real images beside them."""
        setup, data, device = self.setup, self.setup.data, self.accelerator.device
        indices = range(GRID_IMAGES)
        images = generate(
            network, setup.objective, setup.sampling, indices=indices,
            labels=conditions_of(network, data).of(indices), seed=GRID_SEED,
            batch_size=setup.config.evaluation.batch_size, precision=self.precision,
            weak=setup.weak,
        )  # fmt: skip
        path = self.folder / "samples" / f"step_{step:08d}.png"
        real = path.with_name("real.png")
        with _optional(path):
            path.parent.mkdir(exist_ok=True)
            save_grid(data.codec.to_pixels(images, device=device), path)
            self.trackers.image(step, "samples", path)
            if not real.exists():
                part = data.held_out or data.train
                count = min(GRID_IMAGES, len(part))  # type: ignore[arg-type]
                x = data.codec.to_model(read_items(part, range(count))[0], device=device)
                save_grid(data.codec.to_pixels(x, device=device), real)

    def score_if_missing(self, state: TrainState) -> None:
        """Score a resumed run that was stopped after a step was saved and before it was scored."""
        every, step = self.setup.training.score_every, state.step
        if every and step % every == 0 and 0 < step < self.setup.num_steps:
            missing = torch.tensor(float(self.is_main and step not in self.scores))
            if self.accelerator.reduce(missing.to(self.accelerator.device), reduction="sum"):
                self.score(state)

    def score(self, state: TrainState, *, last: bool = False) -> None:
        """Score the averaged weights, all ranks together; `last` ends the run."""
        setup, options = self.setup, self.setup.config.evaluation
        if not last:
            options = replace(options, keep_images=None)
        elif self.is_main:
            self.bar.close()
            with _optional(self.folder / "loss.png"):
                plot_losses(read_metrics(self.folder), self.folder / "loss.png")
        with timed(state, "score"):
            network = state.average.whole(self.accelerator.device)
            record = evaluate(
                network, setup.objective, setup.data, setup.sampling, options, weak=setup.weak,
                precision=self.precision, cache=self.cache, step=state.step,
            )  # fmt: skip
            if self.is_main and (loss := self._held_out_loss(network, HELD_OUT_DRAWS)) is not None:
                record["values"]["held_out_loss"], record["held_out_loss_by_level"] = loss
                record["held_out"] = held_out_record(
                    setup.objective, setup.data, seed=HELD_OUT_SEED, num_draws=HELD_OUT_DRAWS
                )
            state.average.release()
        if not self.is_main:
            return
        seconds = {name: round(value, 3) for name, value in state.seconds.items()}
        record["run"] = {**self.machine, "seconds": seconds}
        if last:
            record["run"]["peak_memory_bytes"] = peak_memory(self.accelerator.device)
        before, values = self.scores.get(state.step), score_names(record)
        self.scores[state.step] = record
        self._write_scores()
        if before is None or score_names(before) != values:  # a finished run may be resumed
            self.trackers.log(state.step, {k: v for k, v in values.items() if math.isfinite(v)})
        if last:
            write_text(self.folder / SCORE, json.dumps(record, indent=2))
            for line in describe_record(record):
                _say("score", line)
            _say("done", f"{self.folder}: samples/, loss.png, score.json, checkpoints/")
        else:
            shown = "  ".join(f"{k} {v:.4g}" for k, v in record["values"].items())
            _say("score", f"step {state.step}  {shown}")

    def _write_scores(self) -> None:
        """Write all of them anew, so that no half of a line is ever there; they are few."""
        if self.scores or (self.folder / SCORES).exists():
            lines = [json.dumps(self.scores[step]) + "\n" for step in sorted(self.scores)]
            with _optional(self.folder / SCORES):
                write_text(self.folder / SCORES, "".join(lines))

    def save(self, state: TrainState) -> None:
        """Save weights, averages, the optimizer's state and settings; every rank must call this."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        setup, scaler = self.setup, self.accelerator.scaler
        with timed(state, "saving"):
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights: Any = get_model_state_dict(setup.backbone, options=options)
            averages = self._gather(state.averages)
            tensors, plain = optimizer_state(state.optimizer, state.parameters)
            parts = {"model": weights, **averages, "optimizer": tensors}
            if setup.projector is not None:
                parts["alignment"] = get_model_state_dict(setup.projector, options=options)
            if self.is_main:
                meta = {
                    "step": state.step,
                    "config": self.settings,
                    "plugins": list(setup.config.plugins),
                    "backbone": describe_backbone(setup.backbone),
                    "data": self.facts["data"],
                    "images_per_step": state.images_per_step,
                    "seconds": state.seconds,
                    "optimizer": plain,
                    "scaler": scaler.state_dict() if scaler else None,
                }
                keep = setup.training.keep_checkpoints
                _say("saved", str(save_checkpoint(self.folder, parts, meta, keep)))
            self.accelerator.wait_for_everyone()

    def snapshot(self, state: TrainState) -> None:
        """Save the averages that other widths are made of; every rank must call this."""
        with timed(state, "saving"):
            parts = self._gather({k: v for k, v in state.averages.items() if k in TRACKED})
            if self.is_main:
                save_checkpoint(self.folder, parts, {"step": state.step}, 0, SNAPSHOTS)

    def _gather(self, averages: dict[str, WeightAverage]) -> dict[str, dict[str, Tensor]]:
        """Return averages, whole, on the CPU of the main process; one at a time, to save memory."""
        parts = {}
        for part, average in averages.items():
            whole = average.whole(self.accelerator.device).state_dict()
            parts[part] = {k: v.cpu() for k, v in whole.items()} if self.is_main else {}
            average.release()
        return parts


def read_scores(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the records of a run's `scores.jsonl` by step, ascending; empty if it has none."""
    records = {int(record["protocol"]["step"]): record for record in read_lines(folder / SCORES)}
    return dict(sorted(records.items()))


def _say(topic: str, text: str) -> None:
    logger.info("%-9s %s", topic, text)


@contextmanager
def _optional(path: Path) -> Iterator[None]:
    """Turn a failure to write a file that the run can do without into a warning."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written (%s); the run goes on without it", path, error)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were used: on a GPU by tensors, since the run began; else by the
    process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # bytes there, KiB elsewhere
