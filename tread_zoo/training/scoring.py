"""The scores of a run: measured by all of its processes together, kept whole in `scores.jsonl`.

    every training.score_every steps, and at the end:
        averaged weights -> each process samples its share -> features -> the main process's record

One protocol holds from the first score to the last, so that they lie on one curve. `scores.jsonl`
has a record a line, by step, each as `score.json` has the last one: `values`, `real`, `protocol`
(with `step`), `run`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread_zoo.backbone import Backbone
from tread_zoo.evaluation.evaluate import evaluate
from tread_zoo.evaluation.held_out import held_out_loss
from tread_zoo.evaluation.known import Known
from tread_zoo.evaluation.protocol import held_out_record
from tread_zoo.evaluation.sharing import Share
from tread_zoo.training.files import told_if_not_written, write_text
from tread_zoo.training.parts import Parts
from tread_zoo.training.ranks import largest

if TYPE_CHECKING:
    from accelerate import Accelerator

FILE = "scores.jsonl"
HELD_OUT_SEED = 0
HELD_OUT_DRAWS = 8  # for each image


class Scorer:
    """This process's share of each score.

    Args:
        parts: the run's.
        accelerator: whose processes share the samples.
        precision: resolved.
    """

    def __init__(self, parts: Parts, accelerator: "Accelerator", precision: str) -> None:
        self.parts, self.accelerator, self.precision = parts, accelerator, precision
        self.share = Share(accelerator.process_index, accelerator.num_processes)
        self.known = Known()

    def score(self, network: Backbone, step: int, *, last: bool) -> dict[str, Any]:
        """Score averaged weights after optimizer step `step`; every rank must call this.

        A rank that fails ends, and the others with it: see `tread_zoo.training.ranks`.

        Args:
            network: whole, on this process's device.
            step: that the weights are of.
            last: nothing is trained after it; `evaluation.keep_images` keeps these samples.

        Returns:
            The record; on other processes than the main one without its values.

        Raises:
            ValueError: see `evaluate`.
        """
        parts, options = self.parts, self.parts.evaluation
        record = evaluate(
            network,
            parts.objective,
            parts.data,
            parts.sampling,
            options if last else replace(options, keep_images=None),
            precision=self.precision,
            weak=parts.weak,
            share=self.share,
            known=self.known,
        )
        record["protocol"] |= {"weights": "ema", "step": step}
        held_out = None
        if self.share.is_main:
            held_out = held_out_loss(
                network, parts.objective, parts.data,
                seed=HELD_OUT_SEED, precision=self.precision, num_draws=HELD_OUT_DRAWS,
            )  # fmt: skip
        if held_out is not None:
            record["values"]["held_out_loss"] = held_out[0]
            record["held_out_loss_by_level"] = held_out[1]
            if self.known.held_out is None:
                self.known.held_out = held_out_record(
                    parts.objective, parts.data, seed=HELD_OUT_SEED, num_draws=HELD_OUT_DRAWS
                )
            record["protocol"] |= self.known.held_out
        return record

    def is_missing(self, step: int, scores: "Scores | None") -> bool:
        """Return whether a resumed run has no score of `step`, where it should have one: it was
        stopped after the step was saved and before it was scored.

        Every rank must call this; `scores` are the main process's.
        """
        every, num_steps = self.parts.options.score_every, self.parts.options.num_steps
        if not every or step % every or not 0 < step < num_steps:
            return False
        return bool(largest(self.accelerator, int(scores is not None and step not in scores)))


class Scores:
    """The records of a run by their step, and their file; those after `step` are dropped.

    Args:
        folder: the run's.
        step: optimizer steps done so far: what comes after them will be done again.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / FILE
        self.records = {
            found: record for found, record in read_scores(folder).items() if found <= step
        }
        if self.path.exists():
            self._write()

    def __contains__(self, step: int) -> bool:
        return step in self.records

    def get(self, step: int) -> dict[str, Any] | None:
        """Return the record of a step, or None."""
        return self.records.get(step)

    def add(self, record: dict[str, Any]) -> None:
        """Write a record, in the place of an older one of its step; one that cannot be written is
        told, and is there again with the next."""
        self.records[record["protocol"]["step"]] = record
        with told_if_not_written(self.path):
            self._write()

    def _write(self) -> None:
        """Write all of them anew, so that no half of a line is ever there; they are few."""
        lines = [json.dumps(self.records[step]) + "\n" for step in sorted(self.records)]
        write_text(self.path, "".join(lines))


def read_scores(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the records of a run's `scores.jsonl` by step, ascending; empty if it has none.

    Raises:
        ValueError: a line that is no record.
    """
    path = folder / FILE
    records = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            record = json.loads(line)
            records[int(record["protocol"]["step"])] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is no record of a score ({error!r}); remove the line."
            ) from error
    return dict(sorted(records.items()))
