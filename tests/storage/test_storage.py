import threading

import pytest

from mindresume.storage import call_within, parallel
from mindresume.storage.posix import PosixStorage


def test_parallel_keeps_the_order_and_raises_the_first_error():
    storage = PosixStorage()
    assert parallel(storage, lambda item: item * 2, range(20)) == list(range(0, 40, 2))
    storage.width = 1
    assert parallel(storage, lambda item: item * 2, range(3)) == [0, 2, 4]
    with pytest.raises(ZeroDivisionError):
        parallel(PosixStorage(), lambda item: 1 // item, [1, 0])


@pytest.fixture
def alone(monkeypatch):
    """Prevents new threads, as at the end of the interpreter or at the limit of processes."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_parallel_without_another_thread(alone):
    assert parallel(PosixStorage(), lambda item: item * 2, range(20)) == list(range(0, 40, 2))


def test_parallel_starts_no_item_after_an_error(alone):
    done = []

    def work(item):
        if item == 3:
            raise KeyboardInterrupt
        done.append(item)

    with pytest.raises(KeyboardInterrupt):
        parallel(PosixStorage(), work, range(100))
    assert done == [0, 1, 2]


def test_a_disk_that_hangs_is_not_waited_for_for_ever():
    answers = threading.Event()
    assert (
        call_within(0.01, "nothing", answers.wait) == "nothing"
        and call_within(600, "nothing", str, 5) == "5"
    )
    answers.set()


def test_a_call_without_a_thread_is_not_made(alone):
    assert call_within(600, "nothing", str, 5) == "nothing"
