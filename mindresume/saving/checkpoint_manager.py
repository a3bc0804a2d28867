"""Saves the checkpoints of one training: which steps, with which saver, until when.

    manager = CheckpointManager(storage, group, settings, options, emit)
    manager.open()                              # all ranks: acquires the directory
    manager.begin(0)  # cleans up, starts saver and uploads; 0: the step before the first one
    manager.count_hosts()                       # all ranks
    manager.handle_preemption()                 # from here on SIGTERM asks the training to stop

    reason = manager.end_step(state)  # after each step; not empty: the training is to stop
    manager.save_last(state)  # at the end of the training, if a rank lacks the step
    manager.end(step)  # commit of all ranks, upload, release; after an error finish_after_error()

    end_step outcomes of earlier saves ─▶ due? ─▶ state.save: collect, ``save`` ─▶ save in memory ─▶
        was any rank asked to stop?

    saver    SyncSaver, or with async_save AsyncSaver: write_shard ─▶ rank 0: commit, pointers,
        prune

If one rank raised early at the end, the other ranks would wait for it in their next collective. So
each part of the end keeps its errors, and they are raised when all parts are done.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import (
    Group,
    SingleProcess,
    Watchdog,
    gather_results,
    gather_values,
    run_on_all,
    run_until_all_done,
)
from mindresume.coordination.host_memory import UNKNOWN, share_of_rank
from mindresume.coordination.lease import Lease
from mindresume.coordination.preemption import BY_GUARD, PreemptionHandler, Version
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import BadStepError, LeaseHeldError, MindResumeError, SaveError
from mindresume.events import (
    ERROR,
    FAILED,
    Emit,
    Event,
    FirstStepDone,
    Notice,
    PreemptionRequested,
    RunOpened,
    SaveBegun,
    SaveCommitted,
    SaveSkipped,
    SaveStaged,
    TrainingEnded,
    ignore,
    warning,
)
from mindresume.formats import CheckpointDir
from mindresume.formats.bad_steps import BadStep
from mindresume.formats.rank_folders import stem
from mindresume.formatting import listed
from mindresume.saving.async_saver import AsyncSaver, Watcher
from mindresume.saving.committer import SyncSaver
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.guard import WINDOW, StepGuard, end_job
from mindresume.saving.memory_tier.opening import newest_run, open_tier
from mindresume.saving.memory_tier.tier import MemoryTier
from mindresume.saving.publisher import Publisher
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.save_policy import SaveOptions, SavePolicy
from mindresume.saving.save_session import Resumed, SaveSession, open_save_session
from mindresume.saving.shard_writer import (
    Outcome,
    Save,
    SaveTarget,
    StepState,
    clean_own_folder,
    is_committed,
    mark_emergency,
    write_shard,
)
from mindresume.saving.staging import StagingLimits
from mindresume.saving.upload import Uploader, UploadQueue, Uploads
from mindresume.settings import Settings
from mindresume.storage import Storage, call_within

_LAST_WORDS = 5.0  # seconds to record an end, on a disk that may hang
_OWN_SIGNAL = (
    "MindSpore sent SIGTERM to its own process. It does so after a failure: a worker of the data "
    "set died, the "
    "scheduler is gone, or a collective failed. The log has its error before this line"
)
# seconds for which rank 0 waits for records of other ranks after an error
_OTHERS = 10.0


class CheckpointManager:
    """Saves the checkpoints of one training. All ranks of ``group`` call each method at the same
    points, except ``finish_after_error`` and ``emergency_save``.

    Args:
        emit: receives the events.
        pending: the load attempt of the checkpoint that was loaded.
        watcher: is told what a thread in the background writes, see ``AsyncSaver``.

    Raises (at the end of a step and of the training):
        SaveError: a save failed and ``on_save_error`` is ``raise``, or ``max_failed_saves`` failed
            in a row.
        LeaseHeldError: another job saves into the directory.
        RemoteError: an upload failed and ``on_save_error`` is ``raise``.
    """

    def __init__(
        self,
        storage: Storage,
        group: Group,
        settings: Settings,
        options: SaveOptions,
        emit: Emit = ignore,
        pending: PendingLoadAttempt | None = None,
        watcher: Watcher | None = None,
    ):
        self.storage = storage
        self.group = group
        self.settings = settings
        self.options = options
        self.emit = emit
        self.pending, self.watcher = pending or PendingLoadAttempt(), watcher
        self.policy = SavePolicy(options, settings, group, emit)
        self.session: SaveSession | None = None
        self.preemption: PreemptionHandler | None = None
        self._saver: SyncSaver | AsyncSaver | None = None
        self._uploads: UploadQueue | None = None
        self._tier: MemoryTier | None = None
        self._publisher: Publisher | None = None
        self._save_began = 0.0
        self._collected: Save | Exception | None = None  # for the disk at this step
        self.guard: StepGuard | None = None
        self._is_bad = False  # this rank has found a bad step
        self._bad_step = math.inf  # the first one, once all ranks know it
        self.bad_before: Sequence[BadStep] = ()  # of earlier runs
        self.window_step: int | None = None  # after it come samples that are skipped
        self._end_errors: list[Exception] = []

    @property
    def target(self) -> SaveTarget:
        return self.session.target

    @property
    def is_active(self) -> bool:
        """Returns whether saves are possible: from ``begin`` to the end."""
        return self._saver is not None

    # ---- start -----------------------------------------------------------------------------------

    def open(
        self,
        shared_groups: dict[str, SharedGroups] | None = None,
        origin: Resumed | None = None,
        remote: RemoteCheckpoints | None = None,
        leases: dict[str, Lease] | None = None,
    ) -> SaveSession:
        """Acquires the directory. Arguments and errors: see ``open_save_session``."""
        options = self.options
        in_memory = (
            newest_run(CheckpointDir(self.storage, options.root), self.group)
            if self.settings.memory_tier.every_steps
            else ""
        )
        self.session = open_save_session(
            self.storage,
            options,
            self.group,
            self.emit,
            self.settings.heartbeat,
            shared_groups,
            origin,
            remote,
            in_memory,
            leases,
        )
        target = self.session.target
        if self.settings.guard.is_on:
            self.guard = StepGuard(self.settings.guard, target.rank, self.emit)
        prefix = (
            options.prefix
            if options.iterations
            else stem(options.prefix, target.rank, self.session.suffix)
        )
        self.emit(
            RunOpened(
                target.run,
                target.root,
                prefix,
                target.world_size,
                max(options.every_steps or 0, 0) or None,
                self.settings.memory_tier.every_steps or None,
            )
        )
        return self.session

    def begin(
        self, step: int, resumed: Resumed | None = None, remote: RemoteCheckpoints | None = None
    ) -> None:
        """Cleans up after earlier runs, and starts the saver and uploads.

        Args:
            step: the step after which the training begins.
            resumed: the checkpoint that it has loaded.
            remote: where checkpoints are uploaded to.
        """
        needs_memory = self.options.async_save or self.settings.memory_tier.every_steps
        share = share_of_rank(self.group) if needs_memory else UNKNOWN
        self.policy.begin(step)
        # rank 0 for all
        run_on_all(
            self.group, partial(self._begin, share, resumed, remote), Watchdog("cleaning up")
        )
        self._tier = open_tier(self.session, self.group, self.settings, self.emit, share, resumed)
        if self._tier is not None:
            self._tier.begin(step)
        if self.settings.publish.every_steps and self.group.rank == 0:
            root, goes_on = self.options.root, resumed is not None
            self._publisher = Publisher(self.settings.publish, root, step, goes_on, self.emit)
        # if no hook sees the end of the training; runs before the end of the uploader
        runtime.at_exit(self.finish_after_error)

    def _begin(self, share: int, resumed: Resumed | None, remote: RemoteCheckpoints | None) -> None:
        """Begins on this rank. ``share``: bytes of host memory for a copy."""
        self.session.begin(resumed)
        try:
            for name in clean_own_folder(self.target):
                self.emit(Notice(f"removed {name}, left half-written by an earlier run"))
        except OSError as error:
            self.emit(
                warning(f"{self.options.shown or self.options.root} is not cleaned up: {error}")
            )
        settings, kind = self.settings, self.options.async_save
        retention = self.options.retention if self.session.is_leader else None
        saver: SyncSaver | AsyncSaver = SyncSaver(self.target, retention, self._emit_of_saver)
        saver.begin()  # commits what earlier runs completed
        if kind:
            saver = AsyncSaver(
                self.target,
                retention,
                kind if isinstance(kind, str) else "thread",
                StagingLimits(int(settings.staging_gib * 2**30), share),
                settings.commit_timeout,
                self._emit_of_saver,
                self.watcher,
            )
        self._saver = saver
        self._uploads = self.session.peer_state.uploads = (
            self._start_uploader(remote).queue if remote is not None else None
        )

    def _emit_of_saver(self, event: Event) -> None:
        """Receives the events of the saver, in any thread."""
        if isinstance(event, SaveCommitted) and event.run_id is None:
            if self._tier is not None:
                self._tier.notes.committed(event.step)
            if self._publisher is not None:
                self._publisher.committed(event.step)
        self.emit(event)

    def _start_uploader(self, remote: RemoteCheckpoints) -> Uploader:
        """Starts uploads. Nodes that share no disk upload only checkpoints that all of them have,
        if they exchange states."""
        stall_timeout, apart = self.settings.commit_timeout, self.session.shared_groups.is_split
        uploader = Uploader(
            Uploads(
                remote,
                self.target,
                self.options.retention,
                stall_timeout,
                self.emit,
                only_scheduled=apart and self.settings.preemption_check_interval > 0,
            )
        ).start()
        # after an error, too, saved checkpoints are uploaded
        runtime.at_exit(uploader.queue.finish_at_exit, stall_timeout)
        return uploader

    def count_hosts(self) -> None:
        """Counts the host names of all ranks together, for the load attempt."""
        names = set(gather_values(self.group, runtime.gethostname()))
        load_attempt = self.pending.attempt
        if load_attempt is not None:
            load_attempt.run, load_attempt.hosts = self.target.run, len(names)

    def handle_preemption(
        self, callbacks: Iterable[Any] = (), before: Mapping[str, Version | None] | None = None
    ) -> None:
        """Handles requests to stop the training from here on. Arguments: see
        ``PreemptionHandler``."""
        self.preemption = PreemptionHandler(
            self.group,
            self.settings.preemption_check_interval,
            callbacks,
            peers=self.session.peer_state,
            before=before,
            on_own_signal=self._end_after_own_signal,
        )
        if self.preemption.file.ignored:
            self.emit(warning(self.preemption.file.ignored))
        self.preemption.install()

    def _end_after_own_signal(self) -> None:
        """Ends this process, as the signal would have done without a handler; in any thread. The
        training thread may wait for ever for the data set or the ranks that have failed."""
        call_within(_LAST_WORDS, None, self._report_own_signal)
        os._exit(1)

    def _report_own_signal(self) -> None:
        # it says nothing against the loaded checkpoint
        self.pending.end(MindResumeError(_OWN_SIGNAL))
        self.emit(Notice(_OWN_SIGNAL, ERROR))
        self.emit(TrainingEnded(FAILED, _OWN_SIGNAL, self.policy.last_step))

    def begin_load_attempt(self) -> None:
        """Records that the first step begins. Records nothing for a job that was asked to stop
        before: if the platform then kills it, the checkpoint is not the reason."""
        load_attempt = self.pending.attempt
        if (
            load_attempt is None
            or load_attempt.begun
            or (self.preemption is not None and self.preemption.signalled)
        ):
            return
        try:
            load_attempt.begin()
        except OSError as error:
            self.emit(
                Notice(
                    "the load attempt cannot be recorded, so the crash-loop protection is off: "
                    f"{error}"
                )
            )

    # ---- each step -------------------------------------------------------------------------------

    def end_step(self, state: StepState) -> str:
        """Ends a step; all ranks call it together.

        A step that is due, the same on all ranks, is collected and given to the saver:
        ``SyncSaver`` writes it in this thread, ``AsyncSaver`` copies it now and writes it in the
        background. Each rank records what it wrote. Rank 0 commits a step once the records of all
        ranks are there: right after its own, when ``poll`` looks again at a later step, or in
        ``end``. To write and to commit, no rank waits for another one. Then the tier in memory
        saves the step, from what was collected for the disk, or collects it itself. Every few
        steps the ranks exchange whether one was asked to stop.

        Returns:
            Why the training is to stop after this step, on all ranks if any rank was asked to; then
            the step is saved, too. Empty: go on.

        Raises:
            BadStepError: On all ranks, once they have agreed on a bad step.
        """
        step = state.step
        if self.guard is not None:
            self._is_bad = self.guard.judge(state)
        # an error, or a save between two steps, may have left that of an earlier step
        self._collected = None
        # the attempt to load the checkpoint has succeeded
        if self.pending.attempt is not None:
            self.pending.end()
        if self.policy.last_step is None:
            self.emit(FirstStepDone(step))
        self.policy.last_step = step
        if self._saver is not None:
            self._handle(self._saver.poll())
        if self._publisher is not None:
            self._publisher.poll(self._saver is not None and self._saver.busy())
        if self.session is not None and self.session.lease is not None:
            self.session.lease.step = step  # published with the next heartbeat
        errors = self._uploads.poll() if self._uploads is not None else []
        if self.is_due(step):
            with self.saving(step):
                state.hand_over(self)
        # an upload that failed loses no save on disk, nor the one that was due
        if errors and self.settings.on_save_error == "raise":
            raise errors[0]
        if self._tier is not None:
            if self._is_bad:
                self._tier.pause()
            self._tier.step_end(state, self._collected)
        self._collected = None
        if self._is_bad and self.preemption is not None:
            self.preemption.finding = self.guard.found
        reason = (
            self.preemption.check(step)
            if self.preemption is not None and self._saver is not None
            else ""
        )
        if reason == BY_GUARD:
            raise self._end_bad(step, self.preemption.findings)
        if not reason and step == self.window_step:
            reason = WINDOW
        if reason:
            self.emit(PreemptionRequested(step, reason))
            self.save_last(state)
        return reason

    def _end_bad(self, step: int, findings: Sequence[Any]) -> BadStepError:
        """Returns the error of ``guard.end_job``, on all ranks."""
        first = self._bad_step = min(row["step"] for row in findings if row is not None)
        begun_at = self.policy.begun_at
        good = max([begun_at, *(saved for saved in self.policy.saved if saved < first)])
        return end_job(
            findings,
            step,
            gather_values(self.group, good)[0],  # of rank 0: ranks decide the same
            # of this training, or of those that ended before their first save
            [row for row in self.bad_before if row.lineage == self.target.lineage or not begun_at],
            self.settings.guard.max_rollbacks,
            self.group,
            self.session,
        )

    def is_due(self, step: int, force: bool = False) -> bool:
        """Returns whether ``step`` is saved to disk now, the same on all ranks; ``force``: unless
        it is saved already. Called once a step. ``async_when_busy: skip`` skips the step on all
        ranks if one of them still writes: if ranks skipped different steps, no save would be
        complete. That is a collective in the training thread, as those of a step."""
        if self._saver is None or not self.policy.is_due(step, force):
            return False
        if force or self.settings.async_when_busy != "skip" or not self.options.async_save:
            return True
        busy = any(gather_results(self.group, self._saver.busy))
        if busy:
            self.policy.skipped += 1
            self.emit(
                SaveSkipped(step, "the previous save is still being written", self.policy.skipped)
            )
        return not busy

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Surrounds the collecting and the saving of ``step``. A SaveError counts as a failed save,
        and is raised as configured."""
        self._save_began = runtime.monotonic()
        self.emit(SaveBegun(step))
        if self._publisher is not None:
            self._publisher.poll(True)
        try:
            yield
        except LeaseHeldError:  # no later save can succeed
            raise
        except SaveError as error:  # the saver did not get it
            self._collected = self._collected or error
            if self.policy.record_failure(step, error):
                raise
        if isinstance(self._saver, SyncSaver):  # it is written already
            self._handle(self._saver.poll())

    def collected(self, save: Save) -> Save:
        """Keeps what was collected for the tier in memory, which can save it even if the disk
        cannot. Returns it."""
        self._collected = save
        return save

    def submit(self, save: Save) -> None:
        """Gives a collected state to the saver, unless this rank has saved the step and has only
        taken part in collecting it. Raises SaveError."""
        if save.step in self.policy.saved:
            return
        self._collected = save  # the tier in memory does not collect it again
        if self._is_bad:
            return
        self.policy.saved.add(save.step)
        self._saver.save(save)
        stall_seconds = self.policy.stalls[save.step] = runtime.monotonic() - self._save_began
        if not isinstance(self._saver, SyncSaver):
            self.emit(SaveStaged(save.step, save.name, stall_seconds))

    def _handle(self, outcomes: Sequence[Outcome], raises: bool = True) -> None:
        """Records outcomes, and enqueues the upload of steps that are saved. Raises SaveError as
        configured."""
        for outcome in outcomes:
            if outcome.saved and self._uploads is not None:
                self._uploads.enqueue(outcome.step)
            fatal = self.policy.record(outcome)
            if fatal is not None and raises:
                raise fatal

    # ---- the end ---------------------------------------------------------------------------------

    def is_last_missing(self, step: int) -> bool:
        """Returns, on all ranks alike, whether one of them has not saved the last step: then all
        collect it, because collecting parameters can be a collective. If one rank ends with an
        error, no rank begins and all raise SaveError: the next collective would wait for that
        rank."""
        if self._saver is None:
            return False

        rows = gather_results(
            self.group,
            partial(self._written, step),
            Watchdog(f"writing what was begun before step {step}", stall_timeout=math.inf),
        )
        findings = [row[2] for row in rows]
        if any(row is not None for row in findings):
            raise self._end_bad(step, findings)
        if self._end_errors:
            raise self._end_errors[0]
        failing = [rank for rank, row in enumerate(rows) if row[1]]
        if failing:
            raise SaveError(
                f"the training ends at step {step}, because rank {listed(failing)} ends with an "
                "error of a save, which the log of that rank tells. What all ranks have written "
                "counts; start the same command again"
            )
        return not all(row[0] for row in rows)

    def _written(self, step: int) -> list[Any]:
        """Waits until all is written. Returns whether this rank has saved ``step``, whether it ends
        with an error, and its bad step."""
        try:
            self._handle(self._saver.wait(self.settings.commit_timeout))
        except SaveError as error:
            self._end_errors.append(error)
        found = self.guard.found if self.guard is not None else None
        return [step in self.policy.saved, bool(self._end_errors), found]

    def save_last(self, state: StepState) -> None:
        """Saves the last step, on all ranks if one of them has not saved it. An error of the save
        is kept until a collective has sent it to the other ranks (``end``)."""
        if not self.is_last_missing(state.step):
            return
        with self._keeping_errors():
            if self.policy.is_due(state.step, True):
                with self.saving(state.step):
                    state.hand_over(self)
            else:
                state.hand_over(self)

    def end(self, step: int) -> None:
        """Waits until the last step is committed and uploaded, and releases the directory. Ranks
        that are done wait for the others. Raises an error of the last save, or of what follows it,
        after all of this."""
        timeout = self.settings.commit_timeout
        if self._saver is not None:
            saver, self._saver = self._saver, None
            runtime.not_at_exit(self.finish_after_error)
            if self._tier is not None:
                self._tier.stop()
            for outcome in self._run_on_all_ranks(
                "committing the last step", partial(saver.finish, timeout)
            ):
                with self._keeping_errors():
                    self._handle([outcome])  # enqueues the last uploads
            tier, self._tier = self._tier, None
            with suppress(OSError):
                if tier is not None and is_committed(self.target, step):
                    tier.remove()
        uploads, self._uploads = self._uploads, None
        if uploads is not None:
            errors = self._run_on_all_ranks(
                "uploading the last step", partial(uploads.finish, timeout)
            )
            if self.settings.on_save_error == "raise":
                self._end_errors += errors
        publisher, self._publisher = self._publisher, None
        if self.settings.publish.every_steps:
            self._run_on_all_ranks(
                "publishing the last weights",
                partial(publisher.finish, timeout) if publisher is not None else list,
            )
        if self.session is not None:
            self._run_on_all_ranks("releasing the directory", self.session.release)
        self._close_preemption()
        # an error of one rank is raised on all: in a later collective a rank
        failing: list[int] = []
        # without it would wait for one that has ended with it
        with self._keeping_errors():
            rows = gather_values(self.group, [True, bool(self._end_errors)])
            failing = [rank for rank, row in enumerate(rows) if row[1]]
        if self._end_errors:
            raise self._end_errors[0]
        if failing:
            raise SaveError(
                f"the training ends with an error, because rank {listed(failing)} does: its log "
                "names it"
            )

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error: the other parts of the end come first
            self._end_errors.append(error)

    def _run_on_all_ranks(self, what: str, work: Callable[[], Iterable[Any] | None]) -> list[Any]:
        """Runs ``work`` on all ranks until all are done, with short collectives meanwhile: rank 0
        may commit and upload for minutes. Returns its result. Keeps errors. A collective that fails
        because a rank is lost is the last one."""
        results: list[Any] = []

        def run() -> None:
            with self._keeping_errors():
                results.extend(work() or ())

        try:
            run_until_all_done(
                self.group,
                run,
                Watchdog(
                    what,
                    stall_timeout=max(Watchdog.stall_timeout, 3 * self.settings.commit_timeout),
                ),
            )
        except Exception as error:  # of the collective: errors of the work are kept already
            self._end_errors.append(error)
            self.group = SingleProcess(self.group.rank)
        return results

    def _write_tier(self, saver: SyncSaver | AsyncSaver) -> None:
        """Writes the newest save in memory to disk, if that is older, after the training ended with
        an error. A save like any other: it counts if all ranks get so far."""
        if self._tier is None:
            return
        tier, self._tier = self._tier, None
        tier.stop()
        if not self.settings.memory_tier.write_after_error:
            return
        shard = tier.newest(max([self.policy.begun_at, *self.policy.saved]), self._bad_step)
        if shard is not None:
            self.emit(
                warning(
                    f"the training ended with an error; step {shard.state.step} is written to disk "
                    "from memory"
                )
            )
            saver.save(Save(shard))
            self.policy.saved.add(shard.state.step)

    def finish_after_error(self) -> None:
        """Finishes the save in progress after the training ended with an error. Rank 0 waits some
        seconds for records of other ranks, which may have failed at the same step. Raises nothing,
        because the training's error is being raised."""
        runtime.not_at_exit(self.finish_after_error)
        saver, self._saver = self._saver, None
        try:
            if saver is not None and saver.busy():
                self.emit(
                    warning(
                        "the training ended with an error; the save in flight is finished first"
                    )
                )
            if saver is not None:
                self._write_tier(saver)
                self._handle(saver.finish(self.settings.commit_timeout, _OTHERS), raises=False)
        except Exception as error:
            self.policy.record_failure(None, SaveError(f"the last save was not finished: {error}"))
        finally:
            self._close_preemption()

    def _close_preemption(self) -> None:
        """Gives SIGTERM back its former handler."""
        if self.preemption is not None:
            self.preemption.close()

    def emergency_save(self, state: StepState) -> bool:
        """Saves what this rank holds of the last step, after other ranks were lost. It becomes a
        checkpoint if the ranks that are left hold everything. Runs in a thread of MindIO, without
        collectives and without removals. Returns False if it failed and mindformers may save
        instead. Raises SaveError if it failed and that would wait for the lost ranks."""
        step = state.step
        if self._is_bad:
            raise SaveError(f"step {step} is not saved: an earlier step is bad")
        try:
            for outcome in self._saver.wait(self.settings.commit_timeout):
                if not outcome.saved:
                    self.policy.saved.discard(outcome.step)
            mark_emergency(self.target, step)
            if step not in self.policy.saved:
                write_shard(self.target, state.collect_local())
                self.policy.saved.add(step)
        except Exception as error:  # any error: the caller has no other copy of the state
            if state.needs_collectives():
                raise SaveError(
                    f"step {step} was not saved before the end on rank {self.target.rank}: {error}"
                ) from error
            failure = f"step {step} was not saved before the end: {error}; mindformers saves it"
            self.policy.record_failure(step, SaveError(failure))
            return False
        self.emit(warning(f"other ranks are lost; rank {self.target.rank} saved step {step}"))
        return True
