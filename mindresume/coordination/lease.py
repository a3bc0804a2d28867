"""Leases on a checkpoint directory: of the one job that saves there, and of readers, whose
checkpoints must not be removed.

    lease = Lease(directory, holder)            # of a job that saves: lease_acquisition.py
    lease.publish();  lease.start();  lease.release()
    fence(directory, run)  # every rank before it writes: LeaseHeldError if a later run took over

    # None: the checkpoint is gone, select again
    lock = acquire_read_lock(directory, attempt, commit_dir)
    read_locks(directory)  # {name of an attempt folder: who reads it}
    announce_removal(directory, names)  # by a removal, before it checks for read locks

A lease is a small sealed file ``.mindresume/claim-{run}.json``. It names its holder and has a
counter, which the holder increments (a heartbeat). The age of a lease never decides whether its
holder is alive: on the same machine its process is looked up; on another machine the counter is
watched for some heartbeats. A holder counts as alive if this cannot be known (its lease cannot be
read, or it is on another machine and has no heartbeat); then a person decides. A job that was taken
for dead and goes on finds the lease of its successor and stops saving.

The run of readers and removals has the number 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Annotated

from mindresume import runtime
from mindresume.coordination.liveness import (
    HeartbeatProcess,
    Watch,
    is_running,
    machine,
    start_ticks,
)
from mindresume.errors import LeaseHeldError, RecordError
from mindresume.formats import CheckpointDir
from mindresume.formats.records import iteration_record_names
from mindresume.formatting import ranks_count
from mindresume.model.manifest import (
    FOLDER,
    Run,
    attempts,
    encode_head,
    is_run,
    read_head,
    run_name,
    run_sequence,
    strip_trash,
)
from mindresume.storage import Storage, parallel, publish
from mindresume.storage.posix import PosixStorage
from mindresume.storage.read_cache import uncached
from mindresume.typed import Count, Limits, Time, decode

BEAT = 15.0  # seconds between two heartbeats
SAVING = "saving"
LOADING = "loading"
REMOVING = "removing"
SCRUBBING = "scrubbing"
READER = 0  # run number of readers and removals: never later than any job
_Text = Annotated[str, Limits(0, 4095)]
PREFIX, SUFFIX = "claim-", ".json"
_TRIES = 5  # starts of the process that sends heartbeats
# of a job that saves; tests and the simulation let a thread send them
start_process = HeartbeatProcess.start
ENDED = "ended-"  # prefix of the marker of a run that is over, which keeps its number


@dataclass(frozen=True)
class LeaseHolder:
    """The process that has a lease.

    Attributes:
        purpose: SAVING, LOADING, REMOVING or SCRUBBING.
        run: number and random part of the run, such as "0003-5f0c21aa"; empty before ``acquire``
            chooses it.
        host: name of the host.
        machine: one boot of one kernel and one namespace of processes, in which ``pid`` is valid.
        pid: process id.
        started: start of the process in kernel ticks; distinguishes it from a later process with
            the same pid.
        since: seconds since 1970, for people.
        world_size: number of ranks of the job.
        holds: names of attempt folders.
        beat: number of heartbeats so far.
        step: the step that the training has reached; 0: not known.
        every: seconds between two heartbeats; 0: none.
        folder: identity of the folder in which it was published (``Status.identity``); empty: not
            known. A copy of that folder has another one.
        is_copy: it was read in another folder. Not stored.
    """

    purpose: _Text
    run: Run
    host: _Text
    machine: _Text
    pid: Count
    started: Count
    since: Time
    world_size: Count = 1
    holds: tuple[_Text, ...] = ()
    beat: Count = 0
    step: Count = 0
    every: Annotated[float, Limits(0, sys.float_info.max)] = BEAT
    folder: _Text = ""
    is_copy: bool = False

    @property
    def order(self) -> tuple[int, str]:
        return run_order(self.run)

    def __str__(self) -> str:
        since = runtime.strftime("%Y-%m-%d %H:%M:%S", runtime.localtime(self.since))
        return (
            f"run {self.run} on host {self.host} (process {self.pid}, "
            f"{ranks_count(self.world_size)}, since {since})"
        )

    def encode(self) -> bytes:
        row = asdict(self)
        del row["is_copy"]
        return encode_head({"version": 1, "kind": "claim", **row})

    @classmethod
    def read(cls, storage: Storage, path: str) -> LeaseHolder:
        """Reads a lease. Raises RecordError if it is torn, altered, of another kind or of a later
        version; FileNotFoundError if it is gone, OSError if it cannot be read."""
        with storage.open(path) as file:
            head, _ = read_head(file, "claim")
        return decode(cls, {**head, "is_copy": False}, "lease")


@runtime.asks_machine
def holder_of_this_process(
    purpose: str, world_size: int = 1, holds: Iterable[str] = ()
) -> LeaseHolder:
    """Returns a holder that describes this process. Its ``run`` is empty: ``acquire`` chooses
    it."""
    return LeaseHolder(
        purpose,
        "",
        runtime.gethostname(),
        machine(),
        os.getpid(),
        start_ticks(os.getpid()),
        runtime.time(),
        world_size,
        tuple(holds),
    )


@runtime.asks_machine
def is_alive(holder: LeaseHolder) -> bool | None:
    """Returns whether the process of a holder runs and holds this lease. None: only its heartbeats
    can tell, because the process is on another machine, cannot be looked at
    (``liveness.is_running``), or has published the lease in another folder."""
    if not holder.machine or holder.machine != machine():
        return None
    runs = is_running(holder.pid, holder.started)
    return None if runs and holder.is_copy else runs


# ---- the folder ----------------------------------------------------------------------------------


def lease_path(directory: CheckpointDir, run: str) -> str:
    return directory.path(FOLDER, f"{PREFIX}{run}{SUFFIX}")


def run_order(run: str) -> tuple[int, str]:
    """Returns the sort key of runs."""
    return run_sequence(run), run


def leased_runs(names: Iterable[str], prefix: str = PREFIX) -> list[str]:
    """Returns the runs of the leases among ``names``."""
    return [
        run
        for name in names
        if name.startswith(prefix)
        and name.endswith(SUFFIX)
        and is_run(run := name[len(prefix) : -len(SUFFIX)])
    ]


def lease_holders(directory: CheckpointDir) -> list[LeaseHolder]:
    """Returns the holder of every lease that can be read, for people."""
    return read_leases(directory)[0]


def read_leases(
    directory: CheckpointDir, runs: Collection[str] | None = None
) -> tuple[list[LeaseHolder], dict[str, str]]:
    """Returns the holder of every lease that can be read, and {run: reason} of the unreadable ones.
    Another host has just replaced such a file (ESTALE), a later version wrote it, or it is damaged:
    its holder counts as alive. ``runs``: only their leases."""
    if runs is None:
        runs = leased_runs(directory.storage.list(directory.path(FOLDER)))
    runs = list(dict.fromkeys(runs))  # a listing of NFS can name a file twice
    here = _identity(directory) if runs else ""
    rows = parallel(directory.storage, partial(_read_lease, directory, here), runs)
    return (
        [row for row in rows if isinstance(row, LeaseHolder)],
        {
            run: row
            for run, row in sorted(zip(runs, rows, strict=True), key=itemgetter(0))
            if row and isinstance(row, str)
        },
    )


def _read_lease(directory: CheckpointDir, here: str, run: str) -> LeaseHolder | str:
    """Returns the holder of a lease, why it cannot be read, or an empty text: it has just ended.
    ``here``: the identity of the folder."""
    try:
        holder = LeaseHolder.read(directory.storage, lease_path(directory, run))
    except FileNotFoundError:
        return ""
    except (RecordError, OSError) as error:
        return str(error) or type(error).__name__
    return replace(holder, is_copy=bool(here and holder.folder) and holder.folder != here)


def _identity(directory: CheckpointDir) -> str:
    """Returns the identity of the folder of records; empty if it is not known."""
    try:
        status = directory.storage.status(directory.path(FOLDER))
    except OSError:
        return ""
    return status.identity if status is not None else ""


def is_job_lease(run: str) -> bool:
    """Returns whether a lease is of a job that saves, by its name alone."""
    return run_sequence(run) != READER


def known_lease_holders(directory: CheckpointDir) -> list[LeaseHolder]:
    """Returns ``lease_holders``, for people: none where the folder of records cannot be listed."""
    try:
        return lease_holders(directory)
    except OSError:
        return []


def fence(directory: CheckpointDir, run: str) -> None:
    """Raises LeaseHeldError if a later run has acquired this directory or saved into it: then this
    one was taken for dead. A run that has published its lease and not sent a heartbeat yet may
    still give way, and does not count."""
    names = directory.storage.list(directory.path(FOLDER))
    own = run_order(run)
    leased = leased_runs(names)
    seen = [*leased_runs(names, ENDED), *(other for _, _, other in attempts(names))]
    if all(run_order(other) <= own for other in (*seen, *leased)):
        return
    holders, unreadable = read_leases(directory, leased)
    seen += [*unreadable, *(holder.run for holder in holders if holder.beat)]
    later = [other for other in seen if run_order(other) > own]
    if later:
        known = {holder.run: str(holder) for holder in holders}
        newest = max(later, key=run_order)
        raise LeaseHeldError(
            f"{known.get(newest, f'run {newest}')} has taken over {directory.root}; this job, "
            f"{known.get(run, f'run {run}')}, stops saving there. Checkpoints of two jobs are "
            "never mixed: end one of them, or give it an output_dir of its own"
        )


class Lease:
    """A lease. ``start`` begins heartbeats; one that fails is tried again at the next. Those of a
    job that saves come from a process of their own (``HeartbeatProcess``), or from a thread where
    none can be started; those of others from a thread. ``keep_run_marker``: ``release`` leaves a
    marker with the number of the run, because a commit moves iteration folders out of the folder of
    records."""

    def __init__(
        self, directory: CheckpointDir, holder: LeaseHolder, keep_run_marker: bool = False
    ):
        self.directory = directory
        self.holder = holder
        self.keep_run_marker = keep_run_marker
        self.run, self.path = holder.run, lease_path(directory, holder.run)
        self.step = 0  # reached by the training; published with the next heartbeat
        self._stop = runtime.Event()
        self._lock = runtime.Lock()
        self._process = os.getpid()
        self._beating: HeartbeatProcess | None = None
        self._tries = _TRIES

    def publish(self) -> None:
        if not self.holder.folder:
            self.holder = replace(self.holder, folder=_identity(self.directory))
        publish(self.directory.storage, self.path, [self.holder.encode()], self.run)

    def beat(self) -> None:
        """Sends a heartbeat. The first one says that the directory is acquired. Raises OSError if
        it cannot be written."""
        with self._lock:
            if not self._stop.is_set():
                self.holder = replace(self.holder, beat=self.holder.beat + 1, step=self.step)
                self.publish()

    def start(self) -> Lease:
        if self.holder.every:
            if self.holder.purpose == SAVING:
                self._start_process()
            runtime.Thread(target=self._work, name="mindresume-heartbeat", daemon=True).start()
        return self

    def _work(self) -> None:
        """Tells the process that sends the heartbeats the step, or sends them where there is
        none."""
        while not self._stop.wait(self.holder.every):
            with self._lock:
                is_beating = self._beating is not None and self._beating.is_alive()
                if is_beating:
                    self._beating.reached(self.step)
            if not is_beating:
                with suppress(OSError):
                    self.beat()
                if self.holder.purpose == SAVING:
                    self._start_process()
        with self._lock:
            self._end_process()

    def _start_process(self) -> None:
        """Lets a process send the heartbeats from here on, at most ``_TRIES`` times: it may be
        killed, or not be able to run."""
        with self._lock:
            if (
                self._tries
                and not self._stop.is_set()
                and type(uncached(self.directory.storage)) is PosixStorage
            ):
                self._tries -= 1
                self._beating = start_process(
                    self.path, self.holder.encode(), self.holder.every, self.run
                )

    def _end_process(self) -> bool:
        """Ends the process that sends the heartbeats. Returns whether it is gone; False if it hangs
        in the file system."""
        beating, self._beating = self._beating, None
        return beating is None or beating.end(BEAT)

    def release(self, is_acquired: bool = True) -> None:
        """Removes the lease. Does nothing the second time, and nothing in a child process. If a
        heartbeat hangs in the file system, the lease stays, so that the job can end; the next job
        finds its holder dead. ``is_acquired`` False: of a job that has not acquired the directory,
        which leaves no marker: others would take it for a later run."""
        if self._stop.is_set() or os.getpid() != self._process:
            return
        self._stop.set()
        if self._lock.acquire(timeout=BEAT):
            try:
                if not self._end_process():  # it could publish the lease again
                    return
                if self.keep_run_marker and is_acquired:
                    self.directory.storage.rename(
                        self.path, self.directory.path(FOLDER, f"{ENDED}{self.run}{SUFFIX}")
                    )
                else:
                    self.directory.storage.remove(self.path)
            except OSError:  # as above
                return
            finally:
                self._lock.release()


# ---- readers and removals ------------------------------------------------------------------------

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
    lease = _lease_without_number(directory, purpose, (attempt,), BEAT)
    outwaited = set() if outwaited is None else outwaited
    try:
        stay: list[set[str]] = []
        while len(stay) < _LOOKS and (
            announced := _announced_removals(directory, attempt, lease) - outwaited
        ):
            stay.append(announced)
            # the removal may have checked for read locks before this one existed
            runtime.sleep(_PAUSE)
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
    return [run for run in leased_runs(names) if not is_job_lease(run)]


class ReadLocks:
    """Returns, when called, the read locks of now: {name of an attempt folder: reader}. It
    remembers heartbeats between calls, so that the lock of a reader that died on another machine
    expires. An unreadable lease may lock any checkpoint, for as long."""

    def __init__(self, directory: CheckpointDir):
        self.directory, self._watch = directory, Watch(runtime.monotonic)

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
