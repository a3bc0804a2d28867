"""Saving one step from many ranks without a collective.

    every rank   publish the files of weights ─▶ publish the record of what was written         (shard_writer.py)
    rank 0       records of all ranks there? ─▶ check them against the files ─▶ manifest ─▶ pointers ─▶ prune

The records of all ranks of one run and step *are* the commit; the manifest says that somebody checked it. Whatever dies between
two of these operations leaves the previous checkpoint as it was, and at worst a file that no manifest names. Nobody waits for
anybody while the training runs: rank 0 looks again after each later step, and at the end of the training until a deadline.

Pointers: ``meta.json`` of the first rank in rank folders; of an iteration folder its name and the tracker
(iteration_publisher.py).
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile

from mindresume.coordination.lease import fence
from mindresume.errors import RecordError
from mindresume.events import CheckpointsRemoved, CommitDelayed, Emit, Event, SaveAbandoned, SaveCommitted, ignore, warning
from mindresume.formats.rank_folder_naming import META, folder_name, meta_json, parse_name
from mindresume.formats.rank_folders import ranks_of
from mindresume.formats.records import find_attempts, scan_records
from mindresume.formats.scan import scan
from mindresume.formatting import listed
from mindresume.model.manifest import FOLDER, MANIFEST, Manifest, Record, read_record, record_name, record_rank, run_sequence
from mindresume.saving import iteration_publisher
from mindresume.saving.garbage_collector import Plan, carry_out, plan
from mindresume.saving.retention import KEEP_ALL, Policy
from mindresume.saving.shard_writer import SaveTarget, is_committed
from mindresume.storage.atomic_publish import publish, publish_json
from mindresume.storage.operations import parallel


class Committer:
    """Commits, on rank 0. Call ``saved(step)`` after each own save, ``poll()`` after each step, ``finish()`` at the end.

    ``emit`` receives an event of each commit, removal and delay. No method raises for a file system that is in trouble: the step
    then stays uncommitted, is tried again, and the reason is in an event; a training never dies of a commit. Raises
    LeaseHeldError if a later run has acquired the directory.

    ``read_locks()``: {name of an attempt folder: who reads it}, which must not be removed now; ``ended(run)``: whether a run is
    over, so that its incomplete saves can be removed: called for runs with a smaller number only, by default all of those are.
    """

    def __init__(self, place: SaveTarget, policy: Policy = KEEP_ALL, emit: Emit = ignore,
                 clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
                 read_locks: Callable[[], Mapping[str, str]] = dict, ended: Callable[[str], bool] | None = None):
        self.place, self.policy, self.emit, self.clock, self.sleep = place, policy, emit, clock, sleep
        self.read_locks, self._ended = read_locks, ended
        self.pending: list[int] = []
        self.committed: list[int] = []
        self._emitted: set[Event] = set()
        self._late = False                          # the pointers are those of an older step
        self._alone = False                         # there is one meta.json only
        self._reasons: dict[int, str] = {}          # why a pending step could not be committed the last time

    def saved(self, step: int) -> None:
        self.pending.append(step)
        self.poll()

    def poll(self, by_name: bool = False) -> list[int]:
        """Commits every pending step whose records are complete. Returns the steps still pending. ``by_name``: as of
        ``try_commit``."""
        for step in list(self.pending):
            if step in self.pending and self._commits(step, by_name):
                for older in [other for other in self.pending if other < step]:
                    self.emit(SaveAbandoned(older, f"not all ranks have saved it, and all have saved step {step}"))
                self.pending = [other for other in self.pending if other > step]
        return self.pending

    def _commits(self, step: int, by_name: bool) -> bool:
        """Returns whether ``step`` is committed now."""
        try:
            missing = self.try_commit(step, by_name)
        except (OSError, RecordError) as error:
            if self._reasons.get(step) != str(error):           # once, not five times a second until the deadline
                self.emit(CommitDelayed(step, str(error)))
            self._reasons[step] = str(error)
            return False
        if not missing:
            self.committed.append(step)
        return not missing

    def finish(self, deadline: float, pause: float = 0.2) -> dict[int, list[int]]:
        """Waits until every pending step is committed, at most ``deadline`` seconds. Returns {step: missing ranks}."""
        until = self.clock() + deadline
        while self.poll() and self.clock() < until:
            self.sleep(pause)
        self.poll(by_name=True)
        left = {step: self._missing(step) for step in self.pending}
        for step, ranks in left.items():
            reason = f"no record of rank {listed(ranks)}" if ranks else self._reasons.get(step, "it was given up")
            self.emit(SaveAbandoned(step, f"{reason} within {deadline:.0f} s; a resume takes an older step", tuple(ranks)))
        return left

    def _missing(self, step: int, by_name: bool = False) -> list[int]:
        storage, attempt = self.place.storage, self.place.attempt(step)
        there = set(map(record_rank, storage.list(attempt)))
        missing = [rank for rank in self.place.ranks if rank not in there]
        if not missing or not by_name:
            return missing
        found = parallel(storage, lambda rank: storage.status(os.path.join(attempt, record_name(rank))), missing)
        return [rank for rank, status in zip(missing, found, strict=True) if status is None]

    def try_commit(self, step: int, by_name: bool = False) -> list[int]:
        """Commits ``step`` if all ranks have recorded it; else returns the ranks that have not. ``by_name``: a record that is not
        listed is looked for. On NFS a listing can be a minute old, and a name that was looked for in vain counts as absent for as
        long: so only when the step is not tried again."""
        missing = self._missing(step, by_name)
        if missing:                         # or its folder has its other name already: a writer died before it said so
            return [] if self.place.iterations and is_committed(self.place, step) else missing
        fence(self.place.storage, self.place.root, self.place.run)
        manifest = self._publish(step)
        for older in [other for other in self.pending if other < step]:
            if self._commits_late(older):
                self.pending.remove(older)
                self.committed.append(older)
        self._after(step, manifest)
        return []

    def _publish(self, step: int) -> Manifest:
        """Commits: publishes the manifest."""
        manifest = self._manifest(self.place, step)
        # A rank may stand between the rename of its record and the flush: a manifest must not outlive a record that it names.
        self.place.storage.sync(self.place.attempt(step))
        publish(self.place.storage, os.path.join(self.place.attempt(step), MANIFEST), [manifest.encode()], self.place.run)
        self.emit(SaveCommitted(step, len(manifest.files), sum(file.size or 0 for files in manifest.files for file in files)))
        return manifest

    def _commits_late(self, step: int) -> bool:
        """Commits ``step`` behind a later one, if it is complete and was only listed late; else it is removed, as one that never
        completed. Returns whether it is committed. The pointers follow the later one."""
        try:
            if self._missing(step, by_name=True):
                return False
            self._publish(step)
        except (OSError, RecordError) as error:
            self._reasons[step] = str(error)
            return False
        return True

    def _after(self, step: int, manifest: Manifest) -> None:
        """Updates the pointers and prunes. The commit stands, whatever fails here; it is done again next time. What old pointers
        lead to stays for one save more, but not for ever."""
        try:
            self._point(self.place, manifest)
            pointed, self._late = True, False
        except OSError as error:
            self.emit(warning(f"step {step} is committed, and what points to it is not changed: {error}"))
            pointed, self._late = self._late, True
        if pointed:
            try:
                self.prune()
            except OSError as error:
                self.emit(warning(f"step {step} is committed, and older ones are not removed now: {error}"))

    def _manifest(self, place: SaveTarget, step: int) -> Manifest:
        """Makes the manifest from the records, each checked against its files. Raises RecordError or OSError if something does
        not fit."""
        storage, attempt, data_dir = place.storage, place.attempt(step), place.data_dir(step)

        def read(rank: int) -> tuple[Record, str]:
            with storage.open(os.path.join(attempt, record_name(rank))) as file:
                record, checksum = read_record(file)
            for row in record.files:
                found = storage.status(os.path.join(data_dir, row.path))
                if found is None or found.size != row.size:
                    raise RecordError(f"{row.path}: recorded {row.size} bytes, found "
                                      f"{'no file' if found is None else found.size}")
            return record, checksum

        records = parallel(storage, read, place.ranks)
        first = records[0][0]
        for rank, (record, _) in zip(place.ranks, records, strict=True):
            if (record.run, record.rank, record.step, record.world_size) != (first.run, rank, first.step, place.world_size):
                raise RecordError(f"the record of rank {rank} is of run {record.run}, rank {record.rank}, step "
                                  f"{record.step}, {record.world_size} ranks; expected run {first.run}, step {first.step}, "
                                  f"{place.world_size} ranks")
        manifest = Manifest.from_records(records, place.local_ranks)
        if not place.iterations:
            return manifest
        return replace(manifest,
                       metadata_files=iteration_publisher.write_metadata_files(place, manifest.state,
                           [record for record, _ in records]))

    def _point(self, place: SaveTarget, manifest: Manifest) -> None:
        """Updates the pointers, so that mindformers without mindresume finds the same checkpoint. An iteration folder that an
        error left without its name gets it first.

        Of rank folders one ``meta.json`` is enough, in that of the first rank: mindformers takes the oldest step that any of them
        names and passes over folders without one. Those that it, or an earlier version, has left in the other folders would hold
        it back; they are removed once a run, after the first commit, while the step they name is still there.
        """
        if place.iterations:
            self._show(manifest.step)
            return
        storage, root, first = self.place.storage, self.place.root, place.ranks[0]
        parsed = parse_name(os.path.basename(manifest.files[0][0].path))
        if parsed is None:
            return
        publish_json(storage, os.path.join(root, folder_name(first), META), meta_json(parsed), self.place.run)

        def forget(rank: int) -> None:
            folder = os.path.join(root, folder_name(rank))
            if storage.status(os.path.join(folder, META)) is not None:
                storage.remove(os.path.join(folder, META))
                storage.sync(folder)
        if not self._alone:
            parallel(storage, forget, [rank for rank in ranks_of(storage.list(root)) if rank != first])
            self._alone = True

    def _show(self, step: int) -> None:
        """Publishes the iteration folder of ``step``, after those of this run that an error left without their names. The tracker
        follows each: one that names an older step than the newest folder, without an intent, counts as set back by hand."""
        for attempt in find_attempts(self.place.storage, self.place.root, top=[]):
            if attempt.run == self.place.run and attempt.step < step and attempt.iteration_dir and MANIFEST in attempt.content:
                iteration_publisher.publish_iteration(self.place, attempt.step, emit=self.emit)
        iteration_publisher.publish_iteration(self.place, step, emit=self.emit)

    def adopt(self) -> list[int]:
        """Commits what earlier runs completed before they died, and makes it visible. Returns its steps, newest first."""
        storage, root, adopted = self.place.storage, self.place.root, []
        found = scan_records(storage, root)[0]
        order = found
        if any(candidate.iteration_dir.startswith(FOLDER) for candidate in found):       # the tracker may have been set back
            order = list(scan(storage, root).candidates)
        usable = [candidate for candidate in order if candidate.problem is None]
        newest = usable[0].name if usable else ""
        # Those in the making that a resume takes before all others. The tracker follows each up to the newest, as in ``_show``.
        ahead = {c.name for c in takewhile(lambda c: c.iteration_dir.startswith(FOLDER), usable) if c.order <= usable[0].order}
        for candidate in reversed(found):                       # the newest last: the pointers are its
            making = candidate.iteration_dir.startswith(FOLDER)
            if candidate.problem is not None or candidate.missing_ranks or (candidate.committed
                                                                     or candidate.iteration_dir) and not making:
                continue
            if candidate.local_ranks and not self.place.local_ranks:          # of one node, whose folder was brought here
                continue
            place = SaveTarget(storage, root, candidate.run or "", 0, candidate.world_size, making, candidate.local_ranks,
                               candidate.lineage)
            step = candidate.step or 0
            try:
                if not candidate.committed:
                    manifest = self._manifest(place, step)
                    publish(storage, os.path.join(place.attempt(step), MANIFEST), [manifest.encode()], self.place.run)
            except (OSError, RecordError) as error:
                self.emit(CommitDelayed(step, str(error), candidate.run))
                continue
            if making and any(c.step == step and c.committed and c.order > candidate.order for c in found):
                continue                                        # a later run has saved this step again
            if making:
                iteration_publisher.publish_iteration(place, step, newest=candidate.name in ahead, emit=self.emit)
            elif candidate.name == newest:
                self._point(place, manifest)
            self.emit(SaveCommitted(step, len(candidate.files), sum(file.size or 0 for file in candidate.all_files),
                                    candidate.run if candidate.run != self.place.run else None))
            adopted.append(step)
        if any(candidate.iteration_dir for candidate in found):
            iteration_publisher.finish_tracker(storage, root, scan_records(storage, root)[0], self.place.run)
        return adopted[::-1]

    # ---- removal ---------------------------------------------------------------------------------------------------

    def prune(self) -> list[int]:
        """Removes what the policy does not keep, and saves that never completed (``mindresume.saving.garbage_collector``).
        Returns the steps of the former."""
        storage, root = self.place.storage, self.place.root
        made = plan(storage, root, self.policy, self.read_locks(), self.place.run, self._is_over, self.place.lineage)
        removed = carry_out(storage, root, made, self.read_locks, self._emit_once)
        steps = [candidate.step or 0 for candidate in made.to_delete if candidate in removed]
        if steps:
            self.emit(CheckpointsRemoved(tuple(steps), root, str(self.policy)))
        return steps

    def make_room(self, step: int) -> list[int]:
        """Removes, after a full disk, the incomplete saves of this run before ``step`` and the one before it, which a slow rank
        can still be writing (one save in flight). Otherwise they stay until a later save is committed, and on a full disk none
        ever would be. Returns their steps."""
        found, _, _ = scan_records(self.place.storage, self.place.root)
        own = sorted((c for c in found if c.run == self.place.run and not c.maybe_completed and (c.step or 0) < step
                      and self._missing(c.step or 0, by_name=True)), key=lambda c: c.step or 0)     # not only listed late
        removed = carry_out(self.place.storage, self.place.root, Plan(orphans=tuple(own[:-1])), self.read_locks, self._emit_once)
        steps = [candidate.step or 0 for candidate in removed]
        self.pending = [other for other in self.pending if other not in steps]
        if steps:
            self.emit(CheckpointsRemoved(tuple(steps), self.place.root, is_incomplete=True))
        return steps

    def _emit_once(self, event: Event) -> None:
        """Emits ``event`` for the first time only: what cannot be removed now is tried after every save."""
        if event not in self._emitted:
            self._emitted.add(event)
            self.emit(event)

    def _is_over(self, run: str) -> bool:
        return run_sequence(run) < run_sequence(self.place.run) and (self._ended is None or self._ended(run))
