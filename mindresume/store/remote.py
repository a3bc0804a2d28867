"""Checkpoints in an object store: what lies there, and the order in which it is put and deleted.

    {remote_save_url}/checkpoint/
      run-0002-1f3a9c04.json                              the newest run, and the step that it is uploading
      step-0000000015-run-0002-1f3a9c04/                  one attempt of one run to save one step: all of it, nothing else
        rank_0/qwen3_rank_0-2_5.safetensors               weights, or qwen3-model-...safetensors, common.json, metadata.json
        .mindresume/step-0000000015-run-0002-1f3a9c04/    rank_00000.json ..., and put last: manifest.json

    put       each rank: weights ─▶ its record      rank 0: objects of all ranks there? ─▶ the manifest: that is the commit
    delete    the manifest ─▶ everything else

Names carry step and run, so no object is ever replaced by another one (but the mark of the run), and what was left by a rank that
died is told from what is being uploaded. Below its name an attempt looks as in the folder of checkpoints: copied from there as it
is, it is one, or an iteration folder.
"""
from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from mindresume.documents import parse_json
from mindresume.errors import RecordError, RemoteError
from mindresume.formats.iteration_files import iteration_name
from mindresume.formats.records import listed
from mindresume.manifest import (
    FOLDER,
    MANIFEST,
    Manifest,
    attempt_name,
    attempts,
    parse_attempt,
    read_record,
    record_name,
    record_rank,
    run_sequence,
)
from mindresume.state import is_count
from mindresume.store.objects import ObjectStore
from mindresume.store.retention import Policy, surplus
from mindresume.store.shard import Place
from mindresume.store.storage import parallel, read_bytes

_MARK, _SUFFIX = "run-", ".json"
_LOST = "lost-"                  # before the name of a record: it will never come


@dataclass(frozen=True)
class Seen:
    """One listing. ``boxes``: {name of an attempt: names of its objects}; ``marks``: runs that left a mark."""
    boxes: Mapping[str, frozenset[str]]
    marks: tuple[str, ...]

    def committed(self) -> list[str]:
        """Names of attempts that have a manifest, newest first: by run, then step."""
        found = [(run_sequence(run), step, name) for name, step, run in attempts(list(self.boxes))
                 if records_of(name, MANIFEST) in self.boxes[name]]
        return [name for *_, name in sorted(found, reverse=True)]

    def runs(self) -> list[str]:
        """Every run that left a trace, the latest last."""
        found = {*self.marks, *(run for _, _, run in attempts(list(self.boxes)))}
        return sorted(found, key=lambda run: (run_sequence(run), run))


@dataclass(frozen=True)
class Mark:
    """Of a run. ``step``: what all ranks are to upload now; ``ended``: nothing will follow, because of ``reason`` if it is not
    the end of the training."""
    step: int | None = None
    ended: bool = False
    reason: str = ""


@dataclass(frozen=True)
class _Saved:
    """What a policy looks at."""
    step: int
    saved_at: float
    metrics: Mapping[str, float]
    health: int | None


def records_of(attempt: str, name: str) -> str:
    """Path of a record, or of the manifest, relative to what the paths in it are relative to."""
    return f"{FOLDER}/{attempt}/{name}"


def committed_base(place: Place, step: int) -> str | None:
    """What the paths in the records of a save of ours are relative to, once it is committed and has its final name; else None."""
    base = os.path.join(place.root, iteration_name(step)) if place.iterations else place.root
    manifest = os.path.join(base, records_of(attempt_name(step, place.run), MANIFEST))
    return base if place.storage.status(manifest) is not None else None


