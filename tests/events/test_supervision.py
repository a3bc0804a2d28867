"""The phases of a recovery between moments, with whatever moments are known."""

from mindresume.events import Moments, phases_of


def test_phases_have_no_gaps_and_leave_out_what_is_out_of_order():
    moments = Moments(
        noticed=90.0, started=110.0, imported=105.0, joined=120.0, loaded=130.0, stepped=140.0
    )
    found = phases_of(100.0, moments, 140.0)
    assert [(phase.names[-1], phase.begin, phase.end) for phase in found] == [
        ("start", 100.0, 110.0),
        ("join", 110.0, 120.0),
        ("load", 120.0, 130.0),
        ("first step", 130.0, 140.0),
    ]
    assert found[0].names == ("notice", "end", "start") and found[1].names == ("import", "join")
