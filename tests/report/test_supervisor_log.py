"""The event files of supervisors: what a supervisor records divides the recoveries of the
report."""

import pytest
from rank_folders import STORAGE
from training_logs import RUNS, ZERO, Training

from mindresume import events as ev
from mindresume.events.event_file import SupervisorEventFile
from mindresume.report.accounting import accounts_of
from mindresume.report.builder import build_report
from mindresume.report.log_reader import (
    RecordedEvent,
    find_supervisor_logs,
    read_events,
    supervised_starts,
)
from mindresume.report.runs import attempts_of

# Attempt 1 trains from 0 to 20, attempt 2 ends before its first step, attempt 3 trains from 60 on.
TRAINING = Training().start(0).fresh(1).run(2, RUNS[0]).steps(10, 1, 8).save(18.5, 5)
TRAINING.start(30).event(31, ev.TrainingEnded(ev.FAILED, "no such file"))
TRAINING.start(60).resume(61, 5, RUNS[0]).run(62, RUNS[1]).steps(70, 6, 9)
EVENTS = [
    RecordedEvent(ZERO + at, event)
    for at, event in (
        (-5.0, ev.SupervisorStarted("node-0", 1, "0.1.0", ("train",))),
        (-4.0, ev.JobStarted(1, 2)),
        (21.0, ev.RankDied(1, "node-0", 5, 3, -9, "training", 8)),
        (22.5, ev.JobEnded(1, 137, "rank 3 was killed by SIGKILL", 26.5, 1.5, None, 8, 5)),
        (25.0, ev.JobStarted(2, 9)),
        (33.0, ev.JobEnded(2, 1, "the command ended with status 1", 8.0, 0.5)),
        (50.0, ev.JobStarted(3, 10)),
        (55.0, ev.JobEnded(3, 1, "no rank has begun", 5.0, 0.25)),
        (57.0, ev.JobStarted(4, 11)),
    )
]


def test_each_start_belongs_to_the_attempt_that_it_began():
    starts = supervised_starts(EVENTS)
    moments = [attempt.origin.moments for attempt in attempts_of(TRAINING.recorded, [], (), starts)]
    known = [[at and at - ZERO for at in (row.noticed, row.ended, row.started)] for row in moments]
    assert known == [[None, None, -4], [21, 22.5, 25], [54.75, 55, 57]]
    assert attempts_of([], [], (), starts) == () and supervised_starts([]) == []


def test_one_node_speaks_for_all(tmp_path):
    writers = ("supervisor_1-1", "supervisor_0-2", "rank_0-3", "supervisor_0-4")
    for number, name in enumerate(writers):
        (tmp_path / f"2026112{number}T200000-{name}.jsonl").touch()
    assert [log.path[-7] for log in find_supervisor_logs([str(tmp_path)])] == ["2", "4"]
    assert find_supervisor_logs([]) == []


def test_the_report_shows_when_a_failure_was_noticed(tmp_path):
    TRAINING.write_all(tmp_path)
    file = SupervisorEventFile(str(tmp_path), 0)
    for at, event in EVENTS:
        file.handle(event, at)
    file.close()
    report = build_report(STORAGE, str(tmp_path), str(tmp_path / "checkpoint"))
    (found,) = report.recoveries
    assert [(phase.name, round(phase.end - ZERO, 3)) for phase in found.phases][:3] == [
        ("notice", 21),
        ("end", 22.5),
        ("start", 57),  # the start between fails, too
    ]
    assert sum("supervisor" in path for path in report.read) == 1


def test_the_death_of_the_scheduler_is_of_no_rank(tmp_path):
    """The event file has the number of the node, too, as the rank that writes."""
    file = SupervisorEventFile(str(tmp_path), 0)
    died = ev.RankDied(1, "node-0", 5, None, -9, is_scheduler=True)
    for event in (ev.JobStarted(1, 2), died):
        file.handle(event, ZERO)
    file.close()
    (log,) = find_supervisor_logs([str(tmp_path)])
    assert [row.event for row in read_events(log)][1] == died and "scheduler" in died.line()
    (start,) = supervised_starts(read_events(log))
    assert start.failure.rank is None


