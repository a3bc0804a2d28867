"""Publishes an iteration folder of Checkpoint 2.0. On rank 0 alone, after all records are there:

    common.json, metadata.json ─▶ manifest (that is the commit) ─▶ the tracker's intent ─▶ rename to iteration_... ─▶ the tracker

    dies before the manifest   all records are there: the next run commits it
    before the rename          committed under its hidden name; the next run renames it
    before the tracker         the intent says that the tracker was not set back by hand, but is late

A folder of that name that is there already (a run that went back saves its steps again) is never written into: the tracker is
first set to an older one, then the old folder is renamed away, then the new one takes its name.
"""
from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress

import xxhash

from mindresume.errors import RecordError
from mindresume.events import Emit, Notice, ignore
from mindresume.formats import Candidate
from mindresume.formats.iteration_naming import COMMON, METADATA, TRACKER, encode_common, iteration_name, parse_iteration
from mindresume.formats.iteration_scan import candidate_without_records, common_from_state, intent_name, intents, tracked
from mindresume.formats.metadata import encode_metadata
from mindresume.formats.metadata_from_records import metadata_from_records
from mindresume.formats.records import attempts_within, details_of, read_attempts
from mindresume.model.file_record import FileRecord
from mindresume.model.manifest import FOLDER, Record, attempt_name, run_name, run_sequence, trash_name
from mindresume.model.training_state import TrainingState
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.atomic_publish import publish, temporary_name
from mindresume.storage.interface import Storage


def write_metadata_files(place: SaveTarget, state: TrainingState, records: Sequence[Record]) -> tuple[FileRecord, ...]:
    """Writes ``common.json`` and, for several ranks, ``metadata.json``, from which mindformers resumes. Raises RecordError if the
    records do not fit together."""
    contents = {COMMON: [encode_common(common_from_state(state), with_status=state.health is not None)]}
    if place.world_size > 1:
        try:
            contents[METADATA] = encode_metadata(metadata_from_records(
                [[file.path for file in record.files] for record in records], any(record.deduplicated for record in records),
                lambda rank: details_of(place.storage, place.attempt(state.step), rank)))
        except ValueError as error:
            raise RecordError(f"{METADATA} cannot be made: {error}") from error
    found = []
    for name, pieces in contents.items():
        checksum = xxhash.xxh3_128()
        for piece in pieces:
            checksum.update(piece)
        size = publish(place.storage, os.path.join(place.data_dir(state.step), name), pieces, place.run)
        found.append(FileRecord(name, "json", size, checksum.hexdigest()))
    return tuple(found)


def publish_iteration(place: SaveTarget, step: int, newest: bool = True, emit: Emit = ignore) -> None:
    """Gives the committed folder of ``step`` its name, and if it is the ``newest`` sets the tracker to it. Raises OSError: what
    was not done is done by the next call, or by ``finish_tracker``."""
    storage, root = place.storage, place.root
    name, records = iteration_name(step), os.path.join(root, FOLDER)
    target, intent = os.path.join(root, name), os.path.join(records, intent_name(step))
    if newest:
        publish(storage, intent, [b""], place.run)
    if storage.status(target) is not None:
        _lead_elsewhere(storage, root, step, place.run)
        _make_way(place, step, emit)
        storage.sync(root)
    storage.rename(place.data_dir(step), target)
    storage.sync(root)
    storage.sync(records)
    if newest:
        set_tracker(storage, root, step, place.run)
        storage.remove(intent)
        for other in intents(storage.list(records)):
            if other < step:                        # its removal had failed; nothing is late any more
                storage.remove(os.path.join(records, intent_name(other)))


def _make_way(place: SaveTarget, step: int, emit: Emit) -> None:
    """Frees the name of the iteration folder of ``step``. A folder that this training saved there before goes to the trash. One
    of another training, of mindformers, or a copy by hand is not removed: it stays under another name, by which it can be
    loaded."""
    storage, root, name = place.storage, place.root, iteration_name(step)
    ours, _, _ = read_attempts(storage, root, attempts_within(storage, root, name))
    if ours:
        removable, replaced = ours[0].step == step and ours[0].lineage == place.lineage, ours[0].name
    else:
        foreign = candidate_without_records(storage, root, name)
        removable = foreign is None or foreign.problem is not None
        replaced = attempt_name(step, run_name(0, secrets.token_hex(4)))        # mindformers gives its runs no name
    free = os.path.join(FOLDER, trash_name(replaced)) if removable else f"{name}.kept-{secrets.token_hex(4)}"
    storage.rename(os.path.join(root, name), os.path.join(root, free))
    if not removable:
        emit(Notice(f"{name} in {root} is of another training, and this one saves step {step} now: it is kept as {free}"))


def set_tracker(storage: Storage, root: str, step: int, tag: str) -> None:
    publish(storage, os.path.join(root, TRACKER), [str(step).encode()], tag)


def _lead_elsewhere(storage: Storage, root: str, step: int, tag: str) -> None:
    """Sets the tracker to the newest iteration before ``step``, if it names ``step``, which is being replaced; removes it if
    there is none."""
    if tracked(storage, root) != step:
        return
    others = [number for name in storage.list(root) if (number := parse_iteration(name)) is not None and number < step
              and storage.status(os.path.join(root, name)) is not None]         # a listing may show what others have removed
    if others:
        set_tracker(storage, root, max(others), tag)
    else:
        storage.remove(os.path.join(root, TRACKER))
        storage.sync(root)


def finish_tracker(storage: Storage, root: str, candidates: Iterable[Candidate], tag: str) -> None:
    """Finishes the change of the tracker that a dead job intended. ``candidates``: those with records, newest first."""
    _clean_trackers(storage, root, tag)
    pending = intents(storage.list(os.path.join(root, FOLDER)))
    if not pending:
        return
    candidates = list(candidates)
    newest = next((c for c in candidates if c.committed and parse_iteration(c.iteration_dir) is not None), None)
    if newest is not None and newest.step in pending:
        set_tracker(storage, root, newest.step or 0, tag)
    seen, there = {c.step for c in candidates if not c.listing_error}, storage.list(root)
    for step in pending:
        if step in seen or iteration_name(step) not in there:   # else it cannot be listed now, and may be the newest
            storage.remove(os.path.join(root, FOLDER, intent_name(step)))


def _clean_trackers(storage: Storage, root: str, tag: str) -> None:
    """Removes trackers that runs before ``tag`` left half-written."""
    head, tail = temporary_name(os.path.join(root, TRACKER), "\0").split("\0")
    for name in storage.list(root):
        path = os.path.join(root, name)
        if path.startswith(head) and path.endswith(tail):
            with suppress(RecordError):
                if run_sequence(path[len(head):-len(tail)]) < run_sequence(tag):
                    storage.remove(path)
