"""Draw the figure and fill in the tables of this page, from its .csv files.

python docs/comparison/where_routing_pays/page.py               # from those that are here
python docs/comparison/where_routing_pays/page.py comparisons   # read them off the runs first

A table stands between `<!-- name -->` and `<!-- end -->` in README.md.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd
from seeds import (
    BATCH_SIZE,
    EVALUATED,
    NAMES,
    OWN,
    SHOWN,
    collect_seeds,
    fronts,
    fronts_of,
    judged,
    over_seeds,
    scored,
    spaces,
    unguided,
    worded,
)

from tread_zoo import comparison
from tread_zoo.comparison.intervals import differences, interval
from tread_zoo.training.log import read_scores

HERE = Path(__file__).parent
ARMS = {  # what tells the folders of an arm, the first that fits: (name, colour)
    "routing-none": ("dense", "#2a7fd4"),
    "dense_tail-0.1": ("routed, dense tail", "#8a5fc7"),
    "start-5": ("routed [5, 9)", "#3aa66a"),
    "selection_rate-0.75": ("routed at 0.75", "#c24a72"),
    "start-3": ("routed [3, 10)", "#3aa66a"),
    "start-2": ("routed", "#e0731d"),
    "routing-tread": ("routed", "#e0731d"),
}
COLOURS = dict(ARMS.values())
INK = "#808080"  # reads on white and on black
STUDIES = {"curves": "where_routing_pays", "scan": "where_routing_pays_scan"}
SHALLOW = "backbone.depth-6_routing-none"
EQUAL_FLOPS = (  # an arm at these images, and dense at those
    ("routed", 768_000, 512_000),
    ("routed at 0.75", 768_000, 512_000),
    ("routed [5, 9)", 768_000, 640_000),
    ("routed", 1_536_000, 1_024_000),
    ("routed", 2_048_000, 1_536_000),
    ("routed, dense tail", 2_048_000, 1_536_000),
)


def collect(comparisons: Path) -> None:
    """Write the .csv files from the runs of both studies, and the records that evaluate left in
    their folders."""
    rows = []
    for name, study in STUDIES.items():
        runs = sorted((comparisons / study / "runs").iterdir())
        curves = comparison.read_curves([str(run) for run in runs])
        tail = curves.folder.str.contains("dense_tail-0.1")  # up to it the routed run's
        curves = curves[(curves.source == "score") & ~(tail & (curves.step <= 28_800))]
        curves.to_csv(HERE / f"{name}.csv", index=False, float_format="%.6g")
        rows += [row for run in runs for row in draws_of(run)]
    keys = ["folder", "step", "scale", "selection_rate", "seed"]
    table = pd.DataFrame(rows).drop_duplicates(keys).sort_values(keys)
    table.to_csv(HERE / "evaluations.csv", index=False, float_format="%.6g")


def read_seeds(study: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return evidence.csv, or a table like it, and the earlier pair of trainings where it has no
    seed 0 of its own: the same settings, features of the same command."""
    file = HERE / "evidence.csv"
    if study is None:
        study = pd.read_csv(file) if file.exists() else pd.DataFrame()
    if len(study) and (study.seed == 0).any():
        return study
    first = read_evaluations().query("arm in ('dense', 'routed')")
    first = first.rename(columns={"seed": "draw"}).assign(
        seed=0, features=OWN, num_images=1000,
        guidance=first.scale.map(lambda scale: "none" if scale == 1 else "cfg"),
    )  # fmt: skip
    return pd.concat([study, first], ignore_index=True)


def draws_of(run: Path) -> list[dict[str, Any]]:
    """Return the scores of a run's checkpoints that evaluate scored again, with the run's own."""
    others = [json.loads(file.read_text()) for file in run.glob("score_*.json")]
    steps = {record["protocol"]["step"] for record in others}
    rows = []
    for record in [r for r in read_scores(run).values() if r["protocol"]["step"] in steps] + others:
        protocol, sampling = record["protocol"], record["protocol"]["sampling"]
        rows.append({
            "folder": str(run),
            "step": protocol["step"],
            "scale": sampling["guidance_scale"],
            "selection_rate": sampling["selection_rate"],
            "seed": protocol["seed"],
            **{metric: record["values"][metric] for metric in EVALUATED},
        })  # fmt: skip
    return rows


def arm_of(folder: str) -> str:
    return next(arm for key, (arm, _) in ARMS.items() if key in folder)


def read_curves(name: str = "curves") -> pd.DataFrame:
    """Return every score of the runs with its arm, and the images that its run had seen."""
    return with_place(pd.read_csv(HERE / f"{name}.csv"))


