"""Saving one step from many ranks without a collective.

    every rank   publish the file of weights ─▶ publish the record of what was written
    rank 0       records of all ranks there? ─▶ check them against the files ─▶ manifest ─▶ meta.json of all ranks ─▶ prune

The records of all ranks of one run and step *are* the commit; the manifest says that somebody checked it. Whatever dies between
two of these operations leaves the previous checkpoint as it was, and at worst a file that no manifest names. Nobody waits for
anybody while the training runs: rank 0 looks again after each later step, and at the end of the training until a deadline.
"""
from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from mindresume.agree import Group, report
from mindresume.errors import NoRoomError, RecordError, SaveError
from mindresume.files import encode, encoded_size
from mindresume.files.checksum import Checksums, checksummed
from mindresume.formats.names import META, FileName, folder_name, label, meta_json, parse_name
from mindresume.formats.rank_folders import listed, ranks_count, scan_records
from mindresume.layout import TensorLayout
from mindresume.manifest import (
    FOLDER,
    MANIFEST,
    Details,
    FileRecord,
    Manifest,
    Record,
    TensorRecord,
    attempt_name,
    read_record,
    record_name,
    record_rank,
    run_sequence,
)
from mindresume.state import TrainingState
from mindresume.store.claim import fence
from mindresume.store.removal import Plan, carry_out, plan
from mindresume.store.retention import KEEP_ALL, Policy
from mindresume.store.storage import TEMPORARY, Storage, parallel, publish, publish_json


@dataclass(frozen=True)
class Place:
    """Who saves where. ``root``: folder of the rank folders."""
    storage: Storage
    root: str
    run: str
    rank: int
    world_size: int

    def attempt(self, step: int) -> str:
        return os.path.join(self.root, FOLDER, attempt_name(step, self.run))


@dataclass(frozen=True)
class Shard:
    """What one rank writes for one step. ``tensors`` in the order of the network; ``layouts``: (layout, global shape) of
    those that the strategy cuts; ``metadata``: of the file, beside our label."""
    name: FileName
    state: TrainingState
    tensors: Mapping[str, np.ndarray]
    layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]] = field(default_factory=dict)
    random: Mapping[str, object] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def write_shard(place: Place, shard: Shard, clock: Callable[[], float] = time.time) -> Record:
    """Writes this rank's file and its record. SaveError names what failed; then neither has appeared, or the file without a
    record, which counts as nothing. A disk or quota without room for the file is an error before its first byte.
    FolderInUseError if a later run has taken over the folder."""
    path = f"{folder_name(place.rank)}/{shard.name}"
    target, attempt = os.path.join(place.root, path), place.attempt(shard.state.step)
    recorded = os.path.join(attempt, record_name(place.rank))
    metadata = {**shard.metadata, **label(place.run, shard.state.step)}
    sums = Checksums()
    try:
        fence(place.storage, place.root, place.run)
        expected = encoded_size(shard.name.format, shard.tensors, metadata)
        _check_room(place, shard, expected)
        place.storage.make_folder(os.path.dirname(target))
        place.storage.make_folder(attempt)
        if place.storage.status(target) is not None:
            raise SaveError(f"{target} exists already; a committed file is never overwritten. Another job is writing into "
                            f"this folder: give each job a folder of its own")
        try:
            pieces = encode(shard.name.format, shard.tensors, metadata)
            size = publish(place.storage, target, checksummed(pieces, sums), place.run, expected)
            if size != expected:
                raise OSError(errno.EIO, f"wrote {size} bytes, expected {expected}", target)
            record = Record(place.run, place.rank, place.world_size, shard.state, clock(),
                            FileRecord(path, shard.name.format, size, sums.file))
            publish(place.storage, recorded, [record.encode(_details(shard, sums))], place.run)
        except OSError:                     # a file without a record is worth nothing, fills the disk and blocks a retry
            with suppress(OSError):         # the first error is the one to report; never a record without its file
                place.storage.remove(recorded)
                place.storage.remove(target)
            raise
    except (OSError, ValueError) as error:      # ValueError: a dtype or name that the format cannot hold
        reason, where = getattr(error, "strerror", None) or error, getattr(error, "filename", None) or target
        kind = NoRoomError if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else SaveError
        raise kind(f"step {shard.state.step} was not saved on rank {place.rank}: {reason} ({where}). The checkpoints "
                   f"saved before are untouched") from error
    return record


_RECORD_ROOM = 64 << 10         # bytes kept free for the small files that follow


def _check_room(place: Place, shard: Shard, needed: int) -> None:
    room = place.storage.room(place.root)
    if room < needed + _RECORD_ROOM:
        raise NoRoomError(f"step {shard.state.step} was not saved on rank {place.rank}: its file needs {needed / 2**20:.1f} MiB, "
                          f"{place.root} has room for {room / 2**20:.1f} MiB. Nothing was written, the checkpoints saved before "
                          f"are untouched; free some space, or keep fewer (keep_checkpoint_max, mindresume prune)")


