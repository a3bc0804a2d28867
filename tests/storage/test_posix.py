import ctypes
import errno
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mindresume.storage import UNKNOWN_SPACE, posix, read_bytes
from mindresume.storage.posix import PosixStorage

STORAGE = PosixStorage()


@pytest.mark.parametrize("path", ["missing", "file/a", "loop/a", "n" * 300])
def test_what_does_not_exist(tmp_path, path):
    """Nothing exists below what is no folder."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    path = str(tmp_path / path)
    assert STORAGE.status(path) is None
    STORAGE.remove(path)
    with pytest.raises(FileNotFoundError):
        STORAGE.open(path)
    assert STORAGE.list(str(tmp_path / "missing")) == [] == STORAGE.list(str(tmp_path / "file"))


def test_a_folder_of_a_lower_layer_that_cannot_be_renamed_is_explained(tmp_path, monkeypatch):
    """overlayfs renames no folder of an image. "Invalid cross-device link" tells nobody that."""

    def replace(old, new):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old, None, new)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="comes from the image of the container") as error:
        STORAGE.rename(str(tmp_path), str(tmp_path) + "-new")
    assert error.value.errno == errno.EXDEV and error.value.filename == str(tmp_path)


def test_folders(tmp_path):
    deep = str(tmp_path / "a" / "b" / "c")
    STORAGE.make_folder(deep)
    STORAGE.make_folder(deep)
    assert STORAGE.status(deep).is_folder
    with pytest.raises(OSError):
        STORAGE.remove(str(tmp_path / "a"))
    STORAGE.remove(deep)
    assert STORAGE.list(str(tmp_path / "a" / "b")) == []


def test_free_space_uses_the_nearest_existing_folder(tmp_path):
    found = os.statvfs(tmp_path)
    room = PosixStorage().free_space(str(tmp_path / "not" / "yet"))
    assert abs(room - found.f_bavail * found.f_frsize) < 1 << 30


@pytest.mark.parametrize(
    "reported, room",
    [
        ({}, UNKNOWN_SPACE),  # FUSE without statfs reports zeros. Unknown is not full
        ({"f_frsize": 4096, "f_bavail": 7}, UNKNOWN_SPACE),
        (OSError(errno.EACCES, "denied"), UNKNOWN_SPACE),
        ({"f_blocks": 1000, "f_frsize": 4096}, 0),
    ],
)
def test_free_space_that_is_not_reported_counts_as_unlimited(tmp_path, monkeypatch, reported, room):
    def statvfs(path):
        if isinstance(reported, OSError):
            raise reported
        return SimpleNamespace(**{"f_blocks": 0, "f_bavail": 0, "f_frsize": 0, **reported})

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert PosixStorage().free_space(str(tmp_path)) == room


class Reserving:
    """The C library on a file system that answers fallocate with an error, or with 0."""

    def __init__(self, code):
        self.code = code

    def fallocate(self, *_):
        ctypes.set_errno(self.code)
        return -1 if self.code else 0


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ESTALE, 0, 524])
def test_files_are_written_where_space_cannot_be_reserved(tmp_path, monkeypatch, code):
    """524: an error of the kernel's own (ENOTSUPP) that some file systems let out."""
    monkeypatch.setattr(posix, "_LIBC", Reserving(code))
    assert PosixStorage().write(str(tmp_path / "file"), [b"abc"], 3) == 3
    made = PosixStorage().create(str(tmp_path / "other"), 3)
    made.write_at(0, memoryview(b"abc"))
    made.finish()
    assert (tmp_path / "file").read_bytes() == (tmp_path / "other").read_bytes() == b"abc"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_a_full_or_broken_device_is_an_error_before_the_first_byte(tmp_path, monkeypatch, code):
    monkeypatch.setattr(posix, "_LIBC", Reserving(code))
    for begin in (
        lambda path: PosixStorage().write(path, [b"abc"], 3),
        lambda path: PosixStorage().create(path, 3),
    ):
        with pytest.raises(OSError) as caught:
            begin(str(tmp_path / "file"))
        assert caught.value.errno == code and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "code, known",
    [
        (errno.EINVAL, False),
        (errno.ENOSYS, False),
        (errno.EOPNOTSUPP, False),
        (errno.EIO, True),
        (errno.ENOSPC, True),
        (errno.ESTALE, True),
    ],
)
def test_unsupported_folder_flushes_are_ignored(tmp_path, monkeypatch, code, known):
    """SMB and some FUSE file systems return EINVAL: they have no such operation, so there is
    nothing to wait for."""

    def fail(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) if known else nullcontext():
        PosixStorage().sync(str(tmp_path))


def test_an_impossible_size_is_an_error_before_the_first_byte(tmp_path):
    """No file system is so large, so no file system can reserve that many bytes."""
    taken = []

    def pieces():
        taken.append(1)
        yield b"x"

    with pytest.raises(OSError):
        PosixStorage().write(str(tmp_path / "file"), pieces(), 1 << 60)
    assert not taken and not list(tmp_path.iterdir())


def test_a_reserved_file_grows_as_it_is_written(tmp_path):
    sizes = []

    def pieces():
        for _ in range(3):
            yield bytes(2 << 20)
            sizes.append((tmp_path / "file").stat().st_size)

    assert PosixStorage().write(str(tmp_path / "file"), pieces(), 6 << 20) == 6 << 20
    assert sizes == sorted(sizes) and sizes[0] < 6 << 20


def test_write_back_begins_early_and_covers_each_byte_once(tmp_path, monkeypatch):
    """It covers all bytes but less than one step; the final flush covers the rest. A device that
    refuses the hint changes nothing."""
    step, pieces, asked = 1 << 20, [bytes([number]) * (300 << 10) for number in range(20)], []
    monkeypatch.setattr(posix, "_FLUSH_EVERY", step)
    begin = posix._begin_flush

    def asking(handle, start, end):
        asked.append((start, end))
        begin(handle, start, end)

    monkeypatch.setattr(posix, "_begin_flush", asking)
    path = str(tmp_path / "file")
    assert PosixStorage().write(path, pieces) == sum(map(len, pieces))
    assert read_bytes(PosixStorage(), path) == b"".join(pieces)
    starts, ends = zip(*asked, strict=True)
    assert starts == (0, *ends[:-1]) and sum(map(len, pieces)) - ends[-1] < step
    begin(-1, 0, step)
