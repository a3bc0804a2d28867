"""Removes small files that processes left when they died, and that have no number of a run that could tell that it is over: their
age decides."""
from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

STALE_SECONDS = 3600.0          # seconds after which nobody works with a file any more that is there for a moment


def remove_stale(storage: Storage, paths: Iterable[str], fresh: str) -> None:
    """Removes those of ``paths`` that are more than ``STALE_SECONDS`` older than ``fresh``, a file that was written just now.
    Both times are those of the file system: hosts may differ in theirs. Raises no error: what cannot be removed is left to the
    next job."""
    others = [path for path in paths if path != fresh]
    with suppress(OSError):
        now = storage.status(fresh) if others else None

        def remove(path: str) -> None:
            with suppress(OSError):             # one that cannot be removed is in nobody's way
                found = storage.status(path)
                if found is not None and not found.is_folder and found.mtime < now.mtime - STALE_SECONDS:
                    storage.remove(path)
        if now is not None:
            parallel(storage, remove, others)
