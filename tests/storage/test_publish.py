import errno
import os

import pytest

from mindresume.storage import TEMPORARY, error_text, publish, publish_json, read_bytes
from mindresume.storage.posix import PosixStorage

STORAGE = PosixStorage()


def test_a_published_file_is_complete(tmp_path):
    path = str(tmp_path / "a.bin")
    assert publish(STORAGE, path, [b"ab", memoryview(b"cd")], "run") == 4
    assert read_bytes(STORAGE, path) == b"abcd"
    assert STORAGE.list(str(tmp_path)) == ["a.bin"]
    assert STORAGE.status(path).size == 4


def test_a_failing_source_leaves_nothing(tmp_path):
    def pieces():
        yield b"half"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        publish(STORAGE, str(tmp_path / "a.bin"), pieces(), "run")
    assert STORAGE.list(str(tmp_path)) == []


def test_a_failing_rename_leaves_no_temporary_file(tmp_path):
    (tmp_path / "a.bin" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        publish(STORAGE, str(tmp_path / "a.bin"), [b"x"], "run")
    assert STORAGE.list(str(tmp_path)) == ["a.bin"]


def test_temporary_names_contain_the_tag(tmp_path):
    seen = []

    def pieces():
        seen.extend(os.listdir(tmp_path))
        yield b"x"

    publish(STORAGE, str(tmp_path / "a.bin"), pieces(), "0001-deadbeef")
    assert seen == [".a.bin.0001-deadbeef" + TEMPORARY]


def test_json(tmp_path):
    publish_json(STORAGE, str(tmp_path / "m.json"), {"last_epoch": 1}, "run")
    assert read_bytes(STORAGE, str(tmp_path / "m.json")) == b'{"last_epoch":1}'


def test_error_text_names_the_final_file():
    full = OSError(errno.ENOSPC, "No space left on device", "/a/.report.html.5410" + TEMPORARY)
    assert error_text(full) == "/a/report.html: No space left on device"
    assert (
        error_text(FileNotFoundError(errno.ENOENT, "No such file or directory", "a"))
        == "a: No such file or directory"
    )
    assert error_text(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    assert (
        error_text(FileNotFoundError("here is nothing")) == "here is nothing"
        and error_text(ValueError()) == "ValueError"
    )
