"""Writes a save in memory of this node to disk: for a training that has ended and does not come back to this node."""
from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from xxhash import xxh3_128

from mindresume.api.progress import SILENT, Progress
from mindresume.api.results import Result
from mindresume.api.sources import existing
from mindresume.coordination.lease import SAVING, is_alive, lease_holders
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.formats import Candidate, Refusal
from mindresume.formats.location import locate
from mindresume.formats.records import scan_records
from mindresume.formats.scan import scan
from mindresume.model.file_record import FileRecord
from mindresume.model.manifest import read_details, record_name
from mindresume.resume.verified_shard import read_size
from mindresume.resume.verifier import verify_rank
from mindresume.saving.committer import Committer
from mindresume.saving.memory_tier.directory import TierOwner, find_tier
from mindresume.saving.memory_tier.tier import path_on_disk
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.checksum import file_checksum
from mindresume.tensor_files.header import CHUNK


@dataclass(frozen=True)
class FlushResult(Result):
    """Holds what was written to disk.

    Attributes:
        root: The checkpoint folder.
        step: The step that was written; None: none.
        size_bytes: Bytes of its files.
        committed: Whether it is a checkpoint now; False: parts of other nodes are missing.
        up_to_date: The disk had a checkpoint that is as new.
        reason: Why nothing was written, as a sentence.
    """
    root: str
    step: int | None = None
    size_bytes: int = 0
    committed: bool = False
    up_to_date: bool = False
    reason: str = ""


def flush(path: str | os.PathLike[str], *, progress: Progress = SILENT, storage: Storage | None = None) -> FlushResult:
    """Writes the newest save in memory of this node, whose bytes are all verified, to disk, if the disk is older.

    Args:
        path: The checkpoint folder, or one above it.
        progress: Receives the numbers of bytes to write, and of bytes written.

    Raises:
        LeaseHeldError: A job saves into the folder.
        SaveError: A file of that name holds something else, or the bytes changed meanwhile.
        FileNotFoundError: ``path`` does not exist.
    """
    storage = storage or PosixStorage()
    root = os.path.realpath(locate(storage, existing(path)))
    tier, problem = find_tier(storage, root)
    if not tier:
        return FlushResult(root, reason=problem or "there is no save of it in memory of this node")
    owner = TierOwner.read(storage, tier)
    living = [holder for holder in lease_holders(storage, root) if holder.purpose == SAVING and is_alive(holder) is not False]
    if living or owner is None or owner.is_alive:
        who = living[0] if living else f"run {owner.run}" if owner else "an unknown run"
        raise LeaseHeldError(f"{root} is in use by {who}; a job that runs saves by itself")
    newest = max((candidate.order[:2] for candidate in scan(storage, root).candidates
                  if candidate.problem is None), default=(0, 0))
    reasons = []
    for candidate in scan_records(storage, tier)[0]:
        if candidate.problem is not None:
            continue
        if candidate.order[:2] <= newest:
            return FlushResult(root, up_to_date=True, reason="the disk has a checkpoint that is as new")
        refused = next((found for rank in candidate.files
                        if isinstance(found := verify_rank(storage, tier, candidate, rank), Refusal)), None)
        if refused is None:
            return _write(storage, root, tier, candidate, progress)
        reasons.append(str(refused))
    return FlushResult(root, reason="; ".join(reasons) or "no save in memory of this node is whole")


def _write(storage: Storage, root: str, tier: str, candidate: Candidate, progress: Progress) -> FlushResult:
    """Copies the files and the records of a save, which are of the same format, then commits as a later run would."""
    target = SaveTarget(storage, root, candidate.run, min(candidate.files), candidate.world_size, bool(candidate.iteration_dir),
                        (), candidate.lineage)
    step, size = candidate.step, read_size(candidate, [*candidate.files])
    progress.expect(size)
    for rank, files in candidate.files.items():
        with storage.open(os.path.join(candidate.records_dir, record_name(rank))) as file:
            record, details = read_details(file)
        rows = [replace(row, path=row.path if target.iterations else path_on_disk(row.path, candidate.run))
                for row in record.files]
        for source, row in zip(files, rows, strict=True):
            _copy(storage, os.path.join(tier, source.path), os.path.join(target.data_dir(step), row.path), row, target.run,
                  progress)
        storage.make_folder(target.attempt(step))
        publish(storage, os.path.join(target.attempt(step), record_name(rank)),
                [replace(record, files=tuple(rows)).encode(details)],
                target.run)
    return FlushResult(root, step, size, step in Committer(target).recover())


def _copy(storage: Storage, source: str, path: str, row: FileRecord, tag: str, progress: Progress) -> None:
    """Copies one file, unless an earlier call has copied it. Raises SaveError if another file has its name."""
    storage.make_folder(os.path.dirname(path))
    if storage.status(path) is not None:
        with storage.open(path) as file:
            if file_checksum(file) == (row.checksum, row.size):
                return
        raise SaveError(f"{path} exists already, with other content; a file of a checkpoint is never overwritten")
    copied = xxh3_128()

    def pieces() -> Iterator[bytes]:
        with storage.open(source) as file:
            while piece := file.read(CHUNK):
                copied.update(piece)
                progress.advance(len(piece))
                yield piece
    publish(storage, path, pieces(), tag, row.size or 0)
    if copied.hexdigest() != row.checksum:
        storage.remove(path)
        raise SaveError(f"{source} changed while it was written to {path}")
