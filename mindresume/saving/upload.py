"""Uploads saves from disk to an object store while the training goes on.

    uploader = Uploader(Uploads(remote, target, policy)).start()    # policy: on rank 0
    queue = uploader.queue
    queue.enqueue(20)                               # this rank has written its shard of step 20
    for error in queue.poll(): ...                  # every step
    for error in queue.finish(600): ...             # the end of the training

    each rank    weights ─▶ its record
    rank 0       newest committed step ─▶ publishes "step 20 now" ─▶ own part ─▶ parts of all there?
        ─▶ manifest ─▶ retention
    others       read the step that rank 0 published ─▶ own part of it, or a report that this part
        is lost

One step is uploaded at a time. Rank 0 selects it: if each rank did, ranks of unequal speed would
skip different steps, and no step would ever be complete. Rank 0 publishes the step as an object,
because the store is the one place that all ranks see, also if their nodes share no disk. While rank
0 uploads a step, its read lock keeps retention from removing the files.

If nodes share no disk, each node removes checkpoints by itself. So the exchange in which the nodes
learn which checkpoints all of them have (``mindresume.coordination.storage_topology``) also
schedules the next upload: at that moment each node has the checkpoint, and locks it from then on.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from mindresume import runtime
from mindresume.coordination.lease import Lease, acquire_read_lock
from mindresume.errors import CorruptFileError, RemoteError
from mindresume.events import (
    Emit,
    Notice,
    UploadFailed,
    UploadFinished,
    UploadsSkipped,
    ignore,
    warning,
)
from mindresume.model.manifest import (
    parse_attempt,
    record_name,
)
from mindresume.saving.remote_checkpoints import (
    RemoteCheckpoints,
    RunStatus,
    SupersededError,
)
from mindresume.saving.replication import LostShardError, RemoteSave, save_of
from mindresume.saving.retention import KEEP_ALL, Policy
from mindresume.saving.shard_writer import SaveTarget

# seconds between two polls of the store; longer if many ranks poll one object
PAUSE = 2.0
AGAIN = 30.0  # seconds until a failed upload is tried again
# seconds for which this host may not list a file of a shared disk yet; then the file is gone
LATE = 60.0
_PER_SECOND = 32  # polls per second of all ranks together


@dataclass(frozen=True)
class Uploads:
    """How one rank uploads.

    Attributes:
        remote: the checkpoints in the object store.
        target: the run, the rank and the checkpoint directory.
        policy: which checkpoints the store keeps; on rank 0.
        stall_timeout: seconds without progress after which rank 0 gives up a step while objects of
            other ranks are missing.
        emit: receives an event for each upload that finished, failed or was skipped, from any
            thread.
        only_scheduled: nodes share no disk, so rank 0 uploads only the steps that
            ``UploadQueue.schedule`` names.
    """

    remote: RemoteCheckpoints
    target: SaveTarget
    policy: Policy | None = None
    stall_timeout: float = 600.0
    emit: Emit = ignore
    only_scheduled: bool = False

    def save(self, step: int) -> RemoteSave:
        return save_of(self.remote, self.target, step)


class UploadQueue:
    """The saves of one rank that are to be uploaded: what the training adds and asks, in any
    thread. Its ``Uploader`` takes them.

    Attributes:
        uploaded: the newest step whose shard this rank has uploaded.
        pending: steps saved by this rank that are not uploaded yet.
        settled: steps whose shard of this rank is uploaded or lost.
        scheduled: the step that is scheduled, on rank 0; 0: none.
        current: the step that is being uploaded, and since when.
        last: the newest step saved.
        retry_at: when the uploader works again after a failure.
        stopped: why uploads have ended; empty: rank 0 has ended; None: they have not.
        closing: no save follows. ``finished``: the uploader has nothing more to do.
        changed: guards all of these.
    """

    def __init__(self, uploads: Uploads):
        self.uploads = uploads
        self.uploaded = self.last = self.scheduled = 0
        self.pending: list[int] = []
        self.settled: set[int] = set()
        self.current: tuple[int, float] | None = None
        self.errors: list[RemoteError] = []
        self.retry_at = 0.0
        self.closing = self.finished = False
        self.stopped: str | None = None
        self.changed = runtime.Condition()
        # on the scheduled checkpoint, on the first rank of each node
        self._lock: Lease | None = None
        self._warned = 0  # the newest step whose upload takes long

    def enqueue(self, step: int) -> None:
        """Adds a step that this rank has saved."""
        with self.changed:
            # also after the worker stopped: ``finish`` reports what the store lacks
            self.pending.append(step)
            self.last = max(self.last, step)
            self.changed.notify_all()

    def ready(self) -> bool:
        """Returns whether rank 0 can begin with another step."""
        with self.changed:
            return not (self.scheduled or self.closing or self.stopped is not None)

    def schedule(self, name: str) -> None:
        """Schedules ``name``, the newest checkpoint that all nodes have, as the next upload of rank
        0. The first rank of each node locks the checkpoint until the next call. All these ranks
        call it after the same exchange; rank 0 was ``ready`` before that exchange."""
        target = self.uploads.target
        step, run = parse_attempt(name) or (0, "")
        if run != target.run or target.rank == 0 and step in self.settled:
            return
        if self._lock is None or self._lock.holder.holds != (name,):
            before, self._lock = self._lock, None
            try:
                self._lock = acquire_read_lock(target, name, target.attempt(step))
            except OSError as error:
                # without a lock the checkpoint may still stay long enough
                self.warn(
                    f"step {step} cannot be locked on the disk of rank {target.rank} while it is "
                    f"uploaded: {error}"
                )
            if before is not None:
                before.release()
        with self.changed:
            self.scheduled = step if target.rank == 0 else 0
            self.changed.notify_all()

    def poll(self) -> list[RemoteError]:
        """Returns the errors since the last call, and once for each step an error if its upload
        takes unusually long. Does not wait. There was an event for each of these errors."""
        timeout = self.uploads.stall_timeout
        with self.changed:
            step, since = self.current or (0, 0.0)
            is_slow = step not in (0, self._warned) and runtime.monotonic() - since > timeout
        if is_slow:
            self._warned = step
            self.warn(
                f"the upload of step {step} to {self.uploads.remote.url} has taken more than "
                f"{timeout:.0f} s; steps saved since then are on this machine only"
            )
        with self.changed:
            errors, self.errors = self.errors, []
            return errors

    def finish(self, timeout: float) -> list[RemoteError]:
        """Waits until the last committed step is uploaded, at most ``timeout`` seconds. Returns
        errors like ``poll``. No save may follow."""
        target = self.uploads.target
        until = runtime.monotonic() + timeout
        with self.changed:
            # a step that is not committed by now never will be
            if target.rank == 0:
                with suppress(OSError):
                    self.pending = [
                        step for step in self.pending if self.uploads.save(step).is_committed
                    ]
                self.last = max(self.pending, default=self.uploaded)
            self.closing = True
            self.retry_at = 0.0
            self.changed.notify_all()
            while not self.finished and (seconds := until - runtime.monotonic()) > 0:
                self.changed.wait(seconds)
        if self._lock is not None:
            self._lock.release()
        current = self.current  # the uploader may end it now
        if self.uploaded < self.last:
            late = "" if self.finished or self.stopped else f" after {timeout:.0f} s"
            state = (
                f"is still uploading step {current[0]}"
                if current is not None
                else "has not uploaded its part"
                if target.rank
                else "has not put the manifest"
            )
            self.warn(
                f"step {self.last} is not complete in {self.uploads.remote.url}{late}: rank "
                f"{target.rank} {state}. A job on an empty disk would resume from an older step"
            )
        return self.poll()

    def finish_at_exit(self, timeout: float) -> None:
        """Uploads committed steps when a process ends without ``finish``. A rank other than 0 that
        uploads nothing at the moment does not wait long, because rank 0 may be gone."""
        if not self.closing:
            waits = self.uploads.target.rank == 0 or self.current is not None
            self.finish(timeout if waits else min(timeout, AGAIN))

    def warn(self, text: str) -> None:
        """Adds an error to those that ``poll`` returns, with an event."""
        with self.changed:
            self.errors.append(RemoteError(text))
        self.uploads.emit(warning(text))

    # ---- of the uploader -------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Records that ``step`` is being uploaded."""
        with self.changed:
            self.current = step, runtime.monotonic()

    def end(self) -> None:
        """Records that nothing is being uploaded."""
        with self.changed:
            self.current = None
            self.changed.notify_all()

    def done(self, step: int, over: int) -> None:
        """Records that the shard of ``step`` is uploaded. Saved steps up to ``over`` are not
        uploaded any more."""
        with self.changed:
            self.uploaded = max(step, self.uploaded)
            self.current = None
            self.settled.add(step)
            self.pending = [other for other in self.pending if other > over and other != step]


