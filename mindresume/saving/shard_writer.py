"""Defines what one rank saves at a step, and writes it: its files of weights, then a record of
them; weights for inference.

    write_shard(target, shard)       # publish the files ─▶ publish the record of what was written
    write_extra_weights(storage, extra, target.run)

A process that dies between two of these operations leaves earlier checkpoints as they were, and
files that no record names.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindresume import runtime
from mindresume.coordination.lease import fence
from mindresume.coordination.lease_acquisition import half_written
from mindresume.errors import OutOfSpaceError, RecordError, SaveError
from mindresume.events import SILENT, Progress
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.iterations import (
    MODEL,
    OPTIMIZER,
    WeightFile,
    iteration_name,
    parse_iteration,
)
from mindresume.formats.rank_folders import FileName, folder_name, label, parse_name
from mindresume.model.layout import Layouts
from mindresume.model.manifest import (
    EMERGENCY,
    FOLDER,
    LAST_STEPS,
    MANIFEST,
    Details,
    FileRecord,
    Record,
    TensorRecord,
    attempt_name,
    read_record,
    record_name,
    run_sequence,
)
from mindresume.model.training_state import DataPosition, TrainingState
from mindresume.storage import Storage, UnknownOutcomeError, publish
from mindresume.tensor_files import (
    Checksums,
    checksummed,
    encode,
    encode_plan,
    file_checksum,
    plan_arrays,
)


@dataclass(frozen=True)
class SaveTarget(CheckpointDir):
    """The destination of the saves of one rank.

    Attributes:
        root: folder of the rank folders, or with ``iterations`` of the iteration folders.
        local_ranks: the ranks that see it, where nodes share no disk; else empty.
        lineage: the run that began this training (``retention.py``).
        samples_in_common: ``common.json`` may have ``consumed_samples``.
    """

    run: str
    rank: int
    world_size: int
    iterations: bool = False
    local_ranks: tuple[int, ...] = ()
    lineage: str = ""
    samples_in_common: bool = False

    @classmethod
    def of(cls, directory: CheckpointDir, candidate: Candidate, rank: int = 0) -> SaveTarget:
        """Returns the destination of a save that is there."""
        return cls(
            directory.storage,
            directory.root,
            candidate.run or "",
            rank,
            candidate.world_size,
            bool(candidate.iteration_dir),
            candidate.local_ranks,
            candidate.lineage,
        )

    @property
    def ranks(self) -> Sequence[int]:
        """Returns the ranks whose records complete a checkpoint in this directory."""
        return self.local_ranks or range(self.world_size)

    def data_dir(self, step: int) -> str:
        """Returns the folder to which paths of files are relative. An iteration folder gets its
        final name after the commit."""
        return (
            os.path.join(self.root, FOLDER, attempt_name(step, self.run))
            if self.iterations
            else self.root
        )

    def data_dirs(self, step: int) -> list[str]:
        """Returns all possible ``data_dir``: of an iteration folder the hidden one and the final
        one."""
        return [
            self.data_dir(step),
            *([os.path.join(self.root, iteration_name(step))] if self.iterations else []),
        ]

    def attempt(self, step: int) -> str:
        """Returns the folder of records."""
        return os.path.join(self.data_dir(step), FOLDER, attempt_name(step, self.run))


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard. ``path``: relative to ``data_dir``. ``tensors``: in the order of the
    network. ``metadata``: written to the header in addition to our label."""

    path: str
    format: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """The state that one rank saves at one step. ``layouts``: (layout, global shape) of the sharded
    tensors. ``deduplicated``: tensors that several ranks hold are written by one of them only."""

    files: tuple[ShardFile, ...]
    state: TrainingState
    layouts: Layouts = field(default_factory=dict)
    random: Mapping[str, object] = field(default_factory=dict)
    deduplicated: bool = False


