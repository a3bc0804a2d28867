"""What all unit tests share."""

import os
from collections import Counter
from pathlib import Path

import pytest
from lease_holders import ManualClock
from rank_folders import by_clock

from mindresume.coordination import lease as lease_module
from mindresume.coordination.lease import Lease

# Rooms and modules that take longest, as measured, or import mindformers. Their tests have the
# mark slow; `pytest -m "not slow" tests`, the suite of daily work, does not even import them.
SLOW = (Path(__file__).parent / "slow.txt").read_text().split()
SHARE = 0.06  # of the time of all modules that are not slow: independent of how busy a machine is


def module_of(path):
    return Path(path).relative_to(Path(__file__).parent).with_suffix("").as_posix()


def is_slow(path):
    name = module_of(path)
    return any(name == slow or name.startswith(f"{slow}/") for slow in SLOW)


def pytest_ignore_collect(collection_path, config):
    return True if config.option.markexpr == "not slow" and is_slow(collection_path) else None


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and is_slow(item.path):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter):
    """Keeps the list true: names modules that take long and are not in it."""
    here, seconds = Path(__file__).parent, Counter()
    for name in SLOW:
        if not (here / name).is_dir() and not (here / f"{name}.py").is_file():
            terminalreporter.line(f"tests/slow.txt names {name}, which does not exist")
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and report.nodeid.startswith("tests/"):
                seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration
    quick = {name: total for name, total in seconds.items() if not is_slow(here / name)}
    for name, total in quick.items():
        if len(quick) > 100 and total > SHARE * sum(quick.values()):
            terminalreporter.line(f"tests/{name}: {total:.0f} s, and not in tests/slow.txt")


@pytest.fixture
def clock():
    """A clock that only ``sleep`` advances answers in the place of the machine's."""
    time = ManualClock()
    with by_clock(time):
        yield time


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
