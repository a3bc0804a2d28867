"""Saves the checkpoints of one training: when a step is due, the outcome of each save, preemption, and the end.

    manager = CheckpointManager(storage, group, settings, options, policy, emit)
    manager.open()                              # on all ranks together: the directory is acquired
    manager.begin(0)                            # after which step; clean-up, saver, uploads
    manager.meet()                              # all ranks: on how many hosts they run
    manager.listen()                            # from here on SIGTERM is noted
    reason = manager.step_end(step)             # after each step; not empty: the training is to stop
    manager.end(step)                           # or, after an error, manager.settle()

    step_end ─▶ outcomes of the saves so far ─▶ due? ─▶ collect ─▶ saver ─▶ was any rank asked to stop?
    end      ─▶ the last step, if it is not saved yet ─▶ the saver waits (with a deadline) until all ranks are committed
    saver    SyncSaver, or with async_save AsyncSaver: write_shard ─▶ rank 0: commit, pointers, prune
"""
from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mindresume.coordination.collectives import Group, SingleProcess, Waiting, agreed, followed, report, watched
from mindresume.coordination.host_memory import UNKNOWN, share_of_rank
from mindresume.coordination.lease import Lease
from mindresume.coordination.preemption import PreemptionHandler, Version
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import LeaseHeldError, RemoteError, SaveError
from mindresume.events import (
    Emit,
    Notice,
    PreemptionRequested,
    RunOpened,
    SaveBegun,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveWritten,
    ignore,
    warning,
)
from mindresume.formats.iteration_naming import iteration_name
from mindresume.formats.rank_folder_naming import stem
from mindresume.formatting import listed
from mindresume.model.training_state import crosses_multiple
from mindresume.saving.async_saver import AsyncSaver, save_job_for
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.retention import Policy
from mindresume.saving.save_request import SaveOptions, Step
from mindresume.saving.save_session import Resumed, SaveSession, open_save_session
from mindresume.saving.shard_writer import SaveTarget, clean_own_folder, mark_emergency, write_shard
from mindresume.saving.sync_saver import Outcome, Saver, SyncSaver
from mindresume.saving.uploader import Uploader
from mindresume.settings import Settings
from mindresume.storage.interface import Storage

_OTHERS = 10.0                          # seconds for the records of other ranks after an error


