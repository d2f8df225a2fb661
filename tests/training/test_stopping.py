"""Signals to this process, and what becomes of them."""

import os
import signal

import pytest

from tread_zoo.training import stopping
from tread_zoo.training.stopping import REQUEUE_STATUS, Stopped, StopSignals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has no such signals")
USED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Alone:
    num_processes = 1


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_are_put_back():
    before = [signal.getsignal(number) for number in USED]
    yield
    assert [signal.getsignal(number) for number in USED] == before


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
        ([signal.SIGUSR1], 75),
        ([signal.SIGUSR2], 75),
        ([signal.SIGTERM, signal.SIGUSR1], 75),  # the time is up while it saves for a requeue
        ([signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM], 75),
        ([signal.SIGTERM, signal.SIGTERM], 143),  # from the cluster, and again from the launcher
    ],
)
def test_the_step_ends_first_and_the_status_says_why(numbers, status):
    with StopSignals() as stop, stop.deferred():
        assert not stop.requested(Alone())
        send(*numbers)
        assert stop.requested(Alone())
        with pytest.raises(Stopped) as stopped:
            stop.leave("somewhere", Alone())
        stop.received.clear()
    assert stopped.value.code == status


def test_the_same_again_later_ends_at_once(monkeypatch):
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.0)
    with StopSignals() as stop, stop.deferred():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        stop.received.clear()


def test_before_and_after_the_steps_there_is_nothing_to_wait_for():
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(Stopped) as stopped:
            send(signal.SIGUSR1)
    assert stopped.value.code == REQUEUE_STATUS == 75


def leave_the_steps_with(number):
    with StopSignals() as stop, stop.deferred():
        send(number)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGUSR1, Stopped), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_after_the_last_step_is_not_lost(number, raised):
    with pytest.raises(raised):
        leave_the_steps_with(number)


def test_who_handled_it_before_gets_it_after_saving():
    """submitit requeues its job so."""
    got = []
    old = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    try:
        with StopSignals() as stop, stop.deferred():
            send(signal.SIGUSR2)
            assert got == []
            with pytest.raises(Stopped):
                stop.leave("somewhere", Alone())
            stop.received.clear()
        assert got == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_a_forked_process_leaves_signals_to_the_run():
    with StopSignals() as stop, stop.deferred():
        child = os.fork()
        if not child:
            send(*USED)
            os._exit(len(stop.received))
        assert os.waitpid(child, 0)[1] == 0
        assert not stop.received
