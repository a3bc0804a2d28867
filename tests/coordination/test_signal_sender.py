"""Who has sent SIGTERM: this process, another one, or not known. With real signals, of which
Python's handler knows no sender."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from senders import from_outside

from mindresume.coordination import preemption
from mindresume.coordination.preemption import OTHER, OWN, UNKNOWN, SignalSenders


def from_a_queue():
    """As sigqueue(3), with which a platform can send a value."""
    from_outside("-q 7")


def from_itself():
    os.kill(os.getpid(), signal.SIGTERM)


def from_a_thread():
    thread = threading.Thread(target=from_itself)
    thread.start()
    thread.join()


@pytest.fixture
def senders(monkeypatch):
    """Watches with a handler of Python. ``noticed``: set by ``on_own``."""
    monkeypatch.setattr(preemption, "_TICK", 0.02)
    before, wakeup, noticed = (
        signal.signal(signal.SIGTERM, lambda *_: None),
        signal.set_wakeup_fd(-1),
        threading.Event(),
    )
    senders = SignalSenders(noticed.set)
    senders.noticed = noticed
    senders.begin()
    yield senders
    senders.close()
    assert signal.set_wakeup_fd(wakeup) == -1
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "send", [from_itself, from_a_thread, lambda: signal.raise_signal(signal.SIGTERM)]
)
def test_a_signal_of_this_process_is_its_own(senders, send):
    assert senders.look() == UNKNOWN
    send()
    assert senders.look() == OWN and senders.noticed.wait(60)


@pytest.mark.parametrize("send", [from_outside, from_a_queue])
def test_a_signal_of_another_process_is_none_of_its_own(senders, send):
    send()
    assert senders.look() == OTHER
    # the workers of the data set got the signal, too, and have died of it
    from_itself()
    assert senders.look() == OTHER and not senders.noticed.is_set()


def test_a_request_is_not_lost_if_an_own_signal_follows_at_once(senders):
    """On the stack the second one has replaced the first one."""
    with senders._lock:
        from_outside()
        from_itself()
    assert senders.look() == UNKNOWN and not senders.noticed.is_set()


def test_a_signal_that_another_thread_has_taken_has_no_known_sender(senders):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        from_itself()
        assert senders.look() == UNKNOWN and not senders.noticed.is_set()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def test_a_signal_from_before_has_no_part_in_it(senders):
    senders.close()
    from_outside()  # its sender stays on the stack
    later = SignalSenders()
    later.begin()
    assert later.look() == UNKNOWN
    from_itself()
    assert later.look() == OWN
    later.close()
    signal.set_wakeup_fd(-1)


def test_a_handler_that_was_installed_later_is_armed_again(senders):
    signal.signal(signal.SIGTERM, lambda *_: None)
    from_outside()
    assert senders.look() == UNKNOWN
    senders.arm()
    from_outside()
    assert senders.look() == OTHER


def test_an_own_signal_is_noticed_while_somebody_else_has_the_place_of_the_pipe(senders, tmp_path):
    """The crash-loop protection has it during the first step. It must not get it back closed, or
    lose it."""
    with open(tmp_path / "signals", "wb", buffering=0) as file:
        os.set_blocking(file.fileno(), False)
        ours = signal.set_wakeup_fd(file.fileno())
        from_itself()
        assert senders.noticed.wait(60)
        senders.close()
        assert signal.set_wakeup_fd(ours) == file.fileno()
    signal.set_wakeup_fd(-1)


BLOCKED = """
import ctypes, os, signal, sys, threading, time
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.preemption import PreemptionHandler
PreemptionHandler(SingleProcess(), 5.0, on_own_signal=lambda: os._exit(7)).install()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_an_own_signal_is_noticed_while_the_main_thread_waits_in_c_for_ever():
    """As in a collective or in the data set: no handler in Python runs there."""
    assert subprocess.run([sys.executable, "-c", BLOCKED], timeout=300).returncode == 7
