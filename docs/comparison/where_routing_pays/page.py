"""The tables and figures of what routing does over training seeds, and in one pair of long runs.

python docs/comparison/tables.py where_routing_pays comparisons   # adds the runs of two studies
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from tables import DIGITS, add_rows, markdown, scores, with_verdict

from tread_zoo.comparison.intervals import differences, interval

HERE = Path(__file__).parent
STUDY = "shallower_fashion_mnist"
OWN = "features"  # the classifier of these images
SPACES = {OWN: "the classifier of these images", "cifar10_resnet56": "ResNet-56 of CIFAR-10"}
METRICS = ["fid", "kid", "precision", "recall", "label_accuracy"]
SHOWN = ["fid", "precision", "recall", "label_accuracy"]
NAMES = "Fréchet distance | precision | recall | label accuracy"
KEYS = ["arm", "seed", "images", "draw", "features", "num_images", "guidance", "scale"]
COLOURS = {"dense": "#2a7fd4", "routed": "#e0731d"}
SHALLOWER = ("#3aa66a", "#8a5fc7")  # of dense networks of fewer blocks
INK = "#808080"  # reads on white and on black


def add(comparisons: str) -> None:
    """Add the scores of the study over seeds; of digits those of the routed `dit`."""
    rows, real = collect_seeds(Path(comparisons) / STUDY)
    add_rows(rows, HERE / "seeds.csv", KEYS)
    add_rows(real, HERE / "real.csv", ["features", "images"])
    digits = []
    for run, config, record in scores(f"{comparisons}/evidence_digits/runs", "score*.json"):
        if run.name.startswith("backbone-dit_tiny_routing-tread_seed"):
            own = {metric: record["values"][metric] for metric in SHOWN}
            draw, (guidance, _) = record["protocol"]["seed"], guided(record)
            digits.append({"seed": config["seed"], "draw": draw, "guidance": guidance, **own})
    add_rows(digits, HERE / "bypassing_digits.csv", ["seed", "draw", "guidance"])


def collect_seeds(study: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return each score of a study by training seed, draw, features and guidance, with what blocks
    are worth; and what held-out images score against training images in each kind of features."""
    rows, real = [], []
    found = list(scores(study / "runs", "score*.json"))
    depth = max(config["backbone"]["depth"] for _, config, _ in found)
    for run, config, record in found:
        facts = pd.read_json(run / "facts.json", typ="series")
        protocol, blocks = record["protocol"], record["contributions"]
        features = protocol["extractor"].partition("@")[0]
        if protocol["reference"] == "train":
            own = {metric: record["real"].get(metric) for metric in METRICS}
            real.append({"features": features, "images": protocol["num_reference"], **own})
            continue
        dense, worth = f"dense, {config['backbone']['depth']} blocks", {}
        if config["backbone"]["depth"] == depth:
            worth = {f"block_{i}": value for i, value in enumerate(blocks["blocks"])}
            dense, worth["routed_blocks"] = "dense", blocks["ranges"][0][2]
        arm = dense if config["routing"]["name"] == "none" else "routed"
        images = int(facts.images_per_step * protocol["step"])
        place = (arm, config["seed"], images, protocol["seed"], features)
        row = dict(zip(KEYS, (*place, protocol["num_generated"], *guided(record)), strict=True))
        own = {metric: record["values"].get(metric) for metric in METRICS}
        rows.append({**row, "flops": facts.flops_routed * images, **own, **worth})
    return rows, real


def guided(record: dict[str, Any]) -> tuple[str, float]:
    """Return the guidance of a score, or the rate at which its sampling bypassed; and its scale."""
    sampling = record["protocol"]["sampling"]
    rate = sampling["selection_rate"]
    return f"rate {rate:g}" if rate else sampling["guidance"], sampling["guidance_scale"]


def tables() -> dict[str, str]:
    """Return every table by its name."""
    study = pd.read_csv(HERE / "seeds.csv")
    return {
        "answers": answers(study),
        "seeds": over_seeds(study),
        "real": real_images(pd.read_csv(HERE / "real.csv")),
        "bypassing": bypassing(study, pd.read_csv(HERE / "bypassing_digits.csv")),
        "spaces": spaces(study),
        "fronts": fronts(study) + "\n\n![Precision, recall and distance by the scale of guidance]"
        "(fronts.png)",
    }


