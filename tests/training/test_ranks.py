"""What ranks tell each other at every step, without waiting for what a GPU is still computing."""

import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.training.test_sweeps import connected
from tread_zoo.process_group import take_connections
from tread_zoo.training.ranks import LateLargest
from tread_zoo.training.stopping import StopSignals

__all__ = ["connected"]
CPU = torch.device("cpu")
TWO = SimpleNamespace(num_processes=2, process_index=0, device=CPU)


@pytest.fixture
def peer(monkeypatch):
    """Another rank: what it says at each call, and what was waited for, by the call's number."""
    says, begun, waited = [], [], []

    def all_reduce(shared, op, async_op):
        assert (op, async_op) == (dist.ReduceOp.MAX, True)
        call = len(begun)
        begun.append(int(shared))

        def wait():
            waited.append(call)
            shared.clamp_(min=says[call] if call < len(says) else 0)

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return SimpleNamespace(says=says, begun=begun, waited=waited)


def test_a_step_waits_for_the_exchange_of_the_one_before_alone(peer):
    late = LateLargest()
    peer.says[:] = [0, 0, 3, 0]
    for step, expected in enumerate([0, 0, 0, 3]):
        assert late(TWO, 0) == expected
        assert peer.waited == list(range(step)), "it waited for its own exchange"


def test_ranks_decide_at_the_same_step_whoever_was_asked(peer):
    """This rank's own number counts no earlier than the other's."""
    late = LateLargest()
    assert [late(TWO, number) for number in (0, 2, 2)] == [0, 0, 2]
    assert peer.begun == [0, 2], "an exchange was begun that nobody reads"


@pytest.mark.parametrize("says", [[0, 0, 3], [0, 3, 0]])
def test_the_last_step_leaves_nothing_open(peer, says):
    late = LateLargest()
    peer.says[:] = says
    assert [late(TWO, 0), late(TWO, 0), late(TWO, 0, last=True)] == [0, 0, 3]
    assert peer.waited == list(range(len(peer.begun)))


def test_a_single_process_decides_at_once():
    assert LateLargest()(SimpleNamespace(num_processes=1), 2) == 2


def test_signals_through_a_real_group(connected):
    with StopSignals() as stop, stop.deferred():
        assert not stop.requested(TWO)
        stop.received[signal.SIGUSR1] = 0.0
        assert not stop.requested(TWO)
        assert stop.requested(TWO)
        assert not StopSignals().requested(TWO)
        last = StopSignals()
        last.received[signal.SIGTERM] = 0.0
        assert last.requested(TWO, last=True)
        stop.received.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_waits_for_the_gpu(tmp_path):
    """Kernels that take long are still under way when a call returns."""
    if dist.is_initialized():
        pytest.skip("this process has a group already")
    device = torch.device("cuda", 0)
    take_connections(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        two, late = SimpleNamespace(num_processes=2, device=device), LateLargest()
        assert late(two, 0) == 0  # what is set up at the first call
        assert late(two, 0) == 0
        torch.cuda.synchronize()
        late(two, 0)
        torch.cuda._sleep(4_000_000_000)  # cycles: more than a second
        assert late(two, 3) == 0
        after = torch.cuda.Event()
        after.record()
        assert not after.query(), "it waited for the kernels"
        assert late(two, 0) == 3
    finally:
        dist.destroy_process_group()
