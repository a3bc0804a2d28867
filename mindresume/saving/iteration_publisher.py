"""Publishes an iteration folder of Checkpoint 2.0, on rank 0, after all records exist:

    common.json, metadata.json ─▶ manifest (that is the commit) ─▶ the tracker's intent ─▶ rename to
        iteration_... ─▶ the tracker

    death before the manifest   all records exist: the next run commits it
    before the rename           committed under its hidden name; the next run renames it
    before the tracker          the intent says that the tracker is late, not set back by hand

An existing folder of that name (a run that resumed from an older step saves later steps again) is
never written into: the tracker is set to an older one, the old folder is renamed, then the new one
gets its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import xxhash

from mindresume import runtime
from mindresume.coordination.lease_acquisition import half_written
from mindresume.errors import RecordError
from mindresume.events import Emit, Notice, ignore
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.iterations import (
    COMMON,
    METADATA,
    TRACKER,
    candidate_without_records,
    common_from_state,
    encode_common,
    intent_name,
    intents,
    iteration_name,
    parse_iteration,
    tracked,
)
from mindresume.formats.metadata import encode_metadata, metadata_from_records
from mindresume.formats.records import RecordFolder, attempts_within, scan_records
from mindresume.model.manifest import (
    FOLDER,
    FileRecord,
    Record,
    attempt_name,
    run_name,
    run_sequence,
    trash_name,
)
from mindresume.model.training_state import TrainingState
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import publish


def write_metadata_files(
    target: SaveTarget, state: TrainingState, records: Sequence[Record]
) -> tuple[FileRecord, ...]:
    """Writes ``common.json`` and, for several ranks, ``metadata.json``, from which mindformers
    resumes. Raises RecordError if the records contradict each other."""
    contents = {COMMON: [encode_common(common_from_state(state, target.samples_in_common))]}
    if target.world_size > 1:
        try:
            contents[METADATA] = encode_metadata(
                metadata_from_records(
                    [[file.path for file in record.files] for record in records],
                    any(record.deduplicated for record in records),
                    RecordFolder(target.storage, target.attempt(state.step)),
                )
            )
        except ValueError as error:
            raise RecordError(f"{METADATA} cannot be made: {error}") from error
    found = []
    for name, pieces in contents.items():
        checksum = xxhash.xxh3_128()
        for piece in pieces:
            checksum.update(piece)
        size = publish(
            target.storage, os.path.join(target.data_dir(state.step), name), pieces, target.run
        )
        found.append(FileRecord(name, "json", size, checksum.hexdigest()))
    return tuple(found)


def publish_iteration(
    target: SaveTarget, step: int, newest: bool = True, emit: Emit = ignore
) -> None:
    """Renames the committed folder of ``step`` to its final name, and sets the tracker to it if it
    is the ``newest``. Raises OSError; the next call, or ``finish_tracker``, then completes the
    rest."""
    storage, root = target.storage, target.root
    name, records = iteration_name(step), os.path.join(root, FOLDER)
    iteration_dir, intent = os.path.join(root, name), os.path.join(records, intent_name(step))
    if newest:
        publish(storage, intent, [b""], target.run)
    if storage.status(iteration_dir) is not None:
        _set_tracker_back(target, step, target.run)
        _free_iteration_name(target, step, emit)
        storage.sync(root)
    storage.rename(target.data_dir(step), iteration_dir)
    storage.sync(root)
    storage.sync(records)
    if newest:
        set_tracker(target, step, target.run)
        storage.remove(intent)
        for other in intents(storage.list(records)):
            # its removal had failed; the tracker is not late any more
            if other < step:
                storage.remove(os.path.join(records, intent_name(other)))


def _free_iteration_name(target: SaveTarget, step: int, emit: Emit) -> None:
    """Frees the name of the iteration folder of ``step``. A folder that this training saved before
    becomes trash, and so does one that no training can resume from. What is of another training or
    of mindformers, a copy, cannot be read, or is no folder, is kept under another name, by which it
    can be loaded."""
    storage = target.storage
    root = target.root
    name = iteration_name(step)
    ours, _, _ = scan_records(target, attempts_within(target, name))
    if ours:
        removable = ours[0].step == step and ours[0].lineage == target.lineage
        replaced = ours[0].name
    else:
        foreign = candidate_without_records(target, name)
        removable = (
            foreign is not None
            and foreign.problem is not None
            and not foreign.problem.is_unreadable
        )
        # mindformers has no run ids
        replaced = attempt_name(step, run_name(0, runtime.token_hex(4)))
    free = (
        os.path.join(FOLDER, trash_name(replaced))
        if removable
        else f"{name}.kept-{runtime.token_hex(4)}"
    )
    storage.rename(os.path.join(root, name), os.path.join(root, free))
    if not removable:
        emit(
            Notice(
                f"{name} in {root} is not of this training, which saves step {step} now: it is "
                f"kept as {free}"
            )
        )


def set_tracker(directory: CheckpointDir, step: int, tag: str) -> None:
    publish(directory.storage, directory.path(TRACKER), [str(step).encode()], tag)


def _set_tracker_back(directory: CheckpointDir, step: int, tag: str) -> None:
    """Sets the tracker, if it names ``step``, which is being replaced, to the newest iteration
    before it; removes the tracker if there is none."""
    if tracked(directory) != step:
        return
    others = [
        number
        for name in directory.storage.list(directory.root)
        if (number := parse_iteration(name)) is not None
        and number < step
        # a listing may show removed folders
        and directory.storage.status(directory.path(name)) is not None
    ]
    if others:
        set_tracker(directory, max(others), tag)
    else:
        directory.storage.remove(directory.path(TRACKER))
        directory.storage.sync(directory.root)


def finish_tracker(directory: CheckpointDir, candidates: Iterable[Candidate], tag: str) -> None:
    """Sets the tracker as a dead job intended. ``candidates``: those with records, newest first."""
    _clean_trackers(directory, tag)
    pending = intents(directory.storage.list(directory.path(FOLDER)))
    if not pending:
        return
    candidates = list(candidates)
    newest = next(
        (c for c in candidates if c.committed and parse_iteration(c.iteration_dir) is not None),
        None,
    )
    if newest is not None and newest.step in pending:
        set_tracker(directory, newest.step or 0, tag)
    seen = {c.step for c in candidates if not c.listing_error}
    there = directory.storage.list(directory.root)
    for step in pending:
        # else it is not listed now, and may be the newest
        if step in seen or iteration_name(step) not in there:
            directory.storage.remove(directory.path(FOLDER, intent_name(step)))


def _clean_trackers(directory: CheckpointDir, tag: str) -> None:
    """Removes temporary files of the tracker of runs before ``tag``."""
    for name, run in half_written(directory.storage.list(directory.root)):
        if name.startswith(f".{TRACKER}.") and run_sequence(run) < run_sequence(tag):
            directory.storage.remove(directory.path(name))
