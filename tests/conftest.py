"""What all unit tests share."""
import os

import pytest

from mindresume.coordination.lease import Lease


@pytest.fixture(scope="session")
def started_leases():
    """Returns the list of the leases that the running test has started. Lease is changed once, not by each test: the simulation
    searches the product again after each change."""
    started, start = [], Lease.start

    def recorded(lease):
        started.append(lease)
        return start(lease)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "start", recorded)
        yield started


@pytest.fixture(autouse=True)
def no_heartbeat_outlives_its_test(started_leases):
    """Ends the heartbeats that a test leaves behind: many tests play jobs that die, which release no lease. Each heartbeat would
    go on until the end of the worker: a thread that writes and flushes a file every 15 s and keeps the bytes of a checkpoint."""
    yield
    for lease in started_leases:
        lease._stop.set()
    started_leases.clear()


@pytest.fixture
def no_flush(monkeypatch):
    """Flushing takes most of the time of a test that does not look at it: on a disk that others write to, minutes."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
