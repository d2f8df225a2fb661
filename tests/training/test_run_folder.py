"""One run at a time has a folder, and a run whose folder is gone ends."""

import json
from dataclasses import dataclass

import pytest

from tread_zoo.diffusion import FlowMatching
from tread_zoo.registry import register
from tread_zoo.runs.checkpoint import find_checkpoint

MEANWHILE = []  # done once, while a run computes its first loss


@register("objective", "flow_interrupted")
@dataclass(frozen=True)
class Interrupted(FlowMatching):
    def loss(self, predict, x, draw):
        if MEANWHILE:
            MEANWHILE.pop()()
        return super().loss(predict, x, draw)


@pytest.fixture
def interrupted(run):
    """Return a function that trains a run and calls `meanwhile` during a step."""

    def train(meanwhile, *overrides):
        MEANWHILE.append(meanwhile)
        return run("run", "objective=flow_interrupted", *overrides)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["overwrite=true"]])
def test_a_second_run_is_refused(run, interrupted, tmp_path, overrides):
    if overrides:  # the lock is as good after an earlier run was moved away
        run("run", "training.num_steps=1")
    refused = []

    def start():
        with pytest.raises(ValueError, match="another process is training"):
            run("run", "overwrite=true")
        refused.append(True)

    interrupted(start, *overrides)
    assert refused
    assert len(list(tmp_path.glob("run.*"))) == len(overrides)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_run_whose_folder_was_taken_away_ends(run, interrupted, tmp_path, again):
    folder = tmp_path / "run"

    def take_away():
        folder.rename(tmp_path / "away")
        if again:
            run("run", "training.num_steps=3")

    with pytest.raises(ValueError, match="removed or replaced") as ended:
        interrupted(take_away, "training.checkpoint_every=1")
    assert str(folder) in str(ended.value)
    assert folder.exists() == again
    if again:
        assert find_checkpoint(folder).step == 3
        assert json.loads((folder / "config.json").read_text())["training"]["num_steps"] == 3
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
        assert steps == sorted(steps)
