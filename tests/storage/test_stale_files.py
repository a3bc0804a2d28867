"""Stale files are removed by the clock of the file system, each independently, without errors."""

import os

import pytest
from rank_folders import STORAGE
from storages import Hooked, failing

from mindresume.storage import STALE_SECONDS, remove_stale

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
    "name, operation, stays",
    [("", "status", ["a", "b", "fresh"]), ("a", "remove", ["a", "fresh"])],
)
def test_an_error_does_not_stop_the_removal_of_others(tmp_path, name, operation, stays):
    aged(tmp_path, a=2 * STALE_SECONDS, b=2 * STALE_SECONDS, fresh=0)
    assert left(tmp_path, failing(name, operation)) == stays


def test_without_files_no_operation_is_done(tmp_path):
    aged(tmp_path, fresh=0)
    storage = Hooked()
    assert left(tmp_path, storage) == ["fresh"] and storage.asked == []
