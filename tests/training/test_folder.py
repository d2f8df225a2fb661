"""Whose a run's folder is: nothing is lost that was not to be replaced, and one run at a time."""

import errno
import fcntl
import logging
import os
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from tests.small_run import settings, train_small
from tread_zoo.training import folder as module
from tread_zoo.training import train
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.folder import RunFolder
from tread_zoo.training.lock import RunLock
from tread_zoo.training.reporting import Reporter

TINY = ("backbone.depth=3", "training.num_steps=2", "training.log_every=1", "sampler.num_steps=1")


def contents(folder):
    """Return the bytes of every file in a folder by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("finished") / "run", *TINY)


@pytest.mark.parametrize("overwrite", ["false", "true"])
def test_what_no_run_of_ours_made_is_never_taken_away(run, tmp_path, overwrite):
    (tmp_path / "mine" / "samples").mkdir(parents=True)
    (tmp_path / "mine" / "samples" / "cat.png").write_text("a cat")
    (tmp_path / "mine" / "config.json").write_text('{"editor": "of mine"}')
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"holds samples, config\.json, and no run of this"):
        run("mine", *TINY, f"overwrite={overwrite}")
    assert contents(tmp_path) == before


def test_a_folder_without_what_a_run_writes_is_taken(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("about this run")
    run("mine", *TINY)
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "notes.txt", "checkpoints", "samples", "config.json", "metrics.jsonl", "loss.png",
        "score.json", "scores.jsonl",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", "file", "file/run"])
def test_what_can_be_no_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=rf"^run_dir='{name}'.* name (one|another folder)"):
        train(**{**settings(*TINY), "run_dir": name})
    assert contents(tmp_path) == {"file": b"mine"}


def test_another_runs_checkpoint_does_not_mix_with_the_run_that_is_there(run, finished, copy_of):
    before = contents(copy_of(finished))
    given = (*TINY, "training.num_steps=4", "training.keep_checkpoints=1")
    with pytest.raises(ValueError, match=r"already holds a run that .* is not of.*overwrite=true"):
        run("run", *given, f"resume={finished}")
    folder = run("run", *given, f"resume={finished}", "overwrite=true")
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_00000004"}
    assert contents(folder)["metrics.jsonl"] != before["metrics.jsonl"]


def test_a_finished_run_without_checkpoints_keeps_its_scores(run, finished, copy_of):
    folder = copy_of(finished)
    shutil.rmtree(folder / "checkpoints")
    before = contents(folder)
    for resume in ("null", "latest"):
        with pytest.raises(ValueError, match="already holds a run"):
            run("run", *TINY, f"resume={resume}")
    assert contents(folder) == before


def test_fewer_steps_than_are_done_are_refused(run, finished, copy_of):
    folder = copy_of(finished)
    before = contents(folder)
    with pytest.raises(ValueError, match=r"training\.num_steps=1, and .*step_00000002 has done 2"):
        run("run", *TINY, "training.num_steps=1", "training.warmup_steps=1", "resume=latest")
    assert contents(folder) == before


def unreadable(folder):
    """Save pictures of 16 bits, which every header says are fine; return the overrides."""
    folder.mkdir()
    for index in range(20):
        Image.fromarray(np.full((8, 8), 999, np.uint16)).save(folder / f"{index}.png")
    return (
        "data=image_folder", f"data.path={folder}", "data.image_size=8", "data.channels=1",
    )  # fmt: skip


def test_what_fails_at_its_first_batch_leaves_the_folder_as_it_was(
    run, finished, copy_of, tmp_path, caplog
):
    folder, given = copy_of(finished), (*TINY, *unreadable(tmp_path / "photos"))
    before = contents(folder)
    for place, more in (("run", ["overwrite=true"]), ("new/deep", [])):
        with pytest.raises(ValueError, match=r"in a row cannot be read.*I;16.*convert"):
            run(place, *given, *more)
    assert contents(folder) == before
    assert not any(path.name.startswith(".") for path in folder.iterdir())
    assert not (tmp_path / "new").exists()
    assert "lies in" not in caplog.text


def test_what_fails_before_its_first_checkpoint_leaves_both(run, finished, copy_of, monkeypatch):
    folder, original = copy_of(finished), Reporter.numbers
    old = contents(folder)

    def crash(self, step, values):
        original(self, step, values)
        raise RuntimeError("power cut")

    monkeypatch.setattr(Reporter, "numbers", crash)
    for _ in range(2):  # what was cut off gives way to the next, and the older run stays
        with pytest.raises(RuntimeError, match="power cut"):
            run("run", *TINY, "seed=1", "overwrite=true")
        assert contents(folder / ".replaced") == old
        assert (folder / "metrics.jsonl").read_text().count("\n") == 1
    monkeypatch.undo()
    run("run", *TINY, "seed=1", "resume=latest")
    assert not (folder / ".replaced").exists()
    assert find_checkpoint(folder).meta["seed"] == 1


def fork(work):
    """Do `work()` in a child process, which then waits to be killed; return once it is done."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(write, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 1) == b"!"
    os.close(read)
    return child


def test_a_lock_is_held_against_others_and_ends_with_its_process(tmp_path):
    """A worker that was forked from the killed process lives on, and holds nothing."""
    workers = tmp_path / "worker"

    def train_and_read():
        RunLock(tmp_path).take()
        workers.write_text(str(fork(lambda: None)))

    child = fork(train_and_read)
    try:
        with pytest.raises(ValueError, match=rf"another process \(process {child} on .* run_dir="):
            RunLock(tmp_path).take()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / ".lock").exists(), "what a kill leaves behind"
    lock = RunLock(tmp_path)
    lock.take()
    os.kill(int(workers.read_text()), signal.SIGKILL)
    lock.release()
    assert not (tmp_path / ".lock").exists()


def test_a_lock_on_a_file_that_its_owner_just_removed_is_none(tmp_path, monkeypatch):
    lockf, removed = fcntl.lockf, []

    def late(handle, how):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        return lockf(handle, how)

    def refused():
        with pytest.raises(ValueError, match=rf"process {os.getppid()} on "):
            RunLock(tmp_path).take()

    monkeypatch.setattr(fcntl, "lockf", late)
    lock = RunLock(tmp_path)
    lock.take()
    child = fork(refused)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock.release()


def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch, caplog):
    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    lock = RunLock(tmp_path)
    with caplog.at_level(logging.WARNING):
        lock.take()
    lock.release()
    assert "cannot be locked" in caplog.text


def test_a_run_that_ended_meanwhile_is_seen_once_the_lock_is_held(finished, tmp_path):
    guard = RunFolder(tmp_path / "run", None, overwrite=False)
    module.check_folder(tmp_path / "run", None, overwrite=False)
    shutil.copytree(finished, tmp_path / "run")
    with guard, pytest.raises(ValueError, match="already holds a run"):
        guard.open()
    assert contents(tmp_path / "run") == contents(finished)
