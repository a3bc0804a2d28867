"""Read locks, which keep a checkpoint from being removed while it is read.

    # None: the checkpoint is gone, select again
    lock = acquire_read_lock(directory, attempt, commit_dir)
    read_locks(directory)  # {name of an attempt folder: who reads it}
    announce_removal(directory, names)  # by a removal, before it checks for read locks

Both are leases whose run has the number 0: ``mindresume.coordination.lease``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from mindresume import runtime
from mindresume.coordination.lease import (
    BEAT,
    LOADING,
    PREFIX,
    READER,
    REMOVING,
    Lease,
    LeaseHolder,
    holder_of_this_process,
    is_alive,
    iteration_record_names,
    lease_path,
    leased_runs,
    read_leases,
)
from mindresume.coordination.liveness import Watch
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, attempts, run_name, run_sequence, strip_trash

# prefix of the names of the leases of readers and removals
WITHOUT_NUMBER = f"{PREFIX}{run_name(READER, '')}"
# heartbeats after which the read lock of a silent reader on another machine expires
GIVEN_UP = 40
# checks of a reader while a removal is announced, and seconds between
_LOOKS, _PAUSE = 20, 0.5


def acquire_read_lock(
    directory: CheckpointDir,
    attempt: str,
    commit_dir: str,
    beat: float = BEAT,
    sleep: Callable[[float], None] = runtime.sleep,
    purpose: str = LOADING,
    outwaited: set[str] | None = None,
) -> Lease | None:
    """Locks a checkpoint against removal.

    Args:
        attempt: the name of its folder of records.
        commit_dir: the folder whose rename un-commits it.
        purpose: LOADING or SCRUBBING.
        outwaited: runs whose announcements an earlier call has waited for as long as it waits; more
            are added. So a process that opens one checkpoint after the other waits once for all
            that do not go away.
    Returns:
        The lock, with heartbeats; None if the checkpoint is gone: select again.
    Raises:
        OSError: the lock cannot be written.
    """
    lease = _lease_without_number(directory, purpose, (attempt,), beat)
    outwaited = set() if outwaited is None else outwaited
    try:
        stay: list[set[str]] = []
        while len(stay) < _LOOKS and (
            announced := _announced_removals(directory, attempt, lease) - outwaited
        ):
            stay.append(announced)
            # the removal may have checked for read locks before this one existed
            sleep(_PAUSE)
        if len(stay) == _LOOKS:
            outwaited |= set.intersection(*stay)
        there = directory.storage.status(commit_dir) is not None
    except BaseException:
        lease.release()
        raise
    if not there:  # the removal was faster
        lease.release()
        return None
    return lease.start()


def announce_removal(directory: CheckpointDir, names: Iterable[str]) -> Lease:
    """Announces to readers that the attempts ``names`` are about to be removed. Returns a lease to
    release after that. A removal announces itself and then checks for read locks; a reader
    publishes its lock and then checks for announcements: one of the two sees the other, so a folder
    is never renamed under a reader. Raises OSError if it cannot be written."""
    return _lease_without_number(directory, REMOVING, tuple(names), 0.0)


def _lease_without_number(
    directory: CheckpointDir, purpose: str, names: tuple[str, ...], beat: float
) -> Lease:
    holder = replace(
        holder_of_this_process(purpose, holds=names),
        run=run_name(READER, runtime.token_hex(4)),
        every=beat,
    )
    lease = Lease(directory, holder)
    try:
        lease.publish()
    except BaseException:  # the lease may exist after an error, too
        lease.release()
        raise
    return lease


def _announced_removals(directory: CheckpointDir, attempt: str, own: Lease) -> set[str]:
    """Returns the runs of the leases that announce a removal of ``attempt``. An unreadable lease
    may be one, and counts. Leases of jobs and the ``own`` one, which are none, are not read."""
    others = [run for run in _reader_runs(directory) if run != own.run]
    found, unreadable = read_leases(directory, others)
    return {
        holder.run
        for holder in found
        if holder.purpose == REMOVING and attempt in holder.holds and is_alive(holder) is not False
    } | unreadable.keys()


def _reader_runs(directory: CheckpointDir) -> list[str]:
    """Returns the runs of the leases of readers and removals."""
    names = directory.storage.list(directory.path(FOLDER))
    return [run for run in leased_runs(names) if run_sequence(run) == READER]


class ReadLocks:
    """Returns, when called, the read locks of now: {name of an attempt folder: reader}. It
    remembers heartbeats between calls, so that the lock of a reader that died on another machine
    expires. An unreadable lease may lock any checkpoint, for as long."""

    def __init__(self, directory: CheckpointDir, time: runtime.Clock = runtime):
        self.directory, self._watch = directory, Watch(time.monotonic)

    def __call__(self) -> Mapping[str, str]:
        held: dict[str, str] = {}
        found, unreadable = read_leases(self.directory, _reader_runs(self.directory))
        for run, why in unreadable.items():
            if not self._silent(run, None, BEAT):
                held.update(
                    {
                        name: f"perhaps, by a reader: {lease_path(self.directory, run)} "
                        f"cannot be read ({why})"
                        for name in self._all_attempts()
                    }
                )
        for holder in found:
            if holder.holds and self._is_active(holder) and holder.purpose != REMOVING:
                held.update(
                    {
                        name: f"{holder.purpose} by process {holder.pid} on host {holder.host}"
                        for name in holder.holds
                    }
                )
        return held

    def _is_active(self, holder: LeaseHolder) -> bool:
        silent = self._silent(holder.run, holder.beat, max(holder.every, BEAT))
        state = is_alive(holder)
        if state is False or (state is None and silent):
            with suppress(OSError):
                self.directory.storage.remove(lease_path(self.directory, holder.run))
            return False
        return True

    def _silent(self, run: str, beat: int | None, every: float) -> bool:
        """Returns whether a lease had no heartbeat for ``GIVEN_UP`` intervals. ``beat``: None while
        it cannot be read."""
        seen = self._watch.see(run, beat)
        return self._watch.clock() - seen.since > every * GIVEN_UP

    def _all_attempts(self) -> set[str]:
        directory = self.directory
        names = [
            *directory.storage.list(directory.path(FOLDER)),
            *iteration_record_names(directory),
        ]
        return {name for name, _, _ in attempts(list(map(strip_trash, names)))}


def read_locks(directory: CheckpointDir) -> Mapping[str, str]:
    """Returns the read locks of now, for a process that checks once."""
    return ReadLocks(directory)()
