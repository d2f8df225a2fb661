"""A run beside its recipe's curve: a table, a plot, and one word."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tread_zoo.comparison.markdown import row
from tread_zoo.comparison.reference.band import Verdict, band_of, judge
from tread_zoo.comparison.reference.curve import Curve
from tread_zoo.comparison.reference.settings import find_recipe
from tread_zoo.comparison.reference.traces import HELD_OUT, TRAINING, Trace, at_steps, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = ("curve", "points", "worst at step", "run", "reference ± band", "off by", "verdict")


@dataclass(frozen=True)
class Comparison:
    """A run, the curve that it was compared with, and what came of it.

    Args:
        run, curve: both.
        differences: of their settings, where the recipe was named by hand.
        verdicts: of each curve and score.
    """

    run: Trace
    curve: Curve
    differences: Sequence[str]
    verdicts: Sequence[Verdict]

    @property
    def is_own(self) -> bool:
        """Whether the run is one that the curve was made of: equal in every digit."""
        same = [seed for seed in self.curve.runs if seed.seed == self.run.settings["seed"]]
        own = {name: float(f"{value:.5g}") for name, value in self.run.scores.items()}
        return bool(same and own) and own == same[0].scores

    @property
    def is_off(self) -> bool:
        """Whether any curve or score lies outside its band, or the run failed."""
        return bool(self.run.failed) or any(verdict.is_off for verdict in self.verdicts)


def compare_run(folder: Path, curves: Mapping[str, Curve], recipe: str | None = None) -> Comparison:
    """Compare a run with the curve of its recipe.

    Args:
        folder: the run's, ended or not.
        curves: by recipe.
        recipe: the one to take; None finds it by the run's settings.

    Raises:
        ValueError: no run, no recipe that fits, or nothing that both have.
    """
    run = read_trace(folder)
    known = {name: curve.settings for name, curve in curves.items()}
    try:
        name, found = find_recipe(run.settings, known, named=recipe)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    curve = curves[name]
    processes = run.machine.get("num_processes"), curve.runs[0].machine.get("num_processes")
    if None not in processes and processes[0] != processes[1]:
        found = [*found, f"processes are {processes[0]}, not {processes[1]}"]
    verdicts = judge(run, curve)
    if not run.failed and not any(verdict.points for verdict in verdicts):
        first = min((*curve.training_steps, *curve.held_out_steps))
        raise ValueError(
            f"{folder} has logged nothing that can be compared with {name} (step {run.last_step}); "
            f"its curve begins at step {first}, and the steps of training.log_every and "
            "training.sample_every must be among the run's."
        )
    return Comparison(run, curve, found, verdicts)


def write_comparison(comparison: Comparison, out: Path) -> str:
    """Write `reference.md` and `reference.png` to the folder `out`, and return the text."""
    out.mkdir(parents=True, exist_ok=True)
    text = describe(comparison)
    (out / "reference.md").write_text(text)
    draw(comparison, out / "reference.png")
    return text


def describe(comparison: Comparison) -> str:
    """Return the comparison as markdown."""
    run, curve = comparison.run, comparison.curve
    state = "ended" if run.has_ended else f"at step {run.last_step}, not ended"
    lines = [
        f"# {run.folder} against {curve.recipe}: {'off' if comparison.is_off else 'on'} the curve",
        "",
        f"Run: seed {run.settings['seed']}, {state}. Reference: seeds {curve.seeds}, "
        f"`{curve.command}`.",
        "The band is the spread of the reference seeds, widened: docs/recipes.md.",
        "",
    ]
    own = run.settings["data"]["name"]
    if own != curve.data:
        lines += [f"Data: {own}; the reference had {curve.data}.", ""]
    if comparison.differences:
        lines += [f"Other settings: {'; '.join(comparison.differences)}.", ""]
    if comparison.is_own:
        lines += [
            "The run is one of the reference's own: that it lies on the curve says nothing.",
            "",
        ]
    if run.failed:
        lines += [f"The run failed: {run.failed}", ""]
    lines += [row(HEADER), row(["---"] * len(HEADER))]
    lines += [row(_cells(verdict)) for verdict in comparison.verdicts]
    notes = dict.fromkeys(v.note for v in comparison.verdicts if v.points and v.note)
    lines += ["", *(f"Training loss, {note}.\n" for note in notes)]
    lines += [*_throughput(run, curve), ""]
    return "\n".join(lines)


def _cells(verdict: Verdict) -> list[str]:
    name = _words(verdict.name)
    if not verdict.points:
        return [name, "0", "", "", "", "", f"not compared: {verdict.note}"]
    percent = 100 * (verdict.value / verdict.mean - 1) if verdict.mean else float("nan")
    return [
        name,
        str(verdict.points),
        str(verdict.step),
        f"{verdict.value:.4f}",
        f"{verdict.mean:.4f} ± {verdict.band:.4f}",
        f"{percent:+.1f} %, {verdict.bands:+.2f} bands",
        verdict.word,
    ]


def _words(name: str) -> str:
    return name.replace("held_out", "held-out").replace("_", " ")


def _throughput(run: Trace, curve: Curve) -> list[str]:
    """Say how fast both were; no verdict, for machines differ."""
    speeds = [seed.images_per_s for seed in curve.runs]
    mean = sum(speeds) / len(speeds)
    if not run.images_per_s:
        return []
    machine = curve.runs[0].machine
    own = run.machine.get("device", "a machine that the run names when it ends")
    return [
        f"Throughput, not judged: {run.images_per_s:.0f} images/s on {own}, "
        f"{run.images_per_s / mean:.2f} of the reference's {mean:.0f} on {curve.hardware} "
        f"({machine.get('precision')}, torch {machine.get('torch')})."
    ]


def draw(comparison: Comparison, path: Path) -> None:
    """Draw every curve with its band, the reference seeds and the run."""
    from matplotlib.figure import Figure

    names = comparison.curve.names
    rows = [group for group in (HELD_OUT, TRAINING) if any(name in names for name in group)]
    figure = Figure(figsize=(15, 3 * len(rows)), layout="constrained")
    for index, group in enumerate(rows):
        for place, name in enumerate(group):
            if name in names:
                axes = figure.add_subplot(len(rows), len(group), index * len(group) + place + 1)
                _draw_curve(axes, comparison, name)
    figure.savefig(path, dpi=80)


def _draw_curve(axes: "Axes", comparison: Comparison, name: str) -> None:
    run, curve = comparison.run, comparison.curve
    steps, means, bands = band_of(curve, name)
    low, high = ([m + s * b for m, b in zip(means, bands, strict=True)] for s in (-1, 1))
    axes.fill_between(steps, low, high, color="gray", alpha=0.25, lw=0, label="band")
    windows = name in TRAINING
    for seed in curve.runs:
        points = at_steps(curve.points_of(name, seed), steps, windows=windows)
        axes.plot(list(points), list(points.values()), color="gray", lw=0.8)
    own = at_steps(run.rows.get(name, ()), steps, windows=windows)
    word = next((v.word for v in comparison.verdicts if v.name == name), "")
    colour = "C0" if word == "on" else "C3"
    axes.plot(list(own), list(own.values()), color=colour, lw=1.5, marker=".", ms=4)
    axes.set_title(f"{_words(name)}: {word}", fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_yscale("log")
    axes.tick_params(labelsize=7, which="both")
    axes.grid(alpha=0.3)
