"""Jobs that start with the remains of earlier runs."""

import pytest

from mindresume.events import SaveCommitted
from sim.catalogue import SCENARIOS
from sim.scenarios import FORMATS, WAYS, Simulation
from sim.schedule import Schedule
from sim.workloads import RUN


def simulated(name, fmt, way="", schedule=None):
    sim = Simulation(SCENARIOS[name], fmt, schedule or Schedule(), way).run()
    chosen = [sim.history.chosen[run] for run in sorted(sim.history.chosen)][1:]
    return sim, chosen


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_an_uncommitted_save_is_selected_and_committed(fmt, way):
    sim, chosen = simulated("uncommitted", fmt, way)
    assert chosen == [(RUN, 6)] and sim.findings() == []
    events = [event for _, event in sim.jobs[0].ranks[0].events if isinstance(event, SaveCommitted)]
    assert [event.step for event in events if event.run_id == RUN] == [4, 6]
