"""Writes a save in memory of this node to disk: for a training that has ended and does not come
back to this node."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume.api.results import Result
from mindresume.api.sources import existing
from mindresume.coordination.lease_acquisition import check_no_live_job
from mindresume.errors import LeaseHeldError
from mindresume.events.progress import SILENT, Progress
from mindresume.formats import CheckpointDir, Refusal
from mindresume.formats.records import scan_records
from mindresume.formats.scan import JOB_FOLDERS, locate, scan
from mindresume.resume.choice import read_size
from mindresume.resume.memory_source import DiskCopy
from mindresume.resume.verifier import Verifier
from mindresume.saving.memory_tier.directory import TierOwner, find_tier, read_mark
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage


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


def flush(
    path: str | os.PathLike[str], *, progress: Progress = SILENT, storage: Storage | None = None
) -> FlushResult:
    """Writes the newest save in memory of this node, whose bytes are all verified, to disk, if the
    disk is older. Of a job of several nodes it writes older ones too, until one is complete: a node
    can have died before the others. Watches the lease of a job on another node for some heartbeats,
    to find out whether it is alive.

    Args:
        path: The checkpoint folder, or one above it.
        progress: Receives the numbers of bytes to write, and of bytes written.

    Raises:
        LeaseHeldError: A job saves into the folder.
        SaveError: A file of that name holds something else, or the bytes changed meanwhile.
        FileNotFoundError: ``path`` does not exist.
    """
    storage = storage or PosixStorage()
    root = os.path.realpath(_root_of(storage, existing(path)))
    directory = CheckpointDir(storage, root)
    tier, problem = find_tier(directory)
    if not tier:
        return FlushResult(root, reason=problem or "there is no save of it in memory of this node")
    owner = TierOwner.read(storage, tier)
    if owner is None or owner.is_alive:
        who = f"run {owner.run}" if owner else "an unknown run"
        raise LeaseHeldError(f"{root} is in use by {who}; a job that runs saves by itself")
    # a killed job has left its lease, mostly on another node
    check_no_live_job(directory)
    newest = max(
        (
            candidate.order[:2]
            for candidate in scan(directory).candidates
            if candidate.problem is None
            # else a part that a flush wrote
            and (candidate.committed or not candidate.local_ranks)
        ),
        default=(0, 0),
    )
    in_memory, reasons, written = CheckpointDir(storage, tier), [], None
    for candidate in scan_records(in_memory)[0]:
        if candidate.problem is not None:
            continue
        if candidate.order[:2] <= newest:
            return written or FlushResult(
                root, up_to_date=True, reason="the disk has a checkpoint that is as new"
            )
        refused = next(
            (
                found
                for found in map(Verifier(in_memory, candidate).verify, candidate.files)
                if isinstance(found, Refusal)
            ),
            None,
        )
        if refused is not None:
            reasons.append(str(refused))
            continue
        size = read_size(candidate, [*candidate.files])
        progress.expect(size)
        copy = DiskCopy(directory, tier, candidate, progress=progress)
        copy.write()
        result = FlushResult(root, candidate.step, size, copy.commit())
        if result.committed or not candidate.local_ranks:
            return result
        written = written or result  # another node may have only an older one
    return written or FlushResult(
        root, reason="; ".join(reasons) or "no save in memory of this node is whole"
    )


def _root_of(storage: Storage, path: str) -> str:
    """Returns the checkpoint directory that ``path`` means, also if only memory has a save of
    it."""
    found = [locate(storage, path), *(os.path.join(path, inner) for inner in JOB_FOLDERS)]
    return next(
        (root for root in found if read_mark(CheckpointDir(storage, root)) is not None), found[0]
    )
