"""The log of a run: printed lines, and files in its folder (see `tread_zoo.runs.folder`)."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from tread_zoo.contract.backbone import Backbone
from tread_zoo.credentials import CleanFormatter
from tread_zoo.data import CorruptLog, read_items
from tread_zoo.data.files import write_text
from tread_zoo.data.split import ordered_as_samples
from tread_zoo.diffusion import generate
from tread_zoo.diffusion.conditions import conditions_of
from tread_zoo.evaluation.evaluate import describe_record, evaluate, score_names
from tread_zoo.evaluation.flops import mean_flops
from tread_zoo.evaluation.held_out import held_out_loss, held_out_record
from tread_zoo.evaluation.pictures import plot_losses, save_animation, save_grid
from tread_zoo.kernels import describe, used_ops
from tread_zoo.progress import progress
from tread_zoo.routing import Stack
from tread_zoo.routing.methods.none import NO_ROUTING
from tread_zoo.runs.checkpoint import delete_later_checkpoints
from tread_zoo.runs.folder import CONFIG, FACTS, SCORE, SCORES
from tread_zoo.runtime import DTYPES, describe_device
from tread_zoo.training.meters import Window, peak_flops, peak_memory, timed
from tread_zoo.training.run_page import REFRESH_S, write_run_page
from tread_zoo.training.setup import TrainState
from tread_zoo.training.trackers import Trackers, read_lines, read_metrics, write_lines
from tread_zoo.version import describe_start

logger = logging.getLogger(__name__)

GRID_IMAGES, GRID_SEED = 100, 0
SHOWN_CLASSES = 10
HELD_OUT_SEED = 0
HELD_OUT_DRAWS = 8  # noises per image for the held-out loss of a score
QUIET = ("loss_level_", "held_out_loss_level_", "peak_memory")  # written, not printed


class EarlyRecords(logging.Handler):
    """Context manager that keeps the package's log records, such as those from opening the data,
    until train.log exists."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def __enter__(self) -> "EarlyRecords":
        logging.getLogger("tread_zoo").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("tread_zoo").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        last = logging.lastResort  # without handlers, logging prints warnings by itself
        if last is not None and not logging.getLogger().handlers and record.levelno >= last.level:
            last.handle(record)

    def write_to(self, handler: logging.Handler) -> None:
        """Pass the records to `handler`, and record no more."""
        self.__exit__()
        for record in self.records:
            handler.handle(record)


