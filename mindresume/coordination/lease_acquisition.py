"""Acquires the lease of a checkpoint directory for a job that saves there; numbers its runs.

    # rank 0; LeaseHeldError if another is alive
    lease = acquire(directory, holder_of_this_process("saving", world_size))

Of jobs that start at the same moment one wins: each publishes its lease and then reads the others.
A job that sees no other lease has acquired the directory, and its first heartbeat says so: of any
two jobs, the one that published later sees the other. A job that sees an earlier (number, run)
gives up. A job that sees only later ones waits until they have given up, or until one of them has
acquired the directory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mindresume import runtime
from mindresume.coordination.lease import (
    BEAT,
    ENDED,
    READER,
    SAVING,
    SUFFIX,
    Lease,
    LeaseHolder,
    holder_of_this_process,
    is_alive,
    is_job_lease,
    lease_holders,
    lease_path,
    leased_runs,
    read_leases,
    run_order,
)
from mindresume.coordination.liveness import AwakeClock, Watch
from mindresume.errors import LeaseHeldError
from mindresume.events import Emit, LeaseWatched, StaleLeaseRemoved, ignore
from mindresume.formats import CheckpointDir
from mindresume.formats.records import iteration_record_names
from mindresume.formatting import ranks_count
from mindresume.model.manifest import FOLDER, attempts, is_run, run_name, run_sequence, strip_trash
from mindresume.storage import TEMPORARY, publish, remove_stale

# heartbeats for which a holder on another machine is watched before it counts as dead
PATIENCE = 3
# longest watch in seconds; a holder with rarer heartbeats never counts as dead
LONGEST = 600.0


def acquire(
    directory: CheckpointDir,
    holder: LeaseHolder,
    beat: float = BEAT,
    emit: Emit = ignore,
    keep_run_marker: bool = False,
) -> Lease:
    """Acquires ``root`` for a job that saves there, as a run later than all before.

    Waits only if another lease has a holder that is not known to be dead: ``PATIENCE`` heartbeats
    of that holder, at most ``LONGEST`` seconds.

    Args:
        beat: seconds between two heartbeats of this job.
        emit: receives LeaseWatched and StaleLeaseRemoved.
        keep_run_marker: see ``Lease``.
    Raises:
        LeaseHeldError: another job is alive, or that cannot be known.
    """
    folder = directory.path(FOLDER)
    directory.storage.make_folder(folder)
    others = _Others(directory, holder, emit)
    dead = others.watch()
    names = directory.storage.list(folder)
    run = holder.run or next_run([*names, *iteration_record_names(directory)])
    lease = Lease(directory, replace(holder, run=run, every=beat), keep_run_marker)
    try:
        dead = _publish_and_look(lease, dead, others)
        used = [
            other
            for other in past_runs(directory.storage.list(folder))
            if run_sequence(other) >= run_sequence(run) and other != run
        ]
        if not used:
            lease.beat()
    except BaseException:  # the lease may exist after an error, too
        lease.release(is_acquired=False)
        raise
    # names were listed late, or another job has started and ended meanwhile
    if used:
        lease.release(is_acquired=False)
        if holder.run:
            raise others.in_use(f"run {used[0]}")
        again = next_run(
            [*names, *directory.storage.list(folder), *iteration_record_names(directory)]
        )
        return acquire(directory, replace(holder, run=again), beat, emit, keep_run_marker)
    for other in dead:
        emit(StaleLeaseRemoved(other.run, other.host, other.pid))
    _remove_left_over(lease, dead, names)
    return lease


def _remove_left_over(lease: Lease, dead: Sequence[LeaseHolder], names: Sequence[str]) -> None:
    """Removes the leases of ``dead`` jobs, and what else earlier jobs have left among ``names``."""
    directory = lease.directory
    half = half_written(names)
    over = [lease_path(directory, other.run) for other in dead]
    # our lease has the largest number now
    ended = [f"{ENDED}{run}{SUFFIX}" for run in leased_runs(names, ENDED)]
    ended += [name for name, run in half if READER < run_sequence(run) < run_sequence(lease.run)]
    for path in over + [directory.path(FOLDER, name) for name in ended]:
        with suppress(OSError):  # it blocks no job; the next job tries again
            directory.storage.remove(path)
    # Run numbers of readers are not ordered: these are removed by age.
    remove_stale(
        directory.storage,
        [directory.path(FOLDER, name) for name, run in half if not is_job_lease(run)],
        lease.path,
    )


def check_no_live_job(directory: CheckpointDir, emit: Emit = ignore) -> None:
    """Waits like ``acquire``, and acquires nothing. Raises LeaseHeldError if a job that saves into
    ``root`` is or may be alive. A lease that an earlier job of this process has left does not
    count."""
    me = holder_of_this_process(SAVING)
    own = [
        holder.run
        for holder in lease_holders(directory)
        if (holder.machine, holder.pid, holder.started) == (me.machine, me.pid, me.started)
    ]
    _Others(directory, me, emit).watch(own)


def _publish_and_look(lease: Lease, dead: list[LeaseHolder], others: _Others) -> list[LeaseHolder]:
    """Publishes ``lease``, and repeats until no other job has one, except those of ``dead``.
    Returns all dead holders. Raises LeaseHeldError if this job must give up.

    The leases of ``dead`` are read once more. A mount can show the old content of a file for a
    minute (NFS with nocto or a long actimeo, FUSE with caches), so that a living holder seems to be
    silent; a change by this host in the folder ends that."""
    while True:
        failed: OSError | None = None
        try:
            # before each listing: NFS lists a folder anew after a change by this host
            lease.publish()
        except OSError as error:
            # a job that starts at the same moment may have removed our temporary file
            failed = error
        known = [lease.run, *(holder.run for holder in dead)]
        found, unreadable = read_leases(lease.directory)
        silent = {holder.run: holder.beat for holder in dead}
        if woken := next(
            (
                holder
                for holder in found
                if silent.get(holder.run, holder.beat) != holder.beat
                and is_alive(holder) is not False
            ),
            None,
        ):
            raise others.in_use(str(woken))
        names = {holder.run: str(holder) for holder in found} | {
            run: f"run {run}" for run in unreadable
        }
        rivals = sorted(run_order(run) for run in names if is_job_lease(run) and run not in known)
        if rivals and (failed is not None or rivals[0] < lease.holder.order):
            raise others.in_use(names[rivals[0][1]]) from failed
        if failed is not None:
            raise failed
        if not rivals:
            return dead
        dead = dead + others.watch(known)


@dataclass(frozen=True)
class _Others:
    """Watches the other jobs that have leases on a directory, for the job ``me``."""

    directory: CheckpointDir
    me: LeaseHolder
    emit: Emit

    def watch(self, besides: Collection[str] = ()) -> list[LeaseHolder]:
        """Returns the dead holders, without the runs ``besides``. A holder on another machine is
        alive if a heartbeat comes, and dead after ``PATIENCE`` of its heartbeats without one. A
        process of this machine may end in this time, and an unreadable lease may become readable.
        Time in which this process was suspended itself does not count: a holder may have been, too.
        Raises LeaseHeldError if a holder is or may be alive."""
        watch, said = Watch(AwakeClock()), False
        while True:
            now = watch.clock()
            found, unreadable = read_leases(self.directory)
            owners = [
                holder for holder in found if holder.purpose == SAVING and holder.run not in besides
            ]
            unreadable = {
                run: why
                for run, why in unreadable.items()
                if is_job_lease(run) and run not in besides
            }
            states = {holder.run: is_alive(holder) for holder in owners}
            for holder in owners:
                if states[holder.run] is None and watch.see(holder.run, holder.beat).advances:
                    raise self.in_use(str(holder))
            alive = [holder for holder in owners if states[holder.run] is not False]
            waits = [
                PATIENCE * BEAT - (now - watch.see((run, "unreadable"), 0).first)
                for run in unreadable
            ]
            waits += [
                PATIENCE * (holder.every if _has_usable_heartbeat(holder) else BEAT)
                - (now - watch.see((holder.run, "alive"), 0).first)
                for holder in alive
            ]
            left = max(waits, default=0.0)
            if left <= 0:
                break
            if not said:
                run, host = (
                    (alive[0].run, alive[0].host) if alive else (next(iter(unreadable)), None)
                )
                self.emit(LeaseWatched(lease_path(self.directory, run), run, host, left))
                said = True
            runtime.sleep(min(1.0, max(0.01, left)))
        self._refuse(alive, states, unreadable)
        return owners

    def _refuse(
        self,
        alive: Sequence[LeaseHolder],
        states: Mapping[str, bool | None],
        unreadable: Mapping[str, str],
    ) -> None:
        """Raises LeaseHeldError if one of the holders that were watched in vain can still be
        alive."""
        for holder in alive:
            if states[holder.run]:
                raise self.in_use(str(holder))
            if not _has_usable_heartbeat(holder):
                rare = f"only every {holder.every:g} s" if holder.every else "none"
                raise self._unknown(
                    holder.run,
                    f"{holder} did not say that it ended, and of its signs of life "
                    f"(mindresume.heartbeat) there are {rare}",
                )
        for run, problem in unreadable.items():
            path = lease_path(self.directory, run)
            raise self._unknown(
                run,
                f"{path}, by which run {run} says that it saves there, cannot be read ({problem})",
            )

    def in_use(self, other: str) -> LeaseHeldError:
        return LeaseHeldError(
            f"{self.directory.root} is in use: {other} is saving there. {self._refused()}: wait "
            "for the other to end, or set another output_dir"
        )

    def _unknown(self, run: str, why: str) -> LeaseHeldError:
        return LeaseHeldError(
            f"{self.directory.root} may be in use: {why}, so it is not known whether that job "
            f"still saves there. {self._refused()}. If it has certainly ended, remove "
            f"{lease_path(self.directory, run)} and start again; or set another output_dir"
        )

    def _refused(self) -> str:
        return (
            f"This job (host {self.me.host}, process {self.me.pid}, "
            f"{ranks_count(self.me.world_size)}) does not start, or their checkpoints would mix"
        )


def _has_usable_heartbeat(holder: LeaseHolder) -> bool:
    return 0 < holder.every * PATIENCE <= LONGEST


# ---- run numbers ---------------------------------------------------------------------------------


def half_written(names: Iterable[str]) -> list[tuple[str, str]]:
    """Returns (name, run) of the temporary files among ``names``."""
    return [
        (name, run)
        for name in names
        if name.endswith(TEMPORARY)
        and is_run(run := name.removesuffix(TEMPORARY).rpartition(".")[2])
    ]


def next_run(names: Iterable[str]) -> str:
    """Returns the name of a run later than every one that left a trace among ``names`` of folders
    of records."""
    names = list(names)
    used = past_runs(names) + leased_runs(names)
    # of a run that died while it acquired the directory
    used += [run for _, run in half_written(names)]
    return run_name(max(map(run_sequence, used), default=0) + 1, runtime.token_hex(4))


def past_runs(names: list[str]) -> list[str]:
    """Returns the runs with a folder of records among ``names``, and those with a marker only."""
    return [run for _, _, run in attempts(list(map(strip_trash, names)))] + leased_runs(
        names, ENDED
    )


def record_run_number(directory: CheckpointDir, run: str) -> None:
    """Leaves a marker of ``run``, which saved elsewhere, so that the next run in ``root`` gets a
    larger number."""
    directory.storage.make_folder(directory.path(FOLDER))
    publish(directory.storage, directory.path(FOLDER, f"{ENDED}{run}{SUFFIX}"), [b""], run)


class EndedRuns:
    """The runs that are certainly over, those without a lease or whose process is gone: ``run in
    EndedRuns(directory)``. Leases are read once, at the first question, which must be after the
    caller has read the directory. ``before``: only runs with a smaller number than this one are
    over."""

    def __init__(self, directory: CheckpointDir, before: str = ""):
        self.directory, self.before = directory, before
        self._living: set[str] | None = None

    def __contains__(self, run: object) -> bool:
        if self.before and run_sequence(str(run)) >= run_sequence(self.before):
            return False
        if self._living is None:
            holders, unreadable = read_leases(self.directory)
            self._living = {
                holder.run
                for holder in holders
                if holder.purpose == SAVING and is_alive(holder) is not False
            }
            self._living |= unreadable.keys()
        return run not in self._living
