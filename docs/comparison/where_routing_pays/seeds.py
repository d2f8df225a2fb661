"""What the study `evidence` says over training seeds: tables from its runs, for page.py."""

import json
from pathlib import Path

import pandas as pd

from tread_zoo.comparison.findings import direction
from tread_zoo.comparison.intervals import differences, interval
from tread_zoo.evaluation.contribution import contribution_names
from tread_zoo.training.log import read_scores

HERE = Path(__file__).parent
SEVERAL = {  # of the study `evidence`, by what tells the folders: seeds, each with draws of noise
    "depth-5": "dense, 5 blocks",
    "depth-8": "dense, 8 blocks",
    "start-2": "routed",
    "routing-none": "dense",
}
BATCH_SIZE = 64
OWN = "features"  # the classifier of these images
SPACES = {OWN: "the classifier of these images", "cifar10_resnet56": "ResNet-56 of CIFAR-10"}
DIGITS = {"fid": 2, "kid": 2, "precision": 3, "recall": 3, "label_accuracy": 3}
EVALUATED = list(DIGITS)
SHOWN = ["fid", "precision", "recall", "label_accuracy"]
NAMES = "Fréchet distance | precision | recall | label accuracy"


def collect_seeds(study: Path) -> None:
    """Write evidence.csv: each score by training seed, draw, features and guidance, and what blocks
    are worth; and spaces.csv: what held-out images score in each kind of features."""
    rows, spaces = [], []
    for run in sorted((study / "runs").iterdir()):
        records = [json.loads(file.read_text()) for file in run.glob("score_*.json")]
        for record in [*read_scores(run).values(), *records]:
            protocol, sampling = record["protocol"], record["protocol"]["sampling"]
            features = protocol["extractor"].partition("@")[0]
            if protocol["reference"] == "train":
                spaces.append({"features": features, **_scores(record["real"])})
            elif sampling["selection_rate"] == 0:
                rows.append({
                    "arm": next(arm for key, arm in SEVERAL.items() if key in run.name),
                    "seed": json.loads((run / "config.json").read_text())["seed"],
                    "images": BATCH_SIZE * protocol["step"],
                    "draw": protocol["seed"],
                    "features": features,
                    "num_images": protocol["num_generated"],
                    "guidance": sampling["guidance"],
                    "scale": sampling["guidance_scale"],
                    **_scores(record["values"]),
                    **contribution_names(record.get("contributions", {})),
                })  # fmt: skip
    # what was scored again comes last, and has the contributions
    keys = ["arm", "seed", "images", "draw", "features", "num_images", "guidance", "scale"]
    table = pd.DataFrame(rows).drop_duplicates(keys, keep="last")
    table.to_csv(HERE / "evidence.csv", index=False, float_format="%.6g")
    if spaces:
        table = pd.DataFrame(spaces).drop_duplicates("features", keep="last")
        table.to_csv(HERE / "spaces.csv", index=False, float_format="%.6g")


def _scores(values: dict[str, float]) -> dict[str, float | None]:
    """Return the scores that the page has; features of other classes have no label accuracy."""
    return {metric: values.get(metric) for metric in EVALUATED}


def unguided(table: pd.DataFrame, features: str = "features") -> pd.DataFrame:
    """Return the scores of 1,000 unguided samples in these features."""
    own = (table.features == features) & (table.guidance == "none") & (table.num_images == 1000)
    return table[own]


def scored(
    table: pd.DataFrame, arm: str, images: int, scale: float = 1.0, metric: str = "fid"
) -> pd.Series:
    """Return one score of an arm, by (seed, draw)."""
    at = table[(table.arm == arm) & (table.images == images) & (table.scale == scale)]
    return at.set_index(["seed", "draw"])[metric]


def over_seeds(table: pd.DataFrame) -> str:
    """Return a table: each arm's mean ± standard deviation over training seeds, and 95 % intervals
    of the differences of equal seeds, the routed network's from each other one."""
    lines = [f"| images | | seeds | {NAMES} | without [2, 9) |", "|---" * 8 + "|"]
    for images, at in unguided(table).groupby("images"):
        groups = at.groupby("arm", sort=False)
        arms = {arm: scores.set_index(["seed", "draw"]) for arm, scores in groups}
        for arm, scores in arms.items():
            means = scores[EVALUATED].groupby(level=0).mean()
            worth = scores.get("contribution_2_9", pd.Series(dtype=float)).mean()
            lines.append(
                f"| {images // 1000}K | {arm} | {len(means)} | "
                f"{with_spread(means.mean(), means.std())} | "
                f"{'' if pd.isna(worth) else f'{worth:.3f}'} |"
            )
        for arm in [arm for arm in arms if "routed" in arms and arm != "routed"]:
            by = pd.DataFrame({
                metric: differences(arms["routed"][metric], arms[arm][metric])
                for metric in SHOWN
            })  # fmt: skip
            if len(by):
                name = f"routed - ({arm})"
                lines.append(f"| {images // 1000}K | {name} | {len(by)} | {judged(by)} | |")
    return "\n".join(lines)


