"""The scripts as a user meets them: exit status, one clear line, pictures on the disk."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.processes import run_python, run_ranks, run_script
from tests.small_run import SMALL, train_small
from tread_zoo.__main__ import COMMANDS
from tread_zoo.evaluation import Protocol

ROOT = Path(__file__).parents[2]
RUN = "runs/digits_dit_tiny_tread_flow_seed0"


def call(script, *overrides, cwd=ROOT, expect=0):
    """Run a script in `cwd`, in this process; return all that it printed."""
    done = run_script(ROOT / "scripts" / script, *overrides, cwd=cwd)
    said = done.stdout + done.stderr
    assert done.returncode == expect, said[-3000:]
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run made by the script."""
    folder = tmp_path_factory.mktemp("cwd")
    said = call("train.py", *SMALL, f"run_dir={RUN}", cwd=folder)
    return folder, said


@pytest.mark.slow
def test_training_leaves_one_folder_and_no_clutter(trained):
    folder, said = trained
    assert [p.name for p in folder.iterdir()] == ["runs"]
    assert [p.name for p in (folder / "runs").iterdir()] == ["digits_dit_tiny_tread_flow_seed0"]
    assert "CPU" in said
    assert "it/s" not in said, "a progress bar where there is no terminal"
    (start,) = (folder / RUN / "commands.jsonl").read_text().splitlines()
    assert json.loads(start)["overrides"] == [*SMALL, f"run_dir={RUN}"]


@pytest.mark.slow
def test_a_run_is_resumed_by_name_with_its_own_settings_but_for_those_given(trained, tmp_path):
    shutil.copytree(trained[0] / RUN, tmp_path / "own run")
    more = ("training.num_steps=7", "routing.selection_rate=0.5")
    call("resume.py", "own run", *more, cwd=tmp_path)
    before, now = (
        json.loads((folder / "config.json").read_text())
        for folder in (trained[0] / RUN, tmp_path / "own run")
    )
    own = ("run_dir", "resume")
    assert now["training"].pop("num_steps") == 7
    assert before["training"].pop("num_steps") == 6
    assert {k: v for k, v in now.items() if k not in own} == {
        k: v for k, v in before.items() if k not in own
    }
    said = call("resume.py", "own run", "routing.selection_rate=0.75", cwd=tmp_path, expect=1)
    assert "routing.selection_rate=0.5, not 0.75" in said
    assert "typo" in call("resume.py", "typo", cwd=tmp_path, expect=1)


@pytest.mark.slow
def test_a_network_that_comes_with_the_package_is_sampled_and_scored_by_its_name(tmp_path):
    few = ["checkpoint=mamba", "sampler.num_steps=1", "device=cpu"]
    call("sample.py", *few, "num_images=2", cwd=tmp_path)
    call("evaluate.py", *few, "evaluation.num_images=4", "evaluation.metrics=[]", cwd=tmp_path)
    made = {path.suffix for path in (tmp_path / "runs" / "mamba").rglob("*")}
    assert {".png", ".npz", ".json"} <= made
    said = call("sample.py", "checkpoint=mambaa", cwd=tmp_path, expect=1)
    assert "mamba2" in said


def test_sampling_writes_pictures_grid_and_arrays_and_continues_a_sequence(trained):
    folder, _ = trained
    run = [f"checkpoint={RUN}", "device=cpu"]
    call("sample.py", *run, "num_images=7", "batch_size=3", "out=a", "gif=true", cwd=folder)
    said = call("sample.py", *run, "num_images=4", "first_index=3", "out=b", cwd=folder)
    assert "4 images" in said
    names = sorted(p.name for p in (folder / "a").iterdir())
    assert names == [*(f"{i:06d}.png" for i in range(7)), "samples.npz", "sampling.json"]
    with Image.open(folder / "a_grid.gif") as gif, Image.open(folder / "a_grid.png") as grid:
        assert (gif.n_frames, grid.info["grid"].split()[1]) == (3, "7")  # two steps and the end
    one, other = (np.load(folder / out / "samples.npz") for out in "ab")
    assert one["arr_0"].shape == (7, 8, 8, 1)
    assert one["arr_1"].tolist() == list(range(7))
    gap = np.abs(one["arr_0"][3:].astype(int) - other["arr_0"].astype(int))
    assert gap.max() <= 1, "an image depends on the batch size, or on the first index"
    picture = np.asarray(Image.open(folder / "a" / "000003.png"))
    assert np.array_equal(picture, one["arr_0"][3, :, :, 0])


@pytest.fixture(scope="module")
def drawn(trained):
    """Seven samples of the small run, and the words that drew them."""
    words = [f"checkpoint={trained[0] / RUN}", "device=cpu", "num_images=7", "batch_size=2"]
    call("sample.py", *words, "out=whole", cwd=trained[0])
    return trained[0] / "whole", words


