"""Uploads checkpoints to an object store in a thread of each rank; the training waits for it only at its end.

    uploader = Uploader(remote, target, policy).start()     # policy: on rank 0
    uploader.enqueue(20)                                    # this rank has written its shard of step 20
    for error in uploader.poll(): ...                       # every step
    for error in uploader.finish(600): ...                  # the end of the training

    rank 0     newest committed step ─▶ publishes "step 20 now" ─▶ own shard ─▶ shards of all there? ─▶ manifest ─▶ retention
    others     read the step that rank 0 published ─▶ own shard of it, or a report that this shard is lost

One step is uploaded at a time. Rank 0 selects it: if each rank did, ranks of unequal speed would skip different steps, and no
step would ever be complete. Rank 0 publishes the step as an object, because the store is the one place that all ranks see, also
if their nodes share no disk. While rank 0 uploads a step, its read lock keeps retention from removing the files.

If nodes share no disk, each node removes checkpoints by itself. So the exchange in which the nodes learn which checkpoints all of
them have (``mindresume.coordination.storage_topology``) also schedules the next upload: at that moment each node has the
checkpoint, and locks it from then on.
"""
from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

from mindresume import runtime
from mindresume.coordination.lease import Lease
from mindresume.coordination.read_locks import acquire_read_lock
from mindresume.errors import CorruptFileError, RemoteError
from mindresume.events import Emit, Notice, UploadFailed, UploadFinished, UploadsSkipped, ignore, warning
from mindresume.model.manifest import attempt_name, parse_attempt
from mindresume.saving.remote_checkpoints import (
    LostShardError,
    RemoteCheckpoints,
    RunStatus,
    SupersededError,
    committed_dir,
    ranks_of,
)
from mindresume.saving.retention import KEEP_ALL, Policy
from mindresume.saving.shard_writer import SaveTarget

PAUSE = 2.0                     # seconds between two polls of the store; longer if many ranks poll one object
AGAIN = 30.0                    # seconds until a failed upload is tried again
LATE = 60.0                     # seconds for which this host may not list a file of a shared disk yet; then the file is gone
_PER_SECOND = 32                # polls per second of all ranks together