def _details(shard: Shard, sums: Checksums) -> Details:
    rows = {}
    for name, array in shard.tensors.items():
        layout, global_shape = shard.layouts.get(name, (None, None))
        rows[name] = TensorRecord("str" if array.dtype.kind == "U" else str(array.dtype), tuple(array.shape),
                                  sums.tensors[name], layout, global_shape)
    return Details(rows, shard.random)


def clean_own_folder(place: Place) -> list[str]:
    """Removes what earlier, dead runs left half-written in this rank's folder. Returns the names removed.

    Only temporary files that carry the name of an earlier run: the launch of this run ended those that wrote here before.
    Flushes the folder of the rank folders: what a process that died right after ``mkdir`` left there is taken for durable.
    """
    folder, removed = os.path.join(place.root, folder_name(place.rank)), []
    if place.storage.status(place.root) is not None:
        place.storage.sync(place.root)
    for name in place.storage.list(folder):
        if not name.endswith(TEMPORARY):
            continue
        try:
            earlier = run_sequence(name[:-len(TEMPORARY)].rpartition(".")[2]) < run_sequence(place.run)
        except RecordError:
            continue
        if earlier:
            place.storage.remove(os.path.join(folder, name))
            removed.append(name)
    return removed


def blind_ranks(place: Place, group: Group, tries: int = 5, pause: float = 1.0) -> list[int]:
    """Ranks that do not see a file that rank 0 has just written below ``place.root``: they are on another disk. Looks again for
    some seconds, because entries of a shared folder can arrive late. Leaves nothing behind."""
    if group.size == 1:
        return []
    folder = os.path.join(place.root, FOLDER)
    probe = os.path.join(folder, f"probe-{place.run}")

    def show() -> None:
        if group.rank == 0:
            place.storage.make_folder(folder)
            publish(place.storage, probe, [b"shared"], place.run)

    def see() -> bool:
        for _ in range(tries):
            if place.storage.status(probe) is not None:
                return True
            time.sleep(pause)
        return False
    report(group, show)
    seen = report(group, see)
    if group.rank == 0:
        place.storage.remove(probe)
        if not place.storage.list(folder):
            place.storage.remove(folder)
    return [rank for rank, visible in enumerate(seen) if not visible]


