"""Work in the background runs in order, in one thread."""

import threading

from mindresume.saving.memory_tier.tier import BackgroundThread


def test_work_runs_in_order_in_one_thread_until_it_is_closed():
    background, gate, seen = BackgroundThread("test-background"), threading.Event(), []

    def work(number):
        gate.wait(60)
        seen.append((number, threading.current_thread()))

    started = [background.start(work, number) for number in range(3)]
    assert not any(one.is_set() for one in started)
    started[0].wait(0)  # a deadline is no error
    background.close()  # what was started is done first
    gate.set()
    for one in started:
        one.wait(60)
    assert [number for number, _ in seen] == [0, 1, 2] and len({thread for _, thread in seen}) == 1
    assert all(one.is_set() for one in started)
    seen[0][1].join(60)
    assert not seen[0][1].is_alive()
    again = background.start(lambda: seen.append((3, threading.current_thread())))
    again.wait(60)
    assert seen[3][0] == 3 and seen[3][1] is not seen[0][1]
    background.close()
    background.close()


def test_without_a_thread_the_work_is_done_at_once(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    seen, background = [], BackgroundThread("test-background")
    assert background.start(seen.append, 1).is_set() and seen == [1]
    background.close()
