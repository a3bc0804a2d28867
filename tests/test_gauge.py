"""One line every few seconds, and none for what is done sooner."""
from mindresume.gauge import Gauge


def gauge(total):
    now, lines = [0.0], []
    made = Gauge("saving step 5", lines.append, 10.0, lambda: now[0])
    made.expect(total)
    return made, now, lines


def test_a_line_every_ten_seconds_with_rate_and_time_left():
    made, now, lines = gauge(1000 << 20)
    for second in range(1, 41):
        now[0] = second
        made.advance(10 << 20)
    assert lines == [f"saving step 5: {done:.1f} MiB of 1000.0 MiB ({done // 10} %), 10.0 MiB/s, {100 - done // 10} s left"
                     for done in (100, 200, 300, 400)]


def test_short_work_says_nothing_and_the_end_is_said_by_others():
    made, now, lines = gauge(30)
    for now[0] in (1.0, 9.9):
        made.advance(10)
    now[0] = 11.0
    made.advance(10)
    assert lines == []


def test_without_a_total():
    made, now, lines = gauge(0)
    now[0] = 20.0
    made.advance(2048)
    assert lines == ["saving step 5: 2.0 KiB, 102 B/s"]


def test_more_than_was_expected_and_beginning_anew():
    made, now, lines = gauge(10)
    now[0] = 10.0
    made.advance(40)
    assert lines == ["saving step 5: 40 B of 10 B (100 %), 4 B/s, 0 s left"]
    made.expect(100)
    now[0] = 19.0
    made.advance(50)
    assert made.done == 50 and len(lines) == 1


def test_pieces_pass_through():
    made, _, _ = gauge(6)
    assert list(made.counted([b"abc", memoryview(b"def")])) == [b"abc", b"def"] and made.done == 6