class Log:
    """Context manager that logs a run to its folder. Only rank 0 writes, except to corrupt.txt.

    Args:
        state: the state at the start or after a resume.
        locked_folder: function that returns the run's folder, see `open_folder`.
        precision: fp32, bf16 or fp16.
        step_flops: function that takes a network and perhaps a routing method, and returns the
            FLOPs per image in each stage of the run; see `loop.step_flops`.
        early: the log records from before train.log exists.
    """

    def __init__(
        self,
        state: TrainState,
        locked_folder: Callable[[], Path],
        precision: str,
        step_flops: Callable[..., list[tuple[range, float]]],
        early: EarlyRecords,
    ) -> None:
        self.early = early
        self.setup, self.accelerator = setup, accelerator = state.setup, state.accelerator
        self.locked_folder, self.precision = locked_folder, precision
        self.is_main, self.first_step = accelerator.is_main_process, state.step
        self.held_out_loss = partial(
            held_out_loss, objective=setup.objective, data=setup.data, seed=HELD_OUT_SEED,
            precision=precision, batch_size=setup.config.evaluation.batch_size,
        )  # fmt: skip
        self.cache: dict[str, Any] = {}  # results of scoring that depend only on the data
        self.peak_flops: float | None = None
        parts = [part for part in (setup.data.train, setup.data.held_out) if part is not None]
        share, device = setup.training.max_corrupt_share, accelerator.device
        self.corrupt = CorruptLog(self.folder / "corrupt.txt", parts, share)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.peak_flops = peak_flops(torch.cuda.get_device_name(device), precision)
        self._stack = ExitStack()
        if not self.is_main:
            return
        self.settings = setup.config.as_dict()
        self.machine = {
            "device": describe_device(device), "precision": precision,
            "num_processes": accelerator.num_processes, "torch": torch.__version__,
        }  # fmt: skip
        used_ops.clear()  # counting FLOPs records this backbone's operations
        self.stages = step_flops(state.whole)
        self.next_page = 0.0
        self.facts: dict[str, Any] = {
            "data": setup.data_metadata,
            "num_parameters": sum(p.numel() for p in state.whole.parameters()),
            "flops_dense": mean_flops(step_flops(state.whole, NO_ROUTING)),
            "flops_routed": mean_flops(self.stages),
            "flops_by_stage": [[steps.stop, each] for steps, each in self.stages],
            "num_steps": setup.num_steps,
            "images_per_step": state.images_per_step,
        }

    @property
    def folder(self) -> Path:
        """The run's folder; for errors see `open_folder`."""
        return self.locked_folder()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.is_main and isinstance(error, Exception):
            self._note(f"error: {error}")
            with suppress(ValueError):  # the folder is gone
                self._write_page([f"error: {error}"], ended=True)
        self._stack.close()

    def __enter__(self) -> "Log":
        if self.is_main:
            self._begin()
        self.began = time.monotonic()
        self.bar = progress(
            "step", total=self.setup.num_steps, initial=self.first_step, leave=True, delay=0,
            shown=sys.stderr.isatty(),
        )  # fmt: skip
        self._stack.callback(self.bar.close)
        if not self.bar.disable:  # log lines appear above the bar
            self._stack.enter_context(logging_redirect_tqdm())
        return self

    def _begin(self) -> None:
        """Open the run's files, start the tracker, and log what the run consists of."""
        self._open_log_file()
        write_text(self.folder / CONFIG, json.dumps(self.settings, indent=2))
        write_text(self.folder / FACTS, json.dumps(self.facts, indent=2))
        step, starts = self.first_step, self.folder / "commands.jsonl"
        write_lines(starts, [*read_lines(starts), {"step": step, **describe_start()}])
        self.scores = {k: v for k, v in read_scores(self.folder).items() if k <= step}
        self._write_scores()
        (self.folder / SCORE).unlink(missing_ok=True)  # the end of the run writes it
        delete_later_checkpoints(self.folder, step)
        name = self.setup.config.tracker["name"]
        self.trackers = Trackers(name, self.setup.tracker, self.folder, step, self.settings)
        self._stack.callback(self.trackers.close)
        for topic, text in self._first_lines():
            _say(topic, text)

    def _open_log_file(self) -> None:
        """Copy log records and warnings to train.log."""
        package, root = logging.getLogger("tread_zoo"), logging.getLogger()
        if not package.isEnabledFor(logging.INFO):
            package.setLevel(logging.INFO)
        logging.basicConfig(format="%(message)s", stream=sys.stdout)  # if the caller has not
        file = self._file = logging.FileHandler(self.folder / "train.log", encoding="utf-8")
        file.setFormatter(CleanFormatter("%(asctime)s  %(message)s"))
        self.early.write_to(file)
        root.addHandler(file)
        logging.captureWarnings(True)
        self._stack.callback(file.close)
        self._stack.callback(root.removeHandler, file)
        self._stack.callback(logging.captureWarnings, False)

    def _first_lines(self) -> list[tuple[str, str]]:
        setup, facts, data = self.setup, self.facts, self.facts["data"]
        size = "x".join(map(str, [data["channels"], *data["image_size"]]))
        condition = f"{data['num_classes']} classes"
        if names := data.get("class_names"):
            shown = [*names[:SHOWN_CLASSES], *(["…"] if len(names) > SHOWN_CLASSES else [])]
            condition += f" ({', '.join(shown)})"
        if "context" in data:
            condition = "contexts of {} embeddings of width {}".format(*data["context"])
        if "captions_by" in data:
            condition += f", captions by {data['captions_by']}"
        variants = list(setup.routing.variants(Stack.of(setup.backbone), setup.num_steps))
        mean = ", on average over training" if len(variants) > 1 else ""
        origin = f"continues after step {self.first_step}" if self.first_step else "starts"
        options = ", ".join(f"{k} {v}" for k, v in setup.config.optimizer.items() if k != "name")
        rest, projector = [], setup.projector
        if projector is not None:
            name, until = setup.config.alignment["name"], f"{setup.alignment.stop:.0%} of training"
            millions = sum(p.numel() for p in projector.parameters()) / 1e6
            text = f"{name} of block {projector.block}, until {until}; {millions:.2f} M parameters"
            rest.append(("alignment", text))
        if setup.initial:
            rest.append(("init", setup.initial))
        if setup.not_scored:
            rest.append(("score", f"not scored: {setup.not_scored}"))
        dtype, precision = DTYPES[self.precision], self.precision
        if self.accelerator.device.type == "cuda" and precision != "fp32":
            precision += ", products of float32 in TF32"
        kernels = describe(self.accelerator.device, used_ops, dtype)
        return [
            ("device", f"{self.machine['device']}; {precision}; "
                       f"{self.machine['num_processes']} process(es)"),
            *(("kernel", line) for line in kernels),
            ("data", f"{data['name']}: {data['num_images']} images {size}, {condition}"),
            ("backbone", f"{setup.backbone.name}: {facts['num_parameters'] / 1e6:.2f} M "
                         "parameters"),
            ("routing", setup.routing.describe(Stack.of(setup.backbone))),
            ("flops", f"{facts['flops_routed'] / 1e6:.1f} M per image, forward and backward{mean}; "
                      f"dense {facts['flops_dense'] / 1e6:.1f} M"),
            ("optimizer", f"{setup.config.optimizer['name']}: {options}"),
            *rest,
            ("run", f"{self.folder} {origin}, {setup.num_steps} steps in all"),
        ]  # fmt: skip

    def estimate_time(self, step: int) -> None:
        """Log how long the steps left of a run on a CPU will take, when it has done three steps
        since its start or resume. `step` is the number of all steps done. On a GPU, where steps are
        queued, the first line of metrics shows the speed."""
        if not self.is_main or self.accelerator.device.type != "cpu":
            return
        if step == self.first_step + 1:
            self.prepared = time.monotonic()
        if step == self.first_step + 3:
            left, memory = self.setup.num_steps - step, peak_memory(self.accelerator.device)
            time_left = self.bar.format_interval((time.monotonic() - self.prepared) / 2 * left)
            _say("cost", f"about {time_left} for {left} steps, {memory / 1e9:.1f} GB")

    def metrics(self, state: TrainState, window: Window) -> None:
        """Write the metrics of the steps in `window`, and empty it; every rank must call this."""
        numbers = window.close(state)
        if corrupt := self.corrupt.items:
            numbers["corrupt_items"] = float(len(corrupt))
        if not self.is_main:
            return
        shown = f"loss {numbers['loss']:.4f}, {numbers['images_per_s']:.0f} images/s"
        if self.peak_flops is not None:
            flops = next(each for steps, each in self.stages if state.step - 1 in steps)
            flops_per_s = flops * numbers["images_per_s"] / self.accelerator.num_processes
            numbers["mfu"] = flops_per_s / self.peak_flops
            shown += f", MFU {numbers['mfu']:.1%}"
        self.bar.set_postfix_str(shown)
        self._write_metrics(state.step, numbers)

    def _write_metrics(self, step: int, numbers: dict[str, float]) -> None:
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self.locked_folder()  # raises if another run owns the folder
        self.trackers.log(step, numbers)
        text = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if not k.startswith(QUIET))
        done, total = step - self.first_step, self.setup.num_steps
        left = (time.monotonic() - self.began) / max(1, done) * (total - step)
        line = f"step {step}/{total}  {text}  left {self.bar.format_interval(left)}"
        if self.bar.disable:
            logger.info(line)
        else:
            self._note(line)
        self._write_page([line])

    def _write_page(self, status: list[str], *, ended: bool = False) -> None:
        """Write the run's page with the lines `status` if a refresh is due or the run `ended`."""
        if not ended and time.monotonic() < self.next_page:
            return
        self.next_page = time.monotonic() + REFRESH_S
        with _optional(self.folder / "index.html"):
            write_run_page(self.folder, read_metrics(self.folder), status, ended=ended)

    def _note(self, text: str) -> None:
        """Write a line to train.log only."""
        self._file.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))

    def stopped(self, signal: int, step: int) -> None:
        """Log that `signal` ends the run, which was saved after `step`."""
        self.bar.close()
        if self.is_main:
            text = f"by {Signals(signal).name}; saved {self.folder} at step {step}; continue with "
            text += "resume=latest"
            _say("stopped", text)
            self._write_page([f"stopped {text}"], ended=True)

    # Averaged weights --------------------------------------------------------------------------

    def due(self, step: int, *, resumed: bool) -> tuple[bool, bool]:
        """Return whether samples are due after `step`, and whether a score is due. The last step
        has no score here: `train` scores the end of the run. If the run was `resumed` at this step,
        only what the run's files lack is due. Every rank must call this."""
        training, last = self.setup.training, step == self.setup.num_steps
        samples = last or is_due(step, training.sample_every)
        score = not last and is_due(step, training.score_every)
        if resumed and self.is_main:
            samples = samples and not self._has_samples(step)
            score = score and step not in self.scores
        if resumed:
            from accelerate.utils import broadcast_object_list

            samples, score = broadcast_object_list([samples, score])
        return samples, score

    def _has_samples(self, step: int) -> bool:
        """Return whether the files show that the method `samples` was completed after `step`."""
        if self.setup.data.held_out is None:
            return self._grid(step).exists()
        rows = read_metrics(self.folder)
        return any(row["step"] == step and "held_out_loss" in row for row in rows)

    def _grid(self, step: int) -> Path:
        return self.folder / "samples" / f"step_{step:08d}.png"

    def samples(self, state: TrainState) -> None:
        """Save a grid of samples and log the held-out loss; every rank must call this."""
        with timed(state, "samples"):
            network = state.average.full_network(self.accelerator.device)
            if self.is_main:
                if self.setup.data.codec.has_pixels:
                    self._save_grids(network, state.step)
                if (loss := self.held_out_loss(network)) is not None:
                    levels = {f"held_out_loss_level_{i}": x for i, x in enumerate(loss[1], 1)}
                    self._write_metrics(state.step, {"held_out_loss": loss[0], **levels})
            state.average.release()

    def _save_grids(self, network: Backbone, step: int) -> None:
        """Save a grid of samples and, the first time, a grid of real images."""
        setup, data, device = self.setup, self.setup.data, self.accelerator.device
        indices = range(GRID_IMAGES)
        names = [data.class_names[i % data.num_classes] for i in indices if data.num_classes]
        images = generate(
            network, setup.objective, setup.sampling, indices=indices,
            labels=conditions_of(network, data).of(indices), seed=GRID_SEED,
            batch_size=setup.config.evaluation.batch_size, precision=self.precision,
            weak=setup.weak,
        )  # fmt: skip
        path = self._grid(step)
        real = path.with_name("real.png")
        with _optional(path):
            path.parent.mkdir(exist_ok=True)
            save_grid(data.codec.to_pixels(images, device=device), path, names)
            self.trackers.image(step, "samples", path)
            if not real.exists():
                part = data.held_out or data.train
                chosen = ordered_as_samples(part, GRID_IMAGES, data.num_classes)
                x = data.codec.to_model(read_items(part, chosen)[0], device=device)
                save_grid(data.codec.to_pixels(x, device=device), real, names)

    def _end_pictures(self) -> None:
        """Save the curve of the loss, and an animation of the samples."""
        with _optional(self.folder / "loss.png"):
            plot_losses(read_metrics(self.folder), self.folder / "loss.png")
        grids = sorted((self.folder / "samples").glob("step_*.png"))
        if len(grids) > 1:
            with _optional(self.folder / "samples.gif"):
                save_animation(grids, self.folder / "samples.gif")

    def score(self, state: TrainState, *, last: bool = False) -> None:
        """Score samples of the averaged weights, and write the scores; every rank must call this.
        `last` marks the score at the end of the run, which is also written to score.json."""
        setup, options = self.setup, self.setup.config.evaluation
        if not last:
            options = replace(options, keep_images=None)
        elif self.is_main:
            self.bar.close()
            self._end_pictures()
        with timed(state, "score"):
            network = state.average.full_network(self.accelerator.device)
            record = evaluate(
                network, setup.objective, setup.data, setup.sampling, options, weak=setup.weak,
                routing=setup.routing, precision=self.precision, cache=self.cache, step=state.step,
            )  # fmt: skip
            loss = self.held_out_loss(network, num_draws=HELD_OUT_DRAWS) if self.is_main else None
            if loss is not None:
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
        if before is None or score_names(before) != values:  # not twice after a resume
            self.trackers.log(state.step, {k: v for k, v in values.items() if math.isfinite(v)})
        if last:
            write_text(self.folder / SCORE, json.dumps(record, indent=2))
            lines = describe_record(record)
            for line in lines:
                _say("score", line)
            self._write_page(lines, ended=True)
            _say("done", f"{self.folder}: index.html, samples/, score.json, checkpoints/")
        else:
            shown = "  ".join(f"{k} {v:.4g}" for k, v in record["values"].items())
            _say("score", f"step {state.step}  {shown}")

    def _write_scores(self) -> None:
        """Rewrite the whole file of scores, so that no line is ever half written."""
        if self.scores or (self.folder / SCORES).exists():
            with _optional(self.folder / SCORES):
                write_lines(self.folder / SCORES, self.scores.values())


def read_scores(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the records of a run's `scores.jsonl` by ascending step; empty if there are none."""
    records = {int(record["protocol"]["step"]): record for record in read_lines(folder / SCORES)}
    return dict(sorted(records.items()))


def is_due(step: int, every: int) -> bool:
    """Return whether a task that is done every `every` steps (0: never) is due after `step`."""
    return bool(every) and step % every == 0


def _say(topic: str, text: str) -> None:
    logger.info("%-9s %s", topic, text)


@contextmanager
def _optional(path: Path) -> Iterator[None]:
    """Turn a failure to write a dispensable file into a warning."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written (%s); the run goes on without it", path, error)
