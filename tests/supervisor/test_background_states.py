"""supervisor/rendezvous.py: a storage that never answers holds nobody up, and one that answers
counts at once."""

import threading
import time

import pytest
from storages import Hooked

from mindresume.errors import RecordError
from mindresume.storage.posix import PosixStorage
from mindresume.supervisor.rendezvous import (
    FAILED,
    READY,
    BackgroundStates,
    NodeState,
    NodeStates,
    Place,
    Rendezvous,
)
from mindresume.supervisor.restart_policy import DIED

PATIENCE = 120.0


class Hanging(Hooked):
    """Is a storage whose operations do not return while it hangs."""

    def __init__(self):
        super().__init__(self._wait)
        self.answers, self.hangs = threading.Event(), threading.Event()
        self.answers.set()

    def _wait(self, operation, path):
        if not self.answers.is_set():
            self.hangs.set()
        self.answers.wait()


@pytest.fixture
def storage():
    made = Hanging()
    yield made
    made.answers.set()


@pytest.fixture
def states(storage, tmp_path):
    return BackgroundStates(storage, str(tmp_path), NodeState(0, "a" * 8), 3600.0, time.monotonic)


def other(tmp_path):
    return NodeStates(PosixStorage(), str(tmp_path), NodeState(1, "b" * 8), 3600.0, time.monotonic)


def wait_until(states, condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        states.refresh()


def test_a_storage_that_hangs_holds_nobody_up_and_nothing_is_lost(states, storage, tmp_path):
    states.set(state=FAILED, status=7)
    wait_until(states, lambda: states.is_published)
    storage.answers.clear()
    # returns, although no operation of the storage does
    for status in range(20):
        states.set(status=status)
        states.refresh()
        states.publish_if_due()
        states.remove_old()
    assert storage.hangs.wait(PATIENCE) and not states.is_published
    storage.answers.set()
    wait_until(states, lambda: states.is_published)
    peer = other(tmp_path)
    peer.set(state=FAILED, status=9)
    peer.refresh()
    assert peer.newest(0).content.status == 19
    wait_until(states, lambda: states.newest(1) is not None)
    assert states.newest(1).content.status == 9 and states.error is None


def test_a_state_that_is_set_while_another_is_published_is_published_too(states, storage, tmp_path):
    storage.answers.clear()
    states.set(state=FAILED, status=1)
    assert storage.hangs.wait(PATIENCE)
    states.set(state=READY, status=2)
    assert not states.is_published
    storage.answers.set()
    wait_until(states, lambda: states.is_published)
    peer = other(tmp_path)
    peer.refresh()
    assert (peer.newest(0).content.state, peer.newest(0).content.status) == (READY, 2)


def test_the_rendezvous_goes_on_without_its_storage(storage, tmp_path):
    """Here time does not pass, so nobody counts as gone."""
    now = [0.0]
    nodes = Rendezvous(
        storage,
        str(tmp_path),
        Place(0, 2, 2, 60.0, "host0"),
        lambda: now[0],
        states=BackgroundStates,
    )
    storage.answers.clear()
    for _ in range(20):
        now[0] += 1.0
        assert nodes.agree() is None
    nodes.fail(9, "rank 0 was killed", DIED)
    assert nodes.check() is None and not nodes.states.is_published
    now[0] += 60.0
    assert nodes.agree().is_last


def test_a_defect_does_not_end_the_thread_in_silence(states, monkeypatch):
    def fail():
        raise RecordError("broken")

    monkeypatch.setattr(states, "look", fail)
    with pytest.raises(RecordError, match="broken"):
        wait_until(states, lambda: False)
