"""The scrub of a running training: it reads what is due, waits while this rank saves, and ends at once."""
import os
import threading
from types import SimpleNamespace

import pytest
from rank_folders import STORAGE, dir_at, flip_bit, path_of, save

from mindresume.coordination.lease import lease_holders
from mindresume.events import CheckpointScrubbed, Notice, SaveBegun, SaveFailed, SaveWritten
from mindresume.formats import CheckpointDir
from mindresume.resume.scrub import LONGEST_SAVE, BackgroundScrub, lower_priority
from mindresume.settings import ScrubSettings
from mindresume.storage.posix import PosixStorage

LONG = 60.0                     # seconds; nothing waits so long unless it hangs


class Events:
    """Collects events; ``wait`` returns once there are so many of a kind."""

    def __init__(self):
        self.events, self.changed = [], threading.Condition()

    def __call__(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(kind)) >= count, LONG)
        return self.of(kind)


def scrub(root, events, storage=STORAGE, **fields):
    settings = ScrubSettings(**{"every_hours": 24.0, "rate_mb": 0.0, **fields})
    return BackgroundScrub(CheckpointDir(storage, str(root)), settings, events, first=0.0)


def test_it_reads_repairs_and_ends(tmp_path):
    for step in (5, 10):
        save(tmp_path, step)
    flip_bit(path_of(tmp_path, 5, 1))
    events = Events()
    running = scrub(tmp_path, events).start()
    found = {event.step: event for event in events.wait(CheckpointScrubbed, 2)}
    running.stop()
    assert not running._thread.is_alive() and lease_holders(dir_at(tmp_path)) == []
    assert (found[10].state, found[5].state) == ("intact", "repaired") and found[5].files == (
        str(path_of(tmp_path, 5, 1).relative_to(tmp_path)),)
    again = Events()
    scrub(tmp_path, again)._scrub_once()                        # nothing is due
    assert again.events == []


def test_without_repair_it_only_tells(tmp_path):
    save(tmp_path, 5)
    flip_bit(path_of(tmp_path, 5, 1))
    bad, events = path_of(tmp_path, 5, 1).read_bytes(), Events()
    scrub(tmp_path, events, repair=0)._scrub_once()
    (found,) = events.events
    assert found.state == "damaged" and "loss_scale" in found.reason and path_of(tmp_path, 5, 1).read_bytes() == bad
    scrub(tmp_path, events, repair=0, every_hours=1e-9)._scrub_once()
    assert len(events.events) == 1                              # it is known, and not read again


def test_it_waits_while_this_rank_saves_and_ends_nevertheless(tmp_path):
    save(tmp_path, 5)
    reading = threading.Event()

    class Watched(PosixStorage):
        def open(self, name):
            reading.set()
            return super().open(name)
    events = Events()
    running = scrub(tmp_path, events, Watched())
    running.handle(SaveBegun(10), 0.0)
    running.start()
    assert reading.wait(LONG)                                   # it lists the checkpoints, and waits at the first read
    running.stop()
    assert not running._thread.is_alive() and events.events == []
    assert lease_holders(dir_at(tmp_path)) == []


@pytest.mark.parametrize("event", [SaveWritten(10, 1, 1.0), SaveFailed(10, "no space")])
def test_it_goes_on_after_a_save(tmp_path, event):
    now = [0.0]
    running = BackgroundScrub(dir_at(tmp_path), ScrubSettings(24), Events(), time=SimpleNamespace(monotonic=lambda: now[0]))
    running.handle(SaveBegun(10), 0.0)
    now[0] = LONGEST_SAVE + 1
    assert running._is_stopped() is False                       # no event said that the save ended
    running.handle(SaveBegun(20), 0.0)
    running.handle(event, 0.0)
    assert running._is_stopped() is False
    running.close()
    assert running._is_stopped() is True


def test_an_error_is_a_warning_said_once(tmp_path):
    save(tmp_path, 5)

    class Failing(PosixStorage):
        def list(self, folder):
            raise OSError(5, "Input/output error", folder)
    events = Events()
    running = BackgroundScrub(CheckpointDir(Failing(), str(tmp_path)), ScrubSettings(24.0), events, first=0.0, poll=0.0).start()
    events.wait(Notice, 1)
    running.stop()
    assert len(events.events) == 1 and str(tmp_path) in events.events[0].text


def test_the_priority_of_the_thread_alone_is_lowered():
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), []
    thread = threading.Thread(target=lambda: (lower_priority(), seen.append(
        os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))))
    thread.start()
    thread.join()
    assert seen == [19] and os.getpriority(os.PRIO_PROCESS, 0) == before
