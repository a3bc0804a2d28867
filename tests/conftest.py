"""What all unit tests share."""

import os

import pytest

from mindresume.coordination import lease as lease_module
from mindresume.coordination.lease import Lease


@pytest.fixture(scope="session")
def started_leases():
    """Returns the list of the leases that the running test has started. Lease is changed once, not
    by each test: the simulation searches the product again after each change."""
    started, start = [], Lease.start

    def recorded(lease):
        started.append(lease)
        return start(lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "start", recorded)
        # a process for each job would take too long
        patch.setattr(lease_module, "start_process", lambda *arguments: None)
        yield started


@pytest.fixture(autouse=True)
def no_heartbeat_outlives_its_test(started_leases):
    """Ends the heartbeats that a test leaves behind: many tests play jobs that die, which release
    no lease. Each heartbeat would go on until the end of the worker: a thread that writes and
    flushes a file every 15 s and keeps the bytes of a checkpoint."""
    yield
    for lease in started_leases:
        lease._stop.set()
    started_leases.clear()


@pytest.fixture(autouse=True, scope="module")
def no_flush(request):
    """Skips flushes, except in tests/storage: on a disk that others write to, the tests wait
    minutes for them. Their order is tested in the simulation and by fault injection, their system
    calls by st/test_syscalls.py."""
    if "storage" in request.path.parts:
        yield
        return

    def checked(handle):
        # a handle that is not open is an error
        os.fstat(handle if isinstance(handle, int) else handle.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", checked)
        yield
