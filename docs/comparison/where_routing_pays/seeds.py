"""What a study says over training seeds: its records, and tables of them, for page.py."""

import json
from pathlib import Path

import pandas as pd

from tread_zoo.comparison.findings import direction
from tread_zoo.comparison.intervals import differences, interval
from tread_zoo.training.log import read_scores

HERE = Path(__file__).parent
STUDY = "shallower_fashion_mnist"
OWN = "features"  # the classifier of these images
SPACES = {OWN: "the classifier of these images", "cifar10_resnet56": "ResNet-56 of CIFAR-10"}
DIGITS = {"fid": 2, "kid": 2, "precision": 3, "recall": 3, "label_accuracy": 3}
EVALUATED = list(DIGITS)
SHOWN = ["fid", "precision", "recall", "label_accuracy"]
NAMES = "Fréchet distance | precision | recall | label accuracy"
KEYS = ["arm", "seed", "images", "draw", "features", "num_images", "guidance", "scale"]


def collect_seeds(study: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return each score of a study by training seed, draw, features and guidance, with what blocks
    are worth; and what held-out images score against training images in each kind of features."""
    rows, real = [], []
    runs = [run for run in sorted((study / "runs").iterdir()) if (run / "config.json").exists()]
    configs = {run: json.loads((run / "config.json").read_text()) for run in runs}
    depths = {run: config["backbone"]["depth"] for run, config in configs.items()}
    for run, config in configs.items():
        facts = json.loads((run / "facts.json").read_text())
        whole = depths[run] == max(depths.values())
        arm = "dense" if whole else f"dense, {depths[run]} blocks"
        records = [json.loads(file.read_text()) for file in sorted(run.glob("score_*.json"))]
        for record in [*read_scores(run).values(), *records]:
            protocol, sampling = record["protocol"], record["protocol"]["sampling"]
            features = protocol["extractor"].partition("@")[0]
            if protocol["reference"] == "train":
                count = protocol["num_reference"]
                real.append({"features": features, "images": count, **_scores(record["real"])})
            else:
                blocks, worth, rate = record["contributions"], {}, sampling["selection_rate"]
                if whole:
                    worth = {f"block_{i}": value for i, value in enumerate(blocks["blocks"])}
                    worth["routed_blocks"] = blocks["ranges"][0][2]
                images = facts["images_per_step"] * protocol["step"]
                rows.append({
                    "arm": arm if config["routing"]["name"] == "none" else "routed",
                    "seed": config["seed"],
                    "images": images,
                    "draw": protocol["seed"],
                    "features": features,
                    "num_images": protocol["num_generated"],
                    "guidance": f"rate {rate:g}" if rate else sampling["guidance"],
                    "scale": sampling["guidance_scale"],
                    "flops": facts["flops_routed"] * images,
                    **_scores(record["values"]),
                    **worth,
                })  # fmt: skip
    # what was scored again comes last
    scores = pd.DataFrame(rows).drop_duplicates(KEYS, keep="last").sort_values(KEYS)
    kinds = pd.DataFrame(real, columns=["features", "images", *EVALUATED])
    return scores, kinds.drop_duplicates(["features", "images"], keep="last")


def _scores(values: dict[str, float]) -> dict[str, float | None]:
    """Return the scores that the page has; features of other classes have no label accuracy."""
    return {metric: values.get(metric) for metric in EVALUATED}


def collect_digits(study: Path) -> pd.DataFrame:
    """Return the scores of the routed `dit` of evidence_digits, by what bypasses in sampling."""
    rows = []
    for file in sorted(study.glob("runs/backbone-dit_tiny_routing-tread_seed-*/score_*.json")):
        record = json.loads(file.read_text())
        if "fid" in record["values"]:
            protocol, seed = record["protocol"], int(file.parent.name.rpartition("-")[2])
            rate = protocol["sampling"]["selection_rate"]
            guidance = f"rate {rate:g}" if rate else "none"
            scores = {metric: record["values"][metric] for metric in SHOWN}
            rows.append({"seed": seed, "draw": protocol["seed"], "guidance": guidance, **scores})
    return pd.DataFrame(rows)


def read_seeds() -> pd.DataFrame:
    """Return seeds.csv."""
    return pd.read_csv(HERE / "seeds.csv")


def unguided(table: pd.DataFrame, features: str = OWN) -> pd.DataFrame:
    """Return the unguided scores in these features, of as many samples as any has."""
    own = table[(table.features == features) & (table.guidance == "none")]
    return own[own.num_images == own.num_images.max()]


def scored(
    table: pd.DataFrame, arm: str, images: int, scale: float = 1.0, metric: str = "fid"
) -> pd.Series:
    """Return one score of an arm, by (seed, draw)."""
    at = table[(table.arm == arm) & (table.images == images) & (table.scale == scale)]
    return at.set_index(["seed", "draw"])[metric]


def others(table: pd.DataFrame) -> list[str]:
    """Return the arms beside the routed one: dense, then those of fewer and fewer blocks."""
    arms = set(table.arm) - {"routed"}
    return sorted(arms, key=lambda arm: -int(arm.split()[1]) if "blocks" in arm else -1000)


def over_seeds(table: pd.DataFrame) -> str:
    """Return two tables: each arm's means over training seeds, and the routed network's differences
    from each other one, by 95 % intervals over equal seeds."""
    plain = unguided(table)
    names = f"seeds | FLOPs | {NAMES}"
    arms = [f"| images | | {names} | without the routed blocks |", "|---" * 9 + "|"]
    apart = [f"| images | routed less | {names} |", "|---" * 8 + "|"]
    for images, at in plain.groupby("images"):
        flops = at.groupby("arm").flops.mean()
        dense = flops.get("dense", flops.max())
        by_arm = {arm: of.set_index(["seed", "draw"]) for arm, of in at.groupby("arm")}
        for arm in [a for a in [*others(at)[:1], "routed", *others(at)[1:]] if a in by_arm]:
            means = by_arm[arm].groupby(level=0).mean(numeric_only=True)
            cells = [f"{means[m].mean():.{DIGITS[m]}f}" for m in SHOWN]
            worth = percent(means.routed_blocks) if "blocks" not in arm else ""
            place = f"| {images // 1000}K | {arm} | {len(means)} | {flops[arm] / dense:.2f}"
            arms.append(f"{place} | {' | '.join(cells)} | {worth} |")
        for arm in [arm for arm in others(at) if "routed" in by_arm]:
            by = pd.DataFrame({
                metric: differences(by_arm["routed"][metric], by_arm[arm][metric])
                for metric in SHOWN
            })  # fmt: skip
            if len(by):
                place = f"| {images // 1000}K | {arm} | {len(by)}"
                ratio = f"{flops['routed'] / flops[arm]:.2f}"
                cells = [interval(by[m]).judged(direction(m) or "lower", DIGITS[m]) for m in SHOWN]
                apart.append(f"{place} | {ratio} | {' | '.join(cells)} |")
    return "\n".join([*arms, "", *apart]) if len(plain) else ""


def bypassing(table: pd.DataFrame, digits: pd.DataFrame) -> str:
    """Return a table: what routed networks' samples lose where tokens bypass the routed blocks in
    sampling, too, here and on digits, by 95 % intervals over seeds."""
    own = table[(table.features == OWN) & (table.arm == "routed")]
    settings = {"Fashion-MNIST": own[own.num_images == own.num_images.max()], "digits": digits}
    names = f"seeds | Fréchet distance | less that without | {NAMES.partition(' | ')[2]}"
    lines = [f"| | bypass in sampling | {names} |", "|---" * 8 + "|"]
    for setting, of in settings.items():
        scores = of.set_index(["seed", "draw"])
        plain, rates = scores[scores.guidance == "none"], scores.guidance.astype(str)
        for rate, at in scores[rates.str.startswith("rate ")].groupby("guidance"):
            by = pd.DataFrame({metric: differences(at[metric], plain[metric]) for metric in SHOWN})
            cells = [interval(by[m]).judged(direction(m) or "lower", DIGITS[m]) for m in SHOWN]
            place = f"| {setting} | {float(rate[5:]):.0%} | {len(by)} | {at.fid.mean():.2f}"
            lines.append(f"{place} | {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(fractions: pd.Series) -> str:
    """Return the mean of fractions in percent, and half of its 95 % interval."""
    return f"{interval(100 * fractions.dropna()).plus_minus(1, signed=False)} %"


def spaces(table: pd.DataFrame) -> str:
    """Return a table: the routed network's distance less that of each other one in both kinds of
    features, by 95 % intervals over seeds."""
    kinds = [name for name in SPACES if name in set(table.features)]
    if len(kinds) < 2:
        return ""
    names = " | ".join(SPACES[name] for name in kinds)
    lines = [f"| images | routed less | seeds | {names} |", "|---" * (3 + len(kinds)) + "|"]
    both = [unguided(table, name) for name in kinds]
    for images in sorted(set(both[1].images)):
        for arm in others(both[1]):
            apart = [
                differences(scored(of, "routed", images), scored(of, arm, images)) for of in both
            ]
            if all(map(len, apart)):
                cells = [interval(each).judged("lower", 3) for each in apart]
                count = min(map(len, apart))
                lines.append(f"| {images // 1000}K | {arm} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def real_images(real: pd.DataFrame) -> str:
    """Return a table: what held-out images score against as many training images."""
    lines = [f"| in features of | images of each | {NAMES} |", "|---" * 6 + "|"]
    for row in real.to_dict("records"):
        cells = ["" if pd.isna(row[m]) else f"{row[m]:.3f}" for m in SHOWN]
        lines.append(f"| {SPACES[row['features']]} | {row['images']:,} | {' | '.join(cells)} |")
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
    guided = own[(own.guidance != "none") & (own.scale > 1)]
    kinds = guided[["arm", "guidance"]].drop_duplicates()
    starts = own[own.guidance == "none"].drop(columns="guidance").merge(kinds, on="arm")
    rows = pd.concat([starts, guided])
    keys = ["guidance", "arm", "scale", "seed"]
    return rows.groupby(keys)[SHOWN].mean().reset_index()


def gained(front: pd.DataFrame, scale: float, guidance: str = "cfg") -> pd.Series:
    """Return by seed what guidance took off the distance of the routed network, less what it took
    off the dense one's; empty where one of them was not guided so."""
    of = front[front.guidance == guidance]
    fid = of.pivot_table(index="seed", columns=["arm", "scale"], values="fid")
    if not {("dense", scale), ("routed", scale)} <= set(fid):
        return pd.Series(dtype=float)
    gains = [fid[arm, 1.0] - fid[arm, scale] for arm in ("dense", "routed")]
    return (gains[1] - gains[0]).dropna()


def fronts(table: pd.DataFrame) -> str:
    """Return a table: distances by guidance and scale, the routed network's less the dense one's,
    and what it gained by guidance, less what the dense one did, by 95 % intervals over seeds."""
    front = fronts_of(table)
    if not len(front):
        return ""
    names = "seeds | dense | routed | routed - dense | gain of routed - of dense"
    lines = [f"| guidance | scale | {names} |", "|---" * 7 + "|"]
    for guidance, of in front.groupby("guidance"):
        for scale in sorted(set(of.scale)):
            at = {
                arm: of[(of.arm == arm) & (of.scale == scale)].set_index("seed").fid
                for arm in ("dense", "routed")
            }
            means = [f"{one.mean():.2f}" if len(one) else "" for one in at.values()]
            apart, more = (at["routed"] - at["dense"]).dropna(), gained(front, scale, guidance)
            cells = [
                interval(apart).judged("lower") if len(apart) else "",
                interval(more).judged("higher") if len(more) and scale > 1 else "",
            ]
            place = f"| {guidance} | {scale:g} | {max(map(len, at.values()))}"
            lines.append(f"{place} | {' | '.join(means + cells)} |")
    picture = "![Precision, recall and distance by the scale of guidance](fronts.png)"
    return "\n".join([*lines, "", picture])