def answers(study: pd.DataFrame) -> str:
    """Return a table: six questions, and what the differences over seeds say of each."""
    plain, million, two = unguided(study), 1_024_000, 2_048_000
    last = plain.images.max()
    at = f"{last // 1000}K images"
    own = {arm: scored(plain, arm, last) for arm in ["routed", *others(plain)]}
    _, dense, nine, *_, six = own
    long = pd.read_csv(HERE / "pairs.csv").query("selection_rate == 0").assign(seed=0)
    dit, rwkv = (long[long.network == name] for name in ("dit", "rwkv"))
    digits = pd.read_csv(HERE.parent / "digits/evidence.csv").query("study == 'evidence_digits'")
    digits = digits.assign(arm=digits.run.str.removeprefix("backbone-dit_tiny_"))
    arms = {"routing-none": "dense", "routing-tread": "routed"}
    digits = digits.replace({"arm": arms | {"backbone.depth-6_routing-none": "shallow"}})
    fids = digits.pivot_table("fid", "seed", "arm")
    on_digits = with_bounds((fids.routed - fids.shallow).dropna(), "lower", fids.shallow)

    def seeds(arm: str) -> str:
        return answer(own["routed"], own[arm])

    def pair(images: int, of_dense: int, long: pd.DataFrame = dit) -> str:
        return answer(scored(long, "routed", images), scored(long, "dense", of_dense))

    gains = [scored(dit, a, million) - scored(dit, a, million, 1.1) for a in ("dense", "routed")]
    rows = {
        "Is routing ahead at equal steps?": {
            at: seeds(dense), "1.0M": pair(million, million), "2.0M": pair(two, two),
        },
        "At equal FLOPs?": {
            f"{at}, {nine}": seeds(nine),
            "1.0M, dense at 768K": pair(million, 768_000),
            "2.0M, dense at 1.5M": pair(two, 1_536_000),
        },
        "Is it more than the blocks outside the route?": {
            f"{at}, {six}": seeds(six), "digits, dense, 6 blocks": on_digits,
        },
        "Do the routed blocks work? Without them the output changes by": {
            at: worth(plain[plain.images == last]), "digits": worth(digits),
        },
        "Does guidance gain it as much as the dense network?": {
            f"{at}, by 1.5": with_bounds(gained(fronts_of(study), 1.5), "higher"),
            "1.0M, by 1.1": answer(gains[1], gains[0], "higher"),
        },
        "For a scan (`rwkv`)?": {"768K": pair(768_000, 768_000, rwkv)},
    }  # fmt: skip
    return markdown(
        "| question | answer |",
        ([row, "; ".join(f"{at}: {text}" for at, text in of.items())] for row, of in rows.items()),
    )


def answer(one: pd.Series, other: pd.Series, better: str = "lower") -> str:
    """Return the verdict on a difference over seeds; of one pair its mean difference, with the
    interval over its draws."""
    by = differences(one, other)
    if len(by) > 1:
        return with_bounds(by, better, other)
    draws = interval((one - other).dropna())
    over = f" (± {draws.half:.2f} over its draws)" if draws.n > 1 else ""
    return f"**not settled**, {draws.mean:+.2f} of one pair{over}"


def with_bounds(by: pd.Series, better: str, other: pd.Series | None = None) -> str:
    """Return the 95 % interval of differences over seeds with its verdict and, if it is not
    settled, what it excludes, also as a part of the mean of `other`."""
    of = interval(by)
    text = f"**{of.plus_minus(2)} {of.verdict(better)}** (n = {of.n})"
    if of.verdict(better) != "not settled":
        return text
    ends = (-of.low, of.high) if better == "lower" else (of.high, -of.low)
    parts = [f" ({100 * v / other.mean():.0f} %)" if other is not None else "" for v in ends]
    gain, loss = (f"{v:.2f}{part}" for v, part in zip(ends, parts, strict=True))
    return f"{text}: excludes a gain beyond {gain} and a loss beyond {loss}"


def worth(table: pd.DataFrame) -> str:
    """Return by how much the output changes without the routed blocks, routed and dense."""
    by = table.pivot_table("routed_blocks", "seed", "arm")
    return f"routed **{percent(by.routed)}**, dense {percent(by.dense)} (n = {len(by)})"


def percent(fractions: pd.Series) -> str:
    """Return the mean of fractions in percent, and half of its 95 % interval."""
    return f"{interval(100 * fractions.dropna()).plus_minus(1, signed=False)} %"


def unguided(table: pd.DataFrame, features: str = OWN) -> pd.DataFrame:
    """Return the unguided scores in these features, of as many samples as any has."""
    own = table[(table.features == features) & (table.guidance == "none")]
    return own[own.num_images == own.num_images.max()]


def scored(table: pd.DataFrame, arm: str, images: int, scale: float = 1.0) -> pd.Series:
    """Return the distances of an arm, by (seed, draw)."""
    at = table[(table.arm == arm) & (table.images == images) & (table.scale == scale)]
    return at.set_index(["seed", "draw"]).fid


