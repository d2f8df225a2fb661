"""Draw the figures and fill in the tables of this page, and README's table, from .csv files.

python docs/comparison/where_routing_pays/page.py               # from those that are here
python docs/comparison/where_routing_pays/page.py comparisons   # read them off the runs first

A table stands between `<!-- name -->` and `<!-- end -->`.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd
from seeds import (
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

from tread_zoo.comparison.intervals import differences, interval

HERE = Path(__file__).parent
COLOURS = {"dense": "#2a7fd4", "routed": "#e0731d"}
SHALLOWER = ("#3aa66a", "#8a5fc7")  # of dense networks of fewer blocks
INK = "#808080"  # reads on white and on black


def answers() -> str:
    """Return a table: six questions, and what the differences over seeds say of each."""
    study, long = read_seeds(), _pair()
    plain, million, two = unguided(study), 1_024_000, 2_048_000
    last = plain.images.max()
    at = f"{last // 1000}K images"
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
            "768K": pair(768_000, 768_000, _pair("rwkv")),
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


def _pair(network: str = "dit") -> pd.DataFrame:
    """Return the densely sampled scores of a pair of long trainings in the form of a study's."""
    table = pd.read_csv(HERE / "pairs.csv").query("network == @network and selection_rate == 0")
    return table.assign(seed=0)


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


def draw() -> None:
    """Draw distances by FLOPs and what blocks are worth, over seeds."""
    plain = unguided(read_seeds())
    last = plain[plain.images == plain.images.max()]
    panels = [lambda axis: draw_seeds(axis, last), lambda axis: draw_blocks(axis, last)]
    draw_panels(HERE / "figure.png", panels)


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
    if comparisons and (comparisons / STUDY).exists():
        seeds, real = collect_seeds(comparisons / STUDY)
        add(seeds, HERE / "seeds.csv", KEYS)
        add(real, HERE / "real.csv", ["features", "images"])
    if comparisons and len(digits := collect_digits(comparisons / "evidence_digits")):
        add(digits, HERE / "bypassing_digits.csv", ["seed", "draw", "guidance"])
    draw_fronts(fronts_of(read_seeds()))
    draw()
    page = HERE / "README.md"
    page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
