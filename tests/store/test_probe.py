"""A folder that cannot hold checkpoints is refused before the training, with the operation that failed."""
import errno
import os

import pytest

from mindresume.errors import SaveError
from mindresume.manifest import FOLDER
from mindresume.store.probe import examine
from mindresume.store.storage import PosixStorage


def test_a_good_folder_is_left_as_it_was(tmp_path):
    examine(PosixStorage(), str(tmp_path / "output" / "checkpoint"))
    assert os.listdir(tmp_path / "output" / "checkpoint" / FOLDER) == []


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(SaveError, match="making a folder failed: Not a directory|making a folder failed: File exists"):
        examine(PosixStorage(), str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("operation, named", [
    ("make_folder", "making a folder"), ("write", "writing and flushing a file"), ("open", "reading it back"),
    ("rename", "renaming a file over another one"), ("sync", "flushing the folders above"), ("list", "listing the folder"),
    ("remove", "removing a file")])
def test_the_operation_that_fails_is_named(tmp_path, operation, named):
    storage = PosixStorage()
    storage.make_folder(str(tmp_path / FOLDER))

    def fail(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), arguments[0])
    setattr(storage, operation, fail)
    with pytest.raises(SaveError, match=f"cannot hold checkpoints: {named} failed: Read-only file system.*output_dir"):
        examine(storage, str(tmp_path))


def test_a_rename_that_does_not_replace(tmp_path):
    storage = PosixStorage()
    storage.rename = lambda old, new: None
    with pytest.raises(SaveError, match="reads b'one' after b'two' was written"):
        examine(storage, str(tmp_path))
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_rename_that_copies(tmp_path):
    storage = PosixStorage()
    storage.rename = lambda old, new: storage.write(new, [b"two"])
    with pytest.raises(SaveError, match="still listed after it was renamed"):
        examine(storage, str(tmp_path))


def test_a_folder_above_that_cannot_be_opened(tmp_path):
    """It was there before: its name needs no flush. Whatever is made below is still flushed."""
    storage, inner = PosixStorage(), PosixStorage().sync
    storage.make_folder(str(tmp_path / "checkpoint"))

    def sync(folder):
        if folder == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        inner(folder)
    storage.sync = sync
    examine(storage, str(tmp_path / "checkpoint"))