def test_each_attempt_knows_where_its_logs_were_moved(tmp_path):
    """Folders that were removed since, to make room for newer ones, are not named."""
    kept = tmp_path / "earlier" / "1"
    kept.mkdir(parents=True)
    first, second = attempts((31.0, ev.LogsKept(1, (str(kept), str(tmp_path / "gone")))))
    assert (first.log_folders, second.log_folders) == ((str(kept),), ())


# ---- why a start ended, and when it began --------------------------------------------------------


def attempts(*events, end=None):
    """Two starts; the first one has ``events`` of the supervisor and, of rank 0, ``end``."""
    training = Training().start(10).fresh(11).run(12, RUNS[0]).steps(20, 1, 8)
    if end is not None:
        training.event(*end)
    training.start(60).resume(61, 5, RUNS[0]).run(62, RUNS[1]).steps(70, 6, 9)
    rows = [(0.0, ev.JobStarted(1, 2)), *events, (50.0, ev.JobStarted(2, 9))]
    starts = supervised_starts([RecordedEvent(ZERO + at, event) for at, event in rows])
    return training.attempts(starts)


KILLED = (29.0, ev.RankDied(1, "node-0", 5, 3, -9, "training", 8))
HUNG = (29.0, ev.HangDetected(1, "node-0", (2, 0), 120.0, "training", 8))
ENDED = (31.0, ev.JobEnded(1, 137, "rank 3 was killed by SIGKILL", 31.0, 2.5))


@pytest.mark.parametrize(
    "events, end, rank, reason",
    [
        ([KILLED, ENDED], None, 3, "was killed by SIGKILL"),
        ([KILLED], None, 3, "was killed by SIGKILL"),  # the supervisor was killed, too
        ([HUNG], None, 2, "made no progress for 120 s while training"),
        (
            [
                HUNG,
                (31.0, ev.JobEnded(1, 124, "rank 2 made no progress (--hang-timeout)", 31.0, 2.5)),
            ],
            None,
            2,
            "made no progress (--hang-timeout)",
        ),
        (
            [(31.0, ev.JobEnded(1, 130, "SIGINT was received", 31.0, 2.5))],
            None,
            None,
            "SIGINT was received",
        ),
        ([KILLED, ENDED], (28.0, ev.TrainingEnded(ev.FAILED, "no such file")), 0, "no such file"),
        (
            [KILLED, ENDED],
            (30.0, ev.TrainingEnded(ev.FAILED, "rank 3 is lost")),
            3,
            "was killed by SIGKILL",
        ),
    ],
)
def test_a_killed_or_hanging_rank_is_the_reason_of_a_failure(events, end, rank, reason):
    first, second = attempts(*events, end=end)
    assert (first.outcome, first.failed_rank, first.reason) == (ev.FAILED, rank, reason)
    assert second.outcome == "unknown"


@pytest.mark.parametrize(
    "outcome, status, reason",
    [(ev.PREEMPTED, 143, "SIGTERM was received"), (ev.FINISHED, 0, "it finished")],
)
def test_an_end_that_rank_0_recorded_stays(outcome, status, reason):
    ended = (31.0, ev.JobEnded(1, status, reason, 31.0, 2.5))
    first, _ = attempts(ended, end=(28.5, ev.TrainingEnded(outcome, "", 8)))
    assert first.outcome == outcome


def test_a_start_begins_with_its_command():
    rows = attempts(KILLED, ENDED)
    assert [row.started - ZERO for row in rows] == [0, 50] and rows[0].ended - ZERO == 28
    first, second = (account.seconds for account in accounts_of(rows))
    assert (first.startup, first.downtime, second.startup) == (20, 22, 20)
