"""The study of guidance: equal cost by a count of one's own, each record once, clear refusals."""

import csv
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch

from tests.small_run import parts_of, settings
from tread_zoo.comparison.guidance_study import (
    Scoring,
    Study,
    compare_guidance,
    plan_study,
    records,
)
from tread_zoo.comparison.guidance_study.groups import group_runs
from tread_zoo.comparison.guidance_study.pictures import plot_scales
from tread_zoo.comparison.guidance_study.plan import choose_num_steps
from tread_zoo.evaluation.evaluate import EvaluationOptions
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.routing import Route
from tread_zoo.training.checkpoints import save_checkpoint

FOUR = ["none", "cfg", "sparse", "interval"]


def leave_run(folder, *overrides, steps=(3, 6)):
    """Leave checkpoints of a network whose weights are noise, as a run of these settings would."""
    parts = parts_of(settings(*overrides))
    generator = torch.Generator().manual_seed(parts.seed)
    for step in steps:
        state = {
            name: 0.3 * torch.randn(value.shape, generator=generator)
            for name, value in parts.backbone.state_dict().items()
        }
        meta = {**parts.settings, "step": step}
        save_checkpoint(folder, {"model": state, "ema": state}, meta, keep=2)
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one setting, of which each kept two checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    return [leave_run(folder / f"dit_seed{seed}", f"seed={seed}") for seed in (1, 0)]


def scoring(**changed):
    options = {"num_images": 6, "extractor": "auto", "metrics": [], "reference": "train",
               "seed": 1, "batch_size": 6}  # fmt: skip
    own = {field.name for field in dataclasses.fields(Scoring)}
    options |= {key: value for key, value in changed.items() if key not in own}
    settings = {"weights": "ema", "device": "cpu", "precision": "fp32", "data": {},
                "num_pictures": 3}  # fmt: skip
    settings |= {key: value for key, value in changed.items() if key in own}
    return Scoring(options=EvaluationOptions(**options), **settings)


def study(runs, **changed):
    asked = {"guidances": FOUR, "scales": [1.5, 3.0], "samplers": ["as_run"], "num_steps": 2}
    return Study(runs, **(asked | changed))


# Steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cost",
    [
        lambda n: 7 * n,
        lambda n: 2 * n - 1,  # heun
        lambda n: n + n // 2,  # plateaus of an interval
        lambda n: 5 if n == 1 else 5 + 100 * (n - 1),  # the first step is the cheapest
    ],
)
@pytest.mark.parametrize("budget", [1, 4, 5, 7, 20, 105, 1000])
def test_no_other_number_of_steps_is_nearer_below_the_budget(cost, budget):
    fitting = [n for n in range(1, 1100) if cost(n) <= budget]
    assert choose_num_steps(cost, budget) == max(fitting, default=0)


@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_steps_and_flops_equal_a_count_by_hand(runs, sampler):
    """Calls of the network for each kind counted by its definition, times the FLOPs of a call."""
    network = parts_of(settings()).backbone
    dense = count_flops(network)
    kept = torch.arange(4)[None]  # of 16 tokens a rate of 0.75 leaves 4; 4 blocks are routed in 2
    sparse = count_flops(network, routes=[Route(1, 3, kept)])
    assert sparse < dense
    budget = round(13.5 * dense)

    def levels(n):
        """Return the time of each call; the first of a step, and the second but at the end."""
        grid = [1 - i / n for i in range(n + 1)]
        if sampler == "euler":
            return grid[:-1]
        return [t for pair in itertools.pairwise(grid) for t in pair if t != 0]

    def cost(kind, n):
        weak = {
            "none": 0,
            "cfg": dense * len(levels(n)),
            "sparse weak_rate=0.75": sparse * len(levels(n)),
            "interval low=0.1 high=0.5": dense * sum(0.1 < t <= 0.5 for t in levels(n)),
        }
        return dense * len(levels(n)) + weak[kind]

    asked = study(
        runs,
        guidances=[
            "none", "cfg", {"name": "sparse", "weak_rate": 0.75},
            {"name": "interval", "low": 0.1, "high": 0.5},
        ],
        samplers=[sampler], num_steps=None, flops=budget,
    )  # fmt: skip
    (plan,) = plan_study(asked, scoring())
    assert plan.budget == budget
    assert len(plan.trials) == 7
    for trial in plan.trials:
        label = trial.guidance.label
        best = max(n for n in range(1, 30) if cost(label, n) <= budget)
        assert (trial.num_steps, trial.cost.flops) == (best, cost(label, best)), label
        assert budget < cost(label, best + 1)