class Committer:
    """Rank 0's part. ``saved(step)`` after each own save, ``poll()`` after each step, ``finish()`` at the end.

    ``log(text)`` gets one line per commit, removal or delay. No method raises for a file system that is in trouble: the
    step then stays uncommitted, is tried again, and the reason is logged; a training never dies of a commit. FolderInUseError
    if a later run has taken over the folder.

    ``holds()``: {name of an attempt folder: who holds it}, what must not be removed now; ``ended(run)``: whether a run is over,
    so that its incomplete saves can go: asked of runs with a smaller number only, by default all of those are.
    """

    def __init__(self, place: Place, policy: Policy = KEEP_ALL, log: Callable[[str], None] = lambda text: None,
                 clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
                 holds: Callable[[], Mapping[str, str]] = dict, ended: Callable[[str], bool] | None = None):
        self.place, self.policy, self.log, self.clock, self.sleep = place, policy, log, clock, sleep
        self.holds, self._ended = holds, ended
        self.pending: list[int] = []
        self.committed: list[int] = []
        self._reasons: dict[int, str] = {}          # why a pending step could not be committed the last time

    def saved(self, step: int) -> None:
        self.pending.append(step)
        self.poll()

    def poll(self) -> list[int]:
        """Commits every pending step whose records are complete. Returns the steps still pending."""
        for step in list(self.pending):
            try:
                missing = self.try_commit(step)
            except (OSError, RecordError) as error:
                if self._reasons.get(step) != str(error):       # once, not five times a second until the deadline
                    self.log(f"step {step} cannot be committed yet: {error}")
                self._reasons[step] = str(error)
                continue
            if not missing:
                self.committed.append(step)
                for older in [other for other in self.pending if other < step]:
                    self.log(f"step {older} is given up: not all ranks have saved it, and all have saved step {step}")
                self.pending = [other for other in self.pending if other > step]
        return self.pending

    def finish(self, deadline: float, pause: float = 0.2) -> dict[int, list[int]]:
        """Waits until every pending step is committed, at most ``deadline`` seconds. Returns {step: missing ranks}."""
        until = self.clock() + deadline
        while self.poll() and self.clock() < until:
            self.sleep(pause)
        left = {step: self._missing(step) for step in self.pending}
        for step, ranks in left.items():
            reason = f"no record of rank {listed(ranks)}" if ranks else self._reasons.get(step, "it was given up")
            self.log(f"step {step} is not committed: {reason} within {deadline:.0f} s. A resume will take an older step")
        return left

    def _missing(self, step: int) -> list[int]:
        there = set(map(record_rank, self.place.storage.list(self.place.attempt(step))))
        return [rank for rank in range(self.place.world_size) if rank not in there]

    def try_commit(self, step: int) -> list[int]:
        """Commits ``step`` if all ranks have recorded it; else returns the ranks that have not."""
        missing = self._missing(step)
        if missing:
            return missing
        fence(self.place.storage, self.place.root, self.place.run)
        attempt = self.place.attempt(step)
        manifest = self._manifest(attempt)
        publish(self.place.storage, os.path.join(attempt, MANIFEST), [manifest.encode()], self.place.run)
        self.log(f"step {step} committed: {ranks_count(self.place.world_size)}, "
                 f"{sum(file.size or 0 for file in manifest.files) / 2**20:.1f} MiB")
        try:
            self._point(manifest)
            self.prune()
        except OSError as error:                  # the commit stands; pointers are hints, pruning is done again next time
            self.log(f"step {step}: after the commit: {error}")
        return []

    def _manifest(self, attempt: str) -> Manifest:
        """From the records, each checked against its file. RecordError or OSError if something does not fit."""
        storage = self.place.storage

        def read(rank: int) -> tuple[Record, str]:
            path = os.path.join(attempt, record_name(rank))
            with storage.open(path) as file:
                record, checksum = read_record(file)
            found = storage.status(os.path.join(self.place.root, record.file.path))
            if found is None or found.size != record.file.size:
                raise RecordError(f"{record.file.path}: recorded {record.file.size} bytes, found "
                                  f"{'no file' if found is None else found.size}")
            return record, checksum

        records = parallel(storage, read, range(self.place.world_size))
        first = records[0][0]
        for rank, (record, _) in enumerate(records):
            if (record.run, record.rank, record.step, record.world_size) != (
                    first.run, rank, first.step, self.place.world_size):
                raise RecordError(f"the record of rank {rank} is of run {record.run}, rank {record.rank}, step "
                                  f"{record.step}, {record.world_size} ranks; expected run {first.run}, step {first.step}, "
                                  f"{self.place.world_size} ranks")
        # Under pipeline parallelism the loss is known to the last stage only; what rank 0 knows goes first.
        metrics = {name: value for record, _ in reversed(records) for name, value in record.state.metrics}
        state = replace(first.state, metrics=tuple(sorted(metrics.items())))
        return Manifest(first.run, state, max(record.saved_at for record, _ in records),
                        tuple(record.file for record, _ in records), tuple(checksum for _, checksum in records))

    def _point(self, manifest: Manifest) -> None:
        """``meta.json`` of every rank, so that mindformers without us finds the same checkpoint."""
        def write(file: FileRecord) -> None:
            folder, _, name = file.path.partition("/")
            parsed = parse_name(name)
            if parsed is not None:
                publish_json(self.place.storage, os.path.join(self.place.root, folder, META), meta_json(parsed),
                             self.place.run)
        parallel(self.place.storage, write, manifest.files)

    def adopt(self) -> list[int]:
        """Writes the manifests of earlier runs whose ranks all recorded their files but that died before the commit, and
        ``meta.json`` if one of them is the newest."""
        adopted, found = [], scan_records(self.place.storage, self.place.root)[0]
        for candidate in found:
            if candidate.problem is None and not candidate.committed:
                place = Place(self.place.storage, self.place.root, candidate.run or "", 0, candidate.world_size)
                try:
                    manifest = Committer(place)._manifest(candidate.attempt)
                    publish(place.storage, os.path.join(candidate.attempt, MANIFEST), [manifest.encode()], self.place.run)
                except (OSError, RecordError) as error:
                    self.log(f"step {candidate.step} of run {candidate.run} cannot be committed afterwards: {error}")
                    continue
                adopted.append(manifest.step)
                if candidate is found[0]:
                    self._point(manifest)
        return adopted

    # ---- removal ---------------------------------------------------------------------------------------------------

    def prune(self) -> list[int]:
        """Removes what the policy does not keep, and saves that never completed (``mindresume.store.removal``). Returns the
        steps of the former."""
        storage, root = self.place.storage, self.place.root
        made = plan(storage, root, self.policy, self.holds(), self.place.run, self._is_over)
        removed = carry_out(storage, root, made, self.holds, self.log)
        steps = [candidate.step or 0 for candidate in made.victims if candidate in removed]
        if steps:
            self.log(f"removed step {', '.join(map(str, steps))}: kept {self.policy}")
        return steps

    def make_room(self, step: int) -> list[int]:
        """After a full disk: removes the incomplete saves of this run before ``step`` and the one before it, which a slow rank
        can still be writing (one save in flight). Otherwise they stay until a later save is committed, and on a full disk none
        ever would be. Returns their steps."""
        found, _, _ = scan_records(self.place.storage, self.place.root)
        own = sorted((c for c in found if c.run == self.place.run and not c.existed and (c.step or 0) < step),
                     key=lambda c: c.step or 0)
        removed = carry_out(self.place.storage, self.place.root, Plan(debris=tuple(own[:-1])), self.holds, self.log)
        steps = [candidate.step or 0 for candidate in removed]
        self.pending = [other for other in self.pending if other not in steps]
        if steps:
            self.log(f"the disk is full: removed what there was of step {', '.join(map(str, steps))}, which never completed")
        return steps

    def _is_over(self, run: str) -> bool:
        return run_sequence(run) < run_sequence(self.place.run) and (self._ended is None or self._ended(run))
