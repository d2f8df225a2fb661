"""A grid is every combination once, checked before it runs and taken up where it stopped."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.small_run import SMALL, counting_once, full_settings
from tread_zoo.comparison import expand, expand_all, find_runs, grid, read_run, run_grid
from tread_zoo.training.stopping import Stopped

SHORT = [*SMALL, "training.num_steps=2", "training.warmup_steps=1"]


def compose(overrides):
    return full_settings(*overrides)


def cells_of(tmp_path, **sweeps):
    return expand(sweeps, SHORT, tmp_path)


@pytest.fixture(scope="module")
def finished_grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with counting_once():
        run_grid(cells_of(folder, routing=["none", "tread"]), compose)
    return folder


@pytest.fixture
def finished(finished_grid, tmp_path):
    """Copy a finished grid into `tmp_path`; return its two cells, without and with routes."""
    shutil.copytree(finished_grid, tmp_path, dirs_exist_ok=True)
    return cells_of(tmp_path, routing=["none", "tread"])


def test_every_combination_has_a_folder_of_its_own(tmp_path):
    cells = cells_of(tmp_path, backbone=["dit", "mamba"], seed=["0", "1", "2"])
    assert len({cell.folder for cell in cells}) == 6
    assert cells[1].choices == {"backbone": "dit", "seed": "1"}
    assert cells[1].overrides == (*SHORT, "backbone=dit", "seed=1")
    odd = expand({"routing.routes": ["[{start: 2, end: 5}]"]}, [], tmp_path)
    assert odd[0].folder.parent == tmp_path / "runs"


def test_names_that_are_alike_as_folders_have_folders_of_their_own(tmp_path):
    paths = ["a/b.npz", "a b.npz", "a:b.npz", "x" * 300 + "1", "x" * 300 + "2", "plain.npz"]
    cells = expand_all([{"data.path": paths}], [], tmp_path)
    assert [cell.choices["data.path"] for cell in cells] == paths
    names = [cell.folder.name for cell in cells]
    assert len(set(names)) == len(paths)
    assert max(len(name.encode()) for name in names) <= 150
    assert names[0].startswith("data.path=a_b.npz-")
    assert names[-1] == "data.path=plain.npz"
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"compare\.grids=\[\] has no run"):
        expand_all([], [], tmp_path)


def test_runs_are_named_by_folder_or_pattern(tmp_path):
    names = ["backbone=dit,seed=0", "backbone=dit,seed=1", "[odd]"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "no_run").mkdir()
    first, second, odd = (tmp_path / name for name in names)
    assert find_runs(str(first)) == [first]
    assert find_runs(str(odd)) == [odd]
    assert find_runs(str(tmp_path / "*seed*")) == [first, second]
    assert find_runs([str(second), str(tmp_path / "*")]) == [second, odd, first]
    assert find_runs(["missing"]) == [Path("missing")], "collect says what is wrong with it"
    with pytest.raises(ValueError, match="no run matches 'missing"):
        find_runs("missing/*")


def test_several_grids_share_cells_and_go_seed_by_seed(tmp_path):
    grids = [
        {"routing": ["none"], "seed": ["0", "1"]},
        {"routing": ["none", "tread"], "seed": ["1"]},
        {"routing.selection_rate": ["0.25"], "seed": ["0", "1"]},
    ]
    found = [tuple(cell.choices.values()) for cell in expand_all(grids, SHORT, tmp_path)]
    assert found == [("none", "0"), ("0.25", "0"), ("none", "1"), ("tread", "1"), ("0.25", "1")]


@pytest.mark.parametrize(
    ("sweeps", "fixed", "words"),
    [
        ({"seed": ["0", "0"]}, [], "seed=0,0 must list different values"),
        ({"seed": []}, [], "seed= must list"),
        ({"seed": ["0"]}, ["run_dir=x"], "run_dir is set by the comparison"),
        ({"resume": ["latest"]}, [], "resume is set by the comparison"),
    ],
)
def test_a_grid_that_cannot_work_says_why(tmp_path, sweeps, fixed, words):
    with pytest.raises(ValueError, match=words):
        expand(sweeps, fixed, tmp_path)


def test_a_bad_setting_is_told_before_any_run_starts(tmp_path):
    cells = cells_of(tmp_path, **{"backbone.patch_size": ["2", "3"]})
    with pytest.raises(ValueError, match=r"patch_size=3: .*patch_size=3"):
        run_grid(cells, compose)
    assert not list(tmp_path.iterdir())


def test_finished_runs_are_kept_and_cut_off_ones_continue(finished, monkeypatch):
    calls = []
    monkeypatch.setattr(grid, "train", lambda **keywords: calls.append(keywords))
    run_grid(finished, compose)
    assert not calls
    (finished[1].folder / "score.json").unlink()
    run_grid(finished, compose)
    assert [(call["run_dir"], call["resume"]) for call in calls] == [
        (str(finished[1].folder), "latest")
    ]


def test_a_stop_leaves_the_grid(tmp_path, monkeypatch):
    def stop(**keywords):
        raise Stopped("asked to")

    monkeypatch.setattr(grid, "train", stop)
    with pytest.raises(Stopped):
        run_grid(cells_of(tmp_path, seed=["0"]), compose)


def test_a_folder_with_another_run_is_not_taken_for_this_one(finished, tmp_path):
    other = expand({"routing": ["tread"]}, [*SHORT, "training.learning_rate=0.5"], tmp_path)
    assert other[0].folder == finished[1].folder
    with pytest.raises(ValueError, match=r"holds a run whose training is .*compare\.out"):
        run_grid(other, compose)


def test_a_finished_run_from_before_samplers_had_grids_is_kept(finished, monkeypatch):
    """Its settings say the same in fewer words; another scale is another run."""
    cells = finished[1:]
    config = cells[0].folder / "config.json"
    old = json.loads(config.read_text())
    old |= {"sampler": {"name": "euler", "num_steps": 2}, "guidance": {"scale": 1.0}}
    config.write_text(json.dumps(old))
    monkeypatch.setattr(grid, "train", None)
    run_grid(cells, compose)
    config.write_text(json.dumps({**old, "guidance": {"scale": 1.5}}))
    with pytest.raises(ValueError, match=r"holds a run whose guidance is \{'scale': 1.5\}"):
        run_grid(cells, compose)


@pytest.mark.parametrize("changed", [{}, {"context": None, "context_length": None}])
def test_a_finished_run_from_before_there_were_contexts_is_kept(tmp_path, monkeypatch, changed):
    """Its settings do not name them, or name them as they are by themselves."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for index in range(20):
        Image.fromarray(np.full((8, 8, 3), index, np.uint8)).save(photos / f"{index}.png")
    given = ["data=image_folder", f"data.path={photos}"]
    (cell,) = expand({"seed": ["0"]}, [*SHORT, *given], tmp_path / "out")
    settings = grid.parts_of(full_settings(*cell.overrides)).settings
    options = {"name": "image_folder", "path": str(photos), "image_size": None, "channels": 3,
               "held_out": 0.1, "num_classes": None}  # fmt: skip
    assert settings["data_options"] == options
    cell.folder.mkdir(parents=True)
    old = {**settings, "data_options": {**options, **changed}}
    (cell.folder / "config.json").write_text(json.dumps(old))
    (cell.folder / "score.json").write_text("{}")
    monkeypatch.setattr(grid, "train", None)
    run_grid([cell], compose)
    old["data_options"]["context"] = "context.npy"
    (cell.folder / "config.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="holds a run whose data_options"):
        run_grid([cell], compose)


def test_a_run_that_diverges_is_noted_and_the_others_go_on(tmp_path, monkeypatch):
    real = grid.train

    def diverge(**keywords):
        if keywords["seed"] == 0:
            real(**{**keywords, "evaluation": {**keywords["evaluation"], "num_images": 1}})
            raise FloatingPointError("the loss is nan at step 2")
        return real(**keywords)

    monkeypatch.setattr(grid, "train", diverge)
    cells = cells_of(tmp_path, seed=["0", "1"])
    with counting_once():
        run_grid(cells, compose)
    assert [read_run(cell.folder).failed for cell in cells] == ["the loss is nan at step 2", ""]
    assert not read_run(cells[0].folder).values
    (cells[0].folder / "metrics.jsonl").write_text("")  # diverged before its first line
    assert math.isnan(read_run(cells[0].folder).images_per_s)


@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": "latest"}])
def test_a_run_that_is_trained_again_has_not_failed(finished, how):
    """What a comparison noted in its folder is of the run that was there before."""
    folder = finished[1].folder
    for name in ("failed.txt", "reference.md", "reference.png"):
        (folder / name).write_text("of before")
    with counting_once():
        grid.train(**{**full_settings(*finished[1].overrides), "run_dir": str(folder), **how})
    assert not read_run(folder).failed
    assert (folder / "reference.md").exists() == ("resume" in how)
    assert (folder / "reference.png").exists() == ("resume" in how)


def test_the_numbers_of_a_run_are_those_that_it_wrote(finished, tmp_path):
    cell = finished[1]
    result = read_run(cell.folder)
    score = json.loads((cell.folder / "score.json").read_text())
    rows = [json.loads(line) for line in (cell.folder / "metrics.jsonl").open()]
    assert result.values == score["values"]
    assert sum(result.by_level) / 4 == pytest.approx(result.values["held_out_loss"], rel=1e-2)
    (speed,) = [row["images_per_s"] for row in rows if "images_per_s" in row]
    assert result.seconds == pytest.approx(2 * 8 / speed)
    assert 0.5 < result.flops / result.flops_dense < 1
    assert "CPU" in result.machine["device"]
    with pytest.raises(ValueError, match=r"score\.json is missing"):
        read_run(tmp_path)
