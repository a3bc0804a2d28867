"""Keeps run numbers increasing across disks: a run that saves to an object store is numbered after all runs in it."""
from __future__ import annotations

from mindresume.coordination.lease import record_run_number
from mindresume.errors import RemoteError
from mindresume.events import Emit, warning
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.saving.remote_checkpoints import RemoteCheckpoints


def number_runs(remote: RemoteCheckpoints | None, emit: Emit, directory: CheckpointDir) -> None:
    """Makes sure that the next run number in ``directory`` is larger than all in ``remote``, also on an empty disk. Rank 0
    calls it before it acquires ``directory``."""
    if remote is None:
        return
    try:
        keep_run_marker(remote, directory)
    except RemoteError as error:                    # uploads will fail, or find the later run, and report it
        emit(warning(error))


def keep_run_marker(remote: RemoteCheckpoints, directory: CheckpointDir) -> None:
    """Leaves the number of the latest run in ``remote`` as a marker in ``directory``: the next run there gets a larger one.

    Raises:
        RemoteError, OSError.
    """
    runs = remote.scan().runs()
    if runs:
        record_run_number(directory, runs[-1])
