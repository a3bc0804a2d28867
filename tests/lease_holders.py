"""Lease holders for the tests: this process, a dead one, one on another host; and a clock that only
sleep advances."""

import subprocess
import sys
from dataclasses import replace

from rank_folders import RUN, STORAGE, by_clock, dir_at, records_of

from mindresume.coordination.lease import (
    LOADING,
    SAVING,
    Lease,
    acquire_read_lock,
    holder_of_this_process,
)
from mindresume.coordination.lease_acquisition import acquire
from mindresume.events import ignore
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, attempt_name, run_name

ME = holder_of_this_process(SAVING, 4)
ELSEWHERE = replace(ME, host="node7", machine="another/1", pid=1)


class ManualClock:
    """A clock that only ``sleep`` advances; unless by nothing, it then calls ``also(now)``."""

    def __init__(self, also=lambda now: None):
        self.now, self.also = 0.0, also

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if seconds:
            self.also(self.now)


def acquire_lease(root, holder=ME, time=None, emit=ignore, storage=STORAGE):
    """Acquires the folder without real waiting."""
    with by_clock(time or ManualClock()):
        return acquire(CheckpointDir(storage, str(root)), holder, emit=emit)


def publish_lease(root, holder=ME, sequence=1):
    """Writes the lease of run number ``sequence`` of this holder, as if it saved there."""
    lease = Lease(dir_at(root), replace(holder, run=run_name(sequence, "0000aaaa")))
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    lease.publish()
    return lease


def reading(root, step, run=RUN):
    """Returns the read lock of this process on a saved step."""
    return acquire_read_lock(
        dir_at(root), attempt_name(step, run), str(records_of(root, step, run))
    )


def dead_reader(root, step, run=RUN):
    """Leaves the lease of a process that has died while it read a step."""
    owner = replace(
        dead_holder(), purpose=LOADING, holds=(attempt_name(step, run),), run="0000-0000dead"
    )
    Lease(dir_at(root), owner).publish()


def dead_holder():
    """Returns the holder of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    holder = replace(ME, pid=child.pid, started=12345)
    child.wait()
    return holder
