"""Reads headers, sizes, times and counters of weight files, and which of them a scrub found
damaged.

mindformers stores the counters of a training as one-element tensors in every file of Checkpoint
1.0. A scrub leaves its result: when all of a checkpoint was read, and which files were damaged
then.

    .mindresume/step-0000000015-run-0001-1f3a9c04/scrub.json        beside the records; line 1 and 2
                                                                    as in a record

    # the Refusal of a file that a scrub found damaged, without reading it; or None
    known_damage(storage, root, candidate)

``known_damage`` is the one rule by which everything refuses such a checkpoint: the selection of a
job, ``which``, ``ls``, the report (all through ``mindresume.resume.eligible``) and retention
(``mindresume.saving.retention``). The result is bound to the records of the checkpoint, and each
damaged file to its size and times: a file that was replaced is read anew, and a result that cannot
be read, or belongs to other records, says nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import BinaryIO

import xxhash

from mindresume import runtime
from mindresume.errors import CorruptFileError, RecordError, UnreadableFileError
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.model import manifest as codec
from mindresume.model.manifest import SCRUB_RESULT, FileRecord
from mindresume.model.training_state import TrainingState
from mindresume.storage import Status, Storage, parallel, publish
from mindresume.tensor_files import file_checksum, read_header, read_scalar
from mindresume.tensor_files.header import Header, file_name
from mindresume.typed import Checksum, Count, Number, RelativePath, Time, decode

KIND = "scrub"
# tensors and files that a result names; the rest is counted by the reading that repairs it
MAX_NAMED = 100
MAX_TEXT = 1000  # characters of a reason
LIMIT = 16 << 20


@contextmanager
def opened(directory: CheckpointDir, file: FileRecord) -> Iterator[BinaryIO]:
    """Opens a file for the block. Raises CorruptFileError if it is missing; UnreadableFileError if
    it, or its bytes in the block, cannot be read."""
    path = directory.path(file.path)
    try:
        with directory.storage.open(path) as readable:
            yield readable
    except FileNotFoundError as error:
        raise CorruptFileError(path, "the file is missing") from error
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read: {error}") from error


def header_of(directory: CheckpointDir, file: FileRecord) -> Header:
    """Returns the header of a file. Raises CorruptFileError if it is missing, truncated or
    malformed; UnreadableFileError if that is not known."""
    with opened(directory, file) as readable:
        return read_header(readable, directory.path(file.path))


def existing(directory: CheckpointDir, files: Iterable[FileRecord]) -> list[Status]:
    """Returns the status of those of the files that exist and can be looked at, for display."""
    paths = [directory.path(file.path) for file in files]
    return [
        status
        for status in parallel(directory.storage, partial(_status, directory.storage), paths)
        if status is not None
    ]


def _status(storage: Storage, path: str) -> Status | None:
    try:
        return storage.status(path)
    except OSError:
        return None


def is_as_recorded(storage: Storage, path: str, file: FileRecord) -> bool:
    """Returns whether the file at ``path`` has the size and the checksum of ``file``. Its bytes are
    read only if its size is right: it can be sparse, of terabytes. Raises OSError, if it is
    missing, too."""
    with storage.open(path) as opened:
        return opened.seek(0, 2) == file.size and file_checksum(opened) == (
            file.checksum,
            file.size,
        )


def file_sizes(directory: CheckpointDir, files: Iterable[FileRecord]) -> list[int | None]:
    """Returns the size of each file in bytes; None for a missing one."""
    found = parallel(
        directory.storage, directory.storage.status, [directory.path(file.path) for file in files]
    )
    return [status.size if status else None for status in found]


def sizes_match(directory: CheckpointDir, files: Iterable[FileRecord]) -> bool:
    """Returns whether all files exist with their recorded sizes (any size but 0 if none was
    recorded), without opening them."""
    files = list(files)
    return all(
        size and file.size in (None, size)
        for file, size in zip(files, file_sizes(directory, files), strict=True)
    )


SCALARS = ("step_num", "epoch_num", "global_step", "global_batch_size", "loss_scale")


def scalars_of(
    directory: CheckpointDir, file: FileRecord, header: Header, names: Iterable[str] = SCALARS
) -> dict[str, int | float]:
    """Returns the counters in a file of mindformers: step_num (absolute), epoch_num, global_step,
    ... Raises the errors of ``opened``, and CorruptFileError like ``read_scalar``, and for NaN or
    infinity."""
    found = {}
    with opened(directory, file) as readable:
        for name in names:
            value = read_scalar(readable, header, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise CorruptFileError(
                    file_name(readable), f"{name} is {value}, expected a finite number", tensor=name
                )
            if value is not None and not isinstance(value, str):
                found[name] = value
    return found


def state_from_scalars(
    step: int,
    epoch: int | None,
    global_step: int | None,
    batch: int | None,
    scale: float | None,
    step_in_epoch: int = 0,
) -> TrainingState:
    """Returns the training state for the counters of mindformers. The steps of an epoch follow from
    ``step_in_epoch`` if it is known (not 0); else they are the smallest number for which ``step``
    lies in ``epoch``."""
    epoch = epoch or 1
    per_epoch = (
        (step - step_in_epoch) // (epoch - 1) if epoch > 1 and step_in_epoch else -(-step // epoch)
    )
    return TrainingState(
        step, max(per_epoch, 1), step if global_step is None else global_step, batch, scale
    )


def is_weights_only(candidate: Candidate) -> bool:
    """Returns whether the weights of a refused candidate can be loaded: it lacks its step or its
    optimizer state alone."""
    return candidate.problem is not None and candidate.problem.is_weights_only


def no_step(path: str) -> Refusal:
    """Refuses weights without the counters of a training, such as those of checkpoint_network."""
    return Refusal(
        None,
        f"{path} holds no step_num: weights only, not a training state",
        path,
        is_weights_only=True,
    )


# ---- the result of a scrub -----------------------------------------------------------------------


@dataclass(frozen=True)
class DamagedFile:
    """Describes a file that a scrub found damaged.

    Attributes:
        path: relative to the folder that contains ``.mindresume``.
        rank: whose file it is.
        size: in bytes, when it was read.
        mtime: last change of its content, in seconds since 1970.
        changed: last change of its content, name or rights, in seconds since 1970; 0: not known.
        reason: what was expected and found.
        tensors: names of the damaged tensors.
    """

    path: RelativePath
    rank: Count
    size: Count
    mtime: Number
    changed: Number
    reason: str
    tensors: tuple[str, ...] = ()

    def is_unchanged(self, status: Status | None) -> bool:
        """Returns whether the file with this status is the one that was read."""
        return status is not None and (status.size, status.mtime, status.changed) == (
            self.size,
            self.mtime,
            self.changed,
        )


@dataclass(frozen=True)
class ScrubResult:
    """Holds the result for one checkpoint. ``read_at``: seconds since 1970. ``records``:
    fingerprint of its records."""

    read_at: Time
    records: Checksum
    damaged: tuple[DamagedFile, ...] = ()

    def encode(self) -> bytes:
        """Returns the content of the file."""
        return codec.encode_head({"version": codec.VERSION, "kind": KIND, **asdict(self)}, LIMIT)


def fingerprint(candidate: Candidate) -> str:
    """Returns a checksum of the checksums of all records, which identifies what was committed."""
    return xxhash.xxh3_128_hexdigest(" ".join([candidate.name, *candidate.records]).encode())


def can_be_scrubbed(candidate: Candidate) -> bool:
    """Returns whether it is a complete checkpoint with records, whose bytes have checksums."""
    return (
        candidate.records_dir is not None and bool(candidate.records) and candidate.problem is None
    )


def read_result(storage: Storage, candidate: Candidate) -> ScrubResult | None:
    """Returns the result beside the records of ``candidate``; None if there is none, it cannot be
    read, or it belongs to other records."""
    if not candidate.has_scrub_result or not can_be_scrubbed(candidate):
        return None
    with (
        suppress(OSError, RecordError),
        storage.open(candidate.in_records(SCRUB_RESULT)) as file,
    ):
        found = decode(ScrubResult, codec.read_head(file, KIND, LIMIT)[0], KIND)
        return found if found.records == fingerprint(candidate) else None
    return None


def known_damage(directory: CheckpointDir, candidate: Candidate) -> Refusal | None:
    """Returns a refusal if a scrub found a file of the checkpoint damaged, and the file is still
    the same. It reads no contents."""
    found = read_result(directory.storage, candidate)
    if found is None:
        return None
    for row in found.damaged:
        path = os.path.join(candidate.iteration_dir, row.path)
        status = None
        # then nothing is known, and whoever takes the checkpoint reads the file
        with suppress(OSError):
            status = directory.storage.status(directory.path(path))
        if row.is_unchanged(status):
            at = runtime.strftime("%Y-%m-%d %H:%M", runtime.localtime(found.read_at))
            more = (
                f"; {len(found.damaged) - 1} more files are damaged"
                if len(found.damaged) > 1
                else ""
            )
            return candidate.refuse(
                f"a scrub at {at} found it damaged: {row.reason}{more}; mindresume scrub --repair "
                "mends what has an intact copy",
                path,
                row.rank,
                row.tensors,
            )
    return None


def publish_result(
    storage: Storage,
    candidate: Candidate,
    damage: Iterable[Refusal],
    before: Mapping[str, Status | None],
    read_at: float,
    tag: str,
) -> None:
    """Writes the result of a scrub. Raises OSError.

    Args:
        damage: of files that exist; what is missing needs no reading to be found.
        before: status of each of these files before the reading that found it damaged.
    """
    rows: dict[str, DamagedFile] = {}
    for refusal in damage:
        status = before.get(refusal.file or "")
        if refusal.file is None or status is None or status.is_folder:
            continue
        path = (
            os.path.relpath(refusal.file, candidate.iteration_dir)
            if candidate.iteration_dir
            else refusal.file
        )
        rows[path] = DamagedFile(
            path,
            refusal.rank or 0,
            status.size,
            status.mtime,
            status.changed,
            refusal.reason[:MAX_TEXT],
            refusal.tensors[:MAX_NAMED],
        )
    result = ScrubResult(read_at, fingerprint(candidate), tuple(rows.values())[:MAX_NAMED])
    folder = candidate.records_dir or ""
    path = os.path.join(folder, SCRUB_RESULT)
    publish(storage, path, [result.encode()], tag)
    # root scrubs, and the jobs of a user read the result
    storage.copy_owner(folder, path)