def others(table: pd.DataFrame) -> list[str]:
    """Return the arms beside the routed one: dense, then those of fewer and fewer blocks."""
    arms = set(table.arm) - {"routed"}
    return sorted(arms, key=lambda arm: -int(arm.split()[1]) if "blocks" in arm else -1000)


def apart(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return the differences of the shown scores over seeds; both are indexed by (seed, draw)."""
    return pd.DataFrame({metric: differences(one[metric], other[metric]) for metric in SHOWN})


def over_seeds(table: pd.DataFrame) -> str:
    """Return two tables: each arm's means over training seeds, and the routed network's differences
    from each other one, by 95 % intervals over equal seeds."""
    means, less = [], []
    for images, at in unguided(table).groupby("images"):
        flops, of = at.groupby("arm").flops.mean(), f"{images // 1000}K"
        by_arm = {arm: own.set_index(["seed", "draw"]) for arm, own in at.groupby("arm")}
        dense, *shallower = others(at)
        for arm in (dense, "routed", *shallower):
            by = by_arm[arm].groupby(level=0).mean(numeric_only=True)
            cells = [of, arm, len(by), f"{flops[arm] / flops[dense]:.2f}"]
            cells += [f"{by[m].mean():.{DIGITS[m]}f}" for m in SHOWN]
            means.append([*cells, percent(by.routed_blocks) if arm not in shallower else ""])
        for arm in (dense, *shallower):
            by = apart(by_arm["routed"], by_arm[arm])
            less.append(
                [of, arm, len(by), f"{flops['routed'] / flops[arm]:.2f}", *with_verdict(by)]
            )
    names = f"seeds | FLOPs | {NAMES}"
    arms = markdown(f"| images | | {names} | without the routed blocks |", means)
    return arms + "\n\n" + markdown(f"| images | routed less | {names} |", less)


def bypassing(table: pd.DataFrame, digits: pd.DataFrame) -> str:
    """Return a table: what routed networks' samples lose where tokens bypass the routed blocks in
    sampling, too, here and on digits, by 95 % intervals over seeds."""
    own = table[(table.features == OWN) & (table.arm == "routed")]
    settings = {"Fashion-MNIST": own[own.num_images == own.num_images.max()], "digits": digits}
    rows = []
    for setting, of in settings.items():
        by_rate = dict(iter(of.set_index(["seed", "draw"]).groupby("guidance")))
        for rate, at in by_rate.items():
            if rate.startswith("rate "):
                by = apart(at, by_rate["none"])
                cells = [setting, f"{float(rate[5:]):.0%}", len(by), f"{at.fid.mean():.2f}"]
                rows.append([*cells, *with_verdict(by)])
    names = f"seeds | Fréchet distance | less that without | {NAMES.partition(' | ')[2]}"
    return markdown(f"| | bypass in sampling | {names} |", rows)


def spaces(table: pd.DataFrame) -> str:
    """Return a table: the routed network's distance less that of each other one in both kinds of
    features, by 95 % intervals over seeds."""
    both, rows = [unguided(table, name) for name in SPACES], []
    for images in sorted(set(both[1].images)):
        for arm in others(both[1]):
            by = [differences(scored(of, "routed", images), scored(of, arm, images)) for of in both]
            cells = [interval(each).with_verdict("lower", 3) for each in by]
            rows.append([f"{images // 1000}K", arm, min(map(len, by)), *cells])
    return markdown(f"| images | routed less | seeds | {' | '.join(SPACES.values())} |", rows)


def real_images(real: pd.DataFrame) -> str:
    """Return a table: what held-out images score against as many training images."""
    rows = (
        [SPACES[row["features"]], f"{row['images']:,}"]
        + ["" if pd.isna(row[m]) else f"{row[m]:.3f}" for m in SHOWN]
        for row in real.to_dict("records")
    )
    return markdown(f"| in features of | images of each | {NAMES} |", rows)


def fronts_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the scores along guidance: for each arm, guidance and scale those by seed (means over
    its draws), the unguided ones of as many images at scale 1 of each guidance."""
    own = table[table.features == OWN]
    counts = own[(own.guidance != "none") & (own.scale > 1)][["num_images", "images"]].mode()
    own = own.merge(counts.head(1))
    with_it = own[(own.guidance != "none") & (own.scale > 1)]
    kinds = with_it[["arm", "guidance"]].drop_duplicates()
    starts = own[own.guidance == "none"].drop(columns="guidance").merge(kinds, on="arm")
    keys = ["guidance", "arm", "scale", "seed"]
    return pd.concat([starts, with_it]).groupby(keys)[SHOWN].mean().reset_index()


def gained(front: pd.DataFrame, scale: float, guidance: str = "cfg") -> pd.Series:
    """Return by seed what guidance took off the distance of the routed network, less what it took
    off the dense one's."""
    fid = front[front.guidance == guidance].pivot_table("fid", "seed", ["arm", "scale"])
    dense, routed = (fid[arm, 1.0] - fid[arm, scale] for arm in ("dense", "routed"))
    return (routed - dense).dropna()


def fronts(table: pd.DataFrame) -> str:
    """Return a table: distances by guidance and scale, the routed network's less the dense one's,
    and what it gained by guidance, less what the dense one did, by 95 % intervals over seeds."""
    front, rows = fronts_of(table), []
    for (guidance, scale), of in front.groupby(["guidance", "scale"]):
        fid = of.pivot_table("fid", "seed", "arm")
        cells = [guidance, f"{scale:g}", len(fid), f"{fid.dense.mean():.2f}"]
        cells += [f"{fid.routed.mean():.2f}"]
        cells += [interval((fid.routed - fid.dense).dropna()).with_verdict("lower")]
        more = interval(gained(front, scale, guidance)).with_verdict("higher") if scale > 1 else ""
        rows.append([*cells, more])
    names = "seeds | dense | routed | routed - dense | gain of routed - of dense"
    return markdown(f"| guidance | scale | {names} |", rows)


def draw() -> None:
    """Draw distances by FLOPs, what blocks are worth, and what guidance does, over seeds."""
    study = pd.read_csv(HERE / "seeds.csv")
    plain, front = unguided(study), fronts_of(study)
    last = plain[plain.images == plain.images.max()]
    draw_panels(HERE / "figure.png", last, draw_seeds, draw_blocks)
    draw_panels(HERE / "fronts.png", front, draw_plane, draw_distances)


def draw_seeds(axis: plt.Axes, scores: pd.DataFrame) -> None:
    """Draw the distance of each training seed by the FLOPs of its training, and means."""
    dense = scores[scores.arm == "dense"].flops.mean()
    colours = COLOURS | dict(zip(others(scores)[1:], SHALLOWER, strict=False))
    for arm, of in scores.groupby("arm"):
        flops, by = of.flops.mean() / dense, of.groupby("seed").fid.mean()
        axis.plot([flops] * len(by), by, "o", mfc="none", color=colours[arm])
        axis.plot(flops, by.mean(), "_", ms=26, mew=2.5, color=colours[arm], label=arm)
    axis.set(xlabel="training FLOPs, over those of dense", ylabel="Fréchet distance")
    axis.margins(x=0.15)
    axis.set_title(f"{scores.images.max() // 1000}K images: seeds and their means")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9, markerscale=0.5)


