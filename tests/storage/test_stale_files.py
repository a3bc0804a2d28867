"""Stale files are removed by the clock of the file system, each independently, without errors."""

import errno
import os

import pytest
from rank_folders import STORAGE

from mindresume.storage.operations import STALE_SECONDS, remove_stale
from mindresume.storage.posix import PosixStorage

NOW = 2_000_000_000.0  # no clock of this host


def aged(folder, **seconds):
    """Creates files of these ages before NOW."""
    for name, age in seconds.items():
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (NOW - age, NOW - age))


def left(folder, storage=STORAGE, fresh="fresh"):
    remove_stale(
        storage, [str(folder / name) for name in sorted(os.listdir(folder))], str(folder / fresh)
    )
    return sorted(os.listdir(folder))


def test_files_older_than_the_limit_are_removed(tmp_path):
    aged(
        tmp_path,
        fresh=0,
        new=1,
        young=STALE_SECONDS,
        old=STALE_SECONDS + 1,
        older=9 * STALE_SECONDS,
        later=-9 * STALE_SECONDS,
    )
    (tmp_path / "folder").mkdir()
    os.utime(tmp_path / "folder", (0, 0))
    assert left(tmp_path) == ["folder", "fresh", "later", "new", "young"]


def test_nothing_is_removed_without_the_current_time(tmp_path):
    aged(tmp_path, old=2 * STALE_SECONDS)
    assert left(tmp_path) == ["old"]


@pytest.mark.parametrize(
    "operation, stays", [("status", ["a", "b", "fresh"]), ("remove", ["a", "fresh"])]
)
def test_an_error_does_not_stop_the_removal_of_others(tmp_path, operation, stays):
    aged(tmp_path, a=2 * STALE_SECONDS, b=2 * STALE_SECONDS, fresh=0)

    class FailingStorage(PosixStorage):
        def status(self, path):
            if operation == "status":
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return super().status(path)

        def remove(self, path):
            if path.endswith("a"):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
            super().remove(path)

    assert left(tmp_path, FailingStorage()) == stays


def test_without_files_no_operation_is_done(tmp_path):
    class Nothing(PosixStorage):
        def status(self, path):
            raise AssertionError(path)

    aged(tmp_path, fresh=0)
    assert left(tmp_path, Nothing()) == ["fresh"]