class Uploader:
    """Uploads the shards that one rank saves, in a thread. On rank 0 it also commits uploads and
    prunes the store. ``failed`` and ``skipped`` count uploads."""

    def __init__(self, uploads: Uploads):
        self.uploads, self.queue = uploads, UploadQueue(uploads)
        self.pause = max(PAUSE, uploads.target.world_size / _PER_SECOND)
        self.failed = self.skipped = 0
        # rank 0 has published the status of the run; the others: have read it
        self._has_status = False
        self._next_check = 0.0
        # (step whose shard this rank does not see, since when)
        self._absent: tuple[int, float] = (0, 0.0)

    def start(self) -> Uploader:
        """Starts the worker thread. Returns this uploader."""
        runtime.Thread(target=self._run, name="mindresume-uploader", daemon=True).start()
        return self

    def _run(self) -> None:
        queue = self.queue
        while (worked := self.run_once()) is not None:
            with queue.changed:
                if not worked and not (queue.closing and self._is_idle()):
                    queue.changed.wait(None if self._is_idle() else self.pause)

    def run_once(self) -> bool | None:
        """Does the work that is due. Returns True if there was some, so that the next call can
        follow at once; False if there was none; None if this was the last call."""
        queue, worked = self.queue, self.work()
        with queue.changed:
            if queue.stopped is None and not (queue.closing and not worked and self._is_idle()):
                return worked
        return self._end()

    def _is_idle(self) -> bool:
        """Returns whether there is no work until the training calls a method."""
        queue = self.queue
        return (
            queue.stopped is None
            and not queue.pending
            and (self._has_status or self.uploads.target.rank != 0)
        )

    def _end(self) -> bool | None:
        """Publishes, on rank 0, that no upload follows, and why. If that fails, it is tried again
        until the training ends. Returns like ``run_once``."""
        queue, target = self.queue, self.uploads.target
        if target.rank == 0:
            if runtime.monotonic() < queue.retry_at:
                return False
            is_published = False
            with self._reporting():
                self.uploads.remote.publish_status(
                    target.run, RunStatus(None, ended=True, reason=queue.stopped or "")
                )
                is_published = True
            if not is_published and not queue.closing:
                return False
        with queue.changed:
            queue.finished = True
            queue.changed.notify_all()
        return None

    def work(self) -> bool:
        """Does the work that is due, unless uploads have ended or pause after a failure. Returns
        whether there was some."""
        worked = False
        if self.queue.stopped is None and runtime.monotonic() >= self.queue.retry_at:
            with self._reporting():
                worked = self._lead() if self.uploads.target.rank == 0 else self._follow()
        return worked

    @contextmanager
    def _reporting(self, pause: float = AGAIN) -> Iterator[None]:
        """Keeps an error of the block for the training. The uploader then pauses for ``pause``
        seconds, unless uploads have ended or the shard is lost."""
        queue = self.queue
        try:
            yield
        except Exception as error:  # any error goes to the training; the worker continues
            step, text = None, str(error)
            if isinstance(error, LostShardError):
                step = error.step
            elif queue.current is not None:
                step = queue.current[0]
                text = f"step {step} is not uploaded: {error}"
            with queue.changed:
                self.failed += 1
                if isinstance(error, SupersededError):
                    queue.stopped = str(error)
                elif isinstance(error, LostShardError):  # no pause: a retry would not help
                    queue.settled.add(error.step)
                    queue.pending = [other for other in queue.pending if other != error.step]
                else:
                    queue.retry_at = runtime.monotonic() + pause
                queue.errors.append(RemoteError(text))
            self.uploads.emit(UploadFailed(step, text, self.failed))
        finally:
            queue.end()

    # ---- rank 0 ----------------------------------------------------------------------------------

    def _lead(self) -> bool:
        """Uploads the next step on rank 0, and prunes the store. Returns whether there was one."""
        uploads, queue = self.uploads, self.queue
        remote, target = uploads.remote, uploads.target
        if not self._has_status:
            remote.check_not_superseded(target.run)
            remote.publish_status(target.run, RunStatus(None, False))
            self._has_status = True
        with queue.changed:
            scheduled = queue.scheduled
            steps = (
                [scheduled]
                if uploads.only_scheduled and not queue.closing
                else sorted(queue.pending, reverse=True)
            )
        saves = (uploads.save(step) for step in steps if step)
        save = next((save for save in saves if save.is_committed), None)
        if save is not None:
            queue.begin(save.step)
            with self._reporting():
                self._upload_whole(save)
        with queue.changed:
            if queue.scheduled == scheduled:
                queue.scheduled = 0
        return save is not None

    def _upload_whole(self, save: RemoteSave) -> None:
        """Uploads this rank's part of a step, waits for those of the others, commits, and prunes
        the store."""
        uploads, queue = self.uploads, self.queue
        remote = uploads.remote
        run = uploads.target.run
        step = save.step
        started = runtime.monotonic()
        lock = self._protect(save)
        try:
            remote.check_not_superseded(run)
            remote.publish_status(run, RunStatus(step, False))
            try:
                sent = save.upload()
            except FileNotFoundError as error:
                raise LostShardError(
                    step, f"the part of rank 0 is not on its disk any more: {error.filename}"
                ) from error
            except CorruptFileError as error:
                raise LostShardError(step, f"the part of rank 0 is damaged: {error}") from error
            self._wait_for_others(save)
            remote.check_not_superseded(run)
            save.commit()
        finally:
            if lock is not None:
                lock.release()
        # ``step`` is uploaded, they will not be
        skipped = tuple(sorted(other for other in queue.pending if other < step))
        if skipped:
            self.skipped += len(skipped)
            uploads.emit(UploadsSkipped(skipped, self.skipped))
        queue.done(step, over=step)
        uploads.emit(UploadFinished(step, remote.url, sent, runtime.monotonic() - started))
        with self._reporting(pause=0):
            remote.prune(uploads.policy or KEEP_ALL, run, step, uploads.emit)

    def _protect(self, save: RemoteSave) -> Lease | None:
        """Locks a step against removal. None: the disk takes no lock now (it is full, or
        read-only). It is uploaded all the same: what is removed meanwhile is noticed, because each
        file is looked for until the manifest is put."""
        target, step = save.target, save.step
        commit_dir = save.data_dir if target.iterations else target.attempt(step)
        try:
            lock = acquire_read_lock(target, save.attempt, commit_dir)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise  # it may pass, and the upload is tried again
            self.uploads.emit(
                Notice(
                    f"step {step} is uploaded without a lock against its removal, because the disk "
                    f"takes none: {error}"
                )
            )
            return None
        if lock is None:
            raise LostShardError(step, "it was removed from the disk of rank 0 before its upload")
        return lock

    def _wait_for_others(self, save: RemoteSave) -> None:
        """Waits for the objects of the other ranks. Raises RemoteError that names the late ranks,
        LostShardError if an object will never come."""
        uploads = self.uploads
        until, before = runtime.monotonic() + uploads.stall_timeout, None
        while missing := save.missing():
            if before is not None and len(missing) < before:
                until = runtime.monotonic() + uploads.stall_timeout
            if runtime.monotonic() >= until:
                raise RemoteError(
                    f"{len(missing)} objects of {save.owners(missing)} did not come within "
                    f"{uploads.stall_timeout:.0f} s, the first is {missing[0]}"
                )
            before = len(missing)
            runtime.sleep(self.pause)

    # ---- the other ranks -------------------------------------------------------------------------

    def _follow(self) -> bool:
        """Uploads the shard of the step that rank 0 has published. Returns whether there was
        one."""
        uploads, queue = self.uploads, self.queue
        remote, target = uploads.remote, uploads.target
        if not queue.pending:
            return False
        status = remote.read_status(target.run)
        # not published yet, or removed by a later run
        if status is None:
            if (self._has_status or queue.closing) and runtime.monotonic() >= self._next_check:
                self._next_check = runtime.monotonic() + AGAIN
                remote.check_not_superseded(target.run)
            return False
        self._has_status = True
        if status.ended:
            with queue.changed:
                queue.stopped = status.reason
            if status.reason:
                queue.warn(status.reason)
            return True
        step = status.step
        if step is None or step in queue.settled:
            return False
        save = uploads.save(step)
        if target.storage.status(save.path(record_name(target.rank))) is None:
            return self._report_missing(save)
        queue.begin(step)
        started = runtime.monotonic()
        try:
            sent = save.upload()
        except FileNotFoundError:
            # rank 0 gave the step up or renamed its folder, or the shard is gone
            queue.end()
            return remote.read_status(target.run) == status and self._report_missing(save)
        except CorruptFileError as error:
            save.report_lost(f"is damaged: {error}")
            raise LostShardError(
                step, f"the part of rank {target.rank} is damaged: {error}"
            ) from error
        uploads.emit(
            UploadFinished(step, remote.url, sent, runtime.monotonic() - started, is_whole=False)
        )
        # If another node has lost this step, rank 0 may next upload an older one, but none before a
        # step that is complete.
        queue.done(step, over=queue.uploaded if target.local_ranks else step)
        return True

    def _report_missing(self, save: RemoteSave) -> bool:
        """Reports to rank 0 that the shard of this rank will never come. A rank sees its files on
        the disk of its own node at once. On a shared disk it can see late that a folder was
        renamed, so it waits first. Returns False while it waits; raises LostShardError after the
        report."""
        uploads = self.uploads
        queue = self.queue
        step = save.step
        unsaved = step > queue.last
        if unsaved and not queue.closing:
            return False
        if self._absent[0] != step:
            self._absent = (step, runtime.monotonic())
        if runtime.monotonic() - self._absent[1] < (
            0 if unsaved or uploads.target.local_ranks else LATE
        ):
            return False
        reason = "was not saved" if unsaved else "is not on its disk any more"
        save.report_lost(reason)
        raise LostShardError(step, f"the part of rank {uploads.target.rank} {reason}")