def draw_blocks(axis: plt.Axes, scores: pd.DataFrame) -> None:
    """Draw by how much the output changes without each block: means, and every seed."""
    blocks = [name for name in scores if name.startswith("block_")]
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


def draw_plane(axis: plt.Axes, front: pd.DataFrame) -> None:
    """Draw precision against recall."""
    draw_lines(axis, front, "precision", "recall")
    axis.set(xlabel="precision", ylabel="recall", title="from no guidance to the strongest")


def draw_distances(axis: plt.Axes, front: pd.DataFrame) -> None:
    """Draw the distance by the scale of guidance."""
    draw_lines(axis, front, "scale", "fid")
    axis.set(xlabel="scale of guidance", ylabel="Fréchet distance")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_lines(axis: plt.Axes, front: pd.DataFrame, x: str, y: str) -> None:
    """Draw each arm's mean over seeds, with standard deviations."""
    for (guidance, arm), of in front.groupby(["guidance", "arm"]):
        by = of.groupby("scale")[SHOWN]
        mean, std = by.mean().reset_index(), by.std().fillna(0).reset_index()
        bars = [None if name == "scale" else std[name] for name in (y, x)]
        style = {"fmt": ".-" if guidance == "cfg" else ".--", "capsize": 2, "color": COLOURS[arm]}
        axis.errorbar(mean[x], mean[y], *bars, label=f"{arm}, {guidance}", **style)


def draw_panels(
    file: Path, table: pd.DataFrame, *panels: Callable[[plt.Axes, pd.DataFrame], None]
) -> None:
    """Draw panels beside each other that read on white and on black."""
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    with plt.rc_context({**style, "xtick.color": INK, "ytick.color": INK, "font.size": 11}):
        size = (5 * len(panels), 4.6)
        figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained")
        for axis, draw_panel in zip(axes, panels, strict=True):
            draw_panel(axis, table)
            axis.grid(alpha=0.25)
            axis.patch.set_alpha(0)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, transparent=True, dpi=100)
        plt.close(figure)