class Uploader:
    """Uploads the shards that one rank saves. On rank 0 it also commits uploads and prunes the store.

    Args:
        remote: the checkpoints in the object store.
        target: the run, the rank and the checkpoint directory.
        policy: which checkpoints the store keeps; on rank 0.
        stall_timeout: seconds without progress after which rank 0 gives up a step while objects of other ranks are missing.
        emit: receives an event for each upload that finished, failed or was skipped, from any thread.
        clock, sleep: of the worker thread, in seconds.
        only_scheduled: nodes share no disk, so rank 0 uploads only the steps that ``schedule`` names.
        wait: waits for a condition, at most so many seconds; ``finish`` waits for the worker with it.
    """

    def __init__(self, remote: RemoteCheckpoints, target: SaveTarget, policy: Policy | None = None, stall_timeout: float = 600.0,
                 emit: Emit = ignore, clock: Callable[[], float] = runtime.monotonic,
                 sleep: Callable[[float], None] = runtime.sleep, only_scheduled: bool = False,
                 wait: Callable[[runtime.Condition, float], object] = lambda changed, seconds: changed.wait(seconds)):
        self.remote, self.target, self.policy, self.stall_timeout, self.emit = remote, target, policy, stall_timeout, emit
        self.clock, self.sleep, self.wait, self.only_scheduled = clock, sleep, wait, only_scheduled
        self.pause = max(PAUSE, target.world_size / _PER_SECOND)
        self.failed = self.skipped = 0
        self.uploaded = 0                               # the newest step whose shard this rank has uploaded
        self._pending: list[int] = []                   # saved by this rank, not uploaded yet
        self._settled: set[int] = set()                 # steps whose shard of this rank is uploaded or lost
        self._scheduled = 0                             # the step that is scheduled, on rank 0; 0: none
        self._lock: Lease | None = None                 # on the scheduled checkpoint, on the first rank of each node
        self._errors: list[RemoteError] = []
        self._step: int | None = None                   # being uploaded, since ``_since``
        self._since = 0.0
        self._warned: int | None = None
        self._last = 0                                  # the newest step saved
        self._absent: tuple[int, float] = (0, 0.0)      # (step whose shard this rank does not see, since when)
        self._not_before = self._next_check = 0.0
        self._closing = self._published = self._has_read_status = False
        self._stopped: str | None = None                # why uploads have ended; empty: rank 0 has ended
        self._finished = False                          # the worker has nothing more to do
        self._changed = runtime.Condition()

    # ---- the training's side ---------------------------------------------------------------------------------------

    def start(self) -> Uploader:
        """Starts the worker thread. Returns this uploader."""
        runtime.Thread(target=self._run, name="mindresume-uploader", daemon=True).start()
        return self

    def enqueue(self, step: int) -> None:
        """Adds a step that this rank has saved."""
        with self._changed:
            self._pending.append(step)              # also after the worker stopped: ``finish`` reports what the store lacks
            self._last = max(self._last, step)
            self._changed.notify_all()

    def ready(self) -> bool:
        """Returns whether rank 0 can begin with another step."""
        with self._changed:
            return not (self._scheduled or self._closing or self._stopped is not None)

    def schedule(self, name: str) -> None:
        """Schedules ``name``, the newest checkpoint that all nodes have, as the next upload of rank 0. The first rank of each
        node locks the checkpoint until the next call. All these ranks call it after the same exchange; rank 0 was ``ready``
        before that exchange."""
        step, run = parse_attempt(name) or (0, "")
        if run != self.target.run or self.target.rank == 0 and step in self._settled:
            return
        before, self._lock = self._lock, None
        if before is not None and before.holder.holds == (name,):
            self._lock = before
        else:
            try:
                self._lock = acquire_read_lock(self.target, name, self.target.attempt(step))
            except OSError as error:                    # without a lock the checkpoint may still stay long enough
                self._warn(f"step {step} cannot be locked on the disk of rank {self.target.rank} while it is uploaded: {error}")
            if before is not None:
                before.release()
        with self._changed:
            self._scheduled = step if self.target.rank == 0 else 0
            self._changed.notify_all()

    def poll(self) -> list[RemoteError]:
        """Returns the errors since the last call, and once for each step an error if its upload takes unusually long. Does not
        wait. There was an event for each of these errors."""
        with self._changed:
            slow = self._step not in (None, self._warned) and self.clock() - self._since > self.stall_timeout
            self._warned = self._step if slow else self._warned
        if slow:
            self._warn(f"the upload of step {self._warned} to {self.remote.url} has taken more than {self.stall_timeout:.0f} s; "
                       f"steps saved since then are on this machine only")
        with self._changed:
            found, self._errors = self._errors, []
            return found

    def finish(self, timeout: float) -> list[RemoteError]:
        """Waits until the last committed step is uploaded, at most ``timeout`` seconds. Returns errors like ``poll``. No
        save may follow."""
        until = self.clock() + timeout
        with self._changed:
            if self.target.rank == 0:                   # a step that is not committed by now never will be
                with suppress(OSError):
                    self._pending = [step for step in self._pending if committed_dir(self.target, step) is not None]
                self._last = max(self._pending, default=self.uploaded)
            self._closing, self._not_before = True, 0.0
            self._changed.notify_all()
            while not self._finished and (left := until - self.clock()) > 0:
                self.wait(self._changed, left)
        if self._lock is not None:
            self._lock.release()
        if self.uploaded < self._last:
            late = "" if self._finished or self._stopped else f" after {timeout:.0f} s"
            self._warn(f"step {self._last} is not complete in {self.remote.url}{late}: rank {self.target.rank} "
                       f"{self._progress()}. A job on an empty disk would resume from an older step")
        return self.poll()

    def finish_at_exit(self, timeout: float) -> None:
        """Uploads committed steps when a process ends without ``finish``. A rank other than 0 that uploads nothing at the moment
        does not wait long, because rank 0 may be gone."""
        if not self._closing:
            self.finish(timeout if self.target.rank == 0 or self._step is not None else min(timeout, AGAIN))

    def _progress(self) -> str:
        if self._step is not None:
            return f"is still uploading step {self._step}"
        return "has not uploaded its part" if self.target.rank else "has not put the manifest"

    # ---- the worker ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (worked := self.run_once()) is not None:
            with self._changed:
                if not worked and not (self._closing and self._idle()):
                    self._changed.wait(None if self._idle() else self.pause)

    def run_once(self) -> bool | None:
        """Does the work that is due. Returns True if there was some, so that the next call can follow at once; False if there was
        none; None if this was the last call."""
        if self._stopped is None:
            worked = self.work()
            with self._changed:
                if self._stopped is None and not (self._closing and not worked and self._idle()):
                    return worked
        return self._end()

    def _idle(self) -> bool:
        """Returns whether there is no work until the training calls a method."""
        return self._stopped is None and not self._pending and (self._published or self.target.rank != 0)

    def _end(self) -> bool | None:
        """Publishes, on rank 0, that no upload follows, and why. If that fails, it is tried again until the training ends.
        Returns like ``run_once``."""
        if self.target.rank == 0:
            if self.clock() < self._not_before:
                return False
            status = RunStatus(None, ended=True, reason=self._stopped or "")
            if not self._attempt(lambda: self.remote.publish_status(self.target.run, status)) and not self._closing:
                return False
        with self._changed:
            self._finished = True
            self._changed.notify_all()
        return None

    def work(self) -> bool:
        """Does the work that is due, unless uploads have ended or pause after a failure. Returns whether there was some."""
        if self._stopped is not None or self.clock() < self._not_before:
            return False
        done: list[bool] = []
        return self._attempt(lambda: done.append(self._lead() if self.target.rank == 0 else self._follow())) and done[0]

    def _attempt(self, work: Callable[[], object], pause: float = AGAIN) -> bool:
        """Runs ``work``. Returns False if it failed: then the error is kept for the training, and the worker pauses for ``pause``
        seconds, unless uploads have ended or the shard is lost."""
        try:
            work()
            return True
        except Exception as error:      # any error goes to the training; the worker continues
            step = error.step if isinstance(error, LostShardError) else self._step
            about = "" if step is None or isinstance(error, LostShardError) else f"step {step} is not uploaded: "
            with self._changed:
                self.failed += 1
                if isinstance(error, SupersededError):
                    self._stopped = str(error)
                elif isinstance(error, LostShardError):         # no pause: a retry would not help
                    self._settled.add(error.step)
                    self._pending = [other for other in self._pending if other != error.step]
                else:
                    self._not_before = self.clock() + pause
                self._errors.append(RemoteError(f"{about}{error}"))
            self.emit(UploadFailed(step, f"{about}{error}", self.failed))
            return False
        finally:
            with self._changed:
                self._step = None
                self._changed.notify_all()

    def _warn(self, text: str) -> None:
        with self._changed:
            self._errors.append(RemoteError(text))
        self.emit(warning(text))

    def _begin(self, step: int) -> None:
        with self._changed:
            self._step, self._since = step, self.clock()

    def _done(self, step: int, over: int) -> None:
        """Records that the shard of ``step`` is uploaded. Saved steps up to ``over`` are not uploaded any more."""
        with self._changed:
            self.uploaded, self._step = max(step, self.uploaded), None
            self._settled.add(step)
            self._pending = [other for other in self._pending if other > over and other != step]

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _lead(self) -> bool:
        """Uploads the next step on rank 0, and prunes the store. Returns whether there was one."""
        if not self._published:
            self.remote.check_not_superseded(self.target.run)
            self.remote.publish_status(self.target.run, RunStatus())
            self._published = True
        with self._changed:
            scheduled = self._scheduled
            steps = [scheduled] if self.only_scheduled and not self._closing else sorted(self._pending, reverse=True)
        step, data_dir = next(((step, data_dir) for step in steps if step and (data_dir := committed_dir(self.target, step))),
                              (0, None))
        if data_dir is not None:
            self._begin(step)
            if self._attempt(lambda: self._lead_step(step, data_dir)):
                self._attempt(lambda: self.remote.prune(self.policy or KEEP_ALL, self.target.run, step, self.emit), 0)
        with self._changed:
            self._scheduled = self._scheduled if self._scheduled != scheduled else 0
        return data_dir is not None

    def _lead_step(self, step: int, data_dir: str) -> None:
        target, attempt, started = self.target, attempt_name(step, self.target.run), self.clock()
        lock = self._protect(attempt, data_dir if target.iterations else target.attempt(step), step)
        try:
            self.remote.check_not_superseded(target.run)
            self.remote.publish_status(target.run, RunStatus(step))
            sent = self._put_shard(step, data_dir)
            self._wait_for_others(step, data_dir)
            self.remote.check_not_superseded(target.run)
            self.remote.commit(target, step, data_dir)
        finally:
            if lock is not None:
                lock.release()
        self._skip_older(step)
        self._done(step, over=step)
        self.emit(UploadFinished(step, self.remote.url, sent, self.clock() - started))

    def _protect(self, attempt: str, commit_dir: str, step: int) -> Lease | None:
        """Locks a step against removal. None: the disk takes no lock now (it is full, or read-only). It is uploaded all the same:
        what is removed meanwhile is noticed, because each file is looked for until the manifest is put."""
        try:
            lock = acquire_read_lock(self.target, attempt, commit_dir)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise                                   # it may pass, and the upload is tried again
            self.emit(Notice(f"step {step} is uploaded without a lock against its removal, because the disk takes none: {error}"))
            return None
        if lock is None:
            raise LostShardError(step, "it was removed from the disk of rank 0 before its upload")
        return lock

    def _put_shard(self, step: int, data_dir: str) -> int:
        try:
            return self.remote.put_shard(self.target, step, data_dir)
        except FileNotFoundError as error:
            raise LostShardError(step, f"the part of rank {self.target.rank} is not on its disk any more: {error.filename}"
                                 ) from error
        except CorruptFileError as error:
            raise LostShardError(step, f"the part of rank {self.target.rank} is damaged: {error}") from error

    def _skip_older(self, step: int) -> None:
        """Counts pending steps before ``step`` as skipped: ``step`` is uploaded, so they will not be."""
        skipped = tuple(sorted(other for other in self._pending if other < step))
        if skipped:
            self.skipped += len(skipped)
            self.emit(UploadsSkipped(skipped, self.skipped))

    def _wait_for_others(self, step: int, data_dir: str) -> None:
        """Waits for the objects of the other ranks. Raises RemoteError that names the late ranks, LostShardError if an object
        will never come."""
        until, before = self.clock() + self.stall_timeout, None
        while missing := self.remote.missing(self.target, step, data_dir):
            if before is not None and len(missing) < before:
                until = self.clock() + self.stall_timeout
            if self.clock() >= until:
                manifest = self.remote.local_manifest(self.target, attempt_name(step, self.target.run), data_dir)[0]
                raise RemoteError(f"{len(missing)} objects of {ranks_of(missing, manifest)} did not come within "
                                  f"{self.stall_timeout:.0f} s, the first is {missing[0]}")
            before = len(missing)
            self.sleep(self.pause)

    # ---- the other ranks ---------------------------------------------------------------------------------------------

    def _follow(self) -> bool:
        """Uploads the shard of the step that rank 0 has published. Returns whether there was one."""
        if not self._pending:
            return False
        status = self.remote.read_status(self.target.run)
        if status is None:                              # not published yet, or removed by a later run
            if (self._has_read_status or self._closing) and self.clock() >= self._next_check:
                self._next_check = self.clock() + AGAIN
                self.remote.check_not_superseded(self.target.run)
            return False
        self._has_read_status = True
        if status.ended:
            with self._changed:
                self._stopped = status.reason
            if status.reason:
                self._warn(status.reason)
            return True
        if status.step is None or status.step in self._settled:
            return False
        data_dir = committed_dir(self.target, status.step) or self.target.data_dir(status.step)
        if not self.remote.has_shard(self.target, status.step, data_dir):
            return self._report_missing(status.step)
        self._begin(status.step)
        started = self.clock()
        try:
            sent = self.remote.put_shard(self.target, status.step, data_dir)
        except FileNotFoundError:                       # rank 0 gave the step up or renamed its folder, or the shard is gone
            with self._changed:
                self._step = None
            return self.remote.read_status(self.target.run) == status and self._report_missing(status.step)
        except CorruptFileError as error:
            self.remote.report_lost_shard(self.target, status.step, f"is damaged: {error}")
            raise LostShardError(status.step, f"the part of rank {self.target.rank} is damaged: {error}") from error
        self.emit(UploadFinished(status.step, self.remote.url, sent, self.clock() - started, is_whole=False))
        # If another node has lost this step, rank 0 may next upload an older one, but none before a step that is complete.
        self._done(status.step, over=self.uploaded if self.target.local_ranks else status.step)
        return True

    def _report_missing(self, step: int) -> bool:
        """Reports to rank 0 that the shard of this rank will never come. A rank sees its files on the disk of its own node at
        once. On a shared disk it can see late that a folder was renamed, so it waits first. Returns False while it waits; raises
        LostShardError after the report."""
        unsaved = step > self._last
        if unsaved and not self._closing:
            return False
        if self._absent[0] != step:
            self._absent = (step, self.clock())
        if self.clock() - self._absent[1] < (0 if unsaved or self.target.local_ranks else LATE):
            return False
        reason = "was not saved" if unsaved else "is not on its disk any more"
        self.remote.report_lost_shard(self.target, step, reason)
        raise LostShardError(step, f"the part of rank {self.target.rank} {reason}")
