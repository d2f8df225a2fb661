import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tread_zoo.training.reporting import Reporter

from tests.small_run import SMALL
from tread_zoo.training.trackers import (
    LocalTracker,
    WandbTracker,
    build_trackers,
    check_tracker,
    read_metrics,
)


def test_the_local_file_drops_what_a_resumed_run_does_again(tmp_path):
    first = LocalTracker(tmp_path, 0)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a crash
    second = LocalTracker(tmp_path, 2)
    second.log(3, {"loss": 30.0})
    second.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [
        (1, 1.0), (2, 2.0), (3, 30.0),
    ]  # fmt: skip


def test_an_unknown_tracker_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"tracker.name='wandbb'.*'wandb'"):
        check_tracker("wandbb")


def test_a_tracker_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install \"tread-zoo\[wandb\]\""):
        check_tracker("wandb")
    check_tracker("local")


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_gets_the_same_names(tmp_path):
    trackers = build_trackers("tensorboard", tmp_path, 0, {}, "project")
    for tracker in trackers:
        tracker.log(5, {"loss": 0.25})
        tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (scalar,) = events.Scalars("loss")
    assert (scalar.step, scalar.value) == (5, 0.25)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_works_offline_and_never_asks(tmp_path):
    """Without a key, without a terminal, without a network: the run ends well."""
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "NETRC")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    overrides = [*SMALL, f"run_dir={tmp_path / 'run'}", "tracker=wandb"]
    done = subprocess.run(
        [sys.executable, "scripts/train.py", *overrides],
        env={**environment, "HOME": str(tmp_path)}, stdin=subprocess.DEVNULL, timeout=240,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "offline" in done.stdout + done.stderr
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert rows[-1]["step"] == 6


@pytest.fixture
def broken_wandb(monkeypatch):
    """A wandb whose call of a given name raises; its list of calls is returned."""

    def install(broken):
        calls = []

        def call(name):
            def called(*a, **k):
                calls.append(name)
                if name == broken:
                    raise ConnectionError("the service is down")
                return types.SimpleNamespace(log=call("log"), finish=call("finish"))

            return called

        fake = types.ModuleType("wandb")
        fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        fake.init, fake.Image = call("init"), call("image")
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return calls

    return install


@pytest.mark.parametrize("broken", ["init", "log", "image", "finish"])
def test_a_tracker_that_is_down_is_one_warning_and_is_left_alone(
    tmp_path, broken_wandb, caplog, broken
):
    calls = broken_wandb(broken)
    trackers = build_trackers("wandb", tmp_path, 0, {}, "project")
    for step in (1, 2):
        for tracker in trackers:
            tracker.log(step, {"loss": 1.0})
            tracker.image(step, "samples", tmp_path / "x.png")
    for tracker in trackers:
        tracker.close()
    assert calls.count(broken) == 1
    assert calls[-1] == broken, "it was called again after it had failed"
    assert caplog.text.count("tracker=wandb failed") == 1
    assert "ConnectionError: the service is down" in caplog.text
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_run_goes_on_without_its_tracker(run, broken_wandb, caplog):
    broken_wandb("log")
    folder = run("run", "tracker=wandb")
    assert (folder / "score.json").exists()
    assert caplog.text.count("tracker=wandb failed") == 1


@pytest.fixture
def ids(monkeypatch):
    """A wandb that only notes, for each `init`, the id and whether it may be there already."""
    noted = []

    def init(**keywords):
        noted.append((keywords["id"], keywords["resume"]))
        return types.SimpleNamespace(log=lambda *a, **k: None, finish=lambda: None)

    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init, fake.Image = init, str
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return noted


def test_a_resumed_run_goes_on_under_the_same_id_and_a_new_one_does_not(run, ids, monkeypatch):
    for name in ("samples", "finish"):
        monkeypatch.setattr(Reporter, name, lambda *args: None)
    options = ["tracker=wandb", "routing=none", "backbone.depth=1"]
    run("run", *options, "training.num_steps=1")
    run("run", *options, "training.num_steps=2", "resume=latest")
    run("run", *options, "training.num_steps=1", "overwrite=true")
    first, resumed, new = ids
    assert first == resumed
    assert first[1] == "allow"
    assert len(first[0]) == 8
    assert new[0] != first[0]


@pytest.mark.parametrize("left", ["", "\n"])
def test_an_id_that_a_kill_left_empty_is_none(tmp_path, ids, left):
    (tmp_path / "wandb_id").write_text(left)
    for _ in range(2):
        build_trackers("wandb", tmp_path, 0, {}, "project")
    assert ids[0] == ids[1]
    assert len(ids[0][0]) == 8


def test_an_id_is_on_the_disk_whole_or_not_at_all(tmp_path, ids, monkeypatch):
    """Killed before the rename, there is no file that the next start would take for an id."""

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        WandbTracker(tmp_path, {}, "project")
    assert not (tmp_path / "wandb_id").exists()
    assert not ids


def test_lines_that_were_cut_short_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n{"st')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]
