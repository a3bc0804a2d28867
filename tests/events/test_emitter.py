"""Events reach all handlers; errors of a handler do not reach the caller."""

import logging

from mindresume import runtime
from mindresume.events import Emitter, LogLines, Notice, SaveBegun


class Recorder:
    def __init__(self):
        self.events, self.times, self.closed = [], [], 0

    def handle(self, event, time_s):
        self.events.append(event)
        self.times.append(time_s)

    def close(self):
        self.closed += 1


class Broken(Recorder):
    def handle(self, event, time_s):
        super().handle(event, time_s)
        raise OSError("disk full")

    def close(self):
        raise OSError("disk full")


def test_all_handlers_receive_the_event_and_its_time(monkeypatch):
    monkeypatch.setattr(runtime, "time", lambda: 5.0)
    one, other = Recorder(), Recorder()
    emit = Emitter(one)
    emit(SaveBegun(1))
    emit.add(other)
    emit(SaveBegun(2))
    assert one.events == [SaveBegun(1), SaveBegun(2)] and one.times == [5.0, 5.0]
    assert other.events == [SaveBegun(2)]


def test_a_failing_handler_is_removed_with_a_notice_to_the_others():
    broken, good = Broken(), Recorder()
    emit = Emitter(broken, Broken(), good)
    for step in (1, 2):
        emit(SaveBegun(step))
    assert len(broken.events) == 1
    assert [event for event in good.events if isinstance(event, SaveBegun)] == [
        SaveBegun(1),
        SaveBegun(2),
    ]
    notices = [event for event in good.events if isinstance(event, Notice)]
    assert len(notices) == 2 and "Broken" in notices[0].text and notices[0].level == "warning"


def test_handlers_are_closed_once_despite_errors():
    good = Recorder()
    emit = Emitter(Broken(), good)
    emit.close()
    emit.close()
    emit(SaveBegun(1))
    assert good.closed == 1 and good.events == []


class Lines(logging.Handler):
    """Keeps what it would print, in the format of mindformers' files."""

    def __init__(self):
        super().__init__()
        self.said = []
        self.setFormatter(
            logging.Formatter("%(name)s [%(levelname)s] [%(pathname)s:%(lineno)d] %(message)s")
        )

    def emit(self, record):
        self.said.append(self.format(record))


def test_a_logger_gets_a_line_or_none():
    """It names the event, not the file that writes all lines, and has no long checksums."""
    lines, logger = Lines(), logging.getLogger("of mindformers")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    for event in (SaveBegun(1), Notice("a % sign", "error"), Notice(f"not {'0123abcd' * 4}")):
        LogLines(logger).handle(event, 0.0)
    logger.setLevel(logging.ERROR)
    LogLines(logger).handle(Notice("not of this level"), 0.0)
    assert lines.said == [
        "mindresume [ERROR] [notice:0] mindresume: a % sign",
        "mindresume [INFO] [notice:0] mindresume: not 0123abcd...",
    ]


class RemovedMeanwhile(list):
    """Is a list of handlers from which another thread removes one between the check and the
    removal."""

    def remove(self, handler):
        super().remove(handler)
        raise ValueError("list.remove(x): x not in list")


def test_two_threads_remove_the_same_handler():
    good = Recorder()
    emit = Emitter()
    emit._handlers = RemovedMeanwhile([Broken(), good])
    emit(SaveBegun(1))
    assert good.events == [SaveBegun(1)]