def rank_shard(
    name: FileName,
    state: TrainingState,
    tensors: Mapping[str, np.ndarray],
    layouts: Layouts | None = None,
    random: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Shard:
    """Returns a shard of Checkpoint 1.0: one file in the folder of the rank."""
    file = ShardFile(f"{folder_name(name.rank)}/{name}", name.format, tensors, metadata or {})
    return Shard(
        (file,),
        state,
        layouts or {},
        random or {},
        file.metadata.get("remove_redundancy") == "True",
    )


def iteration_shard(
    prefix: str | None,
    target: SaveTarget,
    state: TrainingState,
    model: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray] | None,
    layouts: Layouts | None = None,
    random: Mapping[str, object] | None = None,
    deduplicated: bool = False,
) -> Shard:
    """Returns a shard of Checkpoint 2.0: a file of ``model`` and, unless None, one of
    ``optimizer``. A rank writes an empty file too, so that the number in the names is the number of
    ranks."""
    metadata = {"format": "ms", "remove_redundancy": str(deduplicated)}
    files = [
        ShardFile(
            str(WeightFile(prefix, kind, target.rank, target.world_size)),
            "safetensors",
            tensors,
            metadata,
        )
        for kind, tensors in ((MODEL, model), (OPTIMIZER, optimizer))
        if tensors is not None
    ]
    return Shard(tuple(files), state, layouts or {}, random or {}, deduplicated)


@dataclass(frozen=True)
class ExtraWeights:
    """Weights for inference: ``checkpoint_network`` and ``checkpoint_trainable``. They have no
    records, and no resume uses them. ``kind``: "network" or "trainable_params", part of the name.
    ``keep``: how many stay in ``folder``; 0: all."""

    folder: str
    name: str
    kind: str
    format: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    keep: int = 0


@dataclass(frozen=True)
class Save:
    """Everything that one rank writes at one step. ``ledger``: on rank 0, the last rows of its step
    ledger; empty: there is none."""

    shard: Shard
    extras: tuple[ExtraWeights, ...] = ()
    ledger: bytes = b""

    @property
    def step(self) -> int:
        return self.shard.state.step

    @property
    def name(self) -> str:
        """Returns the name in the log: of the file in a rank folder, or of the iteration folder."""
        folder, _, name = self.shard.files[0].path.rpartition("/")
        return name if folder else iteration_name(self.step)


