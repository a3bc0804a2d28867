"""report/supervised.py: what a supervised job does now, also between a death and the first step."""

import os
import socket
import time

import pytest

from mindresume import events as ev
from mindresume.coordination.rank_heartbeat import JOINING, RankHeartbeat
from mindresume.events.event_file import SupervisorEventFile
from mindresume.report.supervised import supervised_state
from mindresume.supervisor import job_end

HERE = socket.gethostname()
BEGUN = ev.SupervisorStarted(HERE, os.getpid(), "0.1.0", ("train",))


@pytest.fixture
def state(tmp_path, monkeypatch):
    """Returns what is said after these events, a second apart until now; ``ranks``: the heartbeats
    of start 4."""
    memory = tmp_path / "memory"
    monkeypatch.setattr(job_end, "_MEMORY", str(memory))
    folder = memory / f"mindresume-supervisor-1000-{os.getpid()}.x" / "start_4"
    folder.mkdir(parents=True)

    def say(*events, ranks=()):
        for number, change in enumerate(ranks):
            change(RankHeartbeat(str(folder / f"process_{number}.heartbeat")))
        file = SupervisorEventFile(str(tmp_path / "output"), 0)
        for index, event in enumerate(events):
            file.handle(event, time.time() - len(events) + index)
        file.close()
        return supervised_state([str(tmp_path / "output")])

    return say


def starts(beat):
    return None


def joins(beat):
    beat.enter(JOINING)


def trains(beat):
    beat.reach(437)


def test_what_the_ranks_do_before_the_first_step(state):
    """The output folder is known from the start before; the heartbeats are there before events."""
    begun = (BEGUN, ev.JobStarted(4, 9), ev.Notice("anything"))
    assert state(*begun).endswith("s: starting, importing")
    assert state(*begun, ranks=[joins, starts, starts]).endswith("s: 2 of 3 ranks importing")


def test_what_the_ranks_do_after_it(state):
    measured = ev.StartupMeasured(4, 0, ("import",), (9.0,))
    assert state(BEGUN, ev.JobStarted(4, 9), measured, ranks=[trains, trains]).endswith(
        "s: 2 of 2 ranks training, step 437"
    )


def test_between_two_starts(state):
    died = ev.RankDied(3, HERE, 8, 1, -9, log=("ValueError: x",))
    assert "ago: rank 1" in state(BEGUN, ev.JobStarted(3, 9), died)
    assert "ago: start 4 follows" in state(BEGUN, ev.JobStarted(3, 9), ev.JobRestarted(4, 2.0, "x"))


def test_on_another_host_the_events_tell(state):
    begun = ev.SupervisorStarted("elsewhere", os.getpid(), "0.1.0", ("train",))
    assert "start 4" in state(begun, ev.JobStarted(4, 9), ranks=[joins])


def test_nothing_runs(state):
    assert state() == "" == state(BEGUN, ev.SupervisorEnded(0, "it finished", 4))
    gone = ev.SupervisorStarted(HERE, 2**22 + 1, "0.1.0", ("train",))
    assert state(gone, ev.JobStarted(4, 9)).endswith("is gone")
