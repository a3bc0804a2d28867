"""Commits, on rank 0, the steps that many ranks have saved, without a collective; saves in the
calling thread.

    saver = SyncSaver(target, policy)               # or AsyncSaver(...): the same five methods
    saver.save(Save(shard, extras))
    for outcome in saver.poll(): ...  # after each step: outcomes of saves, errors included
    saver.finish(timeout)  # at the end: everything is written and committed, or named in an outcome

    every rank   publish the files of weights ─▶ publish the record of what was written
        (shard_writer.py)
    rank 0       records of all ranks there? ─▶ check them against the files ─▶ manifest ─▶ pointers
        ─▶ prune

The records of all ranks of one run and step *are* the commit; the manifest says that they were
checked. A process that dies between two of these operations leaves the previous checkpoint as it
was, and at worst a file that no manifest names. No rank waits while the training runs: rank 0
checks again after each later step, and at the end of the training until a timeout.

Pointers: ``meta.json`` of the first rank in rank folders; of an iteration folder its name and the
tracker (iteration_publisher.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter

from mindresume import runtime
from mindresume.coordination.lease import WITHOUT_NUMBER, ReadLocks, fence
from mindresume.coordination.lease_acquisition import EndedRuns
from mindresume.errors import LeaseHeldError, OutOfSpaceError, RecordError, SaveError
from mindresume.events import (
    CheckpointsRemoved,
    CommitDelayed,
    Emit,
    Event,
    ProgressReporter,
    SaveAbandoned,
    SaveCommitted,
    ignore,
    warning,
)
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.rank_folders import META, folder_name, meta_json, parse_name, ranks_of
from mindresume.formats.records import ReadManifests, find_attempts, scan_records
from mindresume.formats.scan import scan
from mindresume.formatting import listed
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    TRASH,
    Manifest,
    Record,
    attempt_name,
    attempts,
    read_record,
    record_name,
    record_rank,
)
from mindresume.saving import iteration_publisher
from mindresume.saving.garbage_collector import carry_out
from mindresume.saving.retention import KEEP_ALL, KeepAll, Plan, Policy, plan
from mindresume.saving.shard_writer import (
    Outcome,
    Save,
    SaveTarget,
    is_committed,
    write_extra_weights,
    write_ledger,
    write_shard,
)
from mindresume.storage import Storage, parallel, publish, publish_json, read_json


def is_in_meta(directory: CheckpointDir, candidate: Candidate) -> bool:
    """Returns whether ``meta.json`` names ``candidate``, which lies in rank folders; also if it
    cannot be read now: it is left alone."""
    path = candidate.first.path if candidate.first else ""
    parsed = parse_name(os.path.basename(path))
    try:
        return parsed is None or read_json(
            directory.storage, directory.path(os.path.dirname(path), META)
        ) == meta_json(parsed)
    except (FileNotFoundError, ValueError):
        return False
    except OSError:
        return True


class Committer:
    """Commits, on rank 0. Call ``poll(step)`` after each own save, ``poll()`` after each step,
    ``finish()`` at the end.

    An error of the file system is not raised: it is in an event, the step stays uncommitted and is
    tried again. Raises LeaseHeldError if a later run has acquired the directory.

    Args:
        policy: of retention.
        emit: receives an event for each commit, removal and delay.
    """

    def __init__(
        self,
        target: SaveTarget,
        policy: Policy = KEEP_ALL,
        emit: Emit = ignore,
    ):
        self.target = target
        self.policy = policy
        self.emit = emit
        self.pending: list[int] = []
        self.committed: list[int] = []
        self._complete: set[str] = set()  # names of folders of records that have a manifest
        self._emitted: set[Event] = set()
        self._manifests = ReadManifests()
        self._pointers_are_old = False  # the pointers name an older step
        self._has_single_meta = False  # only one meta.json is left
        # why a pending step was not committed at the last attempt
        self._reasons: dict[int, str] = {}

    @cached_property
    def read_locks(self) -> ReadLocks:
        """What is being read is not removed."""
        return ReadLocks(self.target)

    def poll(self, saved: int | None = None, by_name: bool = False) -> list[int]:
        """Commits every pending step that all ranks have recorded. Returns the steps still pending.
        ``saved``: another one, which this rank has saved. ``by_name``: looks up records that are
        not listed. An NFS listing can be a minute old, and a lookup in vain is cached for as long:
        so only at the last attempt."""
        self.pending += [] if saved is None else [saved]
        for step in list(self.pending):
            if step not in self.pending:
                # given up or committed late, with another one
                continue
            try:
                missing = missing_ranks(self.target, step, by_name)
                # or its folder has its final name: the writer died right after the commit
                if missing:
                    if not (self.target.iterations and is_committed(self.target, step)):
                        continue
                else:
                    fence(self.target, self.target.run)
                    manifest = publish_manifest(self.target, step, emit=self.emit)
                    self._after_commit(step, manifest)
            except (OSError, RecordError) as error:
                # once, not five times a second until the timeout
                if self._reasons.get(step) != str(error):
                    self.emit(CommitDelayed(step, str(error)))
                self._reasons[step] = str(error)
                continue
            self.committed.append(step)
            for older in [other for other in self.pending if other < step]:
                self.emit(
                    SaveAbandoned(
                        older, f"not all ranks have saved it, and all have saved step {step}"
                    )
                )
            self.pending = [other for other in self.pending if other > step]
        return self.pending

    def finish(self, timeout: float, pause: float = 0.2) -> dict[int, list[int]]:
        """Waits until every pending step is committed, at most ``timeout`` seconds. Returns {step:
        missing ranks}.

        Raises OSError, after the events, if it is not known which ranks have recorded a step: all
        may have, so the training ends with an error, and the next start commits it."""
        until = runtime.monotonic() + timeout
        while self.poll() and runtime.monotonic() < until:
            runtime.sleep(pause)
        self.poll(by_name=True)
        left: dict[int, list[int]] = {}
        unknown: OSError | None = None
        for step in self.pending:
            try:
                ranks = left[step] = missing_ranks(self.target, step)
            except OSError as error:
                unknown = error
                self.emit(
                    SaveAbandoned(
                        step,
                        f"{error}, after {timeout:.0f} s; the next start commits it if all ranks "
                        "have saved it",
                    )
                )
                continue
            reason = (
                f"no record of rank {listed(ranks)}"
                if ranks
                else self._reasons.get(step, "it was given up")
            )
            self.emit(
                SaveAbandoned(
                    step,
                    f"{reason} within {timeout:.0f} s; a resume takes an older step",
                    tuple(ranks),
                )
            )
        if unknown is not None:
            raise unknown
        return left

    def _after_commit(self, step: int, manifest: Manifest) -> None:
        """Commits earlier steps that were only listed late, updates the pointers, and removes older
        checkpoints. An error of the pointers does not undo the commit, and the next commit tries
        again. A checkpoint that old pointers name stays for one more save, not longer."""
        self._complete.add(attempt_name(step, self.target.run))
        for older in [other for other in self.pending if other < step]:
            try:
                if missing_ranks(self.target, older, by_name=True):
                    continue  # it is removed as incomplete
                publish_manifest(self.target, older, emit=self.emit)
            except (OSError, RecordError) as error:
                self._reasons[older] = str(error)
                continue
            self.pending.remove(older)
            self.committed.append(older)
        try:
            self._update_pointers(self.target, step, manifest.files[0][0].path)
            may_remove, self._pointers_are_old = True, False
        except OSError as error:
            self.emit(
                warning(f"step {step} is committed, but its pointers are not updated: {error}")
            )
            may_remove, self._pointers_are_old = self._pointers_are_old, True
        try:
            if may_remove:
                self.prune()
        except OSError as error:
            self.emit(
                warning(f"step {step} is committed, but older ones are not removed now: {error}")
            )

    def _update_pointers(self, target: SaveTarget, step: int, first_path: str) -> None:
        """Updates the pointers, so that mindformers without mindresume finds the same checkpoint.
        Iteration folders that an error left without their final names get them first.
        ``first_path``: the first file of the first rank.

        One ``meta.json``, in the folder of the first rank, is enough: mindformers takes the oldest
        step that any of them names and ignores folders without one. Older ones in other folders are
        removed once a run, after the first commit, while the step that they name is still there.
        """
        if target.iterations:
            self._publish_iterations(step)
            return
        storage, first = target.storage, target.ranks[0]
        if publish_meta(target, first_path, self.target.run) and not self._has_single_meta:
            names = storage.list(target.root)
            others = [
                target.path(folder_name(rank), META) for rank in ranks_of(names) if rank != first
            ]
            parallel(storage, partial(_remove_meta, storage), others)
            self._has_single_meta = True

    def _publish_iterations(self, step: int) -> None:
        """Publishes the iteration folder of ``step``, after those of this run that an error left
        without their final names. The tracker is set for each: if it named an older step than the
        newest folder, without an intent, it would count as set back by hand."""
        for attempt in find_attempts(self.target, top=[]):
            if (
                attempt.run == self.target.run
                and attempt.step < step
                and attempt.iteration_dir
                and MANIFEST in attempt.content
            ):
                iteration_publisher.publish_iteration(self.target, attempt.step, emit=self.emit)
        iteration_publisher.publish_iteration(self.target, step, emit=self.emit)

    def recover(self) -> list[int]:
        """Commits and publishes what earlier runs completed before they died. Returns the steps,
        newest first."""
        recovered = []
        found = scan_records(self.target)[0]
        order = found
        # the tracker may have been set back
        if any(candidate.iteration_dir.startswith(FOLDER) for candidate in found):
            order = list(scan(self.target).candidates)
        usable = [candidate for candidate in order if candidate.problem is None]
        newest = usable[0].name if usable else ""
        # Hidden iteration folders that a resume takes before all others. The tracker is set for
        # each, up to the newest, as in ``_publish_iterations``.
        published = next(
            (at for at, c in enumerate(usable) if not c.iteration_dir.startswith(FOLDER)),
            len(usable),
        )
        ahead = {c.name for c in usable[:published] if c.order <= usable[0].order}
        placed = {candidate.name for candidate in usable}
        # the newest last: the pointers name it
        for candidate in reversed(found):
            # the second listing could not read it: without its order the tracker would be
            if candidate.name not in placed:
                continue  # wrong, so a later run publishes it
            making = candidate.iteration_dir.startswith(FOLDER)
            if (
                candidate.problem is not None
                or candidate.missing_ranks
                or (candidate.committed or candidate.iteration_dir)
                and not making
            ):
                continue
            # of one node, copied here
            if candidate.local_ranks and not self.target.local_ranks:
                continue
            target = replace(
                SaveTarget.of(self.target, candidate),
                samples_in_common=self.target.samples_in_common,
            )
            step = candidate.step or 0
            try:
                if not candidate.committed:
                    manifest = publish_manifest(target, step, self.target.run)
            except (OSError, RecordError) as error:
                self.emit(CommitDelayed(step, str(error), candidate.run))
                continue
            if making and any(
                c.step == step and c.committed and c.order > candidate.order for c in found
            ):
                # a later run has saved this step again
                continue
            if making:
                iteration_publisher.publish_iteration(
                    target, step, newest=candidate.name in ahead, emit=self.emit
                )
            elif candidate.name == newest:
                self._update_pointers(target, step, manifest.files[0][0].path)
            self.emit(
                SaveCommitted(
                    step,
                    len(candidate.files),
                    sum(file.size or 0 for file in candidate.all_files),
                    candidate.run if candidate.run != self.target.run else None,
                )
            )
            recovered.append(step)
        if usable and usable[0].committed and not usable[0].iteration_dir:
            self._finish_meta(usable[0])
        if any(candidate.iteration_dir for candidate in found):
            iteration_publisher.finish_tracker(
                self.target, scan_records(self.target)[0], self.target.run
            )
        return recovered[::-1]

    def _finish_meta(self, newest: Candidate) -> None:
        """Lets ``meta.json`` name ``newest``, the newest checkpoint with records, if its job died
        between the commit and this pointer. If mindformers alone has saved a newer one since, that
        pointer is right."""
        if newest.first is None or is_in_meta(self.target, newest):
            return
        if (
            next((c.name for c in scan(self.target).candidates if c.problem is None), "")
            == newest.name
        ):
            target, step = SaveTarget.of(self.target, newest), newest.step or 0
            # or between the rename of the manifest and the flush: a pointer must not outlive it
            target.storage.sync(target.attempt(step))
            self._update_pointers(target, step, newest.first.path)

    # ---- removal ---------------------------------------------------------------------------------

    def prune(self) -> list[int]:
        """Removes what the policy does not keep, and saves that never completed
        (``mindresume.saving.garbage_collector``). Returns the steps of the former."""
        if isinstance(self.policy, KeepAll):
            # It removes only saves that never completed, which is certain of none that has a
            # manifest, is published, or cannot be listed. Removals in progress are finished, and
            # read locks of dead readers removed.
            names = self.target.storage.list(self.target.path(FOLDER))
            others = [name for name, _, _ in attempts(names) if name not in self._complete]
            found = find_attempts(self.target, others, top=[]) if others else []
            self._complete |= {each.name for each in found if MANIFEST in each.content}
            if not any(name.startswith((TRASH, WITHOUT_NUMBER)) for name in names) and all(
                each.error or each.name in self._complete for each in found
            ):
                return []
        made = plan(
            self.target,
            self.policy,
            self.read_locks(),
            self.target.run,
            EndedRuns(self.target, self.target.run),
            self.target.lineage,
            self._manifests,
        )
        removed = carry_out(self.target, made, self.read_locks, self._emit_once, self._manifests)
        steps = [candidate.step or 0 for candidate in made.to_delete if candidate in removed]
        if steps:
            self.emit(CheckpointsRemoved(tuple(steps), self.target.root, str(self.policy)))
        return steps

    def reclaim_space(self, step: int) -> list[int]:
        """Removes, when the disk is full, incomplete saves of this run before ``step``, except the
        latest of them, which a slow rank can still be writing. Otherwise they stay until a later
        save is committed, and on a full disk none would be. Returns their steps."""
        found, _, _ = scan_records(self.target)
        own = sorted(
            (
                c
                for c in found
                if c.run == self.target.run
                and not c.maybe_completed
                and (c.step or 0) < step
                # not only listed late
                and missing_ranks(self.target, c.step or 0, by_name=True)
            ),
            key=attrgetter("step"),
        )
        removed = carry_out(
            self.target, Plan(orphans=tuple(own[:-1])), self.read_locks, self._emit_once
        )
        steps = [candidate.step or 0 for candidate in removed]
        self.pending = [other for other in self.pending if other not in steps]
        if steps:
            self.emit(CheckpointsRemoved(tuple(steps), self.target.root, is_incomplete=True))
        return steps

    def _emit_once(self, event: Event) -> None:
        """Emits ``event`` only once: a removal that fails is tried again after every save."""
        if event not in self._emitted:
            self._emitted.add(event)
            self.emit(event)


def missing_ranks(target: SaveTarget, step: int, by_name: bool = False) -> list[int]:
    """Returns the ranks that have not recorded ``step``. ``by_name``: looks up records that are not
    listed."""
    storage, attempt = target.storage, target.attempt(step)
    there = set(map(record_rank, storage.list(attempt)))
    missing = [rank for rank in target.ranks if rank not in there]
    if not missing or not by_name:
        return missing
    found = parallel(
        storage, storage.status, [os.path.join(attempt, record_name(rank)) for rank in missing]
    )
    return [rank for rank, status in zip(missing, found, strict=True) if status is None]


def publish_manifest(target: SaveTarget, step: int, tag: str = "", emit: Emit = ignore) -> Manifest:
    """Publishes the manifest of the records, after a check of each against its files: that is
    the commit. Raises RecordError or OSError if they do not match. ``tag``: of
    the temporary name; empty: the run that saved it."""
    records = parallel(target.storage, partial(_record_of, target, step), target.ranks)
    first = records[0]
    for rank, record in zip(target.ranks, records, strict=True):
        if (record.run, record.rank, record.state.step, record.world_size) != (
            first.run,
            rank,
            first.state.step,
            target.world_size,
        ):
            raise RecordError(
                f"the record of rank {rank} is of run {record.run}, rank {record.rank}, step "
                f"{record.state.step}, {record.world_size} ranks; expected run {first.run}, step "
                f"{first.state.step}, {target.world_size} ranks"
            )
    manifest = Manifest.from_records(records, target.local_ranks)
    if target.iterations:
        manifest = replace(
            manifest,
            metadata_files=iteration_publisher.write_metadata_files(
                target, manifest.state, records
            ),
        )
    # A rank may be between the rename of its record and the flush: a manifest must not outlive
    # a record that it names.
    target.storage.sync(target.attempt(step))
    publish(
        target.storage,
        os.path.join(target.attempt(step), MANIFEST),
        [manifest.encode()],
        tag or target.run,
    )
    size = sum(file.size or 0 for files in manifest.files for file in files)
    emit(SaveCommitted(step, len(manifest.files), size))
    return manifest


def publish_meta(target: SaveTarget, first_path: str, tag: str) -> bool:
    """Lets ``meta.json`` name the checkpoint of ``first_path``, the first file of the first rank.
    Returns False if that is no name of mindformers."""
    parsed = parse_name(os.path.basename(first_path))
    if parsed is not None:
        path = target.path(folder_name(target.ranks[0]), META)
        publish_json(target.storage, path, meta_json(parsed), tag)
    return parsed is not None


def _record_of(target: SaveTarget, step: int, rank: int) -> Record:
    """Returns the record of a rank, after a check of its files."""
    storage, data_dir = target.storage, target.data_dir(step)
    with storage.open(os.path.join(target.attempt(step), record_name(rank))) as file:
        record = read_record(file)
    for row in record.files:
        found = storage.status(os.path.join(data_dir, row.path))
        if found is None or found.size != row.size:
            raise RecordError(
                f"{row.path}: recorded {row.size} bytes, found "
                f"{'no file' if found is None else found.size}"
            )
    return record


def _remove_meta(storage: Storage, path: str) -> None:
    if storage.status(path) is not None:
        storage.remove(path)
        storage.sync(os.path.dirname(path))


class SyncSaver:
    """Writes and commits the saves of one rank in the thread or process that calls it. Errors of a
    save are in its outcome. Raises LeaseHeldError, because no later save can succeed.

    Args:
        policy: of retention, on rank 0, which commits and prunes; None on other ranks.
        emit: receives the events.
    """

    def __init__(self, target: SaveTarget, policy: Policy | None = None, emit: Emit = ignore):
        self.target, self.emit = target, emit
        self.committer = Committer(target, policy, emit) if policy is not None else None
        self._outcomes: list[Outcome] = []

    def begin(self) -> None:
        """Commits, on rank 0, what earlier writers completed but did not commit. If the file system
        fails, emits a warning: the next writer commits it, and until then such a checkpoint counts
        all the same."""
        if self.committer is None:
            return
        try:
            self.committer.recover()
        except OSError as error:
            self.committer.emit(
                warning(f"complete saves of earlier runs are not committed now: {error}")
            )

    def save(self, save: Save) -> None:
        """Saves, now or in the background. The arrays may change as soon as it returns."""
        outcome = self.write(save)
        self._outcomes.append(outcome)
        if self.committer is not None and outcome.saved:
            self.committer.poll(outcome.step)

    def write(self, save: Save) -> Outcome:
        """Writes this rank's shard and extra weights. Raises LeaseHeldError; any other SaveError is
        in the outcome."""
        started = runtime.monotonic()
        try:
            written = write_shard(
                self.target,
                save.shard,
                progress=ProgressReporter(f"saving step {save.step}", self.emit),
            )
        except LeaseHeldError:
            raise
        except SaveError as error:
            if self.committer is not None and isinstance(error, OutOfSpaceError):
                try:
                    self.committer.reclaim_space(save.step)
                except OSError as trouble:
                    self.committer.emit(warning(f"no space could be freed: {trouble}"))
            return Outcome(save.step, False, error)
        if save.ledger:
            write_ledger(self.target, save)
        size = sum(file.size or 0 for file in written.record.files)
        extra_error = None
        try:
            for extra in save.extras:
                write_extra_weights(self.target.storage, extra, self.target.run)
        except SaveError as error:
            extra_error = error
        # Rank 0 does not commit what it could not flush: the commit would remove older checkpoints.
        return Outcome(
            save.step,
            written.durability_error is None,
            written.durability_error or extra_error,
            size,
            runtime.monotonic() - started,
        )

    def busy(self) -> bool:
        """Returns whether ``save`` would have to wait."""
        return False

    def poll(self) -> list[Outcome]:
        """Returns the outcomes since the last call. Commits steps that other ranks have completed.
        Does not wait."""
        if self.committer is not None and self.committer.pending:
            self.committer.poll()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self, timeout: float) -> list[Outcome]:
        """Returns outcomes like ``poll``, after every save so far is written, or after ``timeout``
        seconds."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def finish(self, timeout: float, record_timeout: float | None = None) -> list[Outcome]:
        """Returns outcomes like ``wait``. Rank 0 waits for the records of all ranks, at most
        ``record_timeout`` seconds (None: ``timeout``). Called once, at the end."""
        if self.committer is not None:
            self.committer.finish(timeout if record_timeout is None else record_timeout)
        return self.wait(0)