@pytest.mark.slow
def test_a_stopped_set_goes_on(drawn, tmp_path):
    """Pictures that are there are not drawn again."""
    whole, words = drawn
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out" / "samples.npz").unlink()
    for number in (3, 4, 5):
        (tmp_path / "out" / f"{number:06d}.png").unlink()
    Image.new("L", (8, 8), 9).save(tmp_path / "out" / "000000.png")
    call("sample.py", *words, "out=out", cwd=tmp_path)
    one, other = (np.load(path / "samples.npz") for path in (whole, tmp_path / "out"))
    assert np.array_equal(one["arr_0"][1:], other["arr_0"][1:])
    assert (other["arr_0"][0] == 9).all()


@pytest.mark.nightly
def test_several_processes_draw_what_one_does(drawn, tmp_path, free_port):
    whole, words = drawn
    script = (ROOT / "scripts/sample.py", *words, f"out={tmp_path / 'out'}")
    for done in run_ranks(*script, port=free_port):
        assert done.returncode == 0, done.stderr
    one, other = (np.load(path / "samples.npz") for path in (whole, tmp_path / "out"))
    assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_another_guidance_and_sampler_have_a_folder_of_their_own(trained):
    folder, _ = trained
    run = [f"checkpoint={RUN}", "device=cpu"]
    said = call(
        "sample.py", *run, "num_images=2", "guidance=sparse", "guidance.weak_rate=0.6",
        "sampler=dpmpp_2m", "sampler.num_steps=3", cwd=folder,
    )  # fmt: skip
    for words in ("dpmpp_2m 3 steps, sparse guidance 2.0, 6 evaluations", "MFLOPs per image"):
        assert words in said
    (made,) = (folder / RUN / "generated").glob("*/sampling.json")
    assert json.loads(made.read_text())["settings"]["sampling"]["guidance"] == "sparse"
    out = [*run, f"out={made.parent}"]
    call("sample.py", *out, "guidance=cfg", "num_images=1", cwd=folder, expect=1)
    assert len(list(made.parent.glob("*.png"))) == 2


@pytest.mark.slow
def test_a_set_has_images_of_one_weak_network(trained, tmp_path):
    for copy in ("run", "weak"):
        shutil.copytree(trained[0] / RUN, tmp_path / copy)
    words = ["checkpoint=run", "device=cpu", "guidance=auto", "guidance.weak_checkpoint=weak"]
    words += ["sampler.num_steps=2", "out=out"]
    call("sample.py", *words, "num_images=1", cwd=tmp_path)
    call("resume.py", "weak", "training.num_steps=7", cwd=tmp_path)
    said = call("sample.py", *words, "num_images=2", cwd=tmp_path, expect=1)
    assert "out=" in said


def test_evaluating_prints_the_numbers_and_writes_them_under_their_protocol(trained):
    folder, _ = trained
    said = call("evaluate.py", f"checkpoint={RUN}", "device=cpu", "guidance.scale=1.5", cwd=folder)
    for words in ("label_accuracy", "digits-cnn-64@", "guidance 1.5"):
        assert words in said
    (file,) = (folder / RUN).glob("score_*.json")
    record = json.loads(file.read_text())
    assert file.stem == f"score_00000006_{Protocol.of(record).digest}"
    protocol, sampling = record["protocol"], record["protocol"]["sampling"]
    assert (sampling["guidance"], sampling["guidance_scale"]) == ("cfg", 1.5)
    assert (sampling["sampler"], sampling["num_steps"], protocol["nfe"]) == ("euler", 2, 4)
    run = json.loads((folder / RUN / "score.json").read_text())["protocol"]
    assert protocol["flops_per_image"] == 2 * run["flops_per_image"] > 0
    for field in ("num_generated", "metrics"):
        assert protocol[field] == run[field], "what is not given is as the run was scored"
    assert protocol["weights"] == "ema"


@pytest.mark.slow
def test_what_the_network_cannot_take_is_one_clear_message(trained):
    folder, _ = trained
    said = call("sample.py", f"checkpoint={RUN}", "label=10", "out=bad", cwd=folder, expect=1)
    assert said.startswith("error: ")
    assert "label=10" in said
    assert len(said.splitlines()) == 1
    assert not (folder / "bad").exists()


