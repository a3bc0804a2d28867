"""Finishes what an earlier run did not do for the last step of a training before it died. Such a
training is complete, so nothing saves, commits or uploads later.

    publish_completed(storage, choice, group, ...)      # commit, final name, tracker or meta.json
    upload_completed(storage, choice, group, remote, emit)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from mindresume import runtime
from mindresume.coordination.collectives import Group, Watchdog, run_on_all, run_on_rank0
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import CollectiveError, MindResumeError, RemoteError
from mindresume.events import Emit, Notice, UploadFailed, UploadFinished, warning
from mindresume.formats import OURS, Candidate, CheckpointDir
from mindresume.formats.iterations import tracked
from mindresume.model.manifest import FOLDER
from mindresume.saving.committer import SyncSaver, is_in_meta
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.replication import save_of
from mindresume.saving.retention import KEEP_ALL
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.save_session import Resumed, open_save_session
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import Storage


def publish_completed(
    storage: Storage,
    origin: Resumed,
    group: Group,
    shared_groups: dict[str, SharedGroups],
    heartbeat: float,
    emit: Emit,
    samples_in_common: bool = False,
) -> None:
    """Commits and publishes ``origin``, which an earlier run completed, if that run died before it
    had, on all ranks together. A training that goes on does so when it begins to save. This is for
    one that is complete: mindformers alone, evaluations and exports would never see its last step.
    If it fails, a warning says so, and the step is whole all the same. ``samples_in_common``: see
    ``SaveTarget``."""
    directory, chosen = CheckpointDir(storage, origin.root), origin.chosen
    if run_on_rank0(group, partial(_is_published, directory, chosen)):
        return
    try:
        options = SaveOptions(
            origin.root,
            "",
            iterations=bool(chosen.iteration_dir),
            samples_in_common=samples_in_common,
        )
        session = open_save_session(storage, options, group, emit, heartbeat, shared_groups, origin)
    except MindResumeError as error:
        emit(
            warning(
                f"step {chosen.step} of {origin.root} is complete, and not published now: {error}"
            )
        )
        return
    try:
        policy = KEEP_ALL if session.is_leader else None
        run_on_all(group, SyncSaver(session.target, policy, emit).begin)
    finally:
        session.release()


def _is_published(directory: CheckpointDir, chosen: Candidate) -> bool:
    if chosen.origin != OURS or not chosen.committed:
        return chosen.origin != OURS
    if not chosen.iteration_dir:
        return is_in_meta(directory, chosen)
    return not chosen.iteration_dir.startswith(FOLDER) and tracked(directory) == chosen.step


def upload_completed(
    storage: Storage, origin: Resumed, group: Group, remote: RemoteCheckpoints, emit: Emit
) -> None:
    """Uploads ``origin``, which an earlier run completed, if the store does not have it, on all
    ranks together. Nothing is pruned there.

    Raises:
        RemoteError: it is not in the store.
    """
    chosen, started = origin.chosen, runtime.monotonic()
    if chosen.origin != OURS or chosen.missing_ranks:
        return
    step = chosen.step
    target = SaveTarget.of(CheckpointDir(storage, origin.checkpoint_dir), chosen)
    ranks = range(group.rank, chosen.world_size, group.size)
    try:
        if not run_on_rank0(
            group,
            partial(_is_upload_due, remote, target, step),
            Watchdog("looking for the last step in the object store"),
        ):
            return
        emit(
            Notice(
                f"step {step} is uploaded to {remote.url}: the training is complete with it, and "
                "the store lacks it"
            )
        )
        sent = run_on_all(
            group,
            partial(_upload, remote, target, step, ranks),
            Watchdog("uploading the last step"),
        )
        run_on_rank0(
            group,
            partial(_commit_upload, remote, target, step),
            Watchdog("committing the last step in the object store"),
        )
    except CollectiveError as error:
        text = f"step {step} is not uploaded: {error}"
        emit(UploadFailed(step, text, 1))
        raise RemoteError(text) from error
    emit(
        UploadFinished(
            step, remote.url, sent, runtime.monotonic() - started, is_whole=group.rank == 0
        )
    )


def _is_upload_due(remote: RemoteCheckpoints, target: SaveTarget, step: int) -> bool:
    save = save_of(remote, target, step)
    if not save.is_committed or remote.has(save.attempt):
        return False
    remote.check_not_superseded(target.run)
    return True


def _upload(remote: RemoteCheckpoints, target: SaveTarget, step: int, ranks: Iterable[int]) -> int:
    return sum(save_of(remote, replace(target, rank=rank), step).upload() for rank in ranks)


def _commit_upload(remote: RemoteCheckpoints, target: SaveTarget, step: int) -> None:
    save = save_of(remote, target, step)
    if missing := save.missing():
        raise RemoteError(
            f"{len(missing)} objects are missing in {remote.url}, the first is {missing[0]}"
        )
    save.commit()
