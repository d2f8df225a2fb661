"""Draw the figures and fill in the tables of this page, and README's table, from .csv files.

python docs/comparison/where_routing_pays/page.py               # from those that are here
python docs/comparison/where_routing_pays/page.py comparisons   # read them off the runs first

A table stands between `<!-- name -->` and `<!-- end -->`.
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
    EVALUATED,
    KEYS,
    SHOWN,
    STUDY,
    bypassing,
    collect_digits,
    collect_seeds,
    fronts,
    fronts_of,
    gained,
    others,
    over_seeds,
    percent,
    read_seeds,
    real_images,
    scored,
    spaces,
    unguided,
)

from tread_zoo import comparison
from tread_zoo.comparison.intervals import differences, interval
from tread_zoo.training.log import read_scores

HERE = Path(__file__).parent
PAGES = (HERE / "README.md", HERE.parents[2] / "README.md")
BATCH_SIZE = 64  # of the pair of long trainings
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
SHALLOWER = ("#3aa66a", "#8a5fc7")  # of dense networks of fewer blocks
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
    """Write the .csv files of the pairs of long trainings, from the runs of both studies and the
    records that evaluate left in their folders."""
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


def pairs() -> pd.DataFrame:
    """Return every difference of the pairs of trainings over equal draws of noise, with half of its
    95 % interval: of arms and, where the dense network was guided, of guidance."""
    rows = [
        (f"{network}, {arm}", images, "dense", of_dense, flops, by)
        for name, network in (("curves", "dit"), ("scan", "rwkv"))
        for arm, images, of_dense, flops, by in compared(name)
    ]
    both = read_evaluations().query("arm in ('dense', 'routed')")
    names = both.arm + both.scale.map(lambda scale: "" if scale == 1 else f", guided by {scale:g}")
    for images, at in both.assign(name=names).set_index("seed").groupby("images"):
        arms = {name: of[SHOWN] for name, of in at.groupby("name") if len(of) > 1}
        dense, routed = (f"{arm}, guided by 1.1" for arm in ("dense", "routed"))
        for one, other in (
            ((dense, "dense"), ("routed", dense), (routed, "routed"), (routed, dense))
            if dense in arms
            else ()
        ):
            rows.append((f"dit, {one}", images, other, images, None, arms[one] - arms[other]))
    return pd.DataFrame([
        {"arm": arm, "images": images, "less": other, "less_images": of_other, "flops": flops}
        | {"draws": len(by.dropna())}
        | {
            f"{metric}{end}": value
            for metric in SHOWN
            for of in [interval(by[metric].dropna())]
            for end, value in (("", of.mean), ("_half", of.half))
        }
        for arm, images, other, of_other, flops, by in rows
    ])  # fmt: skip


def answers() -> str:
    """Return a table: six questions, and what the differences over seeds say of each."""
    study, long = read_seeds(), _pair()
    plain, million, two = unguided(study), 1_024_000, 2_048_000
    last = plain.images.max()
    at = f"{last // 1000}K images" if len(plain) else ""
    own = {arm: scored(plain, arm, last) for arm in ["routed", *others(plain)]}
    shallower = [arm for arm in own if "blocks" in arm] or [""]
    front = fronts_of(study)

    def seeds(arm: str) -> str:
        return answer(own["routed"], own[arm]) if {"routed", arm} <= set(own) else ""

    def pair(images: int, of_dense: int, long: pd.DataFrame = long) -> str:
        return answer(scored(long, "routed", images), scored(long, "dense", of_dense))

    gains = [scored(long, a, million) - scored(long, a, million, 1.1) for a in ("dense", "routed")]
    rows = {
        "Is routing ahead at equal steps?": {
            at: seeds("dense"), "1.0M": pair(million, million), "2.0M": pair(two, two),
        },
        "At equal FLOPs?": {
            f"{at}, {shallower[0]}": seeds(shallower[0]),
            "1.0M, dense at 768K": pair(million, 768_000),
            "2.0M, dense at 1.5M": pair(two, 1_536_000),
        },
        "Is it more than the blocks outside the route?": {
            f"{at}, {shallower[-1]}": seeds(shallower[-1]), "digits, dense, 6 blocks": _on_digits(),
        },
        "Do the routed blocks work? Without them the output changes by": {
            at: _worth(plain[plain.images == last]), "digits": _worth(_digits()),
        },
        "Does guidance gain it as much as the dense network?": {
            f"{at}, by 1.5": judged(gained(front, 1.5), "higher") if len(front) else "",
            "1.0M, by 1.1": answer(gains[1], gains[0], "higher"),
        },
        "For a scan (`rwkv`)?": {
            "768K": pair(768_000, 768_000, _pair("scan")),
        },
    }  # fmt: skip
    lines = ["| question | answer |", "|---|---|"]
    for question, cells in rows.items():
        texts = (f"{place}: {text}" for place, text in cells.items() if text)
        lines.append(f"| {question} | {'; '.join(texts)} |")
    return "\n".join(lines)


def answer(one: pd.Series, other: pd.Series, better: str = "lower") -> str:
    """Return the verdict on a difference over seeds; of one pair its mean difference, with the
    interval over its draws. Nothing where there is no pair."""
    by = differences(one, other)
    if len(by) != 1:
        return judged(by, better, other)
    draws = interval((one - other).dropna())
    over = f" (± {draws.half:.2f} over its draws)" if draws.n > 1 else ""
    return f"**not settled**, {draws.mean:+.2f} of one pair{over}"


def judged(by: pd.Series, better: str = "lower", other: pd.Series | None = None) -> str:
    """Return the 95 % interval of differences over seeds with its verdict and, if it is not
    settled, what it excludes, also as a part of the mean of `other`."""
    if not len(by):
        return ""
    of = interval(by)
    text = f"**{of.plus_minus(2)} {of.verdict(better)}** (n = {of.n})"
    if of.verdict(better) != "not settled" or of.n == 1:
        return text
    gain, loss = (-of.low, of.high) if better == "lower" else (of.high, -of.low)
    part = [f"{v:.2f}" for v in (gain, loss)]
    if other is not None:
        part = [f"{v:.2f} ({100 * v / other.mean():.0f} %)" for v in (gain, loss)]
    return f"{text}: excludes a gain beyond {part[0]} and a loss beyond {part[1]}"


def _pair(name: str = "curves") -> pd.DataFrame:
    """Return the scores of a pair of long trainings in the form of a study's."""
    table = read_evaluations(name).query("arm in ('dense', 'routed')")
    return table.rename(columns={"seed": "draw"}).assign(seed=0)


