"""coordination/shared_folder.py: a clock that stands still while nobody reads it."""

from types import SimpleNamespace

from mindresume.coordination.shared_folder import AwakeClock


def test_of_a_gap_between_two_readings_ten_seconds_count():
    now = [0.0]
    clock = AwakeClock(SimpleNamespace(monotonic=lambda: now[0]))
    readings = []
    for moment in (1.0, 9.0, 5009.0, 5010.0):
        now[0] = moment
        readings.append(clock())
    assert readings == [1.0, 9.0, 19.0, 20.0] and clock.at(8.0) == 8.0 and clock.at(5009.5) == 19.5


def test_who_reads_it_rarely_waits_longer_and_not_for_ever():
    now = [0.0]
    clock = AwakeClock(SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(5):
        now[0] += 60.0
        clock()
    assert clock() == 50.0
