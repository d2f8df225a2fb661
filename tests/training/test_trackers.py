"""Where numbers go: the local file always, a tracker as long as it works."""

import importlib.util
import json
from dataclasses import dataclass

import pytest

from tests.small_run import train_small
from tread_zoo.registry import available, create, register
from tread_zoo.training.trackers import Trackers, read_metrics

CALLS = []


@register("tracker", "noting_for_tests")
@dataclass
class Noting:
    broken: str = ""

    def _note(self, name, *given):
        CALLS.append((name, *given))
        if name == self.broken:
            raise ConnectionError("the service is down")

    def start(self, run_dir, step, settings):
        self._note("start", run_dir, step, settings)

    def log(self, step, values):
        self._note("log", step, values)

    def image(self, step, name, path):
        self._note("image", step, name, path)

    def close(self):
        self._note("close")


@pytest.fixture(autouse=True)
def _no_calls_yet():
    CALLS.clear()


def test_the_local_file_drops_what_a_resumed_run_does_again(tmp_path):
    local = create("tracker", "local")
    first = Trackers("local", local, tmp_path, 0, {})
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a crash
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    Trackers("local", local, tmp_path, 2, {}).log(3, {"loss": 30.0})
    rows = [(row["step"], row["loss"]) for row in read_metrics(tmp_path)]
    assert rows == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.slow
def test_a_tracker_gets_what_the_local_file_gets(run):
    folder = run("run", "tracker=noting_for_tests", "seed=3")
    name, run_dir, step, settings = CALLS[0]
    assert (name, run_dir, step, settings["seed"]) == ("start", folder, 0, 3)
    logged = [{"step": step, **values} for name, step, values, *_ in
              (call for call in CALLS if call[0] == "log")]  # fmt: skip
    assert logged == read_metrics(folder)
    (image,) = (call for call in CALLS if call[0] == "image")
    assert image[3].exists()
    assert CALLS[-1] == ("close",)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["start", "log"])
def test_a_tracker_that_fails_is_dropped_with_one_warning(run, caplog, broken):
    folder = run("run", "tracker=noting_for_tests", f"tracker.broken={broken}")
    names = [call[0] for call in CALLS]
    assert names.count(broken) == 1
    assert names[-1] == broken, "it was called again after it had failed"
    assert caplog.text.count("tracker=noting_for_tests failed") == 1
    assert (folder / "score.json").exists()
    assert read_metrics(folder)


def test_a_tracker_that_is_not_installed_says_how():
    missing = [n for n in available("tracker") if n in ("comet", "mlflow", "trackio", "wandb")
               and importlib.util.find_spec({"comet": "comet_ml"}.get(n, n)) is None]  # fmt: skip
    if not missing:
        pytest.skip("all of them are installed")
    with pytest.raises(ValueError, match="pip install"):
        create("tracker", missing[0])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_gets_the_same_names(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run("run", "tracker=tensorboard")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    names = {name for row in read_metrics(folder) for name in row if name != "step"}
    assert set(events.Tags()["scalars"]) == names
    assert events.Tags()["images"] == ["samples"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_works_offline_and_keeps_its_id(tmp_path, monkeypatch):
    """Without a key, without a network: the run ends well, and a resumed one is the same run."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = train_small(tmp_path / "run", "tracker=wandb", "training.num_steps=2")
    own = (folder / "wandb_id").read_text()
    train_small(folder, "tracker=wandb", "resume=latest")
    assert (folder / "wandb_id").read_text() == own
    assert len(list((folder / "wandb").glob(f"offline-run-*-{own}"))) >= 1
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6
