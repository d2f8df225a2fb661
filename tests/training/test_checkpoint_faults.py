"""Faults at every line of saving: what was saved before is found again, or what is being saved."""

import errno
import json
import logging
import multiprocessing
import os
import signal
import sys

import pytest
import torch

from tests.training.test_checkpoints import save
from tread_zoo.training import checkpoints as module
from tread_zoo.training.checkpoints import CheckpointError, find_checkpoint
from tread_zoo.training.ranks import largest
from tread_zoo.training.saving import MAX_FAILED_IN_A_ROW, SaveAttempts


def at_line(number, act):
    """Do `act` before the n-th line that is executed in checkpoints.py; return a counter."""
    lines = [0]

    def trace(frame, event, argument):
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == number:
                act()
        return trace

    sys.settrace(trace)
    return lines


def lines_of_a_save(folder, step):
    lines = at_line(0, None)
    try:
        save(folder, step, keep=1)
    finally:
        sys.settrace(None)
    return lines[0]


def save_and_die(folder, number):
    at_line(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    save(folder, 3, keep=1)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_kill_9_at_every_line_of_saving(tmp_path):
    """keep=1, so that rotation runs; and each folder was left by a kill before."""
    context = multiprocessing.get_context("fork")
    save(tmp_path / "count", 1)
    lines = lines_of_a_save(tmp_path / "count", 3)
    assert lines > 40
    found = []
    for number in range(1, lines + 1):
        folder = tmp_path / "run"
        save(folder, 2, keep=1)
        process = context.Process(target=save_and_die, args=(folder, number))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        checkpoint = find_checkpoint(folder)
        assert torch.equal(
            checkpoint.tensors("model")["w"], torch.full((4,), float(checkpoint.step))
        )
        found.append(checkpoint.step)
        for path in (folder / "checkpoints").glob("step_00000003"):
            module.shutil.rmtree(path)
    assert sorted(found) == found, "a later line must not lose what an earlier one had saved"
    assert {2, 3} == set(found)
    save(folder, 4, keep=1)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000004"]


def test_no_space_at_every_line_of_saving(tmp_path):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path / "count", 1)
    lines = lines_of_a_save(tmp_path / "count", 3)
    failed = 0
    for number in range(1, lines + 1):
        folder = tmp_path / "run"
        save(folder, 2, keep=1)
        at_line(number, full)
        said = ""
        try:
            save(folder, 3, keep=1)
        except CheckpointError as error:
            said, failed = str(error), failed + 1
        except OSError:
            pass  # outside of what can fail so: lines that touch no disk
        finally:
            sys.settrace(None)
        step = find_checkpoint(folder).step
        assert step in (2, 3)
        if said:
            assert f"step_0000000{step} is intact. Free some space and continue with resume" in said
        for path in (folder / "checkpoints").glob("step_00000003"):
            module.shutil.rmtree(path)
    assert failed > lines / 3


def test_every_flipped_byte_is_found(tmp_path):
    path = save(tmp_path, 1, seed=0, data={"name": "digits", "size": [8, 8]})
    for name in ("checkpoint.json", "model.safetensors"):
        content = (path / name).read_bytes()
        told = 0
        for position in range(len(content)):
            changed = bytearray(content)
            changed[position] ^= 1
            (path / name).write_bytes(changed)
            try:
                meta = find_checkpoint(path).meta
            except CheckpointError:
                told += 1
            else:  # the byte said nothing: white space, or the name of the checksum itself
                meta = {key: meta[key] for key in ("step", "seed", "data", "format")}
                assert meta == {
                    "step": 1, "seed": 0, "data": {"name": "digits", "size": [8, 8]}, "format": 1,
                }  # fmt: skip
        (path / name).write_bytes(content)
        assert told == len(content) if name != "checkpoint.json" else told > len(content) / 2