@dataclass
class Remote:
    """``url``: of the folder of checkpoints. RemoteError for whatever fails there."""
    store: ObjectStore
    url: str
    _manifests: dict[str, Manifest] = field(default_factory=dict)       # read already; they never change
    _unreadable: set[str] = field(default_factory=set)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def look(self) -> Seen:
        boxes: dict[str, set[str]] = {}
        marks = []
        for name in self.store.list(self.url):
            box, _, path = name.partition("/")
            if path and parse_attempt(box):             # without a path: an object that stands for an empty folder
                boxes.setdefault(box, set()).add(path)
            elif box.startswith(_MARK) and box.endswith(_SUFFIX):
                with suppress(RecordError):
                    run_sequence(box[len(_MARK):-len(_SUFFIX)])
                    marks.append(box[len(_MARK):-len(_SUFFIX)])
        return Seen({box: frozenset(paths) for box, paths in boxes.items()}, tuple(marks))

    def manifest(self, attempt: str) -> tuple[Manifest, bytes]:
        """RecordError if it is damaged, or not of this attempt; RemoteError if it cannot be read."""
        data = self.store.read(self._url(attempt, records_of(attempt, MANIFEST)))
        manifest = Manifest.read(io.BytesIO(data))
        if attempt_name(manifest.step, manifest.run) != attempt:
            raise RecordError(f"the manifest is of run {manifest.run}, step {manifest.step}")
        return manifest, data

    def record(self, attempt: str, rank: int) -> bytes:
        return self.store.read(self._url(attempt, records_of(attempt, record_name(rank))))

    def download(self, attempt: str, path: str, target: str) -> None:
        """``path``: as a manifest names it."""
        self.store.download(self._url(attempt, path), target)

    def _url(self, attempt: str, path: str) -> str:
        return f"{self.url}/{attempt}/{path}"

    # ---- runs ------------------------------------------------------------------------------------------------------

    def announce(self, run: str, mark: Mark) -> None:
        """Rank 0's word to the other ranks of its run, wherever they are; and to other jobs, that this one is there."""
        text = json.dumps({"step": mark.step, "ended": mark.ended, "reason": mark.reason})
        self.store.put(f"{self.url}/{_MARK}{run}{_SUFFIX}", text.encode())

    def announced(self, run: str) -> Mark | None:
        """None: there is no mark, not yet or not any more, because a later run removes those of earlier ones."""
        if self.store.size(url := f"{self.url}/{_MARK}{run}{_SUFFIX}") is None:
            return None
        try:
            value = parse_json(self.store.read(url))
            step, ended, reason = value["step"], value["ended"], value.get("reason", "")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(f"{url} is not as mindresume writes it ({error}); the next step is announced anew") from error
        return Mark(step if is_count(step) else None, ended is True, reason if isinstance(reason, str) else "")

    def fence(self, run: str, seen: Seen | None = None) -> None:
        """Overtaken if a later run has been here: then this one was taken for dead, or two jobs have the same url."""
        latest = next(reversed((seen or self.look()).runs()), run)
        if (run_sequence(latest), latest) > (run_sequence(run), run):
            raise Overtaken(f"{self.url} has been taken over by run {latest}; this job, run {run}, uploads nothing more. End one "
                            f"of them, or give each job a remote_save_url of its own")

    # ---- putting ---------------------------------------------------------------------------------------------------

    @staticmethod
    def has_share(place: Place, step: int, base: str) -> bool:
        """Whether this rank sees its own record."""
        path = records_of(attempt_name(step, place.run), record_name(place.rank))
        return place.storage.status(os.path.join(base, path)) is not None

    def put_share(self, place: Place, step: int, base: str) -> int:
        """What one rank saved: its files, then its record; rank 0 also the small files beside them. Returns the bytes. What is
        there already is not sent again. OSError or RecordError if it cannot be read here (any more)."""
        attempt = attempt_name(step, place.run)
        recorded = os.path.join(base, records_of(attempt, record_name(place.rank)))
        with place.storage.open(recorded) as file:
            files = [*read_record(file)[0].files]
        if place.rank == 0:
            files += self.local_manifest(place, attempt, base)[0].small
        sent = 0
        for file in files:
            if self.store.size(self._url(attempt, file.path)) != file.size:
                self.store.upload(os.path.join(base, file.path), self._url(attempt, file.path))
                sent += file.size or 0
        self.store.put(self._url(attempt, records_of(attempt, record_name(place.rank))), read_bytes(place.storage, recorded))
        return sent

    def lose(self, place: Place, step: int, reason: str) -> None:
        """Tells rank 0 that the part of this rank will never come."""
        attempt = attempt_name(step, place.run)
        self.store.put(self._url(attempt, records_of(attempt, f"{_LOST}{record_name(place.rank)}")), reason.encode())

    def missing(self, place: Place, step: int, base: str) -> list[str]:
        """What has to be there before the manifest, and is not. For rank 0. A record is there once all files that it names are,
        with their sizes. Lost if a rank has said so."""
        attempt = attempt_name(step, place.run)
        there = set(self.store.list(f"{self.url}/{attempt}"))
        for rank in range(place.world_size):
            if (path := records_of(attempt, f"{_LOST}{record_name(rank)}")) in there:
                reason = self.store.read(self._url(attempt, path)).decode(errors="replace")
                raise Lost(step, f"the part of rank {rank} {reason}")
        records = [records_of(attempt, record_name(rank)) for rank in range(place.world_size)]
        absent = [path for path in records if path not in there]
        if absent:
            return absent
        manifest, _ = self._whole(place, attempt, base)
        files = [*(file for files in manifest.files for file in files), *manifest.small]
        return [file.path for file in files if file.path not in there]

    def commit(self, place: Place, step: int, base: str) -> None:
        """Puts the manifest, after nothing was ``missing``. RemoteError if something is gone all the same: a later run takes this
        one for dead, and removes what it did not complete."""
        attempt = attempt_name(step, place.run)
        manifest, data = self._whole(place, attempt, base)
        path = records_of(attempt, MANIFEST)
        self.store.put(self._url(attempt, path), data)
        # Whoever removes it looks for the manifest before, and removes it once more after everything else: one of the two sees
        # what the other has done.
        gone = self.missing(place, step, base)
        if gone:
            self.store.delete(self._url(attempt, path))
            raise RemoteError(f"{len(gone)} objects were removed while the last ones came, the first is {gone[0]}")
        self._manifests[attempt] = manifest

    def _whole(self, place: Place, attempt: str, base: str) -> tuple[Manifest, bytes]:
        """The manifest of all ranks. Where nodes share no disk that of rank 0's node names its own ranks alone: then it is made
        of the records of all, which lie together here only."""
        manifest, data = self.local_manifest(place, attempt, base)
        if not manifest.part:
            return manifest, data
        if attempt not in self._manifests:
            self._manifests[attempt] = Manifest.of(parallel(
                place.storage, lambda rank: read_record(io.BytesIO(self.record(attempt, rank))), range(manifest.world_size)))
        return self._manifests[attempt], self._manifests[attempt].encode()

    @staticmethod
    def local_manifest(place: Place, attempt: str, base: str) -> tuple[Manifest, bytes]:
        data = read_bytes(place.storage, os.path.join(base, records_of(attempt, MANIFEST)))
        return Manifest.read(io.BytesIO(data)), data

    # ---- deleting --------------------------------------------------------------------------------------------------

    def prune(self, policy: Policy, run: str, step: int, log: Callable[[str], None] = lambda text: None) -> list[int]:
        """After ``step`` of ``run`` was committed: removes what the policy does not keep, and what was never completed by earlier
        runs, or by this one before ``step``. Neither the newest goes, nor the newest that is healthy, nor ``step``; what is of
        another training (``lineage.py``) is not counted and stays. Returns the steps of the former. RemoteError after the rest if
        something could not be removed; Overtaken before anything is."""
        seen = self.look()
        self.fence(run, seen)
        own = self._known(attempt_name(step, run), log)
        newest_first, saved = [], []
        for name in seen.committed():
            manifest = self._known(name, log)
            if manifest is not None and (own is None or manifest.lineage == own.lineage):
                newest_first.append(name)
                saved.append(_Saved(manifest.step, manifest.saved_at, dict(manifest.state.metrics), manifest.state.health))
        healthy = next((index for index, one in enumerate(saved) if not one.health), None)
        going = [index for index in surplus(policy, saved) if index != healthy and newest_first[index] != attempt_name(step, run)]
        failures: list[RemoteError] = []
        removed = [saved[index].step for index in going if self._delete(newest_first[index], seen, failures)]
        for name, number, of in attempts(list(seen.boxes)):
            if records_of(name, MANIFEST) not in seen.boxes[name] and (
                    run_sequence(of) < run_sequence(run) or of == run and number < step):
                self._delete(name, seen, failures)
        for other in seen.marks:
            if run_sequence(other) < run_sequence(run):
                self._try(failures, f"{self.url}/{_MARK}{other}{_SUFFIX}")
        if removed:
            log(f"removed step {', '.join(map(str, removed))} from {self.url}: kept {policy}")
        if failures:
            raise RemoteError(f"{len(failures)} names below {self.url} could not be cleared: {failures[0]}")
        return removed

    def _known(self, attempt: str, log: Callable[[str], None]) -> Manifest | None:
        """None if it cannot be read (damaged, archived, access denied): it stays, and counts as nothing. Each is read once."""
        if attempt not in self._manifests and attempt not in self._unreadable:
            try:
                self._manifests[attempt] = self.manifest(attempt)[0]
            except (RecordError, RemoteError) as error:
                self._unreadable.add(attempt)
                log(f"{self.url}/{attempt} stays, and is not counted: its manifest cannot be read: {error}")
        return self._manifests.get(attempt)

    def _delete(self, attempt: str, seen: Seen, failures: list[RemoteError]) -> bool:
        """Of a checkpoint the manifest goes first: a reader that has begun to download finds objects missing, and takes another
        one. Of what never completed it goes last, as its run may be alive and put it meanwhile."""
        manifest = records_of(attempt, MANIFEST)
        others = sorted(seen.boxes[attempt] - {manifest})
        if manifest not in seen.boxes[attempt]:
            try:
                if self.store.size(self._url(attempt, manifest)) is not None:
                    return False                                    # the listing lags behind
            except RemoteError as error:
                failures.append(error)
                return False
        order = [manifest, *others] if manifest in seen.boxes[attempt] else [*others, manifest]
        self._manifests.pop(attempt, None)
        return self._try(failures, *(self._url(attempt, name) for name in order))

    def _try(self, failures: list[RemoteError], *urls: str) -> bool:
        """Deletes objects in this order. False, and no further one, if one stays: what is left is tried the next time."""
        try:
            for url in urls:
                self.store.delete(url)
        except RemoteError as error:
            failures.append(error)
            return False
        return True


class Lost(RemoteError):
    """A part of this step will never come."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"step {step} is given up: {reason}")
        self.step = step


class Overtaken(RemoteError):
    """There is a later run at this url."""


def ranks_of(paths: Iterable[str], manifest: Manifest) -> str:
    """Whose objects they are, for people."""
    owners = {file.path: rank for rank, files in enumerate(manifest.files) for file in files}
    ranks = {owners.get(path, record_rank(os.path.basename(path))) for path in paths} - {None}
    return f"rank {listed(sorted(ranks))}" if ranks else "rank 0"
