"""Several runs in the processes of one launcher: sweeps, comparisons."""

import json
import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.scripts.test_command_line import ROOT
from tests.small_run import SMALL
from tests.training.test_distributed import launch
from tread_zoo.process_group import leave_connections, take_connections
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.ranks import failing_together
from tread_zoo.training.stopping import Stopped, StopSignals


@pytest.mark.slow
def test_the_runs_of_a_sweep_and_of_a_comparison_are_those_of_their_own(tmp_path, free_port):
    """In other orders, after other runs, the weights are the same to the bit: nothing is left of
    the run before."""
    small = [*SMALL, "training.num_steps=2", "training.warmup_steps=1", "training.log_every=1"]
    scripts = [str(ROOT / "scripts" / name) for name in ("train.py", "compare.py")]
    sweep = [scripts[0], "-m", *small, "backbone=dit_tiny", "routing=none,tread", "seed=3"]
    pair = [scripts[1], *small, "backbone=dit_tiny", "routing=tread,none", "seed=3"]
    (tmp_path / "todo.json").write_text(json.dumps([sweep, [*pair, "compare.out=pair"]]))
    said = launch("-m", "tests.training.sweeper", str(tmp_path / "todo.json"), port=free_port)
    assert said.count("2 process(es)\n") == 4, "four runs, and each in both processes"
    assert said.count("written to pair: ") == 1
    for routing in ("none", "tread"):
        ends = [
            find_checkpoint(tmp_path / "runs" / f"digits_dit_tiny_{routing}_flow_seed3"),
            find_checkpoint(
                tmp_path / "pair" / "runs" / f"backbone=dit_tiny,routing={routing},seed=3"
            ),
        ]
        one, other = (end.tensors("model") for end in ends)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert {path.name for path in tmp_path.glob("closed_*")} == {"closed_0", "closed_1"}


@pytest.fixture
def connected(tmp_path):
    """This process alone in a group, as a run leaves it."""
    if "RANK" in os.environ:
        pytest.skip("this process has a launcher")
    take_connections(torch.device("cpu"))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_run_takes_the_group_that_it_finds_with_its_own_time_limit(connected):
    take_connections(torch.device("cpu"), timedelta(seconds=77))
    assert dist.group.WORLD is connected
    backend = connected._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=77)
    leave_connections()
    assert dist.is_initialized(), "the next run may want it"


def test_another_device_in_connected_processes_is_refused(connected):
    with pytest.raises(ValueError, match=r"device=cuda cannot follow a run on device=cpu"):
        take_connections(torch.device("cuda"))


def fail(accelerator):
    with failing_together(accelerator):
        raise ValueError("cannot start")


def stop(accelerator):
    with StopSignals() as signals, signals.deferred():
        signals.received[signal.SIGUSR1] = 0.0
        signals.leave("run at step 1", accelerator)


@pytest.mark.parametrize(("end", "raised"), [(fail, ValueError), (stop, Stopped)])
def test_processes_that_end_together_close_the_group_at_exit(connected, monkeypatch, end, raised):
    """A group left open to the interpreter's end aborted one process in thirty, with status -6
    instead of 1 or 75, when its threads were slow."""
    at_exit = []
    fake = SimpleNamespace(register=at_exit.append, unregister=lambda each: at_exit.clear())
    monkeypatch.setattr("tread_zoo.process_group.atexit", fake)
    device = torch.device("cpu")
    with pytest.raises(raised):
        end(SimpleNamespace(num_processes=2, process_index=0, device=device))
    assert dist.is_initialized()
    for each in at_exit:
        each()
    assert not dist.is_initialized()
