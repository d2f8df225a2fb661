"""Signals to this process, and what becomes of them."""

import contextlib
import os
import signal

import pytest

from tread_zoo import requeue
from tread_zoo.requeue import REQUEUE_STATUS, answer_requeue_signals, end_at_once
from tread_zoo.training import stopping
from tread_zoo.training.stopping import Stopped, StopSignals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has no such signals")
USED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Alone:
    num_processes = 1


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_are_put_back():
    """SIGINT is Python's, which a shell's background job would ignore."""
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in USED]
    yield
    assert [signal.getsignal(number) for number in USED] == before
    signal.signal(signal.SIGINT, outside)


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


def test_before_and_after_the_steps_there_is_nothing_to_wait_for(capfd):
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(Stopped) as stopped:
            send(signal.SIGUSR1)
    assert stopped.value.code == REQUEUE_STATUS == 75
    assert capfd.readouterr().err == "stopped by SIGUSR1; run the same command again\n"


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


@pytest.fixture
def as_a_script_begins(monkeypatch):
    """The handlers that a script begins with; SIGUSR2 is submitit's already."""
    monkeypatch.setattr(requeue, "_installed_by", 0)
    got = []
    before = {
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number)),
    }
    answer_requeue_signals()
    yield got
    for number, handler in before.items():
        signal.signal(number, handler)


def test_while_a_script_starts_a_requeue_ends_it_at_once(as_a_script_begins):
    """In a process of its own, where even a bare except, as some imports have, cannot hold it."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writes, 2)
        answer_requeue_signals()
        with contextlib.suppress(BaseException):
            send(signal.SIGUSR1)
        os._exit(0)
    os.close(writes)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    with os.fdopen(reads) as said:
        assert said.read() == "stopped by SIGUSR1; run the same command again\n"


def test_whoever_handles_a_signal_already_keeps_it(as_a_script_begins):
    send(signal.SIGUSR2)
    assert as_a_script_begins == [signal.SIGUSR2]


def test_a_process_forked_while_a_script_starts_leaves_signals_to_it(as_a_script_begins):
    child = os.fork()
    if not child:
        send(signal.SIGUSR1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_run_takes_over_from_the_start_and_gives_back(as_a_script_begins):
    """`leave` still waits for the other ranks: the handler of the start does not end it first."""
    with StopSignals() as stop, stop.deferred():
        send(signal.SIGUSR1)
        with pytest.raises(Stopped) as stopped:
            stop.leave("somewhere", Alone())
        stop.received.clear()
    assert stopped.value.code == 75
    assert signal.getsignal(signal.SIGUSR1) is end_at_once
