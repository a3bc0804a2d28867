"""Removes checkpoints: carries out a plan (``retention.py``). The process may die at any
operation.

    made = plan(directory, policy, read_locks(), active=run)
    removed = carry_out(directory, made, read_locks)

    all iteration folders   announce their removal ─▶ read lock? it stays
    each to_delete          rename its commit_dir to trash-... with a nonce ─▶ sync
                            ─▶ read lock by now? rename it back
    then                    weights of all ranks ─▶ sync their folders ─▶ records
                            ─▶ the trash folder

The ``commit_dir`` is the folder of records, or the iteration folder, which also holds the weights.

Renaming ``commit_dir`` un-commits the checkpoint; the next ``carry_out`` of any process finishes
the removal. Records are removed last, because they name the files, and only after the removal of
the weights is durable: a power loss could otherwise restore weights that no record names.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial

from mindresume.coordination.lease import ReadLocks, announce_removal
from mindresume.coordination.lease_acquisition import check_no_live_job
from mindresume.errors import CorruptFileError, RecordError, UnreadableFileError
from mindresume.events import Emit, RemovalPostponed, ignore
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.iterations import COMMON, iteration_name, parse_weight_file
from mindresume.formats.rank_folders import (
    folder_name,
    labelled_files,
    name_for_rank,
    parse_label,
    parse_name,
)
from mindresume.formats.records import ReadManifests, attempts_within, scan_records
from mindresume.formats.weight_files import header_of, sizes_match
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    TRASH,
    FileRecord,
    Manifest,
    parse_attempt,
    read_record,
    record_rank,
    strip_trash,
    trash_name,
)
from mindresume.saving.retention import KEEP_ALL, Plan, plan
from mindresume.storage import TEMPORARY, Storage, parallel, remove_tree, temporary_name


def carry_out(
    directory: CheckpointDir,
    made: Plan,
    read_locks: ReadLocks | None = None,
    emit: Emit = ignore,
    manifests: ReadManifests | None = None,
) -> list[Candidate]:
    """Removes ``to_delete`` and ``orphans`` of a plan, and finishes removals of earlier processes.
    Returns the candidates that this call un-committed; those that another process removed, or that
    are being read by now, are left out. A failure is an event and concerns one candidate only; the
    next call tries again.

    A run may have died between the rename of a manifest and its flush: a loss of power could then
    un-commit what the plan keeps. Only the last commit of a run can be such a one, so these are
    flushed first; if one cannot be, nothing is removed.
    """
    trash: dict[str, Candidate] = {}
    read_locks = read_locks or ReadLocks(directory)
    if made.to_delete:
        # the kept are newest first: the oldest of a run is replaced by its newest
        last = {c.run: c.records_dir for c in reversed(made.kept) if c.committed}
        for folder in filter(None, last.values()):
            try:
                directory.storage.sync(folder)
            except OSError as error:
                emit(_postponed(folder, error))
                return []
    # with their weights
    moving = [candidate.name for candidate in made.to_delete if candidate.iteration_dir]
    announcement = None
    if moving:
        # a full disk: a reader may find its checkpoint renamed for a moment
        with suppress(OSError):
            announcement = announce_removal(directory, moving)
    try:
        for candidate in (*made.to_delete, *made.orphans):
            try:
                name = _uncommit(directory, candidate, read_locks, emit)
            except OSError as error:
                emit(_postponed(candidate.commit_dir, error, candidate.step))
                continue
            if name:
                trash[name] = candidate
    finally:
        if announcement is not None:
            announcement.release()
    empty_trash(directory, read_locks, trash, emit, manifests)
    return list(trash.values())


def free_names(
    directory: CheckpointDir, paths: Collection[str], run: str, emit: Emit = ignore
) -> None:
    """Removes incomplete saves of other runs whose weights have one of the ``paths`` that ``run``
    needs: a training that started afresh, on a disk without the checkpoint of ``run``, has used the
    same names. Raises LeaseHeldError if a job with a lease on the directory is or may be alive."""
    folder = directory.path(FOLDER)
    incomplete = [
        c.name
        for c in scan_records(directory, brief=True)[0]
        if not (c.maybe_completed or c.iteration_dir or c.run == run)
    ]
    # already being removed
    going = [name for name in directory.storage.list(folder) if name.startswith(TRASH)]
    in_the_way: set[str] = set()
    for names in (incomplete, going):
        if not in_the_way:
            in_the_way = {
                name
                for name in names
                if not set(paths).isdisjoint(weights_of(directory, os.path.join(folder, name)))
            }
    if in_the_way:
        check_no_live_job(directory, emit)
        read_locks = ReadLocks(directory)
        runs = {parsed[1] for parsed in map(parse_attempt, in_the_way) if parsed}
        made = plan(directory, KEEP_ALL, read_locks(), ended=runs)
        carry_out(
            directory,
            Plan(orphans=tuple(c for c in made.orphans if c.name in in_the_way)),
            read_locks,
            emit,
        )


def _uncommit(
    directory: CheckpointDir, candidate: Candidate, read_locks: ReadLocks, emit: Emit
) -> str:
    """Renames ``commit_dir`` to a trash folder. Returns the name of the trash folder; empty if the
    checkpoint is being read or gone. A reader publishes its read lock and then checks that the
    folder exists; this function renames the folder and then checks for read locks: at least one of
    the two sees the other. An iteration folder moves with its weights, so read locks are checked
    before its rename, too."""
    held = read_locks() if candidate.iteration_dir else {}
    if candidate.name in held:
        emit(RemovalPostponed(candidate.commit_dir, held[candidate.name], candidate.step))
    if not candidate.commit_dir or candidate.name in held:
        return ""
    records, name = directory.path(FOLDER), trash_name(candidate.name)
    try:
        directory.storage.rename(candidate.commit_dir, os.path.join(records, name))
    except FileNotFoundError:
        # removed by hand or by another process
        return ""
    for folder in dict.fromkeys((os.path.dirname(candidate.commit_dir), records)):
        directory.storage.sync(folder)
    who = read_locks().get(candidate.name)
    if who is None:
        return name
    if _restore(directory.storage, os.path.join(records, name), candidate.commit_dir):
        emit(RemovalPostponed(candidate.commit_dir, who, candidate.step))
    return ""


def _postponed(path: str, error: OSError, step: int | None = None) -> RemovalPostponed:
    """Returns the event for a failure. Without the name of the trash folder, events of the same
    failure are equal, and it is emitted once."""
    return RemovalPostponed(path, error.strerror or str(error), step)


def _restore(storage: Storage, trash: str, attempt: str) -> bool:
    """Renames the trash back. Returns False if another process finished the removal meanwhile."""
    try:
        storage.rename(trash, attempt)
    except FileNotFoundError:
        return False
    storage.sync(os.path.dirname(attempt))
    return True


def empty_trash(
    directory: CheckpointDir,
    read_locks: ReadLocks,
    checked: Collection[str] = (),
    emit: Emit = ignore,
    manifests: ReadManifests | None = None,
) -> None:
    """Finishes every removal in progress. A failure is an event and concerns one of them only.
    ``checked``: names of trash folders without read locks, whose rename is durable.

    A checkpoint in the trash has a read lock if the process that un-committed it died before it
    checked for read locks. It is restored if it is still whole; otherwise it stays in the trash
    until the lock is gone.
    """
    folder = directory.path(FOLDER)
    names = [name for name in directory.storage.list(folder) if name.startswith(TRASH)]
    ready = [name for name in names if name in checked]
    others = [name for name in names if name not in checked]
    if others:
        try:
            for path in (
                directory.root,
                # the process that renamed them may have died before the sync
                folder,
            ):
                directory.storage.sync(path)
            held = read_locks()
        except OSError as error:
            emit(_postponed(folder, error))
            others = []
    for name in others:
        if strip_trash(name) not in held:
            ready.append(name)
        else:
            _restore_if_whole(directory, name, emit)
    if not ready:
        return
    # Two saves can have files of one name, if rank folders were deleted by hand and their records
    # were not: the later file stays.
    found, referenced, _ = scan_records(directory, manifests=manifests)
    # None: not all are known
    known = None if any(candidate.listing_error for candidate in found) else referenced
    for name in ready:
        try:
            _clear(directory, os.path.join(folder, name), known)
        except OSError as error:
            emit(_postponed(os.path.join(folder, name), error))


def _restore_if_whole(directory: CheckpointDir, name: str, emit: Emit) -> None:
    trash = directory.path(FOLDER, name)
    try:
        manifest, base = _manifest_of(directory, trash)
        if manifest is not None:
            commit_dir = directory.path(
                *(
                    [iteration_name(manifest.state.step)]
                    if base != directory.root
                    else [FOLDER, strip_trash(name)]
                )
            )
            if directory.storage.status(commit_dir) is None:
                _restore(directory.storage, trash, commit_dir)
    except OSError as error:
        emit(
            RemovalPostponed(
                trash, f"it is being read and cannot be restored: {error.strerror or error}"
            )
        )


def _manifest_of(directory: CheckpointDir, trash: str) -> tuple[Manifest | None, str]:
    """Returns (manifest of a trash folder, or None unless all of its files are there; folder to
    which its paths are relative)."""
    inner = attempts_within(
        CheckpointDir(directory.storage, os.path.dirname(trash)), os.path.basename(trash)
    )
    folder, base = (
        (os.path.join(os.path.dirname(trash), inner[0].place), trash)
        if inner
        else (trash, directory.root)
    )
    try:
        with directory.storage.open(os.path.join(folder, MANIFEST)) as file:
            manifest = Manifest.read(file)
    except (OSError, RecordError):
        return None, base
    there = set(map(record_rank, directory.storage.list(folder)))
    files = [*(file for files in manifest.files for file in files), *manifest.metadata_files]
    return manifest if there.issuperset(manifest.ranks) and sizes_match(
        CheckpointDir(directory.storage, base), files
    ) else None, base


def _clear(directory: CheckpointDir, trash: str, referenced: Collection[str] | None) -> None:
    status = directory.storage.status(trash)
    # the target of a link is not removed
    if status is not None and not status.is_link:
        if holds_weights(directory.storage, trash):
            remove_tree(directory.storage, trash)
            return
        _clear_weights(directory, trash, referenced)
        parallel(
            directory.storage,
            directory.storage.remove,
            [os.path.join(trash, entry) for entry in directory.storage.list(trash)],
        )
    directory.storage.remove(trash)


def holds_weights(storage: Storage, trash: str) -> bool:
    """Returns whether a trash folder was an iteration folder, which holds its weights."""
    names = storage.list(trash)
    return FOLDER in names or any(map(parse_weight_file, names)) or COMMON in names


def _clear_weights(
    directory: CheckpointDir, trash: str, referenced: Collection[str] | None
) -> None:
    """Removes the weights of a trash folder. ``referenced``: files of other saves, which stay;
    None: not known, so only files whose label names this save are removed."""
    staying = {directory.path(path) for path in referenced or ()}
    by_folder: dict[str, list[str]] = {}
    for path in weights_of(directory, trash):
        if path not in staying and not (
            referenced is None and _may_be_of_another(directory, path, trash)
        ):
            by_folder.setdefault(os.path.dirname(path), []).append(path)
    parallel(directory.storage, partial(_clear_rank_folder, directory.storage), by_folder.items())


def _clear_rank_folder(storage: Storage, item: tuple[str, list[str]]) -> None:
    """Removes the files of ``item`` (folder, their paths)."""
    rank_folder, paths = item
    for path in paths:
        storage.remove(path)
    # this rank wrote nothing, or its folder was removed by hand
    with suppress(FileNotFoundError):
        # also if nothing was left: who removed the files may have died
        storage.sync(rank_folder)


def _may_be_of_another(directory: CheckpointDir, path: str, trash: str) -> bool:
    """Returns whether the weights at ``path`` may be of another save than the one in ``trash``. A
    temporary file cannot be: its name contains its run."""
    step, run = parse_attempt(strip_trash(os.path.basename(trash))) or (0, "")
    if path.endswith(TEMPORARY) or directory.storage.status(path) is None:
        return False
    try:
        return parse_label(
            header_of(directory, FileRecord(os.path.relpath(path, directory.root), ""))
        ) != (run, step)
    except UnreadableFileError as error:
        # without its records nobody would find the file any more
        raise OSError(errno.EIO, error.reason, path) from error
    except CorruptFileError:
        return True


def weights_of(directory: CheckpointDir, folder: str) -> list[str]:
    """Returns the paths of the weights that an attempt may have written, on every rank, recorded or
    not. ``folder``: its folder of records, which may be in the trash already.

    One record gives the names for all ranks, because a prefix with its suffix belongs to one run
    alone. If no record of this attempt names a file of its step, the labels in the files decide.
    """
    step, run = parse_attempt(strip_trash(os.path.basename(folder))) or (0, "")
    entries = [entry for entry in directory.storage.list(folder) if record_rank(entry) is not None]
    # one is enough; the others are read only if the first is damaged
    for portion in (entries[:1], entries[1:]):
        rows = parallel(
            directory.storage, partial(_named_by_record, directory, folder, step, run), portion
        )
        found = next(filter(None, rows), None)
        if found is not None:
            return found
    return labelled_files(directory, run, step)


def _named_by_record(
    directory: CheckpointDir, folder: str, step: int, run: str, entry: str
) -> list[str]:
    """Returns the paths for all ranks that the record ``entry`` gives; empty if it is not of this
    step and run, or damaged."""
    try:
        with directory.storage.open(os.path.join(folder, entry)) as file:
            record = read_record(file)
    except (FileNotFoundError, RecordError):
        return []
    name = record.files[0].path.partition("/")[2]
    parsed = parse_name(name)
    if (
        (record.run, record.state.step) != (run, step)
        or parsed is None
        or (parsed.rank, parsed.epoch, parsed.step)
        != (record.rank, record.state.epoch, record.state.step_in_epoch)
    ):
        # it may name files of another checkpoint
        return []
    paths = [
        directory.path(folder_name(rank), name_for_rank(name, rank, record.files[0].format))
        for rank in range(record.world_size)
    ]
    return paths + [temporary_name(path, record.run) for path in paths]