def test_the_budget_is_what_cfg_costs_in_the_runs_own_steps(runs):
    (plan,) = plan_study(study(runs, guidances=["none", "cfg"], num_steps=None), scoring())
    dense = count_flops(parts_of(settings()).backbone)
    assert plan.budget == 2 * 2 * dense  # sampler.num_steps=2, two networks
    assert [(t.key[0], t.num_steps) for t in plan.trials] == [("none", 4), ("cfg", 2), ("cfg", 2)]
    (plan,) = plan_study(study(runs, guidances=["cfg"], scales=[1, 2], num_steps=3), scoring())
    assert [trial.num_steps for trial in plan.trials] == [6, 3]  # a scale of 1 needs one branch


def test_a_plan_alone_samples_nothing(runs, tmp_path):
    asked = study(runs, guidances=["cfg", "path_drop"], num_steps=3)
    text = compare_guidance(asked, scoring(), tmp_path, plan_only=True)
    assert "| `cfg` | 1.5 | 3 | 6 |" in text
    assert "`path_drop` is not possible" in text
    assert not list(tmp_path.iterdir())


# Groups -------------------------------------------------------------------------------------------


def test_runs_that_differ_in_seed_alone_are_one_group(runs, tmp_path):
    other = leave_run(tmp_path / "more_seed0", "training.learning_rate=0.1")
    scored = leave_run(tmp_path / "dit_seed2", "seed=2", "evaluation.num_images=9")
    groups = group_runs([*runs, other, scored])
    seeds = [[found.meta["seed"] for found in group.checkpoints] for group in groups]
    assert [group.label for group in groups] == ["dit", "more"]
    assert seeds == [[0, 1, 2], [0]]
    with pytest.raises(ValueError, match="same settings and seed 0; give each run once"):
        group_runs([*runs, runs[1]])