@pytest.mark.slow
def test_a_label_of_a_network_without_classes_is_one_clear_message(tmp_path):
    images = np.zeros((20, 8, 8), np.uint8)
    np.savez(tmp_path / "x.npz", images=images)
    data = ["data=npz", f"data.path={tmp_path / 'x.npz'}", "training.num_steps=1"]
    run = train_small(tmp_path / "run", *data, "evaluation.metrics=[]")
    said = call("sample.py", f"checkpoint={run}", "label=0", "device=cpu", cwd=tmp_path, expect=1)
    assert said.startswith("error: label=0")
    assert "no classes" in said
    np.savez(tmp_path / "theirs.npz", pixels=images)
    given = [f"samples={tmp_path / 'theirs.npz'}", "data=digits", "device=cpu"]
    said = call("evaluate.py", *given, cwd=tmp_path, expect=1)
    assert said.startswith("error: samples=")
    assert "arr_0" in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_class_is_named_as_its_folder_is(tmp_path, caplog):
    for number in range(12):
        folder = tmp_path / "pets" / ("ant", "bee", "2")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 20 * number, np.uint8)).save(folder / f"{number}.png")
    data = ["data=image_folder", f"data.path={tmp_path / 'pets'}", "training.num_steps=1"]
    with caplog.at_level("INFO"):
        run = train_small(tmp_path / "run", *data)
    assert "3 classes (2, ant, bee)" in caplog.text
    call("push.py", f"checkpoint={run}", cwd=tmp_path)
    assert "0 2, 1 ant, 2 bee" in (run / "hub" / "README.md").read_text()
    for checkpoint in (run, run / "hub"):
        given = [f"checkpoint={checkpoint}", "num_images=2", "device=cpu", "out=made"]
        said = call("sample.py", *given, "label=bee", "overwrite=true", cwd=tmp_path)
        assert "label 2 is the class bee" in said
        assert np.load(tmp_path / "made" / "samples.npz")["arr_1"].tolist() == [2, 2]
    said = call("sample.py", *given, "label=2", "overwrite=true", cwd=tmp_path)
    assert "label 0 is the class 2" in said
    said = call("sample.py", *given, "label=beee", cwd=tmp_path, expect=1)
    assert "Did you mean 'bee'?" in said
    assert said.count("\n") == 1
    os.rename(tmp_path / "pets" / "ant", tmp_path / "pets" / "dog")  # now another has the label 1
    with pytest.raises(ValueError, match="class 1 'ant', not 'bee'"):
        train_small(run, *data, "training.num_steps=2", "resume=latest")


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_job_that_failed(tmp_path):
    jobs = ["training.num_steps=0,2", "run_dir=of_${training.num_steps}"]
    said = call("train.py", "-m", *SMALL, *jobs, cwd=tmp_path, expect=1)
    assert "error: training.num_steps=0 must be" in said
    assert "Traceback" not in said
    assert (tmp_path / "of_2" / "score.json").exists()


@pytest.mark.parametrize(
    ("script", "overrides", "words"),
    [
        ("train.py", ["backbone=mmaba"], ["mmaba", "mamba"]),
        ("sample.py", ["checkpoint=nowhere"], ["nowhere"]),
        ("doctor.py", ["devic=cpu"], ["device"]),
        ("import_checkpoint.py", ["in=nowhere.pt", "out=x"], ["format is not set"]),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path, script, overrides, words):
    said = call(script, *overrides, cwd=tmp_path, expect=1)
    assert all(word in said for word in words), said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "something half-written is left"


@pytest.mark.slow
def test_what_is_there_is_listed(tmp_path):
    said = call("list.py", cwd=tmp_path)
    for words in ("dit_tiny", "dit_xl_2", "tread\n", "arXiv 2501.04765", "dit_fashion_mnist"):
        assert words in said
    few = call("list.py", "pattern=mamba*", cwd=tmp_path)
    assert "mamba2_tiny" in few
    assert "rwkv" not in few


@pytest.mark.slow
def test_every_script_is_a_command_and_a_wrong_one_is_told_the_nearest(tmp_path):
    assert sorted(COMMANDS.values()) == sorted(p.stem for p in (ROOT / "scripts").glob("*.py"))
    listed = run_python("-m", "tread_zoo", cwd=tmp_path).stdout
    assert all(f"  {name} " in listed for name in COMMANDS)
    wrong = run_python("-m", "tread_zoo", "trian", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "'train'" in wrong.stderr


@pytest.mark.slow
def test_samples_of_another_size_or_why_not(trained, tmp_path):
    given = [f"checkpoint={trained[0] / RUN}", "num_images=3", "device=cpu"]
    for name, more in (("own", []), ("same", ["image_size=8"]), ("wide", ["image_size=[6,12]"])):
        call("sample.py", *given, f"out={name}", *more, cwd=tmp_path)
    own, same, wide = (
        np.load(tmp_path / name / "samples.npz")["arr_0"] for name in ("own", "same", "wide")
    )
    assert np.array_equal(own, same)
    assert wide.shape == (3, 6, 12, 1)
    said = call("sample.py", *given, "image_size=7", cwd=tmp_path, expect=1)
    assert "image_size=[7, 7]: height and width must be multiples of 2" in said


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="other systems have no such pipes")
@pytest.mark.parametrize(("word", "unbuffered"), [("--help", ""), ("list", "1")])
def test_a_command_ends_silently_when_its_output_is_no_longer_read(word, unbuffered):
    read, write = os.pipe()
    os.close(read)  # as `| head` does
    done = subprocess.run(
        [sys.executable, "-m", "tread_zoo", word], cwd=ROOT, stdout=write, timeout=120,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