def _digits() -> pd.DataFrame:
    """Return the runs of `dit` in the study on digits: dense, routed, and dense of 6 blocks."""
    table = pd.read_csv(HERE.parent / "digits" / "evidence.csv").query("study == 'evidence_digits'")
    arms = table.run.map({
        "backbone-dit_tiny_routing-none": "dense",
        "backbone-dit_tiny_routing-tread": "routed",
        "backbone-dit_tiny_backbone.depth-6_routing-none": "shallow",
    })  # fmt: skip
    return table.assign(arm=arms).dropna(subset="arm")


def _by_seed(table: pd.DataFrame, arm: str, metric: str = "fid") -> pd.Series:
    return table[table.arm == arm].groupby("seed")[metric].mean()


def _on_digits() -> str:
    routed, shallow = (_by_seed(_digits(), arm) for arm in ("routed", "shallow"))
    return judged((routed - shallow).dropna(), "lower", shallow)


def _worth(table: pd.DataFrame) -> str:
    """Return by how much the output changes without the routed blocks, routed and dense."""
    both = [_by_seed(table, arm, "routed_blocks") for arm in ("routed", "dense") if len(table)]
    if not both or not min(map(len, both)):
        return ""
    return f"routed **{percent(both[0])}**, dense {percent(both[1])} (n = {min(map(len, both))})"


def gains() -> str:
    """Return README's table: Fréchet distances, dense and routed, of papers and of ours."""
    lines = [
        "| setting | images | dense | routed | routed - dense, 95 % interval "
        "| routed - dense without the routed blocks |",
        "|---" * 6 + "|",
        "| DiT-B/2, ImageNet-256, [TREAD](https://arxiv.org/abs/2501.04765) | 102M | 43.5 | 21.3 "
        "| one run | |",
    ]
    here, study = "docs/comparison/where_routing_pays/README.md", unguided(read_seeds())
    digits = "docs/comparison/digits/README.md#is-a-routed-network-more-than-a-shallower-one"

    def row(setting: str, images: str, *arms: pd.Series) -> None:
        means = [f"{arm.groupby(level=0).mean().mean():.2f}" for arm in arms[:2]]
        apart = [short(arms[1], arm) for arm in (arms[0], *arms[2:])]
        cells = [setting, images, *means, *apart, *[""] * (3 - len(arms))]
        lines.append(f"| {' | '.join(cells)} |")

    row(f"`dit_tiny`, [digits]({digits})", "51K",
        *(_by_seed(_digits(), arm) for arm in ("dense", "routed", "shallow")))  # fmt: skip
    if "routed" in set(study.arm):
        last = study.images.max()
        names = ["dense", "routed", others(study)[-1]]
        row(f"`dit_tiny`, [Fashion-MNIST]({here})", f"{last // 1000}K",
            *(scored(study, arm, last) for arm in names))  # fmt: skip
    for name, table, images, text in (
        ("`dit` of width 128", _pair(), 1_024_000, "1.0M"),
        ("`rwkv` of width 96", _pair("scan"), 768_000, "768K"),
    ):
        arms = (scored(table, arm, images) for arm in ("dense", "routed"))
        row(f"{name}, [Fashion-MNIST]({here})", text, *arms)
    return "\n".join(lines)


