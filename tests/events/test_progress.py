"""One event every few seconds, and none for shorter work."""

import pytest

from mindresume import runtime
from mindresume.events import ProgressReporter, WorkProgress


@pytest.fixture
def now():
    """The time, as a list of one number."""
    time = [0.0]
    with runtime.answers({runtime.monotonic: lambda: time[0]}):
        yield time


def reporter(total):
    events = []
    made = ProgressReporter("saving step 5", events.append)
    made.expect(total)
    return made, events


def test_an_event_every_ten_seconds(now):
    made, events = reporter(1000)
    for second in range(1, 41):
        now[0] = float(second)
        made.advance(10)
    assert events == [
        WorkProgress("saving step 5", done, 1000, seconds)
        for done, seconds in ((100, 10.0), (200, 20.0), (300, 30.0), (400, 40.0))
    ]


def test_short_work_and_the_end_emit_no_event(now):
    made, events = reporter(30)
    for now[0] in (1.0, 9.9):
        made.advance(10)
    now[0] = 11.0
    made.advance(10)
    assert events == []


def test_exceeding_the_total_and_restarting(now):
    made, events = reporter(10)
    now[0] = 10.0
    made.advance(40)
    assert events == [WorkProgress("saving step 5", 40, 10, 10.0)]
    made.expect(100)
    now[0] = 19.0
    made.advance(50)
    assert made.done == 50 and len(events) == 1


def test_rate_share_and_time_left_are_computed():
    amounts = ((100 << 20, 1000 << 20), (40, 10), (2048, 0))
    numbers = [WorkProgress("x", done, total, 10.0).line() for done, total in amounts]
    assert "10 %" in numbers[0] and "10.0 MiB/s" in numbers[0] and "90 s" in numbers[0]
    assert "100 %" in numbers[1] and " 0 s" in numbers[1] and "%" not in numbers[2]
