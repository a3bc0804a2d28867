"""A folder that cannot hold checkpoints is refused before the training, with the operation that
failed."""

import errno
import os

import pytest

from mindresume.errors import SaveError
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER
from mindresume.saving.save_session import check_directory
from mindresume.storage.posix import PosixStorage


def test_a_good_folder_is_left_as_it_was(tmp_path):
    check_directory(CheckpointDir(PosixStorage(), str(tmp_path / "output" / "checkpoint")))
    assert os.listdir(tmp_path / "output" / "checkpoint" / FOLDER) == []


NAMES = ["probe-0123abcd", "probe-0123abcd-4096", ".probe-0123abcd-4096.0123abcd.mindresume-tmp"]


def left(folder, names, seconds):
    """Creates the files of a job killed ``seconds`` ago, by the clock of the file system."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
        now = (folder / name).stat().st_mtime
        os.utime(folder / name, (now - seconds, now - seconds))


def test_old_probes_of_dead_jobs_are_removed_and_those_of_possibly_running_jobs_are_kept(tmp_path):
    left(tmp_path / FOLDER, NAMES, 3700)
    left(
        tmp_path / FOLDER,
        ["claim-0001-0123abcd.json", "tracker-0000000004", ".x.0123abcd.mindresume-tmp"],
        1e6,
    )
    left(tmp_path / FOLDER, [name.replace("0123abcd", "beef0000") for name in NAMES], 3500)
    check_directory(CheckpointDir(PosixStorage(), str(tmp_path)))
    assert sorted(os.listdir(tmp_path / FOLDER)) == [
        ".probe-beef0000-4096.beef0000.mindresume-tmp",
        ".x.0123abcd.mindresume-tmp",
        "claim-0001-0123abcd.json",
        "probe-beef0000",
        "probe-beef0000-4096",
        "tracker-0000000004",
    ]


def test_an_old_probe_that_cannot_be_removed_stops_no_job(tmp_path):
    class Kept(PosixStorage):
        def remove(self, path):
            if path.endswith(NAMES[0]):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
            super().remove(path)

        def status(self, path):
            if path.endswith(NAMES[1]):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return super().status(path)

    left(tmp_path / FOLDER, NAMES, 3700)
    check_directory(CheckpointDir(Kept(), str(tmp_path)))
    assert sorted(os.listdir(tmp_path / FOLDER)) == NAMES[:2]


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(
        SaveError,
        match="making a folder failed: Not a directory|making a folder failed: File exists",
    ):
        check_directory(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint")))


@pytest.mark.parametrize(
    "operation, named",
    [
        ("make_folder", "making a folder"),
        ("write", "writing and flushing a file"),
        ("open", "reading it back"),
        ("rename", "renaming a file over another one"),
        ("sync", "flushing the folders above"),
        ("list", "listing the folder"),
        ("remove", "removing a file"),
    ],
)
def test_the_operation_that_fails_is_named(tmp_path, operation, named):
    storage = PosixStorage()
    storage.make_folder(str(tmp_path / FOLDER))

    def fail(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), arguments[0])

    setattr(storage, operation, fail)
    with pytest.raises(
        SaveError,
        match=f"cannot hold checkpoints: {named} failed: Read-only file system.*output_dir",
    ):
        check_directory(CheckpointDir(storage, str(tmp_path)))


def test_a_rename_that_does_not_replace(tmp_path):
    storage = PosixStorage()
    storage.rename = lambda old, new: None
    with pytest.raises(SaveError, match="reads b'one' after b'two' was written"):
        check_directory(CheckpointDir(storage, str(tmp_path)))
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_rename_that_copies(tmp_path):
    storage = PosixStorage()
    storage.rename = lambda old, new: storage.write(new, [b"two"])
    with pytest.raises(SaveError, match="still listed after it was renamed"):
        check_directory(CheckpointDir(storage, str(tmp_path)))


def test_a_folder_above_that_cannot_be_opened(tmp_path):
    """The parent existed before: its name needs no flush. Folders created below are still
    flushed."""
    storage, inner = PosixStorage(), PosixStorage().sync
    storage.make_folder(str(tmp_path / "checkpoint"))

    def sync(folder):
        if folder == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        inner(folder)

    storage.sync = sync
    check_directory(CheckpointDir(storage, str(tmp_path / "checkpoint")))
