"""Jobs that begin with what runs before have left."""
import pytest

from mindresume.events import CandidateRefused, SaveCommitted
from mindresume.simulation.left_scenarios import SCENARIOS
from mindresume.simulation.scenarios import FORMATS, RUN, WAYS, Play
from mindresume.simulation.schedule import Schedule


def played(name, fmt, way="", schedule=None):
    play = Play(SCENARIOS[name], fmt, schedule or Schedule(), way).run()
    chosen = [play.history.chosen[run] for run in sorted(play.history.chosen)][1:]
    return play, chosen


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_committed_is_taken_and_committed(fmt, way):
    play, chosen = played("uncommitted", fmt, way)
    assert chosen == [(RUN, 6)] and play.findings() == []
    events = [event for _, event in play.jobs[0].ranks[0].events if isinstance(event, SaveCommitted)]
    assert [event.step for event in events if event.run_id == RUN] == [4, 6]


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_damaged_is_passed_over(fmt):
    play, chosen = played("damaged", fmt)
    assert [step for _, step in chosen] == [4, 2] and play.findings() == []
    assert [job.launcher.exit for job in play.jobs] == [0, 0] and [process.exit for process in play.jobs[0].ranks] == [-9, -9]
    assert any(isinstance(event, CandidateRefused) and event.step == 4 for _, event in play.jobs[1].ranks[0].events)
