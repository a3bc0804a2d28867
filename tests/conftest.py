"""What all unit tests share."""
import os

import pytest

from mindresume.coordination.lease import Lease


@pytest.fixture(autouse=True)
def no_heartbeat_outlives_its_test(monkeypatch):
    """Ends the heartbeats that a test leaves behind: many tests play jobs that die, which release no lease. Each heartbeat would
    go on until the end of the worker: a thread that writes and flushes a file every 15 s and keeps the bytes of a checkpoint."""
    started, start = [], Lease.start

    def recorded(lease):
        started.append(lease)
        return start(lease)
    monkeypatch.setattr(Lease, "start", recorded)
    yield
    for lease in started:
        lease._stop.set()


@pytest.fixture
def no_flush(monkeypatch):
    """Flushing takes most of the time of a test that does not look at it: on a disk that others write to, minutes."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
