"""Curves are made of runs of one recipe, and say all that others compare with."""

import json
import shlex

import pytest

from tests.comparison.reference.runs import SCORE, SETTINGS, write_run
from tests.small_run import CONFIGS, full_settings
from tread_zoo.comparison.reference import (
    compare_run,
    differences,
    find_recipe,
    load_curve,
    load_curves,
    make_curve,
    read_trace,
    recipe_block,
    recipe_table,
    replace_between,
    wanted_settings,
    write_comparison,
)
from tread_zoo.comparison.reference.curve import MAX_POINTS
from tread_zoo.comparison.reference.documents import BEGIN, END, TABLE_BEGIN, TABLE_END

RECIPES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
CURVES = load_curves(CONFIGS / "experiment" / "curves")
STEPS = range(10, 101, 10)


def losses(level):
    return {step: level * (1 + 1 / step) for step in STEPS}


@pytest.fixture
def runs(tmp_path):
    """Two runs that a curve can be made of."""
    return [
        write_run(tmp_path / f"seed{seed}", seed=seed, losses=losses(1 + 0.01 * seed),
                  held_out={20: 0.9, 40: 0.6 + 0.01 * seed, 100: 0.4})
        for seed in (0, 1)
    ]  # fmt: skip


def curve_of(folders, **given):
    return make_curve("recipe", SETTINGS, [read_trace(folder) for folder in folders], **given)


def test_a_curve_has_every_number_of_its_runs(runs, tmp_path):
    package = {"version": "1", "commit": None}
    curve = curve_of(runs, hardware="a laptop", data_note="every other one", package=package)
    assert curve.training_steps == tuple(STEPS)
    assert curve.held_out_steps == (20, 40, 100)
    assert curve.runs[1].curves["held_out_loss_level_3"] == (0.9, 0.61, 0.4)
    assert curve.runs[1].scores["held_out_loss_level_2"] == 0.5
    assert curve.seconds_of(curve.runs[0]) == 100 * 64 / 100, "100 steps of 64, 100 images/s"
    assert (curve.runs[0].images_per_s, curve.runs[0].peak_memory) == (100.0, 2**21)
    file = tmp_path / "curve.json"
    file.write_text(curve.as_text())
    assert load_curve(file).as_text() == curve.as_text()
    old = json.loads(curve.as_text()) | {"summary": {}}
    old["runs"][0]["seconds"] = {"training": 12.5}
    file.write_text(json.dumps(old))
    assert load_curve(file) == curve, "as older versions wrote it"
    assert curve.command == "python scripts/train.py -m experiment=recipe seed=0,1"


def test_many_lines_are_thinned_to_means_of_neighbours(tmp_path):
    """1000 lines, the value its own number: 50 points, each the mean of 20."""
    folders = [
        write_run(tmp_path / f"seed{seed}", seed=seed, losses={s: float(s) for s in range(1, 1001)})
        for seed in (0, 1)
    ]
    curve = curve_of(folders)
    assert len(curve.training_steps) == MAX_POINTS
    assert curve.training_steps[0] == 20
    assert curve.runs[0].curves["loss"][:2] == (10.5, 30.5)
    assert len(curve.as_text()) < 30_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"training": {**SETTINGS["training"], "learning_rate": 0.06}},
         r"training.learning_rate is 0.06, not 0.006"),
        ({"backbone": {"name": "dit_tiny", "config": {"depth": 8}}}, "backbone.depth is 8, not"),
        ({"routing": {"name": "tread"}}, r"routing.name is tread, not none"),
        ({"guidance": {"name": "cfg", "scale": 2.0}}, r"guidance.name is cfg, not none"),
        ({"score": None}, r"score.json is missing"),
        ({"score": {**SCORE, "protocol": {**SCORE["protocol"], "extractor": "cnn@2"}}},
         r"extractor=cnn@2, seed0 extractor=cnn@1"),
        ({"score": {**SCORE, "run": {**SCORE["run"], "num_processes": 2}}}, r"num_processes=2"),
        ({"seed": 0}, r"seeds \[0, 0\]"),
        ({"losses": {}}, r"share 0 lines"),
    ],
)  # fmt: skip
def test_runs_that_do_not_belong_to_the_curve_are_named(runs, tmp_path, change, words):
    given = {"seed": 1, "losses": losses(1.0), **change}
    with pytest.raises(ValueError, match=words):
        curve_of([runs[0], write_run(tmp_path / "other", **given)])
    with pytest.raises(ValueError, match="two seeds or more"):
        curve_of(runs[:1])


def test_what_does_not_decide_what_is_learnt_may_differ(runs, tmp_path):
    training = {**SETTINGS["training"], "sample_every": 20, "precision": "fp32"}
    other = write_run(
        tmp_path / "other", seed=5, losses=losses(1.0), training=training,
        data={**SETTINGS["data"], "name": "mine.npz"}, data_options={"path": "/there"},
        evaluation={"num_images": 7},
    )  # fmt: skip
    assert curve_of([other, runs[1]]).command == (
        "python scripts/train.py -m experiment=recipe data=npz data.path=mine.npz "
        "training.precision=fp32 evaluation.num_images=7 seed=5,1"
    )


