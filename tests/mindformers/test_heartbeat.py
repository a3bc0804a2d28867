"""mindformers/heartbeat.py: which phase and which numbers a rank has after the events of its
training."""

import os
import subprocess
import sys
import time

import pytest

from mindresume import events as ev
from mindresume.coordination.rank_heartbeat import (
    ENDING,
    SAVING,
    TRAINING,
    RankHeartbeat,
    read_heartbeat,
)
from mindresume.errors import OutOfSpaceError
from mindresume.mindformers import heartbeat


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Returns a function that handles events and returns the heartbeat as a supervisor sees it."""
    own = RankHeartbeat(str(tmp_path / "process_1.heartbeat"))
    monkeypatch.setattr(heartbeat, "_own", [own])
    handler = heartbeat.FromEvents(0, str(tmp_path))

    def handle(*events):
        for event in events:
            handler.handle(event, 0.0)
        return read_heartbeat(own.path)

    return handle


@pytest.mark.parametrize(
    "end",
    [ev.SaveStaged(10, "name", 0.1), ev.SaveWritten(10, 1, 0.1), ev.SaveFailed(10, "no space", 1)],
)
def test_the_phase_saving_lasts_as_long_as_the_training_thread_saves(seen, end):
    """The end of a step can be a collective, in which a rank that has saved waits for one that has
    died."""
    heartbeat.step(9)
    assert seen(ev.SaveBegun(10)).phase == SAVING
    assert seen(end).phase == TRAINING


def test_the_last_save_belongs_to_the_end_of_the_training(seen):
    """Its uploads have no limit as short as that of a step."""
    heartbeat.enter(ENDING)
    assert seen(ev.SaveBegun(10)).phase == ENDING
    found = seen(ev.SaveWritten(10, 1, 0.1))
    assert (found.phase, found.saves.begun, found.saves.written) == (ENDING, 10, 10)


@pytest.mark.parametrize("reason, unasked", [("SIGTERM", 0), ("SIGTERM of an unknown sender", 1)])
def test_a_supervisor_sees_whether_somebody_asked_to_stop(seen, reason, unasked):
    assert seen(ev.TrainingEnded(ev.PREEMPTED, reason, 3)).unasked == unasked


def test_a_supervisor_sees_how_many_saves_failed_and_whether_the_disk_is_full(seen):
    full = ev.SaveFailed(10, "no room", 2, OutOfSpaceError.code)
    assert (seen(full).saves.failed, seen().saves.full) == (2, 1)
    assert (seen(ev.SaveFailed(20, "EIO", 3)).saves.failed, seen().saves.full) == (3, 0)
    assert seen(ev.SaveWritten(30, 1, 0.1)).saves.failed == 0


def test_what_a_thread_writes(seen):
    heartbeat.writing(10)
    assert seen().saves.writing == 10
    heartbeat.writing(0)
    assert seen().saves.writing == 0


# ---- when this process began ---------------------------------------------------------------------


def test_the_start_of_this_process_was_before_now():
    assert 0 <= time.time() - heartbeat.process_started() < 1e7


def test_the_start_of_a_new_process(tmp_path):
    before = time.time()
    code = "from mindresume.mindformers.heartbeat import process_started; print(process_started())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert before - 0.1 <= float(done.stdout) <= time.time()


def test_the_first_mark_counts(monkeypatch):
    monkeypatch.setattr(heartbeat, "_imported", [])
    assert heartbeat.imported() is None
    heartbeat.mark_imported()
    first = heartbeat.imported()
    heartbeat.mark_imported()
    assert heartbeat.imported() == first <= time.time()