class StepState:
    """The state of a training at the end of a step, as the trainer offers it to what saves.
    ``step``: counted from the beginning of the training, over all resumes. A subclass defines at
    least ``collect``."""

    step: int

    def collect(self) -> Save:
        """Returns everything that this rank writes. All ranks call it, because it can be a
        collective."""
        raise NotImplementedError

    def collect_local(self) -> Shard:
        """Returns all that this rank holds after other ranks were lost, without collectives."""
        return self.collect().shard

    def needs_collectives(self) -> bool:
        """Returns whether ``collect`` waits for other ranks."""
        return False

    def values(self) -> dict[str, float]:
        """Returns the ``loss`` and ``grad_norm`` of the step, as far as this rank has them; nothing
        if the trainer did not update the weights."""
        return {}

    def window(self, steps: int) -> tuple[int, DataPosition | None, int]:
        """Returns the number of the step, or of the first step of a sink; where its samples begin,
        None: not known; and how many ``steps`` steps have, in whole sinks."""
        return self.step, None, 0

    def hand_over(self, manager: Any) -> None:
        """Collects the step, and submits it to ``manager`` (``CheckpointManager``), which saves it
        to disk. All ranks call it, also one that has saved the step, for which ``submit`` does
        nothing."""
        manager.submit(self.collect())


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save. ``saved``: this rank's shard is written, recorded and durable;
    ``error`` may still name a file of extra weights. ``size``: bytes of the shard. ``seconds``: of
    writing."""

    step: int
    saved: bool
    error: SaveError | None = None
    size: int = 0
    seconds: float = 0.0


_RECORD_ROOM = 64 << 10  # bytes for the small files that follow the weights


@dataclass(frozen=True)
class WrittenShard:
    """A shard whose record exists. ``durability_error``: an error after the rename of the record:
    until the commit a power loss may undo the rename."""

    record: Record
    durability_error: SaveError | None = None


def write_shard(
    target: SaveTarget,
    shard: Shard,
    saved_at: float | None = None,
    progress: Progress = SILENT,
) -> WrittenShard:
    """Writes this rank's files and its record, unless this run has written them already.
    ``saved_at``: see ``Record``; None: the time at which the files are written.

    An error before the rename of the record leaves nothing, or files without a record. After the
    rename nothing that the record names is removed, whatever the error: rank 0 may have seen the
    record, committed the step and removed older ones. The disk then tells whether this rank has
    saved. The same step may be tried again after any error.

    Raises:
        SaveError: names what failed.
        OutOfSpaceError: disk or quota have no space for the shard; nothing was written.
        LeaseHeldError: a later run has acquired the directory.
    """
    step = shard.state.step
    data_dir, attempt = target.data_dir(step), target.attempt(step)
    paths = [os.path.join(data_dir, file.path) for file in shard.files]
    where = paths[0]
    try:
        fence(target, target.run)
        written_to = [data_dir]
        if target.iterations and iteration_name(step) in target.storage.list(target.root):
            # listed first: NFS caches that a name looked up was absent
            written_to.append(target.path(iteration_name(step)))
        before = _read_own_record(target, step, written_to)
        if before is not None:
            record, committed = before
            if not committed:  # an earlier try may have failed at this flush
                try:
                    target.storage.sync(attempt)
                except OSError as error:
                    return _resolve_unconfirmed(target, step, error)
            return WrittenShard(record)
        files = [
            replace(file, metadata={**file.metadata, **label(target.run, step)})
            for file in shard.files
        ]
        plans = [plan_arrays(file.format, file.tensors, file.metadata) for file in files]
        there = {path for path in paths if target.storage.status(path) is not None}
        needed = sum(
            plan.size for path, plan in zip(paths, plans, strict=True) if path not in there
        )
        room = target.storage.free_space(target.root)
        if room < needed + _RECORD_ROOM:
            raise OutOfSpaceError(
                f"step {step} was not saved on rank {target.rank}: its file needs "
                f"{needed / 2**20:.1f} MiB, {target.root} has room for {room / 2**20:.1f} MiB. "
                "Nothing was written, the checkpoints saved before are untouched; free some space, "
                "or keep fewer (keep_checkpoint_max, mindresume prune)"
            )
        progress.expect(needed)
        for folder in dict.fromkeys([attempt, *map(os.path.dirname, paths)]):
            target.storage.make_folder(folder)
        made = []
        rows = []
        sums = [Checksums() for _ in files]
        try:
            for where, file, plan, into in zip(paths, files, plans, sums, strict=True):
                if where in there:
                    _check_same(target.storage, where, encode_plan(plan, file.tensors), into)
                else:
                    made.append(where)
                    pieces = checksummed(encode_plan(plan, file.tensors), into, progress.advance)
                    written = publish(target.storage, where, pieces, target.run, plan.size)
                    if written != plan.size:
                        raise OSError(
                            errno.EIO, f"wrote {written} bytes, expected {plan.size}", where
                        )
                rows.append(FileRecord(file.path, file.format, plan.size, into.file))
            where = os.path.join(attempt, record_name(target.rank))
            at = runtime.timestamp() if saved_at is None else saved_at
            try:
                record = publish_record(target, shard, rows, sums, at)
            except UnknownOutcomeError as error:
                return _resolve_unconfirmed(target, step, error)
        except OSError:
            # no record names these files: they fill the disk and block a retry
            with suppress(OSError):  # the first error is the one to report
                for path in made:
                    target.storage.remove(path)
            raise
    except (OSError, ValueError) as error:
        # ValueError: a dtype or name that the format cannot hold
        reason = getattr(error, "strerror", None) or error
        where = getattr(error, "filename", None) or where
        raise _error_type(error)(
            f"step {step} was not saved on rank {target.rank}: {reason} ({where}). The checkpoints "
            "saved before are untouched"
        ) from error
    return WrittenShard(record)


_SPARE = 8 << 20  # bytes that stay free for the manifest


def write_ledger(target: SaveTarget, save: Save) -> None:
    """Writes the ledger of ``save`` beside its record, unless it is there. It is no part of the
    save: after an error, or on a disk that is almost full, there is none. A reader may find a part
    of it; the manifest does not name it."""
    storage, path = target.storage, os.path.join(target.attempt(save.step), LAST_STEPS)
    with suppress(OSError):
        if storage.free_space(target.root) > _SPARE and storage.status(path) is None:
            storage.write(path, [save.ledger])


def _error_type(error: Exception) -> type[SaveError]:
    return (
        OutOfSpaceError
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        else SaveError
    )


def _resolve_unconfirmed(target: SaveTarget, step: int, error: OSError) -> WrittenShard:
    """Returns the shard as it is on disk after an error at the rename of its record, or at a flush
    after it. Raises SaveError if it cannot be read."""
    try:
        found = _read_own_record(target, step, target.data_dirs(step))
    except OSError:
        found = None
    if found is None:
        raise _error_type(error)(
            f"step {step} may not be saved on rank {target.rank}: {error.strerror} "
            f"({error.filename}), and its record cannot be read now. Nothing was removed: it "
            "counts if the record turns out to be there"
        ) from error
    record, committed = found
    # with the manifest rank 0 has flushed the folder of records
    if committed:
        return WrittenShard(record)
    return WrittenShard(
        record,
        SaveError(
            f"step {step} may not stay saved on rank {target.rank}: its record is there, but a "
            f"loss of power could undo that: {error.strerror} ({error.filename}). Nothing was "
            "removed: it counts if all ranks have recorded it"
        ),
    )


def _read_own_record(
    target: SaveTarget, step: int, data_dirs: Sequence[str]
) -> tuple[Record, bool] | None:
    """Returns (record of this rank and run, whether rank 0 has committed the step) if the files
    have the recorded sizes. Looks at both names of an iteration folder, which may be renamed at any
    moment. Raises OSError if it cannot be known."""
    for data_dir in data_dirs:
        try:
            with target.storage.open(
                os.path.join(
                    data_dir, FOLDER, attempt_name(step, target.run), record_name(target.rank)
                )
            ) as file:
                record = read_record(file)
        except (FileNotFoundError, RecordError):
            continue
        found = [target.storage.status(os.path.join(data_dir, row.path)) for row in record.files]
        if all(
            status is not None and status.size == row.size
            for row, status in zip(record.files, found, strict=True)
        ):
            return record, is_committed(target, step)
    return None


def is_committed(target: SaveTarget, step: int) -> bool:
    """Returns whether this run has committed ``step``. Raises OSError."""
    return any(
        target.storage.status(
            os.path.join(data_dir, FOLDER, attempt_name(step, target.run), MANIFEST)
        )
        is not None
        for data_dir in target.data_dirs(step)
    )


def _check_same(
    storage: Storage, path: str, pieces: Iterable[tuple[str | None, memoryview]], into: Checksums
) -> None:
    """Checks that ``path`` has the content ``pieces``, which would be written, and computes its
    checksums. An earlier attempt of this run wrote it; its record may exist without being visible
    yet, so the file is not touched. Raises SaveError if the content differs."""
    for _ in checksummed(pieces, into):
        pass
    with storage.open(path) as opened:
        found = file_checksum(opened)
    if found != (into.file, into.size):
        raise SaveError(
            f"{path} exists already, with other content; a file of a checkpoint is never "
            "overwritten. If another "
            f"job is writing into this folder, give each job a folder of its own"
        )
    storage.sync(os.path.dirname(path))


def mark_emergency(target: SaveTarget, step: int) -> None:
    """Marks the save of ``step`` as an emergency save: ranks were lost, and the shards of the
    others may be all of it. Each rank that is left does so before it writes, unless the step is
    committed. Raises OSError."""
    if is_committed(target, step):
        return
    attempt = target.attempt(step)
    target.storage.make_folder(attempt)
    publish(target.storage, os.path.join(attempt, EMERGENCY), [b""], f"{target.rank}.{target.run}")


def publish_record(
    target: SaveTarget,
    shard: Shard,
    files: Sequence[FileRecord],
    sums: Sequence[Checksums],
    saved_at: float,
) -> Record:
    """Publishes the record of a shard that is written: from then on it counts. Returns it. Raises
    like ``publish``.

    Args:
        files: of the shard, as they are written.
        sums: the checksums of each of them.
    """
    tensors = {}
    for index, file in enumerate(shard.files):
        for name, array in file.tensors.items():
            layout, global_shape = shard.layouts.get(name, (None, None))
            tensors[name] = TensorRecord(
                "str" if array.dtype.kind == "U" else str(array.dtype),
                tuple(array.shape),
                sums[index].tensors[name],
                layout,
                global_shape,
                index,
            )
    record = Record(
        target.run,
        target.rank,
        target.world_size,
        shard.state,
        saved_at,
        tuple(files),
        shard.deduplicated,
        target.lineage,
        target.local_ranks,
    )
    publish(
        target.storage,
        os.path.join(target.attempt(shard.state.step), record_name(target.rank)),
        [record.encode(Details(tensors, shard.random))],
        target.run,
    )
    return record


def clean_own_folder(target: SaveTarget) -> list[str]:
    """Removes the temporary files of earlier runs and of repairs from this rank's folder; the first
    rank, from the iteration folders, too. Returns their names. Those runs are dead: the launch of
    this run has ended them. A repair that still goes on fails, and can be tried again.

    Flushes ``root``: a rank folder counts as durable, but its maker may have died right after
    ``mkdir``.
    """
    storage, root = target.storage, target.root
    if storage.status(root) is not None:
        storage.sync(root)
    folders = [folder_name(target.rank)]
    if target.iterations and target.rank == target.ranks[0]:
        folders += [name for name in storage.list(root) if parse_iteration(name) is not None]
    removed = []
    # one after the other: the own one is cleaned whatever the others are
    for folder in folders:
        for name, run in half_written(storage.list(target.path(folder))):
            if run_sequence(run) < run_sequence(target.run):
                storage.remove(target.path(folder, name))
                removed.append(name)
    return removed


# ---- weights for inference -----------------------------------------------------------------------


def write_extra_weights(storage: Storage, extra: ExtraWeights, tag: str) -> None:
    """Publishes the file, then removes the oldest beyond ``keep``. Raises SaveError that names the
    file."""
    path = os.path.join(extra.folder, extra.name)
    try:
        storage.make_folder(extra.folder)
        publish(
            storage,
            path,
            (piece for _, piece in encode(extra.format, extra.tensors, extra.metadata)),
            tag,
        )
        ours = [
            (position, entry)
            for entry in storage.list(extra.folder)
            if f"-{extra.kind}-" in entry and (position := _position(entry, extra))
        ]
        for _, entry in sorted(ours)[: -extra.keep] if extra.keep else []:
            storage.remove(os.path.join(extra.folder, entry))
    except (OSError, ValueError) as error:
        raise SaveError(
            f"{path} was not written: {getattr(error, 'strerror', None) or error}"
        ) from error


def _position(entry: str, extra: ExtraWeights) -> tuple[int, int, int] | None:
    """Returns (suffix, epoch, step) of ``{stem}-{kind}-{epoch}_{step}.{fmt}``, None for another
    name."""
    parsed = parse_name(entry.replace(f"-{extra.kind}-", "-", 1))
    return (
        (parsed.suffix, parsed.epoch, parsed.step)
        if parsed and parsed.format == extra.format
        else None
    )
