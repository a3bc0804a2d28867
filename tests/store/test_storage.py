import errno
import os
import threading

import pytest

from mindresume.store import storage
from mindresume.store.storage import TEMPORARY, PosixStorage, error_text, parallel, publish, publish_json, read_bytes

STORAGE = PosixStorage()


def test_publish_appears_complete(tmp_path):
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


def test_temporary_names_say_whose_they_are(tmp_path):
    seen = []

    def pieces():
        seen.extend(os.listdir(tmp_path))
        yield b"x"
    publish(STORAGE, str(tmp_path / "a.bin"), pieces(), "0001-deadbeef")
    assert seen == [".a.bin.0001-deadbeef" + TEMPORARY]


def test_absent_things(tmp_path):
    missing = str(tmp_path / "missing")
    assert STORAGE.list(missing) == [] and STORAGE.status(missing) is None
    STORAGE.remove(missing)
    with pytest.raises(FileNotFoundError):
        STORAGE.open(missing)


def test_folders(tmp_path):
    deep = str(tmp_path / "a" / "b" / "c")
    STORAGE.make_folder(deep)
    STORAGE.make_folder(deep)
    assert STORAGE.status(deep).is_folder
    with pytest.raises(OSError):
        STORAGE.remove(str(tmp_path / "a"))
    STORAGE.remove(deep)
    assert STORAGE.list(str(tmp_path / "a" / "b")) == []


def test_json(tmp_path):
    publish_json(STORAGE, str(tmp_path / "m.json"), {"last_epoch": 1}, "run")
    assert read_bytes(STORAGE, str(tmp_path / "m.json")) == b'{"last_epoch":1}'


def test_parallel_keeps_the_order_and_raises_the_first_error():
    storage = PosixStorage()
    assert parallel(storage, lambda item: item * 2, range(20)) == list(range(0, 40, 2))
    storage.width = 1
    assert parallel(storage, lambda item: item * 2, range(3)) == [0, 2, 4]
    with pytest.raises(ZeroDivisionError):
        parallel(PosixStorage(), lambda item: 1 // item, [1, 0])


@pytest.fixture
def alone(monkeypatch):
    """No other thread can be had: the interpreter is ending, or the limit of processes is reached."""
    def start(thread):
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", start)


def test_parallel_without_another_thread(alone):
    assert parallel(PosixStorage(), lambda item: item * 2, range(20)) == list(range(0, 40, 2))


def test_parallel_begins_nothing_after_an_error(alone):
    done = []

    def work(item):
        if item == 3:
            raise KeyboardInterrupt
        done.append(item)
    with pytest.raises(KeyboardInterrupt):
        parallel(PosixStorage(), work, range(100))
    assert done == [0, 1, 2]


def test_room_is_that_of_the_nearest_folder_there_is(tmp_path):
    found = os.statvfs(tmp_path)
    room = PosixStorage().room(str(tmp_path / "not" / "yet"))
    assert abs(room - found.f_bavail * found.f_frsize) < 1 << 30


def test_a_file_that_cannot_be_reserved_is_an_error_before_its_first_byte(tmp_path):
    """A file system knows how large it is: so many bytes cannot be reserved on any."""
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


def test_the_device_begins_early_and_is_asked_for_every_byte_once(tmp_path, monkeypatch):
    """All but less than a step of it; the flush at the end is for the rest. A device that refuses the hint changes nothing."""
    step, pieces, asked = 1 << 20, [bytes([number]) * (300 << 10) for number in range(20)], []
    monkeypatch.setattr(storage, "_AHEAD", step)
    begin = storage._begin_flush

    def asking(handle, start, end):
        asked.append((start, end))
        begin(handle, start, end)
    monkeypatch.setattr(storage, "_begin_flush", asking)
    path = str(tmp_path / "file")
    assert PosixStorage().write(path, pieces) == sum(map(len, pieces))
    assert read_bytes(PosixStorage(), path) == b"".join(pieces)
    starts, ends = zip(*asked, strict=True)
    assert starts == (0, *ends[:-1]) and sum(map(len, pieces)) - ends[-1] < step
    begin(-1, 0, step)


def test_the_text_of_an_error_names_the_file_that_was_meant():
    full = OSError(errno.ENOSPC, "No space left on device", "/a/.report.html.5410" + TEMPORARY)
    assert error_text(full) == "/a/report.html: No space left on device"
    assert error_text(FileNotFoundError(errno.ENOENT, "No such file or directory", "a")) == "a: No such file or directory"
    assert error_text(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    assert error_text(FileNotFoundError("here is nothing")) == "here is nothing" and error_text(ValueError()) == "ValueError"
