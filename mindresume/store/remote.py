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
_FEW = 32                       # objects that are not worth a pool of threads


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
    """Of a run. ``step``: what all ranks are to upload now; ``ended``: nothing will follow."""
    step: int | None = None
    ended: bool = False


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

    # ---- looking ---------------------------------------------------------------------------------------------------

    def look(self) -> Seen:
        boxes: dict[str, set[str]] = {}
        marks = []
        for name in self.store.list(self.url):
            box, _, path = name.partition("/")
            if parse_attempt(box):
                boxes.setdefault(box, set()).add(path)
            elif box.startswith(_MARK) and box.endswith(_SUFFIX):
                with suppress(RecordError):
                    run_sequence(box[len(_MARK):-len(_SUFFIX)])
                    marks.append(box[len(_MARK):-len(_SUFFIX)])
        return Seen({box: frozenset(paths) for box, paths in boxes.items()}, tuple(marks))

    def manifest(self, attempt: str) -> tuple[Manifest, bytes]:
        """RecordError if it is damaged, or not of this attempt."""
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
        text = json.dumps({"step": mark.step, "ended": mark.ended})
        self.store.put(f"{self.url}/{_MARK}{run}{_SUFFIX}", text.encode())

    def announced(self, run: str) -> Mark:
        if self.store.size(url := f"{self.url}/{_MARK}{run}{_SUFFIX}") is None:
            return Mark()
        try:
            value = parse_json(self.store.read(url))
            step, ended = value["step"], value["ended"]
        except (ValueError, LookupError, TypeError) as error:
            raise RemoteError(f"{url} is not as mindresume writes it ({error}); the next step is announced anew") from error
        return Mark(step if is_count(step) else None, ended is True)

    def fence(self, run: str) -> None:
        """Overtaken if a later run has been here: then this one was taken for dead, or two jobs have the same url."""
        latest = next(reversed(self.look().runs()), run)
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

    def missing(self, place: Place, step: int, base: str) -> list[str]:
        """What has to be there before the manifest, and is not, or has another size. For rank 0."""
        attempt = attempt_name(step, place.run)
        manifest, _, absent = self._whole(place, attempt, base)
        if absent:
            return absent
        files = [*(file for files in manifest.files for file in files), *manifest.small]
        records = [records_of(attempt, record_name(rank)) for rank in range(manifest.world_size)]
        wanted = [*(file.path for file in files), *records]
        there = set(self.store.list(f"{self.url}/{attempt}"))
        absent = [path for path in wanted if path not in there]
        if absent:
            return absent
        urls = [self._url(attempt, file.path) for file in files]
        # A process that ends gives no more threads to a pool, and may still be here.
        sizes = list(map(self.store.size, urls)) if len(urls) <= _FEW else parallel(place.storage, self.store.size, urls)
        return [file.path for file, size in zip(files, sizes, strict=True) if file.size != size]

    def commit(self, place: Place, step: int, base: str) -> None:
        attempt = attempt_name(step, place.run)
        manifest, data, absent = self._whole(place, attempt, base)
        if absent:
            raise RemoteError(f"{self.url}/{attempt}: {absent[0]} is gone")
        self.store.put(self._url(attempt, records_of(attempt, MANIFEST)), data)
        self._manifests[attempt] = manifest

    def _whole(self, place: Place, attempt: str, base: str) -> tuple[Manifest, bytes, list[str]]:
        """The manifest of all ranks, and what is missing for it. Where nodes share no disk that of rank 0's node names its own
        ranks alone: then it is made of the records of all, which lie together here only."""
        manifest, data = self.local_manifest(place, attempt, base)
        if not manifest.part:
            return manifest, data, []
        names = [records_of(attempt, record_name(rank)) for rank in range(manifest.world_size)]
        there = set(self.store.list(f"{self.url}/{attempt}"))
        absent = [name for name in names if name not in there]
        if absent:
            return manifest, data, absent
        if attempt not in self._manifests:
            records = [read_record(io.BytesIO(self.record(attempt, rank))) for rank in range(manifest.world_size)]
            self._manifests[attempt] = Manifest.of(records)
        return self._manifests[attempt], self._manifests[attempt].encode(), []

    @staticmethod
    def local_manifest(place: Place, attempt: str, base: str) -> tuple[Manifest, bytes]:
        data = read_bytes(place.storage, os.path.join(base, records_of(attempt, MANIFEST)))
        return Manifest.read(io.BytesIO(data)), data

    # ---- deleting --------------------------------------------------------------------------------------------------

    def prune(self, policy: Policy, run: str, step: int, log: Callable[[str], None] = lambda text: None) -> list[int]:
        """After ``step`` of ``run`` was committed: removes what the policy does not keep, and what was never completed by earlier
        runs, or by this one before ``step``. The newest never goes, nor the newest that is healthy. Returns the steps of the
        former."""
        seen = self.look()
        newest_first, saved = [], []
        for name in seen.committed():
            try:
                if name not in self._manifests:
                    self._manifests[name] = self.manifest(name)[0]
            except RecordError as error:
                log(f"{self.url}/{name} stays: {error}")        # of no use, and of a kind that nobody can judge
                continue
            manifest = self._manifests[name]
            newest_first.append(name)
            saved.append(_Saved(manifest.step, manifest.saved_at, dict(manifest.state.metrics), manifest.state.health))
        healthy = next((index for index, one in enumerate(saved) if not one.health), None)
        going = [newest_first[index] for index in surplus(policy, saved) if index != healthy]
        mine = (run_sequence(run), step)
        debris = [name for name, number, of in attempts(list(seen.boxes)) if (run_sequence(of), number) < mine
                  and records_of(name, MANIFEST) not in seen.boxes[name]
                  and self.store.size(self._url(name, records_of(name, MANIFEST))) is None]     # listings may lag
        for name in (*going, *debris):
            self._delete(name, seen.boxes[name])
        for other in seen.marks:
            if run_sequence(other) < mine[0]:
                self.store.delete(f"{self.url}/{_MARK}{other}{_SUFFIX}")
        return [saved[newest_first.index(name)].step for name in going]

    def _delete(self, attempt: str, names: Iterable[str]) -> None:
        """A reader that has begun to download finds objects missing, and takes another one."""
        manifest = records_of(attempt, MANIFEST)
        for name in sorted(names, key=lambda name: name != manifest):
            self.store.delete(self._url(attempt, name))
        self._manifests.pop(attempt, None)


class Overtaken(RemoteError):
    """There is a later run at this url."""


def ranks_of(paths: Iterable[str], manifest: Manifest) -> str:
    """Whose objects they are, for people."""
    owners = {file.path: rank for rank, files in enumerate(manifest.files) for file in files}
    ranks = {owners.get(path, record_rank(os.path.basename(path))) for path in paths} - {None}
    return f"rank {listed(sorted(ranks))}" if ranks else "rank 0"