def read_evaluations(name: str = "curves") -> pd.DataFrame:
    """Return the scores of single checkpoints by noise and guidance, densely sampled."""
    table = with_place(pd.read_csv(HERE / "evaluations.csv"))
    of_study = table.folder.str.contains(f"/{STUDIES[name]}/")
    return table[of_study & (table.selection_rate == 0)]


def with_place(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(arm=table.folder.map(arm_of), images=BATCH_SIZE * table.step)


def draws(evaluations: pd.DataFrame) -> dict[int, dict[str, pd.DataFrame]]:
    """Return the scores of each draw of the noise, by images and arm."""
    unguided = evaluations[evaluations.scale == 1]
    unguided = unguided.set_index("seed")[["images", "arm", *EVALUATED]]
    return {
        images: {arm: at[at.arm == arm][EVALUATED] for arm in COLOURS if arm in set(at.arm)}
        for images, at in unguided.groupby("images")
    }


def compared(name: str) -> Iterator[tuple[str, int, int, float, pd.DataFrame]]:
    """Yield what the page compares of a study: an arm, its images, those of the dense network, the
    ratio of their FLOPs, and the differences of equal draws, the arm less dense."""
    at, curves = draws(read_evaluations(name)), read_curves(name)
    spent = curves.groupby(["arm", "images"]).flops.mean()
    pairs = [(arm, images, images) for images, arms in at.items() for arm in list(arms)[1:]]
    for arm, images, of_dense in [*pairs, *(EQUAL_FLOPS if name == "curves" else ())]:
        by = at[images][arm] - at[of_dense]["dense"]
        yield arm, images, of_dense, spent[arm, images] / spent["dense", of_dense], by


def differences_of(name: str) -> str:
    """Return a table: arms less the dense network, at equal steps and at about equal FLOPs."""
    lines = [f"| | images | dense at | FLOPs | {NAMES} |", "|---" * 8 + "|"]
    for arm, images, of_dense, flops, by in compared(name):
        place = f"{arm} | {images // 1000}K | {of_dense // 1000}K | {flops:.2f}"
        lines.append(f"| {place} | {judged(by, words=False)} |")
    return "\n".join(lines)


def means() -> pd.DataFrame:
    """Return mean and standard deviation of every score over the draws of its noise."""
    rows = []
    for name in STUDIES:
        table = read_evaluations(name)
        by = table.groupby(["folder", "arm", "images", "scale"])[EVALUATED]
        both = by.agg(["mean", "std", "count"])
        both.columns = [f"{metric}_{of}" for metric, of in both.columns]
        rows.append(both.reset_index())
    return pd.concat(rows)


def guided() -> str:
    """Return a table: the two networks, guided and not, less the unguided dense one, by draws."""
    evaluations = read_evaluations()
    both = evaluations[evaluations.arm.isin(["dense", "routed"])]
    names = both.arm + both.scale.map(lambda scale: "" if scale == 1 else f", guided by {scale:g}")
    lines = [f"| images | | less | {NAMES} |", "|---" * 7 + "|"]
    both = both.assign(name=names).set_index("seed")
    for images, at in both.groupby("images"):
        groups = {name: of[SHOWN] for name, of in at.groupby("name") if len(of) > 1}
        pairs = [("dense, guided by 1.1", "dense"), ("routed", "dense, guided by 1.1")]
        pairs += [("routed, guided by 1.1", "routed"), ("routed, guided by 1.1", pairs[0][0])]
        for one, other in pairs if pairs[0][0] in groups else ():
            cells = judged((groups[one] - groups[other]).dropna(), words=False)
            lines.append(f"| {images // 1000}K | {one} | {other} | {cells} |")
    return "\n".join(lines)


def answers() -> str:
    """Return a table: five questions, and what the differences over seeds say of each."""
    table, million = read_seeds(), 1_024_000
    plain = unguided(table)
    own = table[(table.features == OWN) & table.guidance.isin(["none", "cfg"])]
    own = own[own.num_images == 1000]
    scan = read_evaluations("scan").rename(columns={"seed": "draw"}).assign(seed=0)

    def dit(arm: str, images: int, other: str, of_other: int) -> str:
        return answer(scored(plain, arm, images), scored(plain, other, of_other))

    guided = [scored(own, arm, million, 1.1) for arm in ("dense", "routed")]
    gains = [scored(own, a, million) - g for a, g in zip(("dense", "routed"), guided, strict=True)]
    shallow = dit("routed", million, "dense, 5 blocks", million)
    where = "1.0M" if shallow else "digits"
    rows = {
        "Is routing ahead at equal steps?": [
            ("1.0M images", dit("routed", million, "dense", million)),
            ("2.0M", dit("routed", 2_048_000, "dense", 2_048_000)),
        ],
        "At about equal FLOPs?": [
            ("1.0M, dense at 768K", dit("routed", million, "dense", 768_000)),
            ("2.0M, dense at 1.5M", dit("routed", 2_048_000, "dense", 1_536_000)),
        ],
        "Of a dense network without the routed blocks?": [(where, shallow or _on_digits())],
        "Of a dense network guided by 1.1?": [
            ("1.0M", answer(scored(own, "routed", million), guided[0])),
            ("what guidance gains", answer(gains[1], gains[0], "higher")),
        ],
        "For a scan (`rwkv`)?": [
            ("768K", answer(scored(scan, "routed", 768_000), scored(scan, "dense", 768_000))),
        ],
    }  # fmt: skip
    lines = ["| question | difference in Fréchet distance, 95 % interval |", "|---|---|"]
    for question, cells in rows.items():
        lines.append(f"| {question} | {'; '.join(f'{at}: {text}' for at, text in cells)} |")
    return "\n".join(lines)


def answer(one: pd.Series, other: pd.Series, better: str = "lower") -> str:
    """Return the 95 % interval over seeds and its verdict; of one pair its mean difference, with
    the interval over its draws. Nothing where there is no pair."""
    by = differences(one, other)
    if not len(by):
        return ""
    if len(by) > 1:
        return f"**{worded(by, better)}** (n = {len(by)})"
    draws = interval((one - other).dropna())
    return f"**not settled**, {draws.mean:+.2f} of one pair (± {draws.half:.2f} over its draws)"


def _on_digits() -> str:
    """Return what the study on digits says of a routed `dit` and one of its other blocks."""
    table = pd.read_csv(HERE.parent / "digits" / "evidence.csv").set_index("seed")
    name = "backbone-dit_tiny_"
    arms = [table[table.run == name + arm].fid for arm in ("routing-tread", SHALLOW)]
    by = (arms[0] - arms[1]).dropna()
    return f"**{worded(by)}** (n = {len(by)})"


def draw() -> None:
    """Draw the differences by images, the distances by FLOPs, and precision against recall."""
    draw_panels(HERE / "figure.png", [draw_differences, draw_distances, draw_plane])


def draw_fronts(front: pd.DataFrame, file: Path = HERE / "fronts.png") -> None:
    """Draw what guidance does: precision against recall, and distance by its scale, each arm's mean
    over seeds with their standard deviations. An empty front draws nothing."""
    if not len(front):
        return
    lines = {"cfg": "-", "sparse": "--"}

    def draw_lines(axis: plt.Axes, x: str, y: str) -> None:
        for (guidance, arm), of in front.groupby(["guidance", "arm"]):
            by = of.groupby("scale")[SHOWN]
            at = {"mean": by.mean().reset_index(), "std": by.std().reset_index()}
            bars = [None if n == "scale" else at["std"][n].fillna(0) for n in (y, x)]
            axis.errorbar(
                at["mean"][x], at["mean"][y], *bars, fmt="." + lines[guidance], capsize=2,
                color=COLOURS[arm], label=f"{arm}, {guidance}",
            )  # fmt: skip

    def plane(axis: plt.Axes) -> None:
        draw_lines(axis, "precision", "recall")
        axis.set(xlabel="precision", ylabel="recall", title="from no guidance to the strongest")

    def distance(axis: plt.Axes) -> None:
        draw_lines(axis, "scale", "fid")
        axis.set(xlabel="scale of guidance", ylabel="Fréchet distance")
        axis.legend(frameon=False, labelcolor=INK, fontsize=9)

    draw_panels(file, [plane, distance])


def draw_panels(file: Path, panels: list[Callable[[plt.Axes], None]]) -> None:
    """Draw panels beside each other that read on white and on black."""
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    with plt.rc_context({**style, "xtick.color": INK, "ytick.color": INK, "font.size": 11}):
        size = (5 * len(panels), 4.6)
        figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained")
        for axis, draw_panel in zip(axes, panels, strict=True):
            draw_panel(axis)
            axis.grid(alpha=0.25)
            axis.patch.set_alpha(0)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, transparent=True, dpi=100)
        plt.close(figure)