def test_the_command_has_what_the_scores_need(tmp_path):
    """Options that only the run or only the recipe says, a list, and no path of a machine."""
    asked = {"num_images": 9, "metrics": ["fid", "kid"], "extractor": "/home/me/features v2.npz",
             "keep_images": "/there"}  # fmt: skip
    usual = {"num_images": 500, "metrics": [], "extractor": "auto", "keep_images": None}
    folders = [
        write_run(tmp_path / f"seed{seed}", seed=seed, losses=losses(1.0), evaluation=asked,
                  training={**SETTINGS["training"], "score_every": 50})
        for seed in (0, 1)
    ]  # fmt: skip
    traces = [read_trace(folder) for folder in folders]
    command = make_curve("recipe", {**SETTINGS, "evaluation": usual}, traces).command
    assert shlex.split(command)[4:] == [
        "training.score_every=50", "evaluation.num_images=9", "evaluation.metrics=[fid,kid]",
        'evaluation.extractor="features v2.npz"', "seed=0,1",
    ]  # fmt: skip
    scored = {**SETTINGS, "evaluation": asked}
    scored["training"] = {**SETTINGS["training"], "score_every": 20}
    folder = write_run(tmp_path / "none", seed=2, losses=losses(1.0), evaluation=asked)
    command = make_curve("recipe", scored, [read_trace(folder), traces[0]]).command
    assert "training.score_every=0" in command
    assert "evaluation" not in command


def test_contexts_are_a_difference():
    """Only a run that has them says so: of labels, nothing says that they are none."""
    data = {**SETTINGS["data"], "context": [77, 768]}
    backbone = {"name": "dit_tiny", "config": {**SETTINGS["backbone"]["config"],
                                               "context_length": 77}}  # fmt: skip
    other = {**SETTINGS, "data": data, "backbone": backbone}
    assert differences(other, SETTINGS) == ["data.context is [77, 768], not None"]
    assert differences(SETTINGS, other) == ["data.context is None, not [77, 768]"]
    assert differences(other, other) == differences(SETTINGS, SETTINGS) == []
    digits = full_settings()
    assert "context" not in wanted_settings(digits, data)["data"]


def test_the_recipe_of_a_run_is_found_by_its_settings():
    rate = {**SETTINGS["training"], "learning_rate": 0.06}
    known = {"dense": SETTINGS, "routed": {**SETTINGS, "routing": {"name": "tread"}}}
    assert find_recipe(known["routed"], known) == ("routed", [])
    other = {**SETTINGS, "training": rate}
    with pytest.raises(ValueError, match=r"dense is nearest: here training.learning_rate is 0.06"):
        find_recipe(other, known)
    name, found = find_recipe(other, known, named="routed")
    assert (name, len(found)) == ("routed", 2)
    with pytest.raises(ValueError, match="Did you mean 'routed'"):
        find_recipe(other, known, named="route")
    with pytest.raises(ValueError, match="make_curve"):
        find_recipe(other, {})


def test_a_comparison_says_data_settings_speed_and_verdict(runs, tmp_path):
    curves = {"recipe": curve_of(runs, hardware="a laptop", data_note="every other one")}
    data = {**SETTINGS["data"], "name": "mine.npz"}
    run = write_run(tmp_path / "mine", seed=7, losses=losses(1.0), held_out={20: 0.9}, data=data)
    comparison = compare_run(run, curves)
    assert not comparison.is_off
    text = write_comparison(comparison, tmp_path / "out")
    assert text == (tmp_path / "out" / "reference.md").read_text()
    assert "mine against recipe: on the curve" in text
    assert "Data: mine.npz; the reference had digits (every other one)." in text
    assert "100 images/s on a CPU, 1.00 of the reference's 100 on a laptop" in text
    assert (tmp_path / "out" / "reference.png").stat().st_size > 10_000
    assert not comparison.is_own
    assert compare_run(runs[0], curves).is_own

    (run / "failed.txt").write_text("the loss is not finite")
    assert compare_run(run, curves).is_off
    empty = write_run(tmp_path / "empty", score=None)
    with pytest.raises(ValueError, match="logged nothing that can be compared"):
        compare_run(empty, curves)
    with pytest.raises(ValueError, match=r"config.json is missing"):
        compare_run(tmp_path / "nowhere", curves)


def test_text_between_markers_alone_is_replaced():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert (
        replace_between(text, BEGIN, END, ["new"], "f") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    )
    with pytest.raises(ValueError, match="f has the line"):
        replace_between("nothing\n", BEGIN, END, [], "f")


def block_of(recipe):
    """Return the lines between the markers, or None."""
    text = (CONFIGS / "experiment" / f"{recipe}.yaml").read_text()
    if BEGIN not in text:
        return None
    return text.partition(f"{BEGIN}\n")[2].partition(f"{END}\n")[0].splitlines()


@pytest.mark.parametrize("recipe", sorted(CURVES))
def test_the_head_of_a_recipe_is_written_from_its_curve(recipe):
    """That the curve is the recipe's as it is now: tests/test_experiments.py."""
    curve = CURVES[recipe]
    assert curve.recipe == recipe
    assert block_of(recipe) == recipe_block(curve)
    file = CONFIGS / "experiment" / "curves" / f"{recipe}.json"
    assert file.read_text() == curve.as_text()
    assert file.stat().st_size < 30_000
    assert len(curve.held_out_steps) >= 6


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in CURVES])
def test_a_recipe_without_a_curve_says_that_it_was_not_run(recipe):
    text = (CONFIGS / "experiment" / f"{recipe}.yaml").read_text()
    assert "Not run" in text
    if block_of(recipe) is not None:
        assert "Not run" in " ".join(block_of(recipe))


def test_every_curve_is_in_the_table_of_the_documentation():
    text = (CONFIGS.parent / "docs" / "recipes.md").read_text()
    assert set(CURVES) <= set(RECIPES)
    assert text == replace_between(text, TABLE_BEGIN, TABLE_END, recipe_table(CURVES), "recipes.md")