def test_what_a_crash_left_is_no_checkpoint_and_goes(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in (".partial_step_00000002", ".removed_step_00000000"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"half")
    assert find_checkpoint(tmp_path).step == 1
    save(tmp_path, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000003"]


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, note="old")
    save(tmp_path, 2, note="new")
    assert find_checkpoint(tmp_path).meta["note"] == "new"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def save_as_nobody(folder, to_parent):
    """root may write anywhere."""
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        save(folder, 2)
    except CheckpointError as error:
        to_parent.send(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("readable", [True, False])
def test_a_folder_that_cannot_be_written(readable, tmp_path):
    save(tmp_path, 1)
    own = [f for f in tmp_path.parents if any(p.startswith("pytest-of-") for p in f.parts)]
    for folder in (tmp_path, *own):  # pytest lets nobody else in
        folder.chmod(0o755)
    (tmp_path / "checkpoints").chmod(0o555 if readable else 0o000)
    context = multiprocessing.get_context("fork")
    said, to_parent = context.Pipe(duplex=False)
    process = context.Process(target=save_as_nobody, args=(tmp_path, to_parent))
    process.start()
    process.join(60)
    (tmp_path / "checkpoints").chmod(0o755)
    assert said.poll()
    text = said.recv()
    there = "step_00000001 is intact" if readable else "there is no earlier checkpoint"
    for words in ("Permission denied", there, "Make the folder writable"):
        assert words in text
    assert find_checkpoint(tmp_path).step == 1


def test_a_checkpoint_with_code_to_be_run_is_refused(tmp_path):
    path = save(tmp_path, 1, sampler={"name": "euler", "grid": [{"_target_": "os.system"}]})
    with pytest.raises(ValueError, match=r"checkpoint.json.sampler.grid\[0\] holds _target_='os"):
        find_checkpoint(path)


def test_the_newest_before_a_skipped_step_is_kept(tmp_path):
    def saved(step, since_last):
        save(tmp_path, step, keep=2, skipped_steps={"since_last": since_last})
        return [int(path.name[-1]) for path in sorted((tmp_path / "checkpoints").iterdir())]

    assert saved(1, 0) == [1]
    assert saved(2, 0) == [1, 2]
    assert saved(3, 1) == [2, 3]
    assert saved(4, 5) == [2, 3, 4]
    assert saved(5, 1) == [2, 4, 5]
    assert saved(6, 0) == [5, 6]


class Alone:
    num_processes = 1


def test_failed_saves_on_the_way_are_warnings_up_to_a_number_in_a_row(caplog):
    def fail():
        raise CheckpointError("could not save: no space.")

    saves = SaveAttempts(Alone())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for _ in range(MAX_FAILED_IN_A_ROW - 1):
                saves.attempt(fail, must=False)
            saves.attempt(lambda: None, must=False)
    assert caplog.text.count("Training goes on") == 3 * (MAX_FAILED_IN_A_ROW - 1)
    assert (
        "no space. Training goes on; the next checkpoint is the next attempt (failure 1 of 3)"
        in (caplog.text)
    )
    with pytest.raises(CheckpointError):
        saves.attempt(fail, must=True)
    saves = SaveAttempts(Alone())
    for _ in range(MAX_FAILED_IN_A_ROW - 1):
        saves.attempt(fail, must=False)
    with pytest.raises(CheckpointError):
        saves.attempt(fail, must=False)
    assert largest(Alone(), 7) == 7


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no device that is always full")
def test_a_full_disk_loses_lines_and_pictures_but_not_the_run(run, monkeypatch, caplog, tmp_path):
    """From step 3 on metrics.jsonl and a picture are /dev/full; at step 5 there is room again."""
    from tread_zoo.training.reporting import Reporter

    folder, original = tmp_path / "run", Reporter.numbers

    def numbers(self, step, values):
        metrics = folder / "metrics.jsonl"
        if step == 1:
            (folder / "samples").mkdir()
            (folder / "loss.png").symlink_to("/dev/full")
        if step == 3 and "loss" in values:
            metrics.rename(folder / "aside")
            metrics.symlink_to("/dev/full")
            for at in (3, 6):
                (folder / f"samples/step_{at:08d}.png").symlink_to("/dev/full")
        if step == 5:
            metrics.unlink()
            (folder / "aside").rename(metrics)
        original(self, step, values)

    monkeypatch.setattr(Reporter, "numbers", numbers)
    with caplog.at_level(logging.WARNING):
        run("run", "training.log_every=1", "training.sample_every=3", "resume=latest")
    monkeypatch.undo()
    assert find_checkpoint(folder).step == 6
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().split("\n") if line]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 5, 6]
    assert caplog.text.count("lacks lines from step 3 on") == 1
    assert caplog.text.count("step_00000003.png could not be written") == 1
    assert (folder / "score.json").exists()