class CheckpointManager:
    """Every method is called by all ranks of ``group`` at the same points, ``settle`` and ``rescue`` excepted.

    ``policy``: which checkpoints stay. ``emit``: receives the events. ``pending``: the load attempt of the checkpoint that was
    loaded. ``since``: the time (``time.monotonic``) from which ``every_seconds`` counts, None: now.
    ``step_end``, ``end`` and ``save`` raise SaveError if a save failed and ``on_save_error`` is ``raise``, or after
    ``max_failed_saves`` failures in a row; LeaseHeldError if another job saves into the folder; RemoteError if an upload
    failed and ``on_save_error`` is ``raise``."""

    def __init__(self, storage: Storage, group: Group, settings: Settings, options: SaveOptions, policy: Policy,
                 emit: Emit = ignore, pending: PendingLoadAttempt | None = None, since: float | None = None):
        self.storage, self.group, self.settings, self.options, self.policy, self.emit = (
            storage, group, settings, options, policy, emit)
        self.pending = pending or PendingLoadAttempt()
        self.session: SaveSession | None = None
        self.preemption: PreemptionHandler | None = None
        self._saver: Saver | None = None
        self._uploader: Uploader | None = None
        self._saved: set[int] = set()
        self._stalls: dict[int, float] = {}                 # seconds that the training stood still, of saves not heard of yet
        self._failed_in_a_row = 0
        self._skipped = 0
        self._seen = 0
        self._seconds_since = time.monotonic() if since is None else since
        self._errors: list[Exception] = []                  # of the end: the first is raised when all of it is done

    @property
    def place(self) -> SaveTarget:
        return self.session.place

    @property
    def saving(self) -> bool:
        """Whether a save is possible: from ``begin`` to the end."""
        return self._saver is not None

    # ---- start -----------------------------------------------------------------------------------------------------

    def open(self, shared_groups: dict[str, SharedGroups] | None = None, origin: Resumed | None = None,
             number_runs: Callable[[Storage, str], None] = lambda storage, root: None,
             leases: dict[str, Lease] | None = None) -> SaveSession:
        """Acquires the directory. Arguments and errors as of ``open_save_session``."""
        options = self.options
        self.session = open_save_session(self.storage, options.root, options.prefix, self.group, self.emit,
                                         self.settings.heartbeat, options.iterations, shared_groups, origin, number_runs, leases)
        place = self.session.place
        prefix = options.prefix if options.iterations else stem(options.prefix, place.rank, self.session.suffix)
        self.emit(RunOpened(place.run, place.root, prefix, place.world_size))
        return self.session

    def begin(self, step: int, resumed: Resumed | None = None, remote: RemoteCheckpoints | None = None) -> None:
        """Cleans up what earlier runs left, and makes the saver. ``step``: after which the training begins. ``resumed``: the
        checkpoint that it has loaded. ``remote``: where checkpoints are uploaded to."""
        share = share_of_rank(self.group) if self.options.async_save else UNKNOWN
        self._seen = step
        agreed(self.group, lambda: self._begin(share, resumed, remote), Waiting("cleaning up"))     # rank 0 for all that is there
        atexit.register(self.settle)            # where no hook sees how the training ends; before the end of the uploader

    def _begin(self, share: int, resumed: Resumed | None, remote: RemoteCheckpoints | None) -> None:
        self.session.begin(resumed)
        try:
            for name in clean_own_folder(self.place):
                self.emit(Notice(f"removed {name}, left half-written by an earlier run"))
        except OSError as error:
            self.emit(warning(f"{self.options.shown or self.options.root} is not cleaned up: {error}"))
        self._saver = self._make_saver(self.policy if self.session.is_leader else None, share)
        self._uploader = self.session.peer_state.uploads = self._start_uploader(remote) if remote is not None else None

    def _make_saver(self, policy: Policy | None, share: int) -> Saver:
        """Makes the saver. ``policy``: on rank 0, which first commits what earlier runs completed. ``share``: bytes for a
        copy."""
        settings, kind = self.settings, self.options.async_save
        work = save_job_for(self.place, policy, self.emit)
        work.begin()
        if not kind:
            return SyncSaver(work)
        return AsyncSaver(self.place, policy, kind if isinstance(kind, str) else "thread", int(settings.staging_gib * 2**30),
                          settings.commit_timeout, self.emit, share)

    def _start_uploader(self, remote: RemoteCheckpoints) -> Uploader:
        """Nodes that share no disk upload what all of them have; where they do not exchange that, they remove nothing."""
        patience, apart = self.settings.commit_timeout, self.session.shared_groups.is_split
        uploader = Uploader(remote, self.place, self.policy, patience, self.emit,
                            only_scheduled=apart and self.settings.preemption_check_interval > 0).start()
        atexit.register(uploader.finish_at_exit, patience)      # a training that ends with an error: what it saved still goes
        return uploader

    def meet(self) -> None:
        """Counts the hosts, on all ranks together, for the load attempt of the checkpoint that was loaded."""
        hosts = len(set(report(self.group, socket.gethostname)))
        load_attempt = self.pending.attempt
        if load_attempt is not None:
            load_attempt.run, load_attempt.hosts = self.place.run, hosts

    def listen(self, callbacks: Iterable[Any] = (), before: Mapping[str, Version | None] | None = None) -> None:
        """Notes from here on requests to stop the training. Arguments as of ``PreemptionHandler``."""
        self.preemption = PreemptionHandler(self.group, self.settings.preemption_check_interval, callbacks,
                                            local_state=self.session.peer_state.local_state,
                                            on_peer_state=self.session.on_peer_state, before=before)
        if self.preemption.ignored:
            self.emit(warning(self.preemption.ignored))
        self.preemption.listen()

    def begin_load_attempt(self) -> None:
        """Records that the first step is about to be computed. Nothing is recorded for a job that was asked to stop before: if it
        is killed because that takes too long, the checkpoint is not the reason."""
        load_attempt = self.pending.attempt
        if load_attempt is None or load_attempt.begun or (self.preemption is not None and self.preemption.signalled):
            return
        try:
            load_attempt.begin()
        except OSError as error:
            self.emit(Notice(f"the load attempt cannot be recorded, so the crash-loop protection is off: {error}"))

    # ---- each step -------------------------------------------------------------------------------------------------

    def step_end(self, step: Step) -> str:
        """Saves the step if it is due. Returns why the training is to stop now, with this step saved; empty: it goes on."""
        self.pending.end()
        if self._saver is not None:
            self._learn(self._saver.poll())
        if self.session is not None:
            self.session.reached(step.number)
        if self._uploader is not None:
            self._heed(self._uploader.poll())
        step.save(self, False)
        return self._leave_if_asked(step)

    def _leave_if_asked(self, step: Step) -> str:
        """Saves this step on all ranks and returns the reason, after SIGTERM or a graceful exit on any rank; empty: the training
        goes on."""
        if self.preemption is None or self._saver is None:
            return ""
        reason = self.preemption.at(step.number)
        if reason:
            self.emit(PreemptionRequested(step.number, reason))
            self._save_last(step)
        return reason

    def save(self, step: Step, force: bool = False) -> None:
        """Saves the step if it is due; with ``force`` in any case, unless it is saved already."""
        if self._saver is not None and self.wants(step.number, force):
            self.write(step)

    def wants(self, step: int, force: bool = False) -> bool:
        """Returns whether ``step`` is saved now, the same on all ranks. Called once a step."""
        before, self._seen = (self._seen if self._seen < step else step - 1), step
        if step in self._saved or not (force or self._is_due(before, step)):
            return False
        return force or not self._is_skipped(step)

    def write(self, step: Step) -> None:
        """Saves the step."""
        try:
            self.hand_over(step)
        except LeaseHeldError:                            # no later save can succeed
            raise
        except SaveError as error:                          # what could not even be handed to the saver
            self._failed(step.number, error)
        if isinstance(self._saver, SyncSaver):              # it is written already
            self._learn(self._saver.poll())

    def hand_over(self, step: Step) -> None:
        """Collects what is to be saved and gives it to the saver. Raises SaveError if that is not possible."""
        started = time.monotonic()
        self.emit(SaveBegun(step.number))
        save = step.collect()
        name = iteration_name(save.step) if self.place.iterations else os.path.basename(save.shard.files[0].path)
        step.record(save, name)
        self._saved.add(save.step)
        self._saver.save(save)
        self._stalls[save.step] = time.monotonic() - started
        step.taken(save, name)
        if not isinstance(self._saver, SyncSaver):
            self.emit(SaveStaged(save.step, name, self._stalls[save.step]))

    def _is_due(self, before: int, step: int) -> bool:
        if self.options.every_steps and self.options.every_steps > 0:
            return crosses_multiple(before, step, self.options.every_steps)
        seconds = self.options.every_seconds
        if not seconds or seconds <= 0:
            return False
        due = time.monotonic() - self._seconds_since > seconds
        if self.group.size > 1:                             # clocks differ: rank 0 decides for all
            due = self.group.broadcast(b"1" if due else b"0") == b"1"
        if due:
            self._seconds_since = time.monotonic()
        return due

    def _is_skipped(self, step: int) -> bool:
        """Returns whether ``async_when_busy: skip`` leaves the step out: on all ranks as soon as one of them is still writing, or
        none of the following saves would ever be complete on all of them. The only exchange in a save, in the training thread,
        like a step's own."""
        if self.settings.async_when_busy != "skip" or not self.options.async_save:
            return False
        busy = any(report(self.group, self._saver.busy))
        if busy:
            self._skipped += 1
            self.emit(SaveSkipped(step, "the previous save is still being written", self._skipped))
        return busy

    # ---- what became of it -----------------------------------------------------------------------------------------

    def _learn(self, outcomes: list[Outcome]) -> None:
        """Handles the outcomes of saves. Raises SaveError as configured."""
        for outcome in outcomes:
            self._hear(outcome)
            if outcome.error is not None:
                self._failed(outcome.step, outcome.error)
            else:
                self._failed_in_a_row = 0

    def _hear(self, outcome: Outcome) -> None:
        if not outcome.saved:
            self._saved.discard(outcome.step)
            return
        if self._uploader is not None:
            self._uploader.enqueue(outcome.step)
        self.emit(SaveWritten(outcome.step, outcome.size, outcome.seconds, self._stalls.pop(outcome.step, None)))

    def _failed(self, step: int, error: SaveError) -> None:
        self._emit_failure(step, str(error))
        if self.settings.on_save_error == "raise" or 0 < self.settings.max_failed_saves <= self._failed_in_a_row:
            raise error

    def _emit_failure(self, step: int | None, reason: str) -> None:
        self._failed_in_a_row += 1
        self.emit(SaveFailed(step, reason, self._failed_in_a_row))

    def _heed(self, errors: list[RemoteError]) -> None:
        """Handles errors of uploads. The checkpoints themselves are good, so only ``on_save_error: raise`` stops the training for
        them."""
        if errors and self.settings.on_save_error == "raise":
            raise errors[0]

    # ---- the end ---------------------------------------------------------------------------------------------------

    def end(self, step: Step, closing: Callable[[], None] = lambda: None) -> None:
        """Saves the last step, waits until everything is committed and uploaded, and releases the directory; no rank is done much
        before the others. ``closing()`` is called when nothing can be saved any more. Errors from then on, and that of the last
        save, are raised when all of this is done."""
        deadline = self.settings.commit_timeout
        if self._saver is not None:
            self._save_last(step)
            saver, self._saver = self._saver, None
            closing()
            atexit.unregister(self.settle)
            outcomes: list[Outcome] = []
            self._together("committing the last step", lambda: outcomes.extend(saver.finish(deadline)))
            for outcome in outcomes:
                self._keep_error(partial(self._learn, [outcome]))
        uploader, self._uploader = self._uploader, None
        errors: list[RemoteError] = []
        if uploader is not None:
            self._together("uploading the last step", lambda: errors.extend(uploader.finish(deadline)))
        for error in errors:
            self._keep_error(partial(self._heed, [error]))
        if self.session is not None:
            self._together("releasing the directory", self.session.release)
        self._listen_no_more()
        self._raise_together()

    def _raise_together(self) -> None:
        """Raises the first error of the end. Ranks that have none raise that another rank ends with one: a later exchange would
        wait for it."""
        failing: list[int] = []
        self._keep_error(lambda: failing.extend(
            rank for rank, (_, fails) in enumerate(report(self.group, lambda: [True, bool(self._errors)])) if fails))
        if self._errors:
            raise self._errors[0]
        if failing:
            raise SaveError(f"the training ends with an error, because rank {listed(failing)} does: its log names it")

    def _keep_error(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:          # whatever it is, the other parts of the end are done before
            self._errors.append(error)

    def _together(self, what: str, work: Callable[[], None]) -> None:
        """Does ``work`` on all ranks, which follow it with short exchanges: rank 0 may commit and upload for minutes when the
        others are done. Errors are kept. After a failed exchange, because another rank is lost, no other one follows."""
        patience = max(Waiting.patience, 3 * self.settings.commit_timeout)
        try:
            followed(self.group, lambda: self._keep_error(work), Waiting(what, patience=patience))
        except Exception as error:          # of the exchange: the work keeps its own
            self._errors.append(error)
            self.group = SingleProcess(self.group.rank)

    def _save_last(self, step: Step) -> None:
        """Saves the last step, on all ranks that have not saved it, or whose save of it failed. Collecting parameters can be an
        exchange, so the other ranks take part in it, and write nothing. If one of them is going to end with an error, no rank
        begins, and all end: the next exchange would wait for the one that is gone. An error of this last save is kept until the
        next exchange has sent it to the others."""
        number, deadline = step.number, self.settings.commit_timeout

        def written() -> list[bool]:
            try:
                self._learn(self._saver.wait(deadline))
            except SaveError as error:
                self._errors.append(error)
            return [number in self._saved, bool(self._errors)]
        rows = report(self.group, written, Waiting(f"writing what was begun before step {number}", watched))
        if self._errors:
            raise self._errors[0]
        failing = [rank for rank, (_, fails) in enumerate(rows) if fails]
        if failing:
            raise SaveError(f"the training ends at step {number}, because rank {listed(failing)} ends with an error of a save, "
                            f"which the log of that rank tells. What all ranks have written counts; start the same command again")
        if all(saved for saved, _ in rows):
            return
        self._keep_error(step.collect if number in self._saved else lambda: step.save(self, True))

    def settle(self) -> None:
        """Finishes what was begun to be saved, after the training ended with an error. Rank 0 waits some seconds for the records
        of the others: on the same error they save the same step. Raises nothing, because the training's error is being raised."""
        atexit.unregister(self.settle)
        saver, self._saver = self._saver, None
        try:
            if saver is not None and saver.busy():
                self.emit(warning("the training ended with an error; the save in flight is finished first"))
            outcomes = saver.finish(self.settings.commit_timeout, _OTHERS) if saver is not None else []
            for outcome in outcomes:
                self._hear(outcome)
                if outcome.error is not None:
                    self._emit_failure(outcome.step, str(outcome.error))
        except Exception as error:
            self._emit_failure(None, f"the last save was not finished: {error}")
        finally:
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        """Gives SIGTERM back its former handler."""
        if self.preemption is not None:
            self.preemption.close()

    def rescue(self, step: Step) -> bool:
        """Saves all that this rank holds of the last step, after other ranks were lost. It becomes a checkpoint if the ranks that
        are left hold everything. Runs in a thread of MindIO: no exchange between ranks, nothing is removed, nothing waits for
        others. Returns False if it fails; then another way may be tried. Raises SaveError if that would wait for the ranks that
        are lost."""
        number = step.number
        try:
            for outcome in self._saver.wait(self.settings.commit_timeout):
                if not outcome.saved:
                    self._saved.discard(outcome.step)
            mark_emergency(self.place, number)
            if number not in self._saved:
                write_shard(self.place, step.rescue())
                self._saved.add(number)
        except Exception as error:          # whatever it is: these ranks have nothing else left
            if step.exchanges():
                raise SaveError(f"step {number} was not saved before the end on rank {self.place.rank}: {error}") from error
            self._emit_failure(number, f"step {number} was not saved before the end: {error}; mindformers saves it")
            return False
        self.emit(warning(f"other ranks are lost; rank {self.place.rank} saved step {number}"))
        return True