# What cannot be done ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"guidances": ["cgf"]}, "guidances: name='cgf' is unknown. Did you mean 'cfg'"),
        ({"guidances": [{"name": "sparse", "weak_rat": 0.5}]}, "Did you mean 'weak_rate'"),
        (
            {"guidances": ["cfg", {"name": "sparse", "strong_rate": 0.8, "weak_rate": 0.5}]},
            "0 <= strong_rate < weak_rate < 1 must hold",
        ),
        ({"guidances": [{"name": "cfg", "scale": 2}]}, r"write scales: \[2\]"),
        ({"guidances": ["cfg", "cfg"]}, "guidances: 'cfg' comes twice"),
        ({"guidances": []}, r"guidances=\[\] asks for nothing"),
        ({"guidances": [{"weak_rate": 0.5}]}, "must be a name, or a mapping with a name"),
        ({"guidances": [{"name": "none", "scales": [2]}]}, "needs a kind of guidance"),
        ({"scales": [2, 2]}, r"scales=\[2, 2\] of cfg must list different"),
        ({"scales": [-1]}, "scale=-1 must be finite and at least 0"),
        ({"samplers": ["eular"]}, "samplers: name='eular' is unknown. Did you mean 'euler'"),
        ({"samplers": [{"name": "heun", "num_steps": 4}]}, "follows from the budget"),
        ({"samplers": [{"name": "as_run", "shift": 3}]}, "is the run's own as it is"),
        ({"num_steps": 3, "flops": 10**9}, "are two budgets; give one"),
        ({"num_steps": 0}, "num_steps=0 must be at least 1"),
        ({"num_steps": None, "flops": 10}, "flops=10 pays no step of guidance none"),
        ({"runs": []}, r"runs=\[\] names no run"),
        ({"guidances": ["path_drop"]}, "guidance=path_drop needs a network"),
        ({"samplers": ["edm_stochastic"]}, "sampler=edm_stochastic is for objective=edm"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_sampled(runs, changed, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        compare_guidance(study(**({"runs": runs} | changed)), scoring(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_scores_that_cannot_be_are_told_before_anything_is_sampled(runs, tmp_path):
    few = scoring(metrics=["precision"], num_images=2)
    with pytest.raises(ValueError, match=r"has 2 image\(s\); precision takes at least 4"):
        compare_guidance(study(runs), few, tmp_path)
    with pytest.raises(ValueError, match="num_pictures=-1 must be at least 0"):
        compare_guidance(study(runs), scoring(num_pictures=-1), tmp_path)
    assert not list(tmp_path.iterdir())


# Records ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """A study of all kinds that has been made, one of which the network cannot take."""
    out = tmp_path_factory.mktemp("made")
    asked = study(runs, guidances=["none", "cfg", "auto", "path_drop"], scales=[1, 3])
    return asked, out, compare_guidance(asked, scoring(), out, command="do it")


def test_the_report_has_every_setting_and_what_is_not_possible(made):
    _, out, report = made
    assert (out / "report.md").read_text() == report
    for kind in ("cfg", "auto"):
        for scale in ("1", "3"):
            assert sum(f"| `{kind}` | {scale} |" in line for line in report.splitlines()) == 1
    assert "| `none` | 1 | 4 | 4 |" in report
    assert "- `path_drop` is not possible: guidance=path_drop needs a network" in report
    assert "Mean over seed 0, 1" in report
    assert "do it" in report
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {"scales_dit.png", "samples_dit.png"}
    assert all(f"({name})" in report for name in pictures)
    with (out / "results.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2 * (1 + 2 * 2)
    assert all(int(row["flops"]) <= int(row["budget"]) for row in rows)
    entries = json.loads((out / "results.json").read_text())
    assert [e["guidance"] for e in entries if "not_possible" in e] == ["path_drop"]


def test_the_weak_network_is_the_earliest_checkpoint_of_the_same_run(made, runs, tmp_path):
    _, out, _ = made
    for record in json.loads((out / "results.json").read_text()):
        if record["guidance"] == "auto":
            path = record["protocol"]["sampling"]["guidance_checkpoint"]
            assert path.endswith(f"{record['run']}/checkpoints/step_00000003")
    alone = study([f"{runs[0]}/checkpoints/step_00000003"], guidances=["auto"])
    with pytest.raises(ValueError, match="kept no checkpoint before the one of step 3"):
        plan_study(alone, scoring())
    uneven = leave_run(tmp_path / "dit_seed5", "seed=5", steps=(4, 6))
    with pytest.raises(ValueError, match=r"of different steps \(3 of dit_seed0, 4 of dit_seed5\)"):
        plan_study(study([runs[1], uneven], guidances=["auto"]), scoring())
    given = {"name": "auto", "checkpoint": runs[0]}
    (plan,) = plan_study(study([runs[1], uneven], guidances=[given]), scoring())
    assert not plan.refusals


def test_all_begin_from_the_same_noise(made):
    """At a scale of 1 classifier-free guidance is the network alone, to the bit."""
    _, out, _ = made
    images = {path.stem: np.load(path)["images"] for path in (out / "records").glob("*.npz")}
    alone, one, three = (
        images[f"dit,seed=1,{kind}"]
        for kind in ("none,as_run,scale=1", "cfg,as_run,scale=1", "cfg,as_run,scale=3")
    )
    assert alone.shape == (3, 1, 8, 8)
    assert len(np.unique(alone)) > 2
    assert np.array_equal(alone, one)
    assert not np.array_equal(one, three)


def test_again_makes_what_is_missing_and_nothing_else(made, monkeypatch):
    asked, out, report = made
    calls, real = [], records.evaluate

    def counted(*args, **keywords):
        calls.append(args[3])
        return real(*args, **keywords)

    monkeypatch.setattr(records, "evaluate", counted)
    gone = out / "records" / "dit,seed=0,cfg,as_run,scale=3.json"
    before = gone.read_text()
    gone.unlink()
    assert compare_guidance(asked, scoring(), out, command="do it") == report
    assert [(call.guidance.name, call.guidance.scale) for call in calls] == [("cfg", 3)]
    assert gone.read_text() == before


def test_a_record_of_other_settings_is_not_taken_for_this_one(made, runs):
    asked, out, report = made
    with pytest.raises(ValueError, match=r"holds a record whose evaluation is .*another out"):
        compare_guidance(dataclasses.replace(asked, guidances=["cfg"]), scoring(num_images=7), out)
    fewer = dataclasses.replace(asked, guidances=["none"], num_steps=3)
    with pytest.raises(ValueError, match="holds a record whose sampling is"):
        compare_guidance(fewer, scoring(), out)
    fewer = dataclasses.replace(asked, guidances=["none"])
    file = next((out / "records").glob("*none*.json"))
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match="holds no record"):
        compare_guidance(fewer, scoring(), out)
    file.write_text(text)
    assert (out / "report.md").read_text() == report


# What the report says -----------------------------------------------------------------------------


def test_means_ranges_and_the_best_by_hand(runs, tmp_path, monkeypatch):
    """Scores that are known: the mean over seeds, its range, the best scale of each, of all."""
    fids = {  # (guidance, scale) -> of seeds 0 and 1
        ("none", 1.0): (9.0, 9.0), ("cfg", 1.5): (4.0, 6.0), ("cfg", 3.0): (1.0, 7.0),
        ("sparse", 1.5): (3.0, 3.0), ("sparse", 3.0): (8.0, 10.0),
    }  # fmt: skip

    def scored(*args, **keywords):
        guidance = args[3].guidance
        seed = scored.calls // len(fids)
        scored.calls += 1
        fid = fids[guidance.name, guidance.scale][seed]
        values = {"fid": fid, "recall": fid / 20}
        return {"values": values, "real": {"fid": 0.5}, "protocol": {
            "data": "digits", "reference": "train", "precision": "fp32"}}  # fmt: skip

    scored.calls = 0
    monkeypatch.setattr(records, "evaluate", scored)
    asked = study(runs, guidances=["none", "cfg", "sparse"])
    report = compare_guidance(asked, scoring(), tmp_path)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines()]
    by_key = {tuple(row[:2]): row[-2:] for row in table if len(row) == 8}
    assert by_key["`none`", "1"] == ["9.00", "0.450"]
    assert by_key["`cfg`", "1.5"] == ["5.00 (4.00 … 6.00)", "**0.250 (0.200 … 0.300)**"]
    assert by_key["`cfg`", "3"] == ["**4.00 (1.00 … 7.00)**", "0.200 (0.050 … 0.350)"]
    assert by_key["`sparse`", "1.5"] == ["**3.00**", "0.150"]
    assert by_key["held-out real images", ""] == ["0.50", ""]
    best = {row[0]: row[1:] for row in table if len(row) == 3}
    assert best["`cfg`"] == ["4.00 at 3", "0.250 at 1.5"]
    assert best["`sparse`"] == ["**3.00 at 1.5**", "0.450 at 3"]
    assert best["`none`"] == ["9.00 at 1", "**0.450 at 1**"]


def test_the_picture_has_the_means_as_lines_and_the_seeds_as_bars(made):
    asked, out, _ = made
    (plan,) = plan_study(asked, scoring())
    job_files = sorted((out / "records").glob("*.json"))
    found = [records.Record(**json.loads(file.read_text())) for file in job_files]
    changed = [
        dataclasses.replace(one, values={"recall": 0.0 if one.scale > 2 else one.seed / 2})
        for one in found
    ]
    (panel,) = plot_scales(plan, changed).axes
    (cfg,) = [c for c in panel.containers if c.get_label() == "cfg"]
    assert np.array_equal(cfg.lines[0].get_xydata(), [[1.0, 0.25], [3.0, 0.0]])
    (bars,) = cfg.lines[2]
    assert np.array_equal([segment[:, 1] for segment in bars.get_segments()], [[0, 0.5], [0, 0]])
    handles, labels = panel.get_legend_handles_labels()
    assert set(labels) == {"none", "cfg", "auto"}
    level = handles[labels.index("none")]
    assert list(level.get_ydata()) == [0.25, 0.25]
    assert not math.isnan(sum(level.get_ydata()))