def short(one: pd.Series, other: pd.Series) -> str:
    """Return a difference over seeds with its verdict; of one pair its mean."""
    by = differences(one, other)
    of = interval(by)
    seeds = f"{of.n} seeds" if of.n > 1 else "one pair of trainings"
    return f"{of.plus_minus(2)}, {seeds}: {of.verdict('lower')}"


def draw() -> None:
    """Draw distances by FLOPs and what blocks are worth, over seeds, and the pairs by images."""
    plain = unguided(read_seeds())
    last = plain[plain.images == plain.images.max()]
    panels = [lambda axis: draw_seeds(axis, last), lambda axis: draw_blocks(axis, last)]
    draw_panels(HERE / "figure.png", [*(panels if len(last) else []), draw_differences])


def draw_seeds(axis: plt.Axes, scores: pd.DataFrame) -> None:
    """Draw the distance of each training seed by the FLOPs of its training, and means."""
    dense = scores[scores.arm == "dense"].flops.mean()
    shallower = dict(zip([a for a in others(scores) if "blocks" in a], SHALLOWER, strict=False))
    for arm, of in scores.groupby("arm"):
        colour, flops = (COLOURS | shallower)[arm], of.flops.mean() / dense
        by = of.groupby("seed").fid.mean()
        axis.plot([flops] * len(by), by, "o", mfc="none", color=colour)
        axis.plot(flops, by.mean(), "_", ms=26, mew=2.5, color=colour, label=arm)
    axis.set(xlabel="training FLOPs, over those of dense", ylabel="Fréchet distance")
    axis.margins(x=0.15)
    axis.set_title(f"{scores.images.max() // 1000}K images: seeds and their means")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9, markerscale=0.5)


def draw_blocks(axis: plt.Axes, scores: pd.DataFrame) -> None:
    """Draw by how much the output changes without each block: means, and every seed."""
    blocks = sorted((c for c in scores if c.startswith("block_")), key=lambda c: int(c[6:]))
    for arm in ("dense", "routed"):
        by = 100 * scores[scores.arm == arm].groupby("seed")[blocks].mean()
        for values in by.to_numpy():
            axis.plot(range(len(blocks)), values, "o", ms=4, mfc="none", color=COLOURS[arm])
        axis.plot(range(len(blocks)), by.mean(), color=COLOURS[arm], label=arm)
    axis.set(xlabel="block left out", ylabel="change of the output, %", yscale="log")
    axis.set_yticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    axis.yaxis.set_minor_formatter("")
    axis.set_title("what each block is worth")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


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
        figure, axes = plt.subplots(
            1, len(panels), figsize=size, layout="constrained", squeeze=False
        )
        for axis, draw_panel in zip(axes[0], panels, strict=True):
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
    axis.axhline(0, color=INK, lw=1)
    axis.set(xlabel="million images", ylabel="Fréchet distance, less dense", ylim=(-0.6, 1.15))
    axis.set_title("at equal steps: four draws of one pair")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def tables() -> dict[str, str]:
    """Return every table by its name."""
    study = read_seeds()
    return {
        "answers": answers(),
        "seeds": over_seeds(study),
        "real": real_images(pd.read_csv(HERE / "real.csv")),
        "bypassing": bypassing(study, pd.read_csv(HERE / "bypassing_digits.csv")),
        "spaces": spaces(study),
        "fronts": fronts(study),
        "gains": gains(),
    }


def filled(text: str) -> str:
    """Return a page with its tables."""
    for name, table in tables().items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S)
    return text


def add(rows: pd.DataFrame, file: Path, keys: list[str]) -> None:
    """Write rows to a .csv file in place of those of the same keys; its others stay, whose runs may
    be of another machine."""
    table = pd.concat([pd.read_csv(file), rows]).drop_duplicates(keys, keep="last")
    table.sort_values(keys).to_csv(file, index=False, float_format="%.6g")


def main(comparisons: Path | None) -> None:
    if comparisons and (comparisons / "where_routing_pays").exists():
        collect(comparisons)
    if comparisons and (comparisons / STUDY).exists():
        seeds, real = collect_seeds(comparisons / STUDY)
        add(seeds, HERE / "seeds.csv", KEYS)
        add(real, HERE / "real.csv", ["features", "images"])
    if comparisons and len(digits := collect_digits(comparisons / "evidence_digits")):
        add(digits, HERE / "bypassing_digits.csv", ["seed", "draw", "guidance"])
    pairs().to_csv(HERE / "differences.csv", index=False, float_format="%.4g")
    draw_fronts(fronts_of(read_seeds()))
    draw()
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
