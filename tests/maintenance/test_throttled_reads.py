"""Reads at a bounded rate: by a clock that only the reads move, and past the cache of the
kernel."""

import os

import pytest

from mindresume import runtime
from mindresume.maintenance import scrub
from mindresume.maintenance.scrub import BURST, PIECE, ThrottledReads
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import file_checksum


@pytest.fixture
def now():
    """[seconds]; only a wait for the rate lets them pass."""
    seconds = [100.0]

    def sleep(count):
        assert count > 0
        seconds[0] += count

    with runtime.answers({runtime.monotonic: lambda: seconds[0], runtime.sleep: sleep}):
        yield seconds


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(5 * PIECE + 17))
    return str(path)


def test_the_rate_is_not_exceeded(path, now):
    size = os.path.getsize(path)
    storage = ThrottledReads(PosixStorage(), 1e6)
    with storage.open(path) as file:
        found = file_checksum(file)
    with open(path, "rb") as plain:
        assert found == file_checksum(plain) and storage.read == size
    assert size / 1e6 - BURST - PIECE / 1e6 <= now[0] - 100 <= (size + 2 * PIECE) / 1e6


def test_after_a_pause_one_burst_is_read_at_once(now):
    storage = ThrottledReads(PosixStorage(), 1000.0)
    now[0] += 3600
    storage.admit(1000)
    assert now[0] == pytest.approx(3700 + 1 - BURST)


@pytest.mark.parametrize("rate", [0.0, float("inf")])
def test_no_rate_is_no_limit(path, rate, now):
    with ThrottledReads(PosixStorage(), rate).open(path) as file:
        assert len(file.read()) == os.path.getsize(path) and file.read(10) == b""
    assert now == [100.0]


@pytest.mark.parametrize("count", [0, 10, PIECE, PIECE + 1, 10**9])
def test_reads_return_the_same_bytes(path, count):
    with ThrottledReads(PosixStorage()).open(path) as file, open(path, "rb") as plain:
        file.seek(3)
        plain.seek(3)
        assert file.read(count) == plain.read(count) and file.tell() == plain.tell()
        assert file.readline(64) == plain.readline(64) and file.name == path


def test_other_operations_are_those_of_the_storage(path):
    storage = ThrottledReads(PosixStorage())
    assert (
        storage.status(path).size == os.path.getsize(path) and storage.width == PosixStorage.width
    )
    with pytest.raises(FileNotFoundError):
        storage.open(path + "x")
    assert storage.cached >= 0


def test_bytes_that_the_cache_answers_are_counted_as_often_as_they_are_read(path, monkeypatch):
    """A scrub opens a file for its header, and again for its tensors."""
    monkeypatch.setattr(scrub, "_is_cached", lambda handle, offset, flag: True)
    storage, size = ThrottledReads(PosixStorage()), os.path.getsize(path)
    with storage.open(path) as file:
        file.read(8)
    with storage.open(path) as file:
        file_checksum(file)
    assert (storage.cached, storage.read) == (8 + size, 8 + size)
