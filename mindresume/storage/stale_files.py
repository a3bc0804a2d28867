"""Removes small temporary files of processes that died. Their names hold no run that could be checked for its end, so their age
decides."""
from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

STALE_SECONDS = 3600.0          # no process needs such a file for longer


def remove_stale(storage: Storage, paths: Iterable[str], fresh: str) -> None:
    """Removes each of ``paths`` that is more than ``STALE_SECONDS`` older than ``fresh``, a file that was just written. Compares
    times of the file system only, as clocks of hosts differ. Raises no error: the next job removes what could not be removed now.
    """
    others = [path for path in paths if path != fresh]
    with suppress(OSError):
        now = storage.status(fresh) if others else None
        if now is None:
            return
        oldest = now.mtime - STALE_SECONDS

        def remove(path: str) -> None:
            with suppress(OSError):             # a file that cannot be removed does no harm
                found = storage.status(path)
                if found is not None and not found.is_folder and found.mtime < oldest:
                    storage.remove(path)
        parallel(storage, remove, others)
