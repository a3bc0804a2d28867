"""A file that was read completely is read from memory the next time; files beyond the budget or
read in part are not kept."""

import errno
import mmap
import os
import resource
import threading

import pytest
from storages import Hooked

from mindresume.storage import read_cache
from mindresume.storage.posix import PosixStorage
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import file_checksum

DATA = os.urandom(10_000_000)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    return str(tmp_path / "file")


def opened(disk):
    return [path for operation, path in disk.asked if operation == "open"]


def hashed(storage, path):
    with storage.open(path) as file:
        return file_checksum(file)


def test_a_file_is_read_once(path):
    disk = Hooked()
    storage = ReadCache(disk, 20_000_000)
    first = hashed(storage, path)
    assert storage.size == len(DATA) and opened(disk) == [path]
    # whatever becomes of it: what was hashed is what is read
    with open(path, "r+b") as file:
        file.write(b"other")
    assert hashed(storage, path) == first and opened(disk) == [path]
    with storage.open(path) as one, storage.open(path) as two:  # each at a position of its own
        assert (
            one.read(10) == two.read(10) == DATA[:10]
            and os.pread(one.fileno(), 5, 100) == DATA[100:105]
        )
        assert mmap.mmap(one.fileno(), 0, prot=mmap.PROT_READ)[-7:] == DATA[-7:]
    # forked meanwhile, such as a worker of a data set
    with os.fdopen(os.dup(storage._kept[path][0])) as of_a_child:
        storage.clear()
        assert os.fstat(of_a_child.fileno()).st_blocks == 0
    assert storage.size == 0 and hashed(storage, path) != first and opened(disk) == [path] * 2


def test_partial_and_unordered_reads_are_not_kept(path):
    storage = ReadCache(PosixStorage(), 20_000_000)
    with storage.open(path) as file:
        assert file.read(8) == DATA[:8]
        file.seek(-100, os.SEEK_END)
        assert file.read() == DATA[-100:]
    with storage.open(path) as file:
        assert os.preadv(file.fileno(), [bytearray(len(DATA))], 0) == len(DATA)
    with storage.open(path) as file:
        assert len(file.readline()) + len(file.read()) == len(DATA)
    assert storage.size == 0
    # what was read again counts as it was read last
    with storage.open(path) as file:
        file.read(100_000)
        with open(path, "r+b") as other:
            other.write(DATA[::-1])
        found = file_checksum(file)
    assert storage.size == len(DATA) and hashed(storage, path) == found


def test_the_budget_applies_to_all_files_in_total(tmp_path, path):
    (tmp_path / "second").write_bytes(DATA)
    (tmp_path / "empty").touch()
    storage = ReadCache(PosixStorage(), len(DATA) + 10)
    for name in ("file", "second", "empty"):
        assert hashed(storage, str(tmp_path / name))[1] in (len(DATA), 0)
    assert storage.size == len(DATA)
    storage.clear()
    hashed(storage, str(tmp_path / "second"))
    assert storage.size == len(DATA)
    storage.clear()
    storage.freeze()
    hashed(storage, path)
    assert storage.size == 0


@pytest.mark.parametrize("trouble", ["memfd_create", "pwrite"])
def test_without_memory_files_are_not_kept(path, monkeypatch, trouble):
    def fail(*args):
        raise OSError(errno.ENOMEM, "no memory")

    storage = ReadCache(PosixStorage(), 20_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(read_cache.os, trouble, fail)
        assert hashed(storage, path)[1] == len(DATA) and storage.size == 0
    # the budget was given back
    assert hashed(storage, path)[1] == len(DATA) and storage.size == len(DATA)


def test_no_more_files_are_kept_than_the_process_can_have_open(tmp_path):
    paths = [str(tmp_path / name) for name in "abcd"]
    for path in paths:
        with open(path, "wb") as file:
            file.write(b"1234")
    storage = ReadCache(PosixStorage(), 20_000_000)
    assert storage.max_files >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4 > 0
    storage.max_files = 2
    sums = [hashed(storage, path) for path in paths]
    assert storage.size == 8 and sums == [hashed(storage, path) for path in paths]
    storage.clear()
    # the handles were given back
    assert hashed(storage, paths[3]) == sums[3] and storage.size == 4


def test_two_threads_that_read_the_same_file(path):
    storage, both = ReadCache(PosixStorage(), 30_000_000), threading.Barrier(2)

    def read():
        with storage.open(path) as file:
            both.wait()
            file_checksum(file)
            both.wait()

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.size == len(DATA) and storage._reserved == len(DATA)
    storage.clear()
    assert storage._reserved == 0


def test_other_operations_are_passed_to_the_inner_storage(tmp_path, path):
    storage = ReadCache(PosixStorage(), 0)
    assert storage.list(str(tmp_path)) == ["file"] and storage.status(path).size == len(DATA)
    assert storage.width == PosixStorage.width
    with pytest.raises(FileNotFoundError):
        storage.open(str(tmp_path / "none"))


def test_parts_are_given_away_once(path):
    storage, parts = ReadCache(PosixStorage(), 100), {("a", 1): [1], ("b", 2): [2]}
    assert storage.left == 100 and not storage.keeps(path)
    storage.keep_parts(path, parts, 60)
    assert storage.left == 40 and storage.keeps(path) and storage.size == 0
    assert (
        storage.take_part(path, ("a", 1)) is parts["a", 1]
        and storage.take_part(path, ("a", 1)) is None
    )
    assert storage.take_part("other", ("b", 2)) is None
    storage.freeze()
    assert storage.left < 0 and storage.take_part(path, ("b", 2)) == [2]
    storage = ReadCache(PosixStorage(), 100)
    storage.keep_parts(path, parts, 60)
    storage.clear()
    assert (
        storage.left == 100
        and not storage.keeps(path)
        and storage.take_part(path, ("a", 1)) is None
    )