def spaces(table: pd.DataFrame, real: pd.DataFrame) -> str:
    """Return two tables: the routed network's distance less that of each other one in both kinds of
    features, by 95 % intervals over seeds; and what held-out images score in them."""
    kinds = [name for name in SPACES if name in set(table.features)]
    if len(kinds) < 2:
        return ""
    names = " | ".join(f"{SPACES[name]} | " for name in kinds)
    lines = [f"| images | routed less | seeds | {names}|", "|---" * (3 + 2 * len(kinds)) + "|"]
    both = [unguided(table, name) for name in kinds]
    for images, arm in both[1][["images", "arm"]].drop_duplicates().itertuples(index=False):
        apart = [differences(scored(of, "routed", images), scored(of, arm, images)) for of in both]
        if arm != "routed" and all(map(len, apart)):
            cells = [f"{(i := interval(a)).plus_minus(2)} | {i.verdict('lower')}" for a in apart]
            count = min(map(len, apart))
            lines.append(f"| {images // 1000}K | {arm} | {count} | {' | '.join(cells)} |")
    lines += ["", f"| held-out images, in features of | {NAMES} |", "|---" * 5 + "|"]
    for row in real[real.features.isin(kinds)].to_dict("records"):
        cells = ["" if pd.isna(row[m]) else f"{row[m]:.{DIGITS[m]}f}" for m in SHOWN]
        lines.append(f"| {SPACES[row['features']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fronts_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the scores along guidance: for each arm, guidance and scale those by seed (means over
    its draws), the unguided ones of as many images at scale 1 of each guidance."""
    own = table[table.features == OWN]
    guided = own[(own.guidance != "none") & (own.scale > 1)]
    if not len(guided):
        return guided
    count, images = guided[["num_images", "images"]].mode().iloc[0]
    own = own[(own.num_images == count) & (own.images == images)]
    guided = own[own.guidance != "none"]
    kinds = guided[["arm", "guidance"]].drop_duplicates()
    starts = own[own.guidance == "none"].drop(columns="guidance").merge(kinds, on="arm")
    rows = pd.concat([starts, guided])
    keys = ["guidance", "arm", "scale", "seed"]
    return rows.groupby(keys)[SHOWN].mean().reset_index()


def fronts(table: pd.DataFrame) -> str:
    """Return a table: distances by guidance and scale, the routed network's less the dense one's,
    and how much more the dense one gained by guidance, by 95 % intervals over seeds."""
    front = fronts_of(table)
    if not len(front):
        return ""
    names = "seeds | dense | routed | routed - dense | gained more by dense"
    lines = [f"| guidance | scale | {names} |", "|---" * 7 + "|"]
    for guidance, of in front.groupby("guidance"):
        fid = of.pivot_table(index="seed", columns=["arm", "scale"], values="fid")
        for scale in sorted(set(of.scale)):
            arms = [fid[arm] for arm in ("dense", "routed") if arm in fid]
            at = [one[scale] for one in arms if scale in one]
            means = [f"{one.mean():.2f}" for one in at]
            place = f"| {guidance} | {scale:g} | {max(map(len, at))}"
            if len(at) < 2:
                means.insert(0 if "dense" not in fid else 1, "")
                lines.append(f"{place} | {' | '.join(means)} | | |")
                continue
            apart, gains = (at[1] - at[0]).dropna(), [one[1.0] - one[scale] for one in arms]
            more = (gains[0] - gains[1]).dropna()
            last = "" if scale == 1 or not len(more) else interval(more).plus_minus(2)
            lines.append(f"{place} | {' | '.join(means)} | {worded(apart)} | {last} |")
    return "\n".join(lines)


def worded(by: pd.Series, better: str = "lower") -> str:
    """Return an interval of differences over seeds, in a distance or what `better` says, and its
    verdict."""
    of = interval(by)
    return f"{of.plus_minus(2)} {of.verdict(better)}"


def with_spread(mean: pd.Series, spread: pd.Series) -> str:
    """Return mean ± standard deviation of each score; of one value the value."""
    return " | ".join(
        f"{mean[m]:.{DIGITS[m]}f}" + ("" if pd.isna(spread[m]) else f" ± {spread[m]:.{DIGITS[m]}f}")
        for m in SHOWN
    )


def judged(by: pd.DataFrame, *, words: bool = True) -> str:
    """Return the 95 % interval of each score's differences, bold where it leaves 0 out; with its
    verdict where they are of several trainings (`words`)."""
    cells = []
    for metric in SHOWN:
        of = interval(by[metric].dropna())
        verdict, text = of.verdict(direction(metric) or "lower"), of.plus_minus(DIGITS[metric])
        word = f" {verdict}" if words else ""
        cells.append(text if verdict == "not settled" else f"**{text}**{word}")
    return " | ".join(cells)
