"""Saves the checkpoints of one training: which steps, with which saver, until when.

    manager = CheckpointManager(storage, group, settings, options, policy, emit)
    manager.open()                              # all ranks: acquires the directory
    manager.begin(0)                            # cleans up, starts saver and uploads; 0: the step before the first one
    manager.count_hosts()                       # all ranks
    manager.handle_preemption()                 # from here on SIGTERM asks the training to stop
    reason = manager.step_end(request)          # after each step; not empty: the training is to stop
    manager.end(request)                        # or, after an error, manager.finish_after_error()

    step_end ─▶ outcomes of the saves so far ─▶ due? ─▶ collect ─▶ saver ─▶ was any rank asked to stop?
    end      ─▶ TrainingEnd: the last step, if it is not saved yet ─▶ commit of all ranks ─▶ upload ─▶ release
    saver    SyncSaver, or with async_save AsyncSaver: write_shard ─▶ rank 0: commit, pointers, prune
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import Group, Watchdog, gather_results, run_on_all
from mindresume.coordination.host_memory import UNKNOWN, share_of_rank
from mindresume.coordination.lease import Lease
from mindresume.coordination.preemption import PreemptionHandler, Version
from mindresume.coordination.process_identity import host_identity
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import LeaseHeldError, MindResumeError, SaveError
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
from mindresume.formats.iteration_naming import iteration_name
from mindresume.formats.rank_folder_naming import stem
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.memory_tier.opening import keep_number, newest_run, open_tier
from mindresume.saving.memory_tier.tier import MemoryTier
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.retention import Policy
from mindresume.saving.save_outcomes import SaveOutcomes
from mindresume.saving.save_request import SaveOptions, SaveRequest
from mindresume.saving.save_schedule import SaveSchedule
from mindresume.saving.save_session import Resumed, SaveSession, open_save_session
from mindresume.saving.shard_writer import SaveTarget, clean_own_folder, is_committed, mark_emergency, write_shard
from mindresume.saving.sync_saver import Outcome, Save, Saver, SyncSaver, save_job_for
from mindresume.saving.training_end import TrainingEnd
from mindresume.saving.uploader import Uploader
from mindresume.settings import Settings
from mindresume.storage.interface import Storage
from mindresume.storage.operations import call_within

_LAST_WORDS = 5.0                       # seconds to record an end, on a disk that may hang
_OWN_SIGNAL = ("MindSpore sent SIGTERM to its own process. It does so after a failure: a worker of the data set died, the "
               "scheduler is gone, or a collective failed. The log has its error before this line")
_OTHERS = 10.0                          # seconds for which rank 0 waits for records of other ranks after an error


class CheckpointManager:
    """Saves the checkpoints of one training. All ranks of ``group`` call each method at the same points, except
    ``finish_after_error`` and ``emergency_save``.

    Args:
        policy: of retention.
        emit: receives the events.
        pending: the load attempt of the checkpoint that was loaded.
        since: time (``time.monotonic``) from which ``every_seconds`` counts; None: now.
        on_write: receives what a thread in the background writes, see ``AsyncSaver``.

    Raises (``step_end``, ``end`` and ``save``):
        SaveError: a save failed and ``on_save_error`` is ``raise``, or ``max_failed_saves`` failed in a row.
        LeaseHeldError: another job saves into the directory.
        RemoteError: an upload failed and ``on_save_error`` is ``raise``.
    """

    def __init__(self, storage: Storage, group: Group, settings: Settings, options: SaveOptions, policy: Policy,
                 emit: Emit = ignore, pending: PendingLoadAttempt | None = None, since: float | None = None,
                 on_write: Callable[[int], None] = lambda step: None):
        self.storage, self.group, self.settings, self.options, self.policy, self.emit = (
            storage, group, settings, options, policy, emit)
        self.pending, self.on_write = pending or PendingLoadAttempt(), on_write
        self.outcomes = SaveOutcomes(settings, emit, self._record_outcome)
        self.training_end = TrainingEnd(group, self.outcomes, settings.commit_timeout)
        self.session: SaveSession | None = None
        self.preemption: PreemptionHandler | None = None
        self._saver: Saver | None = None
        self._uploader: Uploader | None = None
        self._tier: MemoryTier | None = None
        self._collected: Save | Exception | None = None     # for the disk at this step
        self._skipped = self._begun_at = 0
        self._last_step: int | None = None
        self.is_first_on_host = False                   # known after count_hosts
        self._schedule = SaveSchedule(options, since)

    @property
    def target(self) -> SaveTarget:
        return self.session.target

    @property
    def saving(self) -> bool:
        """Returns whether saves are possible: from ``begin`` to the end."""
        return self._saver is not None

    # ---- start -----------------------------------------------------------------------------------------------------

    def open(self, shared_groups: dict[str, SharedGroups] | None = None, origin: Resumed | None = None,
             number_runs: Callable[[Storage, str], None] = lambda storage, root: None,
             leases: dict[str, Lease] | None = None) -> SaveSession:
        """Acquires the directory. Arguments and errors: see ``open_save_session``."""
        options = self.options
        in_memory = newest_run(self.storage, options.root, self.group) if self.settings.memory_tier.every_steps else ""

        def number(storage: Storage, root: str) -> None:
            number_runs(storage, root)
            keep_number(storage, root, in_memory)
        self.session = open_save_session(self.storage, options.root, options.prefix, self.group, self.emit,
                                         self.settings.heartbeat, options.iterations, shared_groups, origin, number, leases)
        self.session.target = target = replace(self.session.target, samples_in_common=options.samples_in_common)
        prefix = options.prefix if options.iterations else stem(options.prefix, target.rank, self.session.suffix)
        self.emit(RunOpened(target.run, target.root, prefix, target.world_size, max(options.every_steps or 0, 0) or None,
                            self.settings.memory_tier.every_steps or None))
        return self.session

    def begin(self, step: int, resumed: Resumed | None = None, remote: RemoteCheckpoints | None = None) -> None:
        """Cleans up after earlier runs, and starts the saver and uploads.

        Args:
            step: the step after which the training begins.
            resumed: the checkpoint that it has loaded.
            remote: where checkpoints are uploaded to.
        """
        tier = self.settings.memory_tier
        share = share_of_rank(self.group) if self.options.async_save or tier.every_steps else UNKNOWN
        self._begun_at = step
        self._schedule.begin(step)
        run_on_all(self.group, lambda: self._begin(share, resumed, remote),
                   Watchdog("cleaning up"))  # rank 0 for all that is there
        self._tier = open_tier(self.session, self.group, tier, self.emit, share, self.settings.commit_timeout, resumed)
        if self._tier is not None:
            self._tier.begin(step)
        runtime.at_exit(self.finish_after_error)  # if no hook sees the end of the training; runs before the end of the uploader

    def _begin(self, share: int, resumed: Resumed | None, remote: RemoteCheckpoints | None) -> None:
        self.session.begin(resumed)
        try:
            for name in clean_own_folder(self.target):
                self.emit(Notice(f"removed {name}, left half-written by an earlier run"))
        except OSError as error:
            self.emit(warning(f"{self.options.shown or self.options.root} is not cleaned up: {error}"))
        self._saver = self._make_saver(self.policy if self.session.is_leader else None, share)
        self._uploader = self.session.peer_state.uploads = self._start_uploader(remote) if remote is not None else None

    def _make_saver(self, policy: Policy | None, share: int) -> Saver:
        """Returns the saver, after the commit of what earlier runs completed. ``policy``: on the leader, else None. ``share``:
        bytes of host memory for a copy."""
        settings, kind = self.settings, self.options.async_save
        work = save_job_for(self.target, policy, self._emit_of_saver)
        work.begin()
        if not kind:
            return SyncSaver(work)
        return AsyncSaver(self.target, policy, kind if isinstance(kind, str) else "thread", int(settings.staging_gib * 2**30),
                          settings.commit_timeout, self._emit_of_saver, share, on_write=self.on_write)

    def _emit_of_saver(self, event: Event) -> None:
        """Receives the events of the saver, in any thread."""
        if isinstance(event, SaveCommitted) and event.run_id is None and self._tier is not None:
            self._tier.notes.committed(event.step)
        self.emit(event)

    def _start_uploader(self, remote: RemoteCheckpoints) -> Uploader:
        """Starts uploads. Nodes that share no disk upload only checkpoints that all of them have, if they exchange states."""
        stall_timeout, apart = self.settings.commit_timeout, self.session.shared_groups.is_split
        uploader = Uploader(remote, self.target, self.policy, stall_timeout, self.emit,
                            only_scheduled=apart and self.settings.preemption_check_interval > 0).start()
        runtime.at_exit(uploader.finish_at_exit, stall_timeout)  # after an error, too, saved checkpoints are uploaded
        return uploader

    def count_hosts(self) -> None:
        """Finds the first rank of each host, on all ranks together; and counts the host names for the load attempt, which tells
        hosts apart by name."""
        rows = gather_results(self.group, lambda: [host_identity(), runtime.gethostname()])
        hosts = [host for host, _ in rows]
        self.is_first_on_host = hosts.index(hosts[self.group.rank]) == self.group.rank
        load_attempt = self.pending.attempt
        if load_attempt is not None:
            load_attempt.run, load_attempt.hosts = self.target.run, len({name for _, name in rows})

    def handle_preemption(self, callbacks: Iterable[Any] = (), before: Mapping[str, Version | None] | None = None) -> None:
        """Handles requests to stop the training from here on. Arguments: see ``PreemptionHandler``."""
        self.preemption = PreemptionHandler(self.group, self.settings.preemption_check_interval, callbacks,
                                            local_state=self.session.peer_state.local_state,
                                            on_peer_state=self.session.on_peer_state, before=before,
                                            on_own_signal=self._end_after_own_signal)
        if self.preemption.ignored:
            self.emit(warning(self.preemption.ignored))
        self.preemption.install()

    def _end_after_own_signal(self) -> None:
        """Ends this process, as the signal would have done without a handler; in any thread. The training thread may wait for
        ever for the data set or the ranks that have failed."""
        def report() -> None:
            self.pending.end(MindResumeError(_OWN_SIGNAL))      # it says nothing against the loaded checkpoint
            self.emit(Notice(_OWN_SIGNAL, ERROR))
            self.emit(TrainingEnded(FAILED, _OWN_SIGNAL, self._last_step))
        call_within(_LAST_WORDS, report, None)
        os._exit(1)

    def begin_load_attempt(self) -> None:
        """Records that the first step begins. Records nothing for a job that was asked to stop before: if the platform then kills
        it, the checkpoint is not the reason."""
        load_attempt = self.pending.attempt
        if load_attempt is None or load_attempt.begun or (self.preemption is not None and self.preemption.signalled):
            return
        try:
            load_attempt.begin()
        except OSError as error:
            self.emit(Notice(f"the load attempt cannot be recorded, so the crash-loop protection is off: {error}"))

    # ---- each step -------------------------------------------------------------------------------------------------

    def step_end(self, request: SaveRequest) -> str:
        """Saves the step if it is due. Returns why the training is to stop after this step, which is saved then; empty: go on."""
        self.pending.end()
        if self._last_step is None:
            self.emit(FirstStepDone(request.step))
        self._last_step = request.step
        if self._saver is not None:
            self.outcomes.handle(self._saver.poll())
        if self.session is not None:
            self.session.reached(request.step)
        if self._uploader is not None:
            self.outcomes.handle_upload_errors(self._uploader.poll())
        self._collected = None
        request.save(self, False)
        if self._tier is not None:
            self._tier.step_end(request, self._collected)
        self._collected = None
        return self._stop_if_preempted(request)

    def _stop_if_preempted(self, request: SaveRequest) -> str:
        """Saves this step on all ranks if any rank was asked to stop. Returns the reason; empty: go on."""
        if self.preemption is None or self._saver is None:
            return ""
        reason = self.preemption.check(request.step)
        if reason:
            self.emit(PreemptionRequested(request.step, reason))
            self.training_end.save_last(request, self._saver, self)
        return reason

    def save(self, request: SaveRequest, force: bool = False) -> None:
        """Saves the step if it is due; with ``force`` in any case, unless it is saved already."""
        if self._saver is not None and self.should_save(request.step, force):
            self.save_now(request)

    def should_save(self, step: int, force: bool = False) -> bool:
        """Returns whether ``step`` is saved now, the same on all ranks. Called once a step."""
        before = self._schedule.advance(step)
        if step in self.outcomes.saved or not (force or self._schedule.is_due(before, step, self.group)):
            return False
        return force or not self._is_skipped(step)

    def save_now(self, request: SaveRequest) -> None:
        """Saves the step."""
        try:
            self.submit(request)
        except LeaseHeldError:                            # no later save can succeed
            raise
        except SaveError as error:                          # the saver did not get it
            self.outcomes.handle_failure(request.step, error)
        if isinstance(self._saver, SyncSaver):              # it is written already
            self.outcomes.handle(self._saver.poll())

    def submit(self, request: SaveRequest) -> None:
        """Collects the state and gives it to the saver. Raises SaveError if one of the two fails."""
        started = runtime.monotonic()
        self.emit(SaveBegun(request.step))
        try:
            save = self._collected = request.collect()
        except Exception as error:
            self._collected = error
            raise
        name = iteration_name(save.step) if self.target.iterations else os.path.basename(save.shard.files[0].path)
        request.on_collected(save, name)
        self.outcomes.saved.add(save.step)
        self._saver.save(save)
        stall_seconds = runtime.monotonic() - started
        self.outcomes.set_stall(save.step, stall_seconds)
        request.on_submitted(save, name)
        if not isinstance(self._saver, SyncSaver):
            self.emit(SaveStaged(save.step, name, stall_seconds))

    def _is_skipped(self, step: int) -> bool:
        """Returns whether ``async_when_busy: skip`` skips the step: on all ranks if one of them still writes. If ranks skipped
        different steps, no save would be complete. A collective in the training thread, as those of a step."""
        if self.settings.async_when_busy != "skip" or not self.options.async_save:
            return False
        busy = any(gather_results(self.group, self._saver.busy))
        if busy:
            self._skipped += 1
            self.emit(SaveSkipped(step, "the previous save is still being written", self._skipped))
        return busy

    def _record_outcome(self, outcome: Outcome) -> None:
        """Enqueues the upload of a step that is saved."""
        if outcome.saved and self._uploader is not None:
            self._uploader.enqueue(outcome.step)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def end(self, request: SaveRequest, closing: Callable[[], None] = lambda: None) -> None:
        """Saves the last step, waits until everything is committed and uploaded, and releases the directory. Ranks that are done
        wait for the others. Calls ``closing()`` when no save is possible any more. Raises an error of the last save, or of what
        follows it, after all of this."""
        if self._saver is not None:
            self.training_end.save_last(request, self._saver, self)
            saver, self._saver = self._saver, None
            closing()
            runtime.not_at_exit(self.finish_after_error)
            if self._tier is not None:
                self._tier.stop()
            self.training_end.commit(saver)                 # its outcomes enqueue the last uploads
            self._remove_tier(request.step)
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            self.training_end.upload(uploader)
        if self.session is not None:
            self.training_end.release(self.session)
        self._close_preemption()
        self.training_end.raise_errors()

    def _remove_tier(self, step: int) -> None:
        """Removes the tier in memory if the disk has the last step."""
        tier, self._tier = self._tier, None
        with suppress(OSError):
            if tier is not None and is_committed(self.target, step):
                tier.remove()

    def _write_tier(self, saver: Saver) -> None:
        """Writes the newest save in memory to disk, if that is older, after the training ended with an error. A save like any
        other: it counts if all ranks get so far."""
        if self._tier is None:
            return
        tier, self._tier = self._tier, None
        tier.stop()
        shard = tier.newest(max([self._begun_at, *self.outcomes.saved])) if self.settings.memory_tier.write_after_error else None
        if shard is not None:
            self.emit(warning(f"the training ended with an error; step {shard.state.step} is written to disk from memory"))
            saver.save(Save(shard))
            self.outcomes.saved.add(shard.state.step)

    def finish_after_error(self) -> None:
        """Finishes the save in progress after the training ended with an error. Rank 0 waits some seconds for records of other
        ranks, which may have failed at the same step. Raises nothing, because the training's error is being raised."""
        runtime.not_at_exit(self.finish_after_error)
        saver, self._saver = self._saver, None
        try:
            if saver is not None and saver.busy():
                self.emit(warning("the training ended with an error; the save in flight is finished first"))
            if saver is not None:
                self._write_tier(saver)
            outcomes = saver.finish(self.settings.commit_timeout, _OTHERS) if saver is not None else []
            for outcome in outcomes:
                self.outcomes.record(outcome)
                if outcome.error is not None:
                    self.outcomes.record_failure(outcome.step, str(outcome.error))
        except Exception as error:
            self.outcomes.record_failure(None, f"the last save was not finished: {error}")
        finally:
            self._close_preemption()

    def _close_preemption(self) -> None:
        """Gives SIGTERM back its former handler."""
        if self.preemption is not None:
            self.preemption.close()

    def emergency_save(self, request: SaveRequest) -> bool:
        """Saves what this rank holds of the last step, after other ranks were lost. It becomes a checkpoint if the ranks that are
        left hold everything. Runs in a thread of MindIO, without collectives and without removals. Returns False if it failed and
        mindformers may save instead. Raises SaveError if it failed and that would wait for the lost ranks."""
        number = request.step
        try:
            for outcome in self._saver.wait(self.settings.commit_timeout):
                if not outcome.saved:
                    self.outcomes.saved.discard(outcome.step)
            mark_emergency(self.target, number)
            if number not in self.outcomes.saved:
                write_shard(self.target, request.collect_local())
                self.outcomes.saved.add(number)
        except Exception as error:          # any error: the caller has no other copy of the state
            if request.needs_collectives():
                raise SaveError(f"step {number} was not saved before the end on rank {self.target.rank}: {error}") from error
            self.outcomes.record_failure(number, f"step {number} was not saved before the end: {error}; mindformers saves it")
            return False
        self.emit(warning(f"other ranks are lost; rank {self.target.rank} saved step {number}"))
        return True