def draw_differences(axis: plt.Axes) -> None:
    """Draw each arm's distance less that of dense at equal steps, with its 95 % interval."""
    arms = [(f"dit, {a}", COLOURS[a], i, by) for a, i, d, _, by in compared("curves") if i == d]
    arms += [("rwkv, routed", "#777777", i, by) for a, i, _, _, by in compared("scan")
             if a == "routed"]  # fmt: skip
    labels = list(dict.fromkeys(label for label, *_ in arms))
    for label, colour, images, by in arms:
        of, shift = interval(by.fid.dropna()), 1 + 0.02 * labels.index(label)
        first = axis.get_legend_handles_labels()[1].count(label) == 0
        axis.errorbar(
            images / 1e6 * shift, of.mean, of.half, fmt="o", ms=5, capsize=2, color=colour,
            label=label if first else None,
        )  # fmt: skip
    plain = unguided(read_seeds())
    for images in sorted(set(plain.images)):  # other seeds: a ring for each pair
        by = differences(scored(plain, "routed", images), scored(plain, "dense", images)).drop(
            0, errors="ignore"
        )
        axis.plot([images / 1e6 * 1.03] * len(by), by, "o", mfc="none", color=COLOURS["routed"])
    axis.axhline(0, color=INK, lw=1)
    axis.set(xlabel="million images", ylabel="Fréchet distance, less dense", ylim=(-0.6, 1.15))
    axis.set_title("at equal steps: four draws of one pair")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_distances(axis: plt.Axes) -> None:
    """Draw the mean distance over draws of each arm by the FLOPs that it took."""
    curves, at = read_curves(), draws(read_evaluations())
    spent = curves.groupby(["arm", "images"]).flops.mean()
    for arm, colour in COLOURS.items():
        points = [(spent[arm, i], arms[arm].fid) for i, arms in at.items() if arm in arms]
        if points:
            x, y = zip(*points, strict=True)
            means, spread = [v.mean() for v in y], [v.std() for v in y]
            axis.errorbar(x, means, spread, fmt=".-", color=colour, capsize=2, label=arm)
    axis.set(xlabel="training FLOPs", ylabel="Fréchet distance")
    axis.set_title("mean and standard deviation of four draws")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_plane(axis: plt.Axes) -> None:
    """Draw precision and recall as images go by, and what guidance does to them."""
    table = means()
    table = table[table.arm.isin(["dense", "routed"]) & ~table.folder.str.contains("scan")]
    for arm, path in table[table.scale == 1].sort_values("images").groupby("arm"):
        axis.plot(path.precision_mean, path.recall_mean, ".-", color=COLOURS[arm], label=arm)
        last = path.iloc[-1]
        axis.plot(last.precision_mean, last.recall_mean, "o", ms=8, color=COLOURS[arm])
    several = table[(table.scale > 1) & (table.fid_count > 1)]
    for row in several.itertuples():
        start = table[(table.scale == 1) & (table.folder == row.folder)]
        start = start[start.images == row.images].iloc[0]
        axis.annotate(
            "", (row.precision_mean, row.recall_mean), (start.precision_mean, start.recall_mean),
            arrowprops={"arrowstyle": "->", "color": COLOURS[row.arm]},
        )  # fmt: skip
    axis.set(xlabel="precision", ylabel="recall")
    axis.set_title("as images go by; arrows: guided by 1.1")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def tables() -> dict[str, str]:
    """Return every table of the page by its name."""
    seeds, real = HERE / "evidence.csv", HERE / "spaces.csv"
    study = pd.read_csv(seeds) if seeds.exists() else None
    return {
        "answers": answers(),
        "seeds": "" if study is None else over_seeds(read_seeds(study)),
        "spaces": spaces(study, pd.read_csv(real)) if real.exists() else "",
        "dit": differences_of("curves"),
        "guided": guided(),
        "fronts": "" if study is None else fronts(study),
        "scan": differences_of("scan"),
    }


def filled(text: str) -> str:
    """Return the page with its tables."""
    for name, table in tables().items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S)
    return text


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if (Path(sys.argv[1]) / "where_routing_pays").exists():
            collect(Path(sys.argv[1]))
        if (Path(sys.argv[1]) / "evidence").exists():
            collect_seeds(Path(sys.argv[1]) / "evidence")
    if (HERE / "evidence.csv").exists():
        draw_fronts(fronts_of(pd.read_csv(HERE / "evidence.csv")))
    means().to_csv(HERE / "means.csv", index=False, float_format="%.4g")
    draw()
    page = HERE / "README.md"
    page.write_text(filled(page.read_text()))
